"""Tables at every width: no number is cut, and each name that is cut matches one name of its column."""

from __future__ import annotations

import ast
import io
import random
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper
from rich.cells import cell_len
from rich.console import Console

import singa.cli._common as common
from singa.cli import main
from singa.cli._main import COMMANDS
from singa.cli._tables import NAME, NUMBER, WHOLE, WORDS, Columns, TextTable, graphemes, shown

WIDTHS = (40, 60, 80, 120, None)
NUMBERS = (1e-300, -(2**63), 2**63 - 1, 6.40422603e-10, -1.2345678e-38, float("nan"), float("-inf"), 0, 0.1, 1e22, 99.99995, None)
LOWEST = str(-(2**63))
WIDE = "画像の分類"
MODULES = sorted({m for m, _ in COMMANDS.values()} | {"singa.cli._releases", "singa.cli._graphs"})
TABLES = [
    pytest.param(value, id=f"{module.rpartition('.')[2]} {name}")
    for module in MODULES
    for name, value in vars(import_module(module)).items()
    if isinstance(value, Columns)
]


def drawn_name(draw: random.Random) -> str:
    part = [
        "blocks",
        "attn",
        "MatMul",
        WIDE,
        "e\u0301tat",
        "🇫🇷🇩🇪",
        "\x1b[2J",
        "layer.0",
        "x" * 30,
        str(draw.randrange(10**6)),
        "🏽👍🏽",
    ]
    name = draw.choice(("/", "", ".")) + draw.choice(("/", ".", "")).join(draw.choices(part, k=draw.randrange(1, 40)))
    return name[: draw.choice((3, 20, 200, 200))]


def drawn(kind: Any, draw: random.Random) -> Any:
    if kind is NUMBER:
        return draw.choice(NUMBERS)
    if kind is WHOLE:
        return draw.choice(("supported", "agrees", WIDE))
    if kind is WORDS:
        return draw.choice(("float[1, 64, 56, 56]", f"int64[{LOWEST}]", "", f"1e-300 {LOWEST} 6.40423e-10"))
    return "\n".join(drawn_name(draw) for _ in range(draw.randrange(1, 3)))


def text_of(lines: list[tuple[str, str]]) -> str:
    return "\n".join(line for line, _ in lines)


def check(table: TextTable, width: int | None) -> None:
    lines = [line for line, _ in table.lines(width)]
    text = "\n".join(lines)
    words = re.findall(r"\S+", text)
    optional = table.columns.optional  # columns are left out in this order, so the text is one of a table without some of them
    fewer = [
        TextTable(Columns(table.columns.kinds), table.title, table.rows)._without(optional[:n]) for n in range(len(optional))
    ]
    for one in fewer if width is not None else ():
        one.title = table.title
        if text == text_of(one.lines(width)):
            table = one
    kinds = list(table.columns.kinds.values())
    for i, kind in enumerate(kinds):
        cells = [row[i] for row, _ in table.rows]
        if kind is NUMBER:
            assert not {c for c in cells if c} - set(words), (width, text)
        if kind is WORDS:
            numbers = {w for c in cells for w in re.findall(r"[-+.\de]{4,}", c)}
            assert all(n in text for n in numbers), (width, text)
    if width is None:
        assert "…" not in text and all(part in text for row, _ in table.rows for c in row for part in c.split("\n"))
    else:
        assert all(cell_len(line) <= width for line in lines), (width, text)
    check_names(table, width, text)


def check_names(table: TextTable, width: int | None, text: str) -> None:
    """Every name is in the text: whole, folded over lines of a record, or cut so that it matches one name of its column."""
    flat = re.sub(r"\n +", "", text)
    for i, kind in enumerate(table.columns.kinds.values()):
        names = {part for row, _ in table.rows for part in row[i].split("\n") if part} if kind is NAME else set()
        for name in names:
            if name in text or name in flat:
                continue
            cuts = [halves(graphemes(name), text[: m.start()], text[m.end() :]) for m in re.finditer("…", text)]
            assert any(sum(matches(n, *c) for n in names) == 1 and "" not in c for c in cuts), (name, width, text)


def halves(parts: list[str], before: str, after: str) -> tuple[str, str]:
    """The longest start of a name that is in front of a cut, and the longest end that follows it."""
    starts = ("".join(parts[:a]) for a in range(len(parts) - 1, -1, -1))
    ends = ("".join(parts[b:]) for b in range(1, len(parts) + 1))
    return next(s for s in starts if before.endswith(s)), next(e for e in ends if after.startswith(e))


def matches(name: str, head: str, tail: str) -> bool:
    return name.startswith(head) and name.endswith(tail) and len(name) >= len(head + tail)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("columns", TABLES)
def test_every_table_at_every_width(columns: Columns, width: int | None) -> None:
    draw = random.Random(f"{list(columns.kinds)} {width}")
    for rows in (1, 6):
        table = columns.table("a title")
        for _ in range(rows):
            table.add(*(drawn(k, draw) for k in columns.kinds.values()))
        check(table, width)


@pytest.mark.parametrize("width", WIDTHS)
def test_names_that_differ_in_one_place(width: int | None) -> None:
    columns = Columns({"name": NAME, "max abs": NUMBER})
    table = columns.table()
    for i in range(30):
        start = "/blocks/attention" * 5
        table.add(f"{start}/{i}{start}/Conv", 10.0**-i)
        table.add(f"{start}/{i}{start}/{WIDE}", i)
    check(table, width)


def test_columns_are_left_out_until_each_row_is_one_line() -> None:
    columns = Columns({"value": NAME, "type": WORDS, "ULP": NUMBER, "of": NUMBER}, optional=("ULP", "type"))
    table = columns.table()
    for i in range(3):
        table.add(f"layer.{i}.attention.output", f"float[1, 64, 56, {i}]", 8.21753e08 + i, 0.5)
    counts = {w: (len(table.lines(w)), "ULP" in text_of(table.lines(w)), "type" in text_of(table.lines(w))) for w in (80, 52, 30)}
    assert counts == {80: (6, True, True), 52: (6, False, True), 30: (6, False, False)}
    assert all("ULP" in text_of(table.lines(w)) for w in (None, 10))  # in full, and as records


def test_a_cut_keeps_the_ends_of_a_path() -> None:
    table = Columns({"node": NAME, "max abs": NUMBER}).table()
    table.add("/blocks/attention/self/query/projection/Conv", 6.40422603e-10)
    assert "/blocks/…/projection/Conv  6.40423e-10" in text_of(table.lines(42))


def test_no_cut_is_inside_a_character() -> None:
    assert graphemes("e\u0301🇫🇷🇩🇪👍🏽\\x1bA한") == ["e\u0301", "🇫🇷", "🇩🇪", "👍🏽", "\\x1b", "A", "한"]
    for room in range(13, 60):
        table = Columns({"node": NAME}).table()
        table.add("e\u0301🇫🇷" * 30)
        for line, _ in table.lines(room):
            assert set(graphemes(line)) <= {"e\u0301", "🇫🇷", "…", "─", *"node "}


def test_six_digits_and_whole_integers() -> None:
    values = (6.40422603e-10, -(2**63), np.float32(0.1), np.int64(7), True, None, 1e-300, float("inf"))
    assert [*map(shown, values)] == ["6.40423e-10", LOWEST, "0.1", "7", "True", "–", "1e-300", "inf"]


def test_a_row_has_a_cell_for_each_column() -> None:
    with pytest.raises(ValueError, match="2 cells, got 1"):
        Columns({"a": NAME, "b": NUMBER}).table().add("x")


def test_commands_declare_their_tables_at_the_top_level() -> None:
    """Otherwise a table would not be among those that are rendered above; rich's own tables cut numbers."""
    for path in Path(common.__file__).parent.glob("*.py"):
        tree = ast.parse(path.read_text())
        imported = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module == "rich.table" for a in n.names}
        assert not imported, path
        inside = [n for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) for n in ast.walk(f)]
        made = [n for n in inside if isinstance(n, ast.Call) and getattr(n.func, "id", "") in ("Columns", "Table")]
        assert path.name == "_tables.py" or not made, path
    assert len(TABLES) >= 20


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with long names that differ in the middle, and constants at the ends of their types."""
    start = "/blocks/attention/self" * 4
    names = [f"{start}/{i}/{WIDE}{start}/out" for i in range(2)]
    small = numpy_helper.from_array(np.array([1e-300, -6.40422603e-10]), names[0])
    whole = numpy_helper.from_array(np.array([-(2**63), 2**63 - 1]), names[1])
    outputs = [
        helper.make_tensor_value_info(f"{n}_y", t, [2])
        for n, t in zip(names, (TensorProto.DOUBLE, TensorProto.INT64), strict=False)
    ]
    nodes = [helper.make_node("Identity", [n], [f"{n}_y"], name=f"{n}_node") for n in names[:2]]
    path = tmp_path_factory.mktemp("tables") / "m.onnx"
    graph = helper.make_graph(nodes, "g", [], outputs, [small, whole])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10), path)
    return path


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("command", "numbers"),
    [
        ("run --random 0", {"1e-300", "-6.40423e-10", LOWEST}),
        ("inspect --nodes --stats", {"1e-300", "-6.40423e-10", "16"}),
        ("compare --against reference", {"0"}),
    ],
)
def test_commands_print_whole_numbers(
    model: Path, command: str, numbers: set[str], width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = io.StringIO()
    terminal = width is not None
    console = common._Console(file=page, width=width or 80, force_terminal=terminal, color_system=None, markup=False, emoji=False)
    for module in (common, *(import_module(m) for m in MODULES)):
        if isinstance(getattr(module, "out", None), Console):
            monkeypatch.setattr(module, "out", console)
    found = CliRunner().invoke(main, [command.split()[0], str(model), *command.split()[1:]])
    assert found.exit_code == 0, found.output
    assert numbers <= set(re.findall(r"\S+", page.getvalue())), page.getvalue()
    assert terminal or "…" not in page.getvalue()
