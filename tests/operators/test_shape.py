"""Shapes: every version of every operator that moves values and computes none."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

F = np.float32
X = np.arange(24, dtype=F).reshape(2, 3, 4)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


# dtype -> the opset whose Reshape, Transpose, ... first takes it
DTYPES = {
    "bool": 13, "uint8": 13, "uint16": 13, "uint32": 13, "uint64": 13, "int8": 13, "int16": 13, "int32": 13, "int64": 13,
    "float16": 13, "float32": 13, "float64": 13, "complex64": 13, "complex128": 13, "object": 13, "bfloat16": 13,
    "float8_e4m3fn": 21, "float8_e4m3fnuz": 21, "float8_e5m2": 21, "float8_e5m2fnuz": 21, "int4": 21, "uint4": 21,
    "float4_e2m1fn": 23, "float8_e8m0fnu": 24, "int2": 25, "uint2": 25,
}  # fmt: skip


def sample(name: str) -> np.ndarray:
    """Six values of a dtype, not all equal, in two rows."""
    if name == "object":
        return np.array([["a", "", "longer"], ["\0b\0", "é", "a"]], object)
    values = [[1, 2, 4], [1, 8, 2]] if name == "float8_e8m0fnu" else [[1, 0, 1], [0, 1, 1]]  # it has no zero
    return np.array(values).astype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_moves(check: Any, name: str) -> None:
    x, opset = sample(name), DTYPES[name]
    flat, same = x.reshape(-1), {"opset": opset}
    check("Identity", [x], [x], **same)
    check("Reshape", [x, ints(3, -1)], [flat.reshape(3, 2)], **same)
    check("Flatten", [x], [x], **same)
    check("Unsqueeze", [x, ints(0)], [flat.reshape(1, 2, 3)], **same)
    check("Squeeze", [flat.reshape(1, 2, 3), ints(0)], [x], **same)
    check("Transpose", [x], [np.array([flat[[0, 3]], flat[[1, 4]], flat[[2, 5]]])], **same)
    check("Shape", [x], [ints(2, 3)], **same)
    check("Size", [x], [np.array(6, np.int64)], **same)
    if opset == 13:  # these have not learned newer dtypes
        check("Concat", [x, x], [np.array([[*x[0], *x[0]], [*x[1], *x[1]]], x.dtype)], axis=-1, **same)
        check("Split", [x, ints(1, 2)], [x[:, :1], x[:, 1:]], axis=1, **same)
        check("Expand", [x[:1], ints(2, 3)], [np.array([x[0], x[0]], x.dtype)], **same)
        check("Tile", [x, ints(2, 1)], [np.array([*x, *x], x.dtype)], **same)


@pytest.mark.parametrize("opset", [1, 13, 14, 16, 19, 21, 23, 24, 25])
def test_identity(check: Any, opset: int) -> None:
    check("Identity", [X], [X], opset=opset)
    if opset >= 14:
        check("Identity", [[X, X[0]]], [[X, X[0]]], opset=opset)


@pytest.mark.parametrize("opset", [1, 13, 15, 19, 21, 23, 24, 25])
def test_shape_and_size(check: Any, opset: int) -> None:
    for x in (X, np.zeros((0, 3), F), np.array(1, F)):
        check("Shape", [x], [ints(*x.shape)], opset=opset)
        check("Size", [x], [np.array(x.size, np.int64)], opset=max(opset, 1) if opset != 15 else 13)


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [(0, None, (2, 3, 4)), (-1, None, (4,)), (0, -1, (2, 3)), (1, 2, (3,)), (-9, 9, (2, 3, 4)), (2, 1, ()), (5, None, ()),
     (0, -9, ())],
)  # fmt: skip
def test_part_of_a_shape(check: Any, start: int, end: int | None, expected: tuple[int, ...]) -> None:
    check("Shape", [X], [ints(*expected)], opset=15, start=start, **({} if end is None else {"end": end}))


@pytest.mark.parametrize("opset", [5, 13, 14, 19, 21, 23, 24, 25])
def test_reshape(check: Any, fails: Any, opset: int) -> None:
    check("Reshape", [X, ints(4, -1)], [np.arange(24, dtype=F).reshape(4, 6)], opset=opset)
    check("Reshape", [X, ints(0, -1)], [np.arange(24, dtype=F).reshape(2, 12)], opset=opset)
    check("Reshape", [X, ints(0, 0, 2, -1)], [np.arange(24, dtype=F).reshape(2, 3, 2, 2)], opset=opset)
    check("Reshape", [X[0, 0, :1], ints()], [np.array(0, F)], opset=opset)
    check("Reshape", [np.zeros((0, 3), F), ints(-1, 7)], [np.zeros((0, 7), F)], opset=opset)
    for bad in [(5, -1), (-1, -1), (-2, 12), (2, 3), (0, 0, 0, 0), (23,)]:
        fails("Reshape", [X, ints(*bad)], "cannot reshape", opset=opset)
    fails("Reshape", [np.zeros((0, 3), F), ints(0, -1)], "must divide 0 elements", opset=opset)


def test_reshape_1_takes_an_attribute(check: Any) -> None:
    check("Reshape", [X], [np.arange(24, dtype=F).reshape(2, 2, 6)], opset=1, shape=[0, 2, -1])
    check("Reshape", [X], [np.arange(24, dtype=F)], opset=4, shape=[-1], consumed_inputs=[0])


@pytest.mark.parametrize("opset", [14, 19, 25])
def test_allowzero(check: Any, fails: Any, opset: int) -> None:
    check("Reshape", [np.zeros((0, 3), F), ints(3, 4, 0)], [np.zeros((3, 4, 0), F)], opset=opset, allowzero=1)
    fails("Reshape", [np.zeros((0, 3), F), ints(0, -1)], "-1 and 0 must not both occur", opset=opset, allowzero=1)
    fails("Reshape", [X, ints(0, 12)], "number of elements must be 24, got 0", opset=opset, allowzero=1)


@pytest.mark.parametrize("opset", [1, 9, 11, 13, 21, 23, 24, 25])
def test_flatten(check: Any, fails: Any, opset: int) -> None:
    check("Flatten", [X], [np.arange(24, dtype=F).reshape(2, 12)], opset=opset)
    for axis, shape in enumerate([(1, 24), (2, 12), (6, 4), (24, 1)]):
        check("Flatten", [X], [np.arange(24, dtype=F).reshape(shape)], opset=opset, axis=axis)
        if opset >= 11 and axis < 3:
            check("Flatten", [X], [np.arange(24, dtype=F).reshape(shape)], opset=opset, axis=axis - 3)
    check("Flatten", [np.zeros((0, 2, 3), F)], [np.zeros((0, 6), F)], opset=opset)
    check("Flatten", [np.array(7, F)], [np.array([[7]], F)], opset=opset, axis=0)
    fails("Flatten", [X], "axis must be in .* got 4", opset=opset, axis=4)
    if opset < 11:
        fails("Flatten", [X], "before opset 11", opset=opset, axis=-1)


@pytest.mark.parametrize("opset", [1, 11, 13, 21, 23, 24, 25])
def test_squeeze_and_unsqueeze(check: Any, fails: Any, opset: int) -> None:
    def both(op: str, x: np.ndarray, axes: list[int]) -> tuple[list[np.ndarray], dict[str, Any]]:
        return ([x, ints(*axes)], {"opset": opset}) if opset >= 13 else ([x], {"opset": opset, "axes": axes})

    wide = X.reshape(2, 1, 3, 1, 4)
    inputs, options = both("Squeeze", wide, [3])
    check("Squeeze", inputs, [X.reshape(2, 1, 3, 4)], **options)
    check("Squeeze", [wide], [X], opset=opset)
    check("Squeeze", [X[:1, :1, :1]], [np.array(0, F)], opset=opset)
    inputs, options = both("Unsqueeze", X, [3, 1])  # their order does not matter
    check("Unsqueeze", inputs, [wide], **options)
    inputs, options = both("Unsqueeze", np.array(5, F), [0])
    check("Unsqueeze", inputs, [np.array([5], F)], **options)
    inputs, options = both("Squeeze", X, [0])
    fails("Squeeze", inputs, "axes must be of size 1", **options)
    inputs, options = both("Unsqueeze", X, [1, 1])
    fails("Unsqueeze", inputs, "axes must be different", **options)
    inputs, options = both("Unsqueeze", X, [5])
    fails("Unsqueeze", inputs, "axis must be in .* got 5", **options)
    for op, x in (("Squeeze", wide), ("Unsqueeze", X)):
        inputs, options = both(op, x, [-2])
        if opset < 11:
            fails(op, inputs, "before opset 11", **options)
        else:
            check(op, inputs, [X.reshape(2, 1, 3, 4) if op == "Squeeze" else X.reshape(2, 3, 1, 4)], **options)


def test_squeeze_of_no_axes_is_no_squeeze(check: Any) -> None:
    check("Squeeze", [X[:1], ints()], [X[:1]], opset=13)


@pytest.mark.parametrize("opset", [1, 13, 21, 23, 24, 25])
def test_transpose(check: Any, fails: Any, opset: int) -> None:
    y = np.zeros((4, 2, 3), F)
    for i, j, k in np.ndindex(2, 3, 4):
        y[k, i, j] = X[i, j, k]
    check("Transpose", [X], [y], opset=opset, perm=[2, 0, 1])
    check("Transpose", [np.array([[1, 2, 3]], F)], [np.array([[1], [2], [3]], F)], opset=opset)
    check("Transpose", [np.array(3, F)], [np.array(3, F)], opset=opset)
    for bad in [[0, 1], [0, 1, 1], [0, 1, 3]]:
        fails("Transpose", [X], "perm must be a permutation", opset=opset, perm=bad)


@pytest.mark.parametrize("opset", [1, 4, 11, 13])
def test_concat(check: Any, fails: Any, opset: int) -> None:
    a, b = np.array([[1, 2], [3, 4]], F), np.array([[5], [6]], F)
    check("Concat", [a, b, a], [np.array([[1, 2, 5, 1, 2], [3, 4, 6, 3, 4]], F)], opset=opset, axis=1)
    check("Concat", [a, b], [np.array([[1, 2, 5], [3, 4, 6]], F)], opset=opset, axis=-1)
    check("Concat", [a, np.zeros((0, 2), F)], [a], opset=opset, axis=0)
    fails("Concat", [a, b], "equal except along axis 0", opset=opset, axis=0)
    fails("Concat", [a, a[0]], "equal except along axis 0", opset=opset, axis=0)
    fails("Concat", [a[0, 0], a[0, 1]], "axis must be in .* got 0", opset=opset, axis=0)


def test_concat_1_has_a_default_axis(check: Any) -> None:
    check("Concat", [X[:, :1], X[:, 1:]], [X], opset=3)


@pytest.mark.parametrize("opset", [1, 2, 11, 13, 18])
def test_split(check: Any, fails: Any, opset: int) -> None:
    def sized(*sizes: int, axis: int = 0) -> tuple[list[np.ndarray], dict[str, Any]]:
        if opset >= 13:
            return [x, ints(*sizes)], {"opset": opset, "axis": axis}
        return [x], {"opset": opset, "axis": axis, "split": sizes}

    x = np.arange(6, dtype=F)
    check("Split", [x], [x[:2], x[2:4], x[4:]], opset=opset)
    check("Split", [X], [X[:, :, :2], X[:, :, 2:]], opset=opset, axis=2)
    inputs, options = sized(1, 0, 5)
    check("Split", inputs, [x[:1], x[:0], x[1:]], **options)
    inputs, options = sized(1, 5, axis=-1)
    check("Split", inputs, [x[:1], x[1:]], **options)
    inputs, options = sized(2, 3)
    fails("Split", inputs, "sizes that add up to 6", outputs=2, **options)
    inputs, options = sized(8, -2)
    fails("Split", inputs, "sizes that add up to 6", outputs=2, **options)
    inputs, options = sized(2, 2, 2)
    fails("Split", inputs, "must have 2 sizes", outputs=2, **options)
    fails("Split", [x], "must be a multiple of 4, the number of outputs", outputs=4, opset=opset)
    check("Split", [x[:0]], [x[:0], x[:0]], opset=opset)


def test_split_1_takes_sizes_as_floats(check: Any) -> None:
    x = np.arange(6, dtype=np.float16)
    check("Split", [x, np.array([1, 5], np.float16)], [x[:1], x[1:]], opset=1)


def test_split_18_rounds_the_size_up(check: Any, fails: Any) -> None:
    x = np.arange(7, dtype=F)
    check("Split", [x], [x[:2], x[2:4], x[4:6], x[6:]], opset=18, num_outputs=4)
    check("Split", [x], [x[:3], x[3:6], x[6:]], opset=18, num_outputs=3, axis=-1)
    fails("Split", [x, ints(3, 4)], "both", outputs=2, opset=18, num_outputs=2)
    fails("Split", [x], "num_outputs must be 3", outputs=3, opset=18, num_outputs=4)
    fails("Split", [x[:5]], "4 sizes that add up to 5", outputs=4, opset=18, num_outputs=4)  # 2 + 2 + 2 is more than 5


@pytest.mark.parametrize("opset", [8, 13])
def test_expand(check: Any, fails: Any, opset: int) -> None:
    x = np.array([[1], [2]], F)
    check("Expand", [x, ints(2, 3)], [np.array([[1, 1, 1], [2, 2, 2]], F)], opset=opset)
    check("Expand", [x, ints(1)], [x], opset=opset)
    check("Expand", [x, ints(3, 1, 1)], [np.array([x, x, x])], opset=opset)
    check("Expand", [x, ints(0)], [np.zeros((2, 0), F)], opset=opset)
    check("Expand", [np.array(4, F), ints()], [np.array(4, F)], opset=opset)
    fails("Expand", [x, ints(3, 1)], "do not broadcast", opset=opset)
    fails("Expand", [x, ints(2, -1)], "do not broadcast", opset=opset)


@pytest.mark.parametrize("opset", [6, 13])
def test_tile(check: Any, fails: Any, opset: int) -> None:
    x = np.array([[1, 2]], F)
    check("Tile", [x, ints(2, 2)], [np.array([[1, 2, 1, 2], [1, 2, 1, 2]], F)], opset=opset)
    check("Tile", [x, ints(0, 1)], [np.zeros((0, 2), F)], opset=opset)
    check("Tile", [np.array(1, F), ints()], [np.array(1, F)], opset=opset)
    fails("Tile", [x, ints(2)], "repeats must have one non-negative value for each axis", opset=opset)
    fails("Tile", [x, ints(-1, 1)], "repeats must have one non-negative value for each axis", opset=opset)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_tile_1_repeats_one_axis(check: Any, dtype: Any) -> None:
    x = np.array([[1, 2], [3, 4]], dtype)
    check("Tile", [x, np.array(3, dtype), np.array(1, dtype)], [np.array([[1, 2] * 3, [3, 4] * 3], dtype)], opset=1)
    check("Tile", [x, np.array([2], dtype), np.array([0], dtype)], [np.array([*x, *x], dtype)], opset=5)
