"""Sequences and optionals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from singa_backend import SingaBackend

A = np.array([1, 2**53 + 1], np.int64)
B = np.array([[3]], np.int64)
C = np.zeros(0, np.int64)
S = np.array(["a", "é"], object)


def test_construct_empty_length(check: Any) -> None:
    check("SequenceConstruct", [A, B], [[A, B]], opset=11)
    check("SequenceConstruct", [S], [[S]], opset=23)
    check("SequenceEmpty", [], [[]], opset=11, dtype=TensorProto.STRING)
    check("SequenceEmpty", [], [[]], opset=25)
    check("SequenceLength", [[A, B, C]], [np.int64(3)], opset=11)
    check("SequenceLength", [[]], [np.int64(0)], opset=11)


@pytest.mark.parametrize("position", [np.int64(1), np.int32(-2), np.array([1], np.int64)])
def test_at_insert_erase(check: Any, position: Any) -> None:
    check("SequenceAt", [[A, B, C], position], [B], opset=11)
    check("SequenceErase", [[A, B, C], position], [[A, C]], opset=11)
    check("SequenceInsert", [[A, B, C], C, position], [[A, C, B, C]], opset=11)


def test_defaults_and_ends(check: Any) -> None:
    check("SequenceErase", [[A, B, C]], [[A, B]], opset=11)
    check("SequenceInsert", [[A], B], [[A, B]], opset=11)
    check("SequenceInsert", [[A], B, np.int64(1)], [[A, B]], opset=11)
    check("SequenceInsert", [[A], B, np.int64(-1)], [[B, A]], opset=11)
    check("SequenceInsert", [[], S], [[S]], opset=11)
    check("SequenceAt", [[S, S[:1]], np.int64(-1)], [S[:1]], opset=11)


def test_positions_outside(fails: Any) -> None:
    for op, extra, low, high in (("SequenceAt", [], -2, 1), ("SequenceErase", [], -2, 1), ("SequenceInsert", [C], -2, 2)):
        for position in (low - 1, high + 1):
            fails(op, [[A, B], *extra, np.int64(position)], f"SX401.*position must be in .* got {position}", opset=11)
    fails("SequenceErase", [[]], "position must be in .* got -1", opset=11)
    fails("SequenceInsert", [[A], S], "one element type, got int64 and string", opset=11)
    fails("SequenceConstruct", [A, np.float32([1])], "one element type", opset=11)
    fails("SequenceAt", [[A], np.int64([0, 0])], "must hold one value", opset=11)


@pytest.mark.parametrize("opset", [11, 24])
def test_split(check: Any, opset: int) -> None:
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    check("SplitToSequence", [x, np.int64(2)], [[x[:, :2], x[:, 2:4], x[:, 4:]]], opset=opset, axis=-1)
    check("SplitToSequence", [x, np.int64([3, 0, 2])], [[x[:, :3], x[:, :0], x[:, 3:]]], opset=opset, axis=1)
    check("SplitToSequence", [x, np.int32([2])], [[x]], opset=opset)
    check("SplitToSequence", [x], [[x[:1], x[1:]]], opset=opset)
    check("SplitToSequence", [x], [[x[0], x[1]]], opset=opset, keepdims=0)
    check("SplitToSequence", [x[0]], [[np.float32(i) for i in range(5)]], opset=opset, keepdims=0)
    # With a split, keepdims is ignored.
    check("SplitToSequence", [x, np.int64(1)], [[x[:1], x[1:]]], opset=opset, keepdims=0)
    check("SplitToSequence", [x[:0]], [[]], opset=opset)
    check("SplitToSequence", [S, np.int64(1)], [[S[:1], S[1:]]], opset=opset)


def test_split_bfloat16(check: Any) -> None:
    x = np.arange(4).astype(ml_dtypes.bfloat16)
    check("SplitToSequence", [x, np.int64(3)], [[x[:3], x[3:]]], opset=24)


def test_split_refuses(fails: Any) -> None:
    x = np.ones((2, 5), np.float32)
    fails("SplitToSequence", [x, np.int64([2, 2])], "must add up to the size 5 of axis 1", opset=11, axis=1)
    fails("SplitToSequence", [x, np.int64([7, -2])], "must add up to the size 5", opset=11, axis=1)
    fails("SplitToSequence", [x, np.int64(0)], "split must be at least 1", opset=11)
    fails("SplitToSequence", [x], "axis must be in .* got 2", opset=11, axis=2)
    fails("SplitToSequence", [np.float32(1)], "x must have at least one axis, got a scalar", opset=11)


def test_concat(check: Any) -> None:
    x, y = np.arange(6, dtype=np.int64).reshape(2, 3), np.arange(2, dtype=np.int64).reshape(2, 1) + 2**53
    check("ConcatFromSequence", [[x, y]], [np.concatenate([x, y], 1)], opset=11, axis=-1)
    check("ConcatFromSequence", [[x, x]], [np.stack([x, x], 2)], opset=11, axis=2, new_axis=1)
    check("ConcatFromSequence", [[x, x]], [np.stack([x, x], 0)], opset=11, axis=-3, new_axis=1)
    one, two = np.array(1, np.float32), np.array(2, np.float32)
    check("ConcatFromSequence", [[one, two]], [np.float32([1, 2])], opset=11, axis=0, new_axis=1)
    check("ConcatFromSequence", [[S, S]], [np.array(["a", "é", "a", "é"], object)], opset=11, axis=0)
    check("ConcatFromSequence", [[C, C]], [C], opset=11, axis=0)


def test_concat_refuses(fails: Any) -> None:
    x = np.ones((2, 3), np.float32)
    fails("ConcatFromSequence", [[x, x[:1]]], "equal except along axis 1", opset=11, axis=1)
    fails("ConcatFromSequence", [[x, x[:1]]], "equal except along axis 0", opset=11, axis=0, new_axis=1)
    fails("ConcatFromSequence", [[x]], "axis must be in .* got 2", opset=11, axis=2)
    fails("ConcatFromSequence", [[]], "the sequence must not be empty", opset=11, axis=0)
    fails("ConcatFromSequence", [[np.array(1.0)]], "at least one axis unless new_axis=1", opset=11, axis=0)


# --- optionals

FLOATS = helper.make_tensor_type_proto(TensorProto.FLOAT, None)


@pytest.mark.parametrize("opset", [15, 28])
def test_optional(check: Any, opset: int) -> None:
    check("Optional", [A], [A], opset=opset)
    check("Optional", [[A, B]], [[A, B]], opset=opset)
    check("Optional", [], [None], opset=opset, type=FLOATS)


@pytest.mark.parametrize("opset", [18, 28])
def test_an_element_stands_for_its_optional(check: Any, opset: int) -> None:
    for value in (A, [A, B], [], S):
        check("OptionalGetElement", [value], [value], opset=opset)
        check("OptionalHasElement", [value], [np.True_], opset=opset)
    check("OptionalHasElement", [], [np.False_], opset=opset)


def through_optional(opset: int, device: str, op: str, value: Any) -> Any:
    """The result of `op` on the output of an Optional."""
    names = [] if value is None else ["x"]
    make = helper.make_node("Optional", names, ["o"], **({"type": FLOATS} if value is None else {}))
    graph = helper.make_graph(
        [make, helper.make_node(op, ["o"], ["y"])], "g",
        [helper.make_empty_tensor_value_info(n) for n in names], [helper.make_empty_tensor_value_info("y")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])
    return SingaBackend.run_model(model, dict.fromkeys(names, value), device)[0]


@pytest.mark.parametrize("device", ["CPU", "STRICT"])
@pytest.mark.parametrize("opset", [15, 18, 28])
def test_optional_chain(opset: int, device: str) -> None:
    assert through_optional(opset, device, "OptionalHasElement", A)
    assert not through_optional(opset, device, "OptionalHasElement", None)
    np.testing.assert_array_equal(through_optional(opset, device, "OptionalGetElement", A), A)
    with pytest.raises(Exception, match="the optional must not be empty"):
        through_optional(opset, device, "OptionalGetElement", None)


def test_optional_of_nothing(fails: Any) -> None:
    fails("Optional", [], "must have an input, or the attribute 'type'", opset=15)
