"""Bodies are written with sizes that are not known, as they are for a file with open sizes, and equal the definitions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import helper

import singa_backend
from singa_backend import dtypes
from singa_backend.conform.fuzz import generate
from singa_backend.ir.declaration import declarations
from singa_backend.opsets.model import to_model
from singa_backend.opsets.writer import OpsetWriter

COUNT, SEED = 120, 4
SELECT = (
    "com.microsoft:(CDist|ComplexMul|ComplexMulConj|ConvTransposeWithDynamicPads|CropAndResize|ExpandDims|FusedConv|FusedGemm|"
    "FusedMatMul|FusedMatMulActivation|GatherND|GridSample|Inverse|IsAllFinite|Irfft|MaxpoolWithMask|NGramHashMapping|NGramRepeatBlock|"
    "NhwcConv|NhwcFusedConv|Pad|Range|Rfft|SampleOp|SparseToDenseMatMul|TorchEmbedding|TransposeMatMul|Trilu|UnfoldTensor|Unique|"
    "WordConvEmbedding)-"
)
STEPS = {"float32": 1e-4, "float64": 1e-10, "complex64": 0, "complex128": 0}
"""The allowed error of a dtype, relative to the largest value; of narrower floats 3e-2."""


def lowered(case: generate.NodeCase) -> Any:
    """The body of a case as a model of ONNX's operators, whose inputs have ranks but no sizes."""
    writer = OpsetWriter(21)
    inputs = []
    for name in case.node.input:
        value = case.inputs.get(name)
        sizes = None if value is None else [f"{name}_{axis}" for axis in range(value.ndim)]
        kind = None if value is None else helper.make_tensor_type_proto(dtypes.onnx_code(value.dtype), sizes)
        inputs.append(None if value is None else writer.builder.input(name, kind))
    given = {a.name: helper.get_attribute_value(a) for a in case.node.attribute}
    given = {n: v.decode() if isinstance(v, bytes) else v for n, v in given.items()}
    declaration = declarations[case.domain, case.operator][case.version]
    made = declaration.decompose(writer, case.version, inputs, given, len(case.node.output))
    names = [f"out{i}" for i in range(len(made))]
    return to_model(writer.builder, "body", made, names)


@pytest.mark.parametrize("index", range(COUNT))
def test_body(index: int) -> None:
    case = generate.draw(SEED, index, SELECT)
    if case is None:
        pytest.skip("no node has these types")
    model = lowered(case)
    assert {n.domain for n in model.graph.node} == {""}
    expected = singa_backend.prepare(case.model).run(case.feeds)
    found = singa_backend.prepare(model).run({i.name: case.inputs[i.name] for i in model.graph.input})
    for y, want in zip(found, expected, strict=True):
        assert y.dtype == want.dtype and y.shape == want.shape, case.describe()
        if not dtypes.is_float(want.dtype):
            np.testing.assert_array_equal(y, want, err_msg=case.describe())
            continue
        step = STEPS.get(want.dtype.name, 3e-2)
        y, want = y.astype(np.float64), want.astype(np.float64)
        largest = np.abs(want[np.isfinite(want)]).max(initial=0.0)
        np.testing.assert_allclose(y, want, rtol=step, atol=step * largest, err_msg=case.describe())
