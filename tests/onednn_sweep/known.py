"""Faults of oneDNN 3.2, each as a small case: the sweep finds them again if it runs what is refused, and `trust` refuses them.

All can be reached at the level AVX2, some by an implementation that oneDNN offers after others.
"""

from __future__ import annotations

from typing import NamedTuple

from .cases import Case


class Known(NamedTuple):
    """A fault.

    Attributes:
        implementation: its name begins so.
        sorts: what the sweep may report.
        case: the case.
        level: the level at which oneDNN offers the code first; "" for all.
    """

    implementation: str
    sorts: tuple[str, ...]
    case: Case
    level: str = ""


_COMMON = {"prop": "inference", "threads": 1, "seed": 1, "gap": 0, "post": []}
_WINDOW = _COMMON | {
    "n": 1, "kernel": [1, 1], "strides": [1, 1], "dilations": [1, 1], "begin": [0, 0], "end": [0, 0], "layout": "last",
}  # fmt: skip
_CONVOLUTION = _WINDOW | {
    "family": "convolution", "kind": "convolution_forward", "g": 0, "weights": "any", "bias": 0, "dtypes": ["f32"] * 3, "zero": 0,
}  # fmt: skip
_POOLING = _WINDOW | {"family": "pooling", "dtype": "f32", "dilations": [1], "begin": [0], "end": [0]}
_ROWS = _COMMON | {
    "family": "normalization",
    "prop": "training",
    "shape": [8, 7],
    "gap": 3,
    "layout": "plain",
    "shared": 0,
    "relu": 0,
}

_STRIDED = _CONVOLUTION | {"kind": "convolution_backward_weights", "prop": "training", "strides": [2, 2]}
_OPERAND = _CONVOLUTION | {"ic": 3, "oc": 16, "size": [4, 4], "post": [["binary", "add", [1], 3]]}
_DEPTHWISE = _CONVOLUTION | {"g": 5, "ic": 1, "oc": 1}

FAULTS: dict[str, Known] = {
    "1x1 by weights with a stride": Known(
        "jit_1x1:avx2", ("crash", "outside", "wrong"), _STRIDED | {"n": 4, "ic": 1, "oc": 8, "size": [16, 16]}, "AVX2"
    ),
    "1x1 by weights with a stride and a bias": Known(
        "jit_1x1:avx2", ("crash", "outside", "wrong"), _STRIDED | {"n": 5, "ic": 6, "oc": 6, "size": [8, 8], "bias": 1}, "AVX2"
    ),
    "gradient of an LSTM without a first state": Known(
        "ref", ("wrong",), _COMMON | {
            "family": "recurrent", "kind": "lstm_backward", "prop": "training", "t": 2, "n": 1, "i": 1, "h": 1,
            "direction": "left2right",
            "weights": "any", "bias": 1, "state": 0, "last": 1, "order": "plain", "activation": "tanh", "peephole": 0,
        },
    ),
    "operand of a post-op with gaps, 1x1": Known("brgconv_1x1:avx2", ("wrong", "crash"), _OPERAND, "AVX2"),
    "operand of a post-op with gaps": Known("jit:avx2", ("wrong", "crash"), _OPERAND, "AVX2"),
    "operand of a post-op for each channel of samples": Known(
        "jit:uni", ("wrong",), _COMMON | {
            "family": "binary", "kind": "binary", "algorithm": "add", "shape": [2, 2, 1], "keep": [1], "layout": "plain",
            "gaps": [0, 0],
            "dtype": "f32", "shared": "", "post": [["binary", "add", [1], 0]], "seed": 4,
        },
    ),
    "rows with gaps": Known("jit:uni", ("outside", "wrong"), _ROWS | {"kind": "layer_normalization_forward", "flags": 0}),
    "softmax of one channel": Known(
        "ref", ("wrong",), _COMMON | {
            "family": "softmax", "kind": "softmax_backward", "prop": "training", "shape": [4, 1, 8], "axis": 2, "log": 0,
            "layout": "last",
            "shared": 0,
        },
    ),
    "resampling that adds": Known(
        "ref", ("wrong",), _COMMON | {
            "family": "resampling", "kind": "resampling_forward", "n": 1, "ic": 1, "size": [4], "to": [8], "algorithm": "linear",
            "layout": "last", "dtype": "f32", "post": [["sum"]],
        },
    ),
    "function of elements that adds": Known(
        "ref", ("wrong",), _COMMON | {
            "family": "eltwise", "kind": "eltwise_forward", "algorithm": "linear", "by_result": 0, "shape": [64],
            "layout": "plain",
            "shared": 0, "post": [["sum"]],
        },
    ),
    "gradient of a pooling with gaps": Known(
        "ref", ("outside", "wrong", "unstable"), _POOLING | {
            "kind": "pooling_backward", "prop": "training", "algorithm": "avg_exclude_padding", "n": 2, "ic": 3, "size": [6],
            "kernel": [2], "strides": [2], "gap": 3,
        },
    ),
    "transposed convolution with gaps": Known(
        "conv:any+ref", ("crash", "outside"), _CONVOLUTION | {
            "kind": "deconvolution_forward", "prop": "training", "ic": 1, "oc": 1, "size": [40, 40], "strides": [3, 3],
            "gap": 3, "bias": 1,
        },
    ),
    "depthwise int8 with an operand": Known(
        "jit_uni_int8:avx2", ("wrong",), _DEPTHWISE | {
            "size": [3, 3], "kernel": [1, 2], "end": [0, 1], "dtypes": ["u8", "s8", "f32"], "post": [["binary", "add", [1], 0]],
        },
        "AVX2",
    ),
    "depthwise of SSE41 that adds": Known("jit_dw:sse41", ("crash",), _DEPTHWISE | {"size": [3, 4], "post": [["sum"]]}),
    "average of SSE41 at an odd address": Known(
        "jit:sse41", ("crash",), _POOLING | {
            "kind": "pooling_forward", "algorithm": "avg_include_padding", "ic": 40, "size": [24], "kernel": [5],
            "strides": [3], "begin": [1],
        },
    ),
}  # fmt: skip
"""The faults by name."""
