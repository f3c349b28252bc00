"""The numbers by which oneDNN's execute function knows the arguments of a primitive, with oneDNN's names."""

from __future__ import annotations

SRC = SRC_LAYER = FROM = 1
SRC_1 = SRC_ITER = 2
SRC_2 = SRC_ITER_C = 3
DST = DST_LAYER = TO = 17
DST_1 = DST_ITER = 18
DST_2 = DST_ITER_C = 19
WEIGHTS = WEIGHTS_LAYER = 33
WEIGHTS_1 = WEIGHTS_ITER = 34
WEIGHTS_2 = WEIGHTS_PEEPHOLE = 35
WEIGHTS_3 = WEIGHTS_PROJECTION = 36
BIAS = 41
MEAN = 49
VARIANCE = 50
SCALE = 51
SHIFT = 52
WORKSPACE = 64
SCRATCHPAD = 80
DIFF_SRC = DIFF_SRC_LAYER = 129
DIFF_SRC_1 = DIFF_SRC_ITER = 130
DIFF_SRC_2 = DIFF_SRC_ITER_C = 131
DIFF_DST = DIFF_DST_LAYER = 145
DIFF_DST_1 = DIFF_DST_ITER = 146
DIFF_DST_2 = DIFF_DST_ITER_C = 147
DIFF_WEIGHTS = DIFF_WEIGHTS_LAYER = 161
DIFF_WEIGHTS_1 = DIFF_WEIGHTS_ITER = 162
DIFF_BIAS = 169
DIFF_SCALE = 255
DIFF_SHIFT = 256
MULTIPLE_SRC = 1024
"""The first source of concat and sum; source i is MULTIPLE_SRC + i."""


def post_op(index: int, arg: int = SRC_1) -> int:
    """The argument for the operand of a post-op: SRC_1 of a binary one, WEIGHTS of a PReLU.

    Args:
        index: the position of the post-op among all of its primitive.
        arg: the operand.

    Returns:
        The number of the argument.
    """
    return 32768 * (index + 1) | arg


def scales(arg: int) -> int:
    """The argument for the scales of an argument.

    Args:
        arg: the argument to which the scales belong.

    Returns:
        The number of the argument.
    """
    return 4096 | arg


def zero_points(arg: int) -> int:
    """The argument for the zero points of an argument.

    Args:
        arg: the argument to which the zero points belong.

    Returns:
        The number of the argument.
    """
    return 8192 | arg
