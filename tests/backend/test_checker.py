"""onnx's checker and inference run in one warm child process: it may die, the user's process may not."""

from __future__ import annotations

import ast
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import ModelProto, TensorProto, defs, helper, numpy_helper, parser
from tests.helpers.paths import PROJECT

from singa import codegen, sonnx
from singa.cli import main
from singa.tensor import Tensor
from singa_backend import InvalidModel, ResourceExhausted, SingaBackend, SonnxError, passes
from singa_backend.debug.model import ComparedModel
from singa_backend.devices import guards
from singa_backend.interpreters.builder import GraphBuilder
from singa_backend.proto import checker
from singa_backend.proto.save import save

EYE = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]> g (float[2, 2] x) => (int64[2, 2] y, float[2, 2] z)
    { a = ai.onnx.ml.Normalizer <norm = "L2"> (x) y = EyeLike <dtype = 7> (a) z = Cast <to = 1> (x) }"""
"""onnx 1.23 infers no type for a, and its inference of EyeLike reads it."""

IMAGE = (
    EYE.replace("x)", "x, float[1, 2, 3, 4] i)", 1).replace("float[2, 2] z)", "float[1, 2, 3, 4] z)").replace("(x) }", "(i) }")
)

NEG = '<ir_version: 8, opset_import: ["": 17]> g (float[2] x) => (float[2] y) { y = Neg(x) }'


def model(text: str) -> ModelProto:
    return parser.parse_model(text)


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Iterator[checker.CheckerProcess]:
    """A process of this test alone."""
    made = checker.CheckerProcess()
    monkeypatch.setattr(checker, "process", made)
    yield made
    if made._child is not None:
        made._child.close()


# --- one place


ALLOWED = {
    "singa_backend/proto/_checker_child.py": {"onnx.checker", "onnx.shape_inference"},  # the child itself
    "singa_backend/engines/oracle.py": {"onnxruntime"},  # imported in an engine's child process
    "singa_backend/engines/exact_products.py": {"onnx.shape_inference.infer_shapes"},  # in that process too
    "singa_backend/conform/fuzz/graphs/scope.py": {  # one drawn node of known types
        "onnx.shape_inference.infer_shapes",
        "onnx.shape_inference.InferenceError",
    },
    # what conform has generated itself:
    "singa_backend/conform/fuzz/generate.py": {"onnx.shape_inference"},
    "singa_backend/conform/opset_matrix/judge.py": {"onnx.checker"},
    "singa_backend/conform/opset_matrix/problems.py": {"onnx.checker"},
    "singa_backend/conform/opset_matrix/supported.py": {"onnx.parser"},
    "singa_backend/conform/device_check_load.py": {"onnx.parser"},  # its own models
    "singa_backend/conform/device_check_stages.py": {"onnx.parser"},  # its own models
    "singa/cli/_device_stages.py": {"onnx.parser"},  # its own models
}
FOREIGN = (
    "checker", "shape_inference", "version_converter", "parser", "printer", "inliner", "compose", "utils", "hub",
    "onnx_cpp2py_export",
)  # fmt: skip
METHODS = {"get_context_dependent_function", "get_context_dependent_function_with_opset_version", "_infer_node_outputs"}
"""Methods of onnx's schemas that run C++ on a node."""


def foreign_uses(source: str) -> set[str]:
    """The parts of onnx's C++ and of onnxruntime that a module uses, by their full names."""
    names: dict[str, str] = {}
    used: set[str] = set()
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                names[a.asname or a.name.partition(".")[0]] = a.name if a.asname else a.name.partition(".")[0]
                used.add(a.name)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for a in node.names:
                names[a.asname or a.name] = f"{node.module}.{a.name}"
                used.add(f"{node.module}.{a.name}")
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            used |= {a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)}
    read = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and id(node) not in read:
            parts: list[str] = []
            while isinstance(node, ast.Attribute):
                parts.insert(0, node.attr)
                node = node.value
            if isinstance(node, ast.Name) and node.id in names:
                used.add(".".join([names[node.id], *parts]))
    modules = (*(f"onnx.{name}" for name in FOREIGN), "onnxruntime")
    found = {u for u in used if any(u == m or u.startswith(f"{m}.") for m in modules)}
    return {u for u in found if not any(other.startswith(f"{u}.") for other in found)}


def test_onnx_and_onnxruntime_are_used_in_one_place() -> None:
    wrong = []
    for root in ("backend", "frontend"):
        for path in (PROJECT / root).rglob("*.py"):
            name = path.relative_to(PROJECT / root).as_posix()
            source = path.read_text()
            for use in foreign_uses(source) if any(word in source for word in (*FOREIGN, "onnxruntime")) else ():
                if not any(use == a or use.startswith(f"{a}.") for a in ALLOWED.get(name, ())):
                    wrong.append(f"{name}: {use}")
    assert not wrong, f"a model of a user may only be passed to these by singa_backend.proto.checker: {wrong}"


def test_methods_of_schemas_that_read_a_node_are_called_in_the_child() -> None:
    found = {
        path.name: node.attr
        for root in ("backend", "frontend")
        for path in (PROJECT / root).rglob("*.py")
        if any(method in path.read_text() for method in METHODS)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in METHODS
    }
    assert set(found) == {"_checker_child.py", "witnesses.py"}, found  # witnesses: of the fuzzer's own nodes


@pytest.mark.parametrize(("source", "found"), [
    ("import onnx\ndef f(m): onnx.checker.check_model(m)", {"onnx.checker.check_model"}),
    ("from onnx import shape_inference as s, helper\nx = s.infer_shapes", {"onnx.shape_inference.infer_shapes"}),
    ("def f():\n    from onnx.version_converter import convert_version", {"onnx.version_converter.convert_version"}),
    ("import onnx as o\no.inliner", {"onnx.inliner"}),
    ("import importlib\nimportlib.import_module('onnxruntime')", {"onnxruntime"}),
    ("from onnx import helper, load\nparser = 1\nparser.parse_args()", set()),
])  # fmt: skip
def test_the_guard_sees_every_way_to_import(source: str, found: set[str]) -> None:
    assert foreign_uses(source) == found


# --- the process


def test_one_process_answers_and_is_replaced_when_it_dies(child: checker.CheckerProcess) -> None:
    assert child.pid is None
    assert checker.check_model(model(NEG)).valid
    first = child.pid
    assert checker.infer_shapes(model(NEG)).failure == "" and child.pid == first
    found = checker.infer_shapes(model(EYE))
    assert not found.answered and "SIGSEGV" in found.failure
    assert [v.name for v in found.model.graph.output] == ["y", "z"]
    assert checker.check_model(model(NEG)).valid and child.pid != first
    second = child.pid
    assert second is not None
    os.kill(second, signal.SIGKILL)
    os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT)
    assert checker.check_model(model(NEG)).valid and child.pid != second


def test_its_address_space_is_bounded(child: checker.CheckerProcess) -> None:
    checker.check_model(model(NEG))
    limits = Path(f"/proc/{child.pid}/limits").read_text()
    line = next(text for text in limits.splitlines() if text.startswith("Max address space"))
    assert line.split()[3:5] == [str(checker.MEMORY)] * 2


def test_a_lower_limit_of_the_user_stays() -> None:
    done = script("""
import resource
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
assert checker.check_model(m).valid
print(open(f"/proc/{checker.process.pid}/limits").read())
""")
    assert done.returncode == 0 and str(3 << 30) in done.stdout, done.stderr


def test_threads_share_it(child: checker.CheckerProcess) -> None:
    wrong: list[Any] = []

    def work(size: int) -> None:
        text = NEG.replace("float[2]", f"float[{size}]")
        for _ in range(10):
            graph = checker.infer_shapes(model(text.replace(f"=> (float[{size}] y)", "=> (y)"))).model.graph
            if graph.output[0].type.tensor_type.shape.dim[0].dim_value != size:
                wrong.append(graph)

    threads = [threading.Thread(target=work, args=(size,)) for size in range(1, 9)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong and child.pid is not None


def script(text: str) -> subprocess.CompletedProcess[str]:
    head = f"from onnx import parser\nfrom singa_backend.proto import checker\nm = parser.parse_model({NEG!r})\n"
    return subprocess.run([sys.executable, "-c", head + text], capture_output=True, text=True, timeout=60, check=False)


def test_a_fork_starts_its_own_and_leaves_that_of_its_parent_alone() -> None:
    """Also while another thread of the parent waits for an answer, and when the fork ends like a program."""
    done = script("""
import os, sys, threading
checker.check_model(m)
first = checker.process.pid
checker.process._lock.acquire()
pid = os.fork()
if not pid:
    assert checker.check_model(m).valid and checker.process.pid != first
    sys.exit(0)
checker.process._lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
assert checker.check_model(m).valid and checker.process.pid == first
""")
    assert done.returncode == 0, done.stderr


def test_it_ends_with_its_parent_even_if_a_fork_lives_on() -> None:
    done = script("""
import os, sys, time
checker.check_model(m)
print(checker.process.pid, flush=True)
if not os.fork():
    os.close(1), os.close(2)
    time.sleep(30)
os._exit(0)
""")
    until = time.monotonic() + 20
    while Path(f"/proc/{done.stdout.strip()}").exists():
        state = Path(f"/proc/{done.stdout.strip()}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":
            break
        assert time.monotonic() < until, "the child outlives its parent"
        time.sleep(0.05)


def test_imports_loading_and_runs_start_no_process() -> None:
    done = script("""
import numpy as np
import singa.sonnx, singa.autograd, singa.model
rep = singa.sonnx.prepare(m)
assert rep.run([np.ones(2, np.float32)])[0][0] == -1
assert checker.process.pid is None
""")
    assert done.returncode == 0, done.stderr


# --- models without their large tensors


def large(**fields: Any) -> ModelProto:
    """A model with 4 MiB of weights; fields: of the tensor."""
    proto = model(NEG.replace("Neg(x)", "Slice(w, s, e)").replace("(float[2] x)", "()"))
    weight = numpy_helper.from_array(np.arange(1 << 20, dtype=np.float32), "w")
    for name, value in fields.items():
        setattr(weight, name, value)
    proto.graph.initializer.extend([weight, *(numpy_helper.from_array(np.array([i]), n) for n, i in (("s", 1), ("e", 3)))])
    return proto


def test_large_data_stay_here() -> None:
    proto = large()
    whole = proto.SerializeToString()
    light = checker.without_data(proto)
    assert light.ByteSize() < 1000 and [list(t.dims) for t in light.graph.initializer] == [[1 << 20], [1], [1]]
    assert checker.check_model(proto).valid and checker.check_and_infer(proto, 60).values[""]["y"].shape == (2,)
    assert proto.SerializeToString() == whole


def test_data_in_subgraphs_nodes_and_functions_stay_here_too() -> None:
    proto = model(
        """<ir_version: 8, opset_import: ["": 17, "f": 1]> g (bool c) => (float[N] y)
        { a = If (c) <then_branch = t () => (float[N] p) { p = Neg(w) }, else_branch = e () => (q) { q = f.big() }>
          y = Neg(a) }
        <domain: "f", opset_import: ["": 17]> big () => (r) { r = Constant <value = float[1] {1}> () }"""
    )
    weight = numpy_helper.from_array(np.ones(1 << 18, np.float32), "w")
    proto.graph.node[0].attribute[0].g.initializer.append(weight)
    proto.functions[0].node[0].attribute[0].t.CopyFrom(weight)
    assert proto.ByteSize() > 2 << 20 and checker.without_data(proto).ByteSize() < 2000
    assert checker.check_model(proto).valid
    assert checker.infer_shapes(proto).model.graph.node[0].attribute[0].g.initializer[0].dims == [1 << 18]


@pytest.mark.parametrize(("fields", "says"), [
    ({"raw_data": b"\0" * 100}, "raw_data"), ({"data_type": 99}, ""), ({"raw_data": b""}, ""),
    ({"data_location": TensorProto.EXTERNAL, "raw_data": b"\0" * (1 << 22)}, "w"),
])  # fmt: skip
def test_an_invalid_large_tensor_is_refused_as_a_small_one(fields: dict[str, Any], says: str) -> None:
    found = checker.check_model(large(**fields))
    assert found.valid is False and says in found.message


def test_inference_that_reads_more_than_a_small_tensor() -> None:
    """600 parts of Split are 4,800 bytes."""
    proto = model('<ir_version: 8, opset_import: ["": 17]> g (float[600] x) => (float[1] y0) { y0 = Split(x, parts) }')
    proto.graph.node[0].output.extend(f"y{i}" for i in range(1, 600))
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(600, np.int64), "parts"))
    onnx.checker.check_model(proto, full_check=True)
    assert checker.check_model(proto).valid


def test_external_data_need_not_exist() -> None:
    weight = TensorProto(name="w", data_type=1, dims=[1 << 20], data_location=TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="nowhere.bin")
    proto = large()
    proto.graph.initializer[0].CopyFrom(weight)
    assert checker.check_model(proto).valid
    for t in proto.graph.initializer:
        del t.external_data[:]
    assert "location" in checker.check_model(proto).message


@pytest.mark.parametrize("seed", range(12))
def test_the_verdict_is_that_of_onnx(seed: int) -> None:
    """Small models with one drawn fault, or none: the same message with and without the data of tensors."""
    rng = random.Random(seed)
    proto = model("""<ir_version: 8, opset_import: ["": 17]> g (float[2, 3] x) => (float[2, 4] z)
        <float[3, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}> { y = MatMul(x, w) z = Relu(y) }""")
    faults: list[Callable[[], Any]] = [
        lambda: None, lambda: setattr(proto.graph.node[1], "op_type", "Relux"), lambda: proto.graph.node[0].input.pop(),
        lambda: setattr(proto.graph.output[0].type.tensor_type, "elem_type", 7), lambda: proto.graph.node.pop(0),
        lambda: setattr(proto.graph.initializer[0], "data_type", 7), lambda: proto.graph.initializer[0].dims.append(2),
        lambda: proto.opset_import.pop(), lambda: setattr(proto, "ir_version", 3),
        lambda: setattr(proto.graph.output[0].type.tensor_type.shape.dim[1], "dim_value", 9),
    ]  # fmt: skip
    rng.choice(faults)()
    try:
        onnx.checker.check_model(proto, full_check=True)
        says = ""
    except Exception as error:
        says = str(error).strip()
    found = checker.check_model(proto)
    assert found.valid is not None and (found.message == "") == (says == "")
    assert found.message.splitlines()[:1] == says.splitlines()[:1]


# --- a model on which inference dies


def values(proto: ModelProto, x: np.ndarray) -> list[np.ndarray]:
    return [np.asarray(v) for v in SingaBackend.prepare(proto).run([x])]


def same(got: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in zip(got, expected, strict=True))


X = np.array([[3.0, -4.0], [0.5, 2.0]], np.float32)
EXPECTED = [np.eye(2, dtype=np.int64), X]


@pytest.mark.parametrize("command", [
    "check", "check --train", "inspect", "run --random 0", "optimize -o OUT", "layout --to channels_last -o OUT",
    "codegen -o OUT.py", "convert --opset 18 -o OUT", "convert --optimize --shape x=2,2 -o OUT", "compare --random 0",
])  # fmt: skip
def test_no_command_dies(command: str, tmp_path: Path) -> None:
    """A rank that is not known blocks a gradient, which is the only exit code but 0."""
    words = command.split()
    path, out = tmp_path / "m.onnx", tmp_path / "out.onnx"
    onnx.save(model(EYE), path)
    if words[0] == "layout":
        onnx.save(model(IMAGE), path)
    done = CliRunner().invoke(main, [words[0], str(path), *(str(out) + w[3:] if w.startswith("OUT") else w for w in words[1:])])
    assert done.exit_code == 0 or (isinstance(done.exception, SystemExit) and command == "check --train"), done.output
    if words[0] == "layout":
        image = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
        y, v = SingaBackend.prepare(onnx.load(out)).run([X, image.transpose(0, 2, 3, 1)])
        assert same([y, np.asarray(v)], [EXPECTED[0], image.transpose(0, 2, 3, 1)])
    if words[0] in ("optimize", "convert"):
        assert same(values(onnx.load(out), X), EXPECTED)


def converted(proto: ModelProto) -> ModelProto:
    return sonnx.convert(proto, 19)


def exported(proto: ModelProto) -> ModelProto:
    return sonnx.export(sonnx.SONNXModel(proto), [Tensor(data=X, requires_grad=False)])


def optimized(proto: ModelProto) -> ModelProto:
    copy = ModelProto.FromString(proto.SerializeToString())
    passes.optimize(copy)
    return copy


WRITERS = [converted, exported, optimized]


@pytest.mark.parametrize("write", WRITERS)
def test_every_writer_writes_it(write: Callable[[ModelProto], ModelProto]) -> None:
    assert same(values(write(model(EYE)), X), EXPECTED)


def test_what_was_not_known_is_reported() -> None:
    report = passes.optimize(model(EYE))
    assert [n for n in report.notes if "SIGSEGV" in n]
    assert not ComparedModel(model(EYE)).types.get("a")
    seen = sonnx.inspect(model(EYE))
    assert "SIGSEGV" in seen.opinion.inference
    assert "eyelike" in codegen.generate(model(EYE)).text.lower()


def test_a_check_without_an_answer_is_no_silent_yes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Types that could not be checked are a warning; a structure that could not be is an error."""
    real = checker.process.ask

    def dies(task: str) -> Callable[..., Any]:
        def ask(timeout: float, asked: str, *arguments: Any) -> Any:
            if asked == task:
                raise checker.ChildFailure("died", "exit code -11", -11)
            return real(timeout, asked, *arguments)

        return ask

    monkeypatch.setattr(checker.process, "ask", dies("infer"))
    assert checker.check_model(model(NEG)).valid is None
    notes: list[str] = []
    save(model(NEG), tmp_path / "a.onnx", warnings=notes)
    assert len(notes) == 1 and "SIGSEGV" in notes[0]
    _, report = sonnx.convert(model(NEG), 18, tmp_path / "b.onnx", with_report=True)
    assert [w for w in report.warnings if "SIGSEGV" in w] and (tmp_path / "b.onnx").exists()
    monkeypatch.setattr(checker.process, "ask", dies("check"))
    for path in (None, tmp_path / "c.onnx"):
        with pytest.raises(InvalidModel, match=r"not checked.*SIGSEGV") as caught:
            sonnx.convert(model(NEG), 18, path)
        assert caught.value.code == "SX109" and "check=False" in caught.value.hint
    assert not (tmp_path / "c.onnx").exists()


def unary_operators() -> list[str]:
    """Operators of opset 17 that take a float tensor and nothing else."""
    found = []
    for schema in {s.name: s for s in defs.get_all_schemas() if s.domain == "" and s.since_version <= 17}.values():
        inputs, attributes = schema.inputs, schema.attributes.values()
        plain = len(inputs) and schema.min_input == 1 and schema.min_output == 1 and not any(a.required for a in attributes)
        floats = plain and "tensor(float)" in {
            t for c in schema.type_constraints if c.type_param_str == inputs[0].type_str for t in c.allowed_type_strs
        }
        if (
            floats
            and not schema.deprecated
            and schema.name not in ("RandomNormalLike", "RandomUniformLike", "Bernoulli", "Dropout")
        ):
            found.append(schema.name)
    return sorted(found)


@pytest.mark.parametrize("operator", ["EyeLike", *random.Random(5).sample(unary_operators(), 9)])
def test_an_operator_over_an_unknown_type(operator: str) -> None:
    """Also where an If hides it from the inference of the main graph."""
    within = f"""s = ReduceSum(x) c = Cast <to = 9> (s) y = If (c)
        <then_branch = t () => (p) {{ p = {operator}(a) }}, else_branch = e () => (q) {{ q = {operator}(a) }}>"""
    for nodes in (f"y = {operator}(a)", within):
        text = f'{{ a = ai.onnx.ml.Normalizer <norm = "L2"> (x) {nodes} z = Cast <to = 1> (x) }}'
        proto = model(f'<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]> g (float[2, 2] x) => (y, float[2, 2] z) {text}')
        expected = values(proto, X)
        for write in (lambda p: sonnx.convert(p, 19, check=False), optimized):
            assert same(values(write(proto), X), expected), operator
        assert sonnx.check(proto).good


# --- one node


def test_nodes_that_would_crash_this_process_go_to_the_child(child: checker.CheckerProcess) -> None:
    """Found by drawing nodes with known types for every schema."""

    def built(op: str, types: list[Any], outputs: int = 1, values: int = 0, **attributes: Any) -> Any:
        builder = GraphBuilder(18)
        inputs = [builder.input("x", t) for t in types]
        return builder.node(op, inputs, attributes, outputs)

    tensor = helper.make_tensor_type_proto
    cases = [
        ("GatherND", [tensor(1, [2, 3]), tensor(7, [-5])], 1, {}),
        ("Split", [tensor(1, [3, 3])], 3, {"num_outputs": 1}),
        ("EyeLike", [onnx.TypeProto()], 1, {}),
        ("EyeLike", [tensor(0, [2, 2])], 1, {}),
        ("SequenceAt", [onnx.TypeProto(sequence_type=onnx.TypeProto.Sequence()), tensor(7, [])], 1, {}),
    ]
    for op, types, outputs, attributes in cases:
        made = built(op, types, outputs, **attributes)
        assert len(made) == outputs, op


def single(op: str, types: dict[str, Any], opset: int = 17, **attributes: Any) -> ModelProto:
    node = helper.make_node(op, list(types), ["y"], **attributes)
    inputs = [helper.make_tensor_value_info(n, code, shape) for n, (code, shape) in types.items()]
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", 1, None)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


GATHER = single("GatherND", {"x": (1, [2, 3]), "i": (7, [2, 1])}, batch_dims=-3)
EINSUM = single("Einsum", {"x": (1, [2, 3])}, equation="-")


def writes(proto: ModelProto) -> list[Callable[[], Any]]:
    return [
        lambda: sonnx.convert(proto, 22, check=False),
        lambda: codegen.generate(proto),
        lambda: sonnx.to_training_onnx(proto, "mse_loss"),
        lambda: passes.optimize(ModelProto.FromString(proto.SerializeToString())),
    ]


@pytest.mark.parametrize("at", range(4))
@pytest.mark.parametrize("proto", [GATHER, EINSUM], ids=["dies", "hangs"])
def test_a_node_that_kills_or_hangs_inference(
    proto: ModelProto, at: int, child: checker.CheckerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node is written, with an unknown type, or a typed error names the reason."""
    monkeypatch.setattr(checker, "NODE_TIMEOUT", 1.0)
    monkeypatch.setattr(checker, "LEAST_TIMEOUT", 2.0)
    monkeypatch.setattr(checker, "_known", type(checker._known)())
    start = time.monotonic()
    try:
        writes(proto)[at]()
    except SonnxError as error:
        assert error.code
    assert time.monotonic() - start < 60  # the deadlines, with time for a busy machine; without them Einsum runs for ever


def test_the_child_dies_of_a_node_once(child: checker.CheckerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "_known", type(checker._known)())
    asked: list[str] = []
    real = child.ask

    def ask(timeout: float, task: str, *arguments: Any) -> Any:
        asked.append(task)
        return real(timeout, task, *arguments)

    monkeypatch.setattr(child, "ask", ask)
    for _ in range(3):
        sonnx.convert(GATHER, 19, check=False)
    assert asked.count("node") == 1


def test_equal_nodes_are_asked_once_whatever_their_names(child: checker.CheckerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checker, "_known", type(checker._known)())
    tensor = helper.make_tensor_type_proto
    patience = checker.Patience()

    def infer(names: list[str], output: str, sizes: list[int]) -> dict[str, Any]:
        node = helper.make_node("Einsum", names, [output], equation="ij,jk->ik")
        types = dict(zip(names, (tensor(1, sizes), tensor(1, [3, 4])), strict=True))
        return checker.infer_node(node, 12, types, {}, 17, patience).types

    first = infer(["a", "b"], "c", [2, 3])
    pid = child.pid
    monkeypatch.setattr(child, "ask", lambda *_: pytest.fail("asked again"))
    again = infer(["p", "q"], "r", [2, 3])
    assert pid and [d.dim_value for d in again["r"].tensor_type.shape.dim] == [2, 4] and again["r"] == first["c"]
    with pytest.raises(pytest.fail.Exception):
        infer(["a", "b"], "c", [5, 3])


def test_a_child_that_cannot_start_is_no_answer(child: checker.CheckerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(checker, "_known", type(checker._known)())
    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert sonnx.convert(single("Einsum", {"x": (1, [2, 3])}, equation="ij->ji"), 22, check=False).graph.node
    found = checker.check_model(model(NEG))
    assert found.valid is None and "cannot start" in found.message


def test_inference_that_fails_again_and_again_is_given_up(child: checker.CheckerProcess) -> None:
    node = helper.make_node("Einsum", ["x"], ["y"], equation="ij->ji")
    types = {"x": helper.make_tensor_type_proto(1, [77, 3])}
    assert not checker.infer_node(node, 12, types, {}, 17, checker.Patience(0.0)).types and child.pid is None
    assert checker.infer_node(node, 12, types, {}, 17, checker.Patience()).types


@pytest.mark.parametrize("opset", range(7, 16))
def test_a_constant_that_a_decomposition_makes_is_within_the_limits(opset: int) -> None:
    types = {"x": (1, [1, 1, 4, 4]), "r": (1, [1, 4]), "b": (7, [1])}
    with pytest.raises(ResourceExhausted) as caught:
        sonnx.convert(single("RoiAlign", types, 16, output_height=2**31 - 1), opset)
    assert caught.value.code == "SX603"


MAKERS = {*guards.SIZES, "eye", "identity", "indices", "linspace", "tri", "outer", "kron", "pad"} - {"take", "where"}


def test_rules_make_arrays_by_the_namespace_that_checks_the_limits() -> None:
    """A function of `op` that calls `np.arange(n)` allocates before any limit is checked; `host.arange(n)` does not."""
    wrong, checked = [], 0
    for path in [
        *(PROJECT / "backend/singa_backend/operators").glob("*.py"),
        PROJECT / "backend/singa_backend/opsets/adapters.py",
    ]:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef) or "op" not in {a.arg for a in function.args.args[:2]}:
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS:
                    owner = node.func.value
                    checked += isinstance(owner, ast.Name) and owner.id == "host"
                    sized = not all(isinstance(a, ast.Constant) for a in node.args[:1])
                    if isinstance(owner, ast.Name) and owner.id == "np" and sized:
                        wrong.append(f"{path.name}:{node.lineno}: np.{node.func.attr}")
    assert checked >= 3 and not wrong, wrong
