"""A script for a child process: runs onnx's shape inference and checker, which may die, and prints lines of JSON.

_checker_child.py infer PATH     # the model is on standard input; PATH is its file ("" if unknown)
_checker_child.py check PATH     # the checker alone, on a file
"""

import base64
import json
import sys
from typing import Any

import onnx


def main() -> None:
    task, path = sys.argv[1:]
    if task == "check":  # a file that this package has written: the address space is not limited
        with open(path, "rb"):  # a file that cannot be read is not one that the checker refuses
            _check(path)
        return
    data = sys.stdin.buffer.read()
    _bound(len(data))
    model = onnx.load_model_from_string(data)
    try:
        _say("inference", values=_values(onnx.shape_inference.infer_shapes(model, data_prop=True)), message="")
    except Exception as error:
        _say("inference", values=_values(model), message=f"{type(error).__name__}: {error}")
    _check(path or model)


def _check(model: str | onnx.ModelProto) -> None:
    try:
        onnx.checker.check_model(model, full_check=True)
        _say("checker", message="")
    except Exception as error:
        _say("checker", message=str(error).strip() or type(error).__name__)


def _bound(size: int) -> None:
    """Limit the address space, if the system supports it: a small file may require any amount of memory."""
    try:
        import resource

        cap = (8 << 30) + 8 * size
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (cap if hard < 0 else min(cap, hard), hard))
    except (ImportError, ValueError, OSError):
        return


def _say(part: str, **answer: Any) -> None:
    print(json.dumps({"part": part, **answer}), flush=True)


def _values(model: onnx.ModelProto) -> dict[str, list[str]]:
    """The typed values of every graph, by the graph's path ("" is the main graph, "3.body" a graph of its fourth node)."""
    found: dict[str, list[str]] = {}
    pending = [("", model.graph)]
    while pending:
        path, graph = pending.pop()
        infos = [*graph.input, *graph.output, *graph.value_info]
        found[path] = [base64.b64encode(i.SerializeToString()).decode() for i in infos]
        for i, node in enumerate(graph.node):
            pending += [(f"{path}/{i}.{a.name}".lstrip("/"), a.g) for a in node.attribute if a.HasField("g")]
    return found


if __name__ == "__main__":
    main()
