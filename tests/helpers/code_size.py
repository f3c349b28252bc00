"""The size of the source: code lines by room, and counts that fall when mechanisms are merged; code_size.toml has their limits.

python -m tests.helpers.code_size            print the code lines of each room
python -m tests.helpers.code_size --write    lower the limits to what is measured now; it raises none
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from tests.helpers.paths import PROJECT

PRODUCT = ("backend/", "frontend/")
OTHERS = ("tests/", "benchmarks/", "conformance/", "docs/", "examples/", "notices/")

LIMITS = Path(__file__).with_suffix(".toml")

LONG = 600
"""A file of this many lines is long."""

REWRITING = tuple(f"backend/singa_backend/{part}/" for part in ("passes", "plans/fusion", "rewriting"))
GRAPHS = tuple(
    f"backend/singa_backend/{part}" for part in ("ir/", "plans/flat.", "interpreters/builder.", "opsets/model.", "debug/model.")
)
GRAPH_CLASSES = {"Graph", "Region", "RegionView", "GraphEditor", "NodeEditor", "ModelView", "GraphView", "Source", "Lowered"}
GRADIENT_CALLS = re.compile("GradientCall|DifferentiatedCall|DEFERRED|Deferrable|gradient_calls")
VAGUE = {"made", "found", "held", "given", "known"}

TOKEN = re.compile(
    r"""(?P<newline>\n)|(?P<comment>\#[^\n]*)|(?P<open>[(\[{])|(?P<close>[)\]}])|
    (?P<string>[a-zA-Z]{0,2}(?:\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^\\"\n])*"|'(?:\\.|[^\\'\n])*'))|
    (?P<other>[^\s#"'()\[\]{}][^\n#"'()\[\]{}]*)""",
    re.DOTALL | re.VERBOSE,
)
"""What decides on the lines of code: a string, a comment, the end of a line, a bracket, or a run of anything else."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.comprehension)


class Source(NamedTuple):
    """A file of the product."""

    text: str
    nodes: list[ast.AST]


def texts(*folders: str) -> dict[str, str]:
    """The text of every Python file in some folders of the project, by its path."""
    paths = sorted(path for folder in folders for path in (PROJECT / folder).rglob("*.py"))
    return {path.relative_to(PROJECT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    """The nodes of the syntax tree of a file."""
    nodes: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in nodes:
        nodes.extend(children(node))
    return nodes


def children(node: ast.AST) -> Iterator[ast.AST]:
    """What ast.iter_child_nodes yields, in half the time."""
    for value in vars(node).values():
        if isinstance(value, ast.AST):
            yield value
        elif isinstance(value, list):
            yield from (v for v in value if isinstance(v, ast.AST))


@cache
def product() -> dict[str, Source]:
    """Every file of the product, by its path."""
    return {name: Source(text, nodes_of(PROJECT / name)) for name, text in texts(*PRODUCT).items()}


def code_lines(text: str) -> int:
    """The number of lines of code: no blank lines, no comments, no statements that are a string, such as docstrings."""
    total, line, depth = 0, 1, 0
    lines: set[int] = set()  # of a statement
    is_code = False
    for token in TOKEN.finditer(f"{text}\n"):
        kind, found = token.lastgroup, token[0]
        if kind == "newline":
            if depth == 0:
                total += len(lines) if is_code else 0
                is_code = False
                lines.clear()
            line += 1
        elif kind != "comment":
            first, line = line, line + found.count("\n")
            lines.update(range(first, line + 1))
            is_code |= kind != "string"
            depth += (kind == "open") - (kind == "close")
    return total


def room(name: str) -> str:
    """The folder or file directly in a package of the product, or the folder in the root."""
    return "/".join(name.split("/")[: 3 if name.startswith(PRODUCT) else 1])


def complexity(function: ast.AST) -> int:
    """1, and 1 for each branch, loop, handler, `and`, `or` and part of a comprehension, without those of functions in it."""
    total, pending = 1, [function]
    while pending:
        node = pending.pop()
        total += isinstance(node, BRANCHES)
        total += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        total += len(node.ifs) if isinstance(node, ast.comprehension) else 0
        pending += [child for child in children(node) if not isinstance(child, FUNCTIONS)]
    return total


def parameters(function: ast.FunctionDef) -> int:
    a = function.args
    return len([*a.posonlyargs, *a.args, *a.kwonlyargs]) + (a.vararg is not None) + (a.kwarg is not None)


def _name(expression: ast.expr) -> str:
    """The last name of `a`, `m.a` or `a[T]`."""
    node = expression.value if isinstance(expression, ast.Subscript) else expression
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _depth(name: str, bases: dict[str, list[str]]) -> int:
    """The length of the longest chain of inheritance up from a class, among the classes of a folder."""
    return 1 + max((_depth(b, bases) for b in bases[name]), default=0) if name in bases else 0


def _reads_outputs(node: ast.DictComp) -> bool:
    read = chain.from_iterable(ast.walk(g.iter) for g in node.generators)
    return isinstance(node.key, ast.Name) and any(isinstance(n, ast.Attribute) and n.attr in ("output", "outputs") for n in read)


def _runs(method: ast.FunctionDef) -> bool:
    """Whether a method is a public one that takes inputs and returns outputs."""
    takes = [a.arg for a in method.args.args[1:2]] == ["inputs"]
    return takes and not method.name.startswith("_") and method.returns is not None and "list[Any]" in ast.unparse(method.returns)


def measures() -> dict[str, int]:
    """Every measure that code_size.toml limits and explains, by its name there."""
    from tests.test_arrows import imports, rooms
    from tests.test_arrows import room as room_of

    lines = {name: code_lines(text) for name, text in texts(*PRODUCT, "tests/").items()}
    nodes: dict[type, list[tuple[str, Any]]] = defaultdict(list)
    for name, source in product().items():
        for node in source.nodes:
            nodes[type(node)].append((name, node))

    def within(kind: type, part: str = "") -> list[Any]:
        return [node for name, node in nodes[kind] if name.startswith(f"backend/singa_backend/{part}")]

    functions = [f for kind in FUNCTIONS for _, f in nodes[kind]]
    vague = defaultdict(list)  # the lines of each file that assign to such names
    for name, node in nodes[ast.Name]:
        if node.id in VAGUE and isinstance(node.ctx, ast.Store):
            vague[name].append(node.lineno)
    complexities = [complexity(f) for f in functions]
    many = [f for kind in FUNCTIONS for f in within(kind) if parameters(f) >= 7]
    bases = {c.name: [_name(b) for b in c.bases] for c in within(ast.ClassDef, "plans/")}
    decorators = [d for f in within(ast.FunctionDef, "operators/microsoft/") for d in f.decorator_list]
    pairs = {(room_of(a), room_of(b)) for a, targets in imports("singa_backend").items() for b in targets}
    return {
        "product": sum(n for name, n in lines.items() if name.startswith(PRODUCT)),
        "tests": sum(n for name, n in lines.items() if name.startswith("tests/")),
        "rewriting": sum(n for name, n in lines.items() if name.startswith(REWRITING)),
        "graphs": sum(n for name, n in lines.items() if name.startswith(REWRITING + GRAPHS)),
        "graph_classes": len(GRAPH_CLASSES & {c.name for _, c in nodes[ast.ClassDef]}),
        "producer_maps": sum(map(_reads_outputs, within(ast.DictComp))),
        "gradient_call_files": sum(bool(GRADIENT_CALLS.search(source.text)) for source in product().values()),
        "microsoft_twice": sum(_name(d) == "decomposition" for d in decorators),
        "rank_words": sum(str(c.value).startswith(("rank_of_", "rank_one")) for c in within(ast.Constant)),
        "shape_rules": sum(len(c.args) for c in within(ast.Call, "interpreters/") if _name(c.func) == "covers"),
        "element_texts": sum(k.arg == "element" for k in within(ast.keyword, "operators/")),
        "ways_to_run": sum(map(_runs, within(ast.FunctionDef, "session.py"))),
        "inheritance": max(_depth(name, bases) for name in bases),
        "complexity_above_30": sum(n > 30 for n in complexities),
        "complexity_above_20": sum(n > 20 for n in complexities),
        "many_parameters": len(many),
        "signature_lines": sum(f.body[0].lineno - f.lineno for f in many),
        "vague_locals": sum(
            any(f.lineno <= line <= f.end_lineno for line in vague[name]) for kind in FUNCTIONS for name, f in nodes[kind]
        ),
        "rooms": len(rooms("singa_backend")),
        "room_imports": sum(a != b for a, b in pairs),
        "long_files": sum(source.text.count("\n") >= LONG for source in product().values()),
    }


def limits() -> dict[str, int]:
    return tomllib.loads(LIMITS.read_text(encoding="utf-8"))


def problems(measured: dict[str, int]) -> list[str]:
    """What is above its limit, or more than a hundredth below it."""
    above = [
        f"{name} must be at most {limit}, got {measured[name]}" for name, limit in limits().items() if measured[name] > limit
    ]
    below = [name for name, limit in limits().items() if measured[name] < limit - limit // 100]
    return above + [f"{name} has fallen to {measured[name]}: python -m tests.helpers.code_size --write" for name in below]


def write() -> None:
    """Lower the limits to what is measured; stop if something is above its limit."""
    text, measured = LIMITS.read_text(encoding="utf-8"), measures()
    for name, limit in limits().items():
        text = re.sub(rf"^{name} = \d+", f"{name} = {min(limit, measured[name])}", text, flags=re.MULTILINE)
    LIMITS.write_text(text, encoding="utf-8")
    if any(problems(measured)):
        sys.exit("\n".join(problems(measured)))


def show() -> None:
    """Print the code lines by room and in all."""
    sizes: Counter[str] = Counter()
    for name, text in texts(*PRODUCT, *OTHERS).items():
        sizes[room(name)] += code_lines(text)
    for name, size in sizes.items():
        print(f"{size:8,} {name}")
    print(f"{sum(n for name, n in sizes.items() if name.startswith(PRODUCT)):8,} product, at most {limits()['product']:,}")
    print(f"{sizes['tests']:8,} tests, at most {limits()['tests']:,}")


if __name__ == "__main__":
    write() if "--write" in sys.argv else show()
