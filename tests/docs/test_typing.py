"""The types of the public API as mypy sees them, and the number of `type: ignore`s.  Run by `tox -e types`."""

from __future__ import annotations

import re

import pytest
from tests.helpers.paths import PROJECT

api = pytest.importorskip("mypy.api", reason="mypy is not installed; tox -e types runs this file")


HEADER = """
import os
from pathlib import Path
import ml_dtypes
import numpy as np
import onnx
import onnx.backend.base
import singa_backend
from singa import device, layer, sonnx, tensor
from singa.tape import op
from singa.tensor import Tensor
from singa_backend import dtypes
from singa_backend.devices.device import CpuDevice
from singa_backend.interpreters.base import Op
proto: onnx.ModelProto
path: Path
x: Tensor
rule: Op
"""

REVEALED = {
    # the operators of an interpreter
    "op.Relu(x)": "singa._core.tensor.Tensor",
    "op.Mul(x, 2.0)": "singa._core.tensor.Tensor",
    "op.Concat(x, x, axis=0)": "singa._core.tensor.Tensor",
    "op.TopK(x, [2], axis=-1, outputs=2)": "tuple[singa._core.tensor.Tensor, ...]",
    "op.Philox(x, [3], domain='ai.singa')": "singa._core.tensor.Tensor",
    "op.shape(x)": "tuple[int | str | None, ...] | None",
    "rule.Relu(x)": "Any",
    "rule.TopK(x, [2], outputs=2)": "tuple[Any, ...]",
    "sonnx.graph(lambda x: x)": "singa._onnx.graph_function.GraphFunction",
    "sonnx.Float['N', 3]": "singa._onnx.types.TensorType",
    # tensors
    "x + x": "singa._core.tensor.Tensor",
    "2.0 * x": "singa._core.tensor.Tensor",
    "x[0]": "singa._core.tensor.Tensor",
    "x.as_type(tensor.int32)": "singa._core.tensor.Tensor",
    "x.as_type(np.float64)": "singa._core.tensor.Tensor",
    "x.as_type('float16')": "singa._core.tensor.Tensor",
    "x.as_type(ml_dtypes.bfloat16)": "singa._core.tensor.Tensor",
    "layer.ReLU().forward(x)": "singa._core.tensor.Tensor",
    # models
    "singa_backend.prepare(path)": "singa_backend.backend.SingaRep",
    "singa_backend.prepare('model.onnx')": "singa_backend.backend.SingaRep",
    "singa_backend.prepare(proto)": "singa_backend.backend.SingaRep",
    "singa_backend.prepare(proto.SerializeToString())": "singa_backend.backend.SingaRep",
    "singa_backend.prepare(memoryview(b''))": "singa_backend.backend.SingaRep",
    "sonnx.prepare(path)": "singa._onnx.rep.SingaRep",
    # devices
    "singa_backend.prepare(path, 'CUDA:1')": "singa_backend.backend.SingaRep",
    "singa_backend.prepare(path, device=CpuDevice())": "singa_backend.backend.SingaRep",
    "singa_backend.prepare(path, device=onnx.backend.base.Device('CPU'))": "singa_backend.backend.SingaRep",
    "sonnx.prepare(path, device=device.create_cpu_device())": "singa._onnx.rep.SingaRep",
    "sonnx.prepare(path, device='CUDA:1')": "singa._onnx.rep.SingaRep",
    "sonnx.run_model(path, [x], device.create_cpu_device())": "singa_backend.backend.Outputs",
    "sonnx.SONNXModel(path, None)": "singa._onnx.model.SONNXModel",
    "sonnx.SONNXModel(path, device.create_cpu_device())": "singa._onnx.model.SONNXModel",
    "Tensor((2, 3), device='CPU', dtype=tensor.int32)": "singa._core.tensor.Tensor",
    # dtypes
    "dtypes.onnx_code(np.float32)": "int",
    "dtypes.onnx_code(np.dtype('int4'))": "int",
    "dtypes.onnx_code('int64')": "int",
}

REFUSED = {
    "singa_backend.prepare(3)": "arg-type",
    "singa_backend.prepare(path, 3)": "arg-type",
    "singa_backend.prepare(path, device.create_cpu_device())": "arg-type",
    "sonnx.inspect(3)": "arg-type",
    "sonnx.prepare([path])": "arg-type",
    "sonnx.SONNXModel(path, 1.5)": "arg-type",
    "sonnx.export(path)": "arg-type",
    "Tensor((2, 3), dtype=1.5)": "arg-type",
    "dtypes.onnx_code(3)": "arg-type",
    "len(op.Relu(x).raise_)": "attr-defined",
}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """What mypy reports about each line of a program that has one expression on each line."""
    body = [f"reveal_type({expression})" for expression in REVEALED] + list(REFUSED)
    program = tmp_path_factory.mktemp("typing") / "program.py"
    program.write_text(HEADER + "\n".join(body))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(PROJECT)  # for the configuration
        output, errors, _ = api.run([str(program), "--no-error-summary"])
    assert not errors
    found = dict(re.findall(r"program\.py:(\d+): (.*)$", output, re.MULTILINE))
    return {int(n) - HEADER.count("\n") - 1: text for n, text in found.items()}


@pytest.mark.parametrize("expression", REVEALED)
def test_the_type_of_an_expression(lines: dict[int, str], expression: str) -> None:
    assert lines[list(REVEALED).index(expression)] == f'note: Revealed type is "{REVEALED[expression]}"'


@pytest.mark.parametrize("expression", REFUSED)
def test_a_wrong_argument_is_an_error(lines: dict[int, str], expression: str) -> None:
    reported = lines.get(len(REVEALED) + list(REFUSED).index(expression), "nothing")
    assert reported.startswith("error:") and reported.endswith(f"[{REFUSED[expression]}]"), reported


def test_the_program_has_no_other_error(lines: dict[int, str]) -> None:
    assert all(0 <= n < len(REVEALED) + len(REFUSED) for n in lines), lines


def test_type_ignores_are_few_and_have_a_reason() -> None:
    files = [*PROJECT.glob("backend/**/*.py"), *PROJECT.glob("frontend/**/*.py")]
    found = [
        f"{p.relative_to(PROJECT)}: {line.strip()}"
        for p in files
        for line in p.read_text().splitlines()
        if "type: ignore" in line
    ]
    assert len(found) <= 20, "\n".join(found)
    without = [line for line in found if not re.search(r"type: ignore\[[\w-]+\]  # \w", line)]
    assert not without, "\n".join(without)
    assert not [p for p in files if re.search(r"^# mypy: ", p.read_text(), re.MULTILINE)]
