"""Numbers of oneDNN's C headers, equal in all versions 3.x."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

DTYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.float16): 1,
    np.dtype(ml_dtypes.bfloat16): 2,
    np.dtype(np.float32): 3,
    np.dtype(np.int32): 4,
    np.dtype(np.int8): 5,
    np.dtype(np.uint8): 6,
    np.dtype(np.float64): 7,
}
"""The data types that have a NumPy dtype."""

DTYPE_OF = {number: dtype for dtype, number in DTYPES.items()}

RUNTIME_DIM = -(2**63)
"""A size or stride that is known only when the primitive runs.  Such a primitive is slower, and few operators accept it."""

FORMAT_ANY = 1

STATUS = {
    1: "out_of_memory",
    2: "invalid_arguments",
    3: "unimplemented",
    4: "last_impl_reached",
    5: "runtime_error",
    6: "not_required",
    7: "invalid_graph",
    8: "invalid_graph_op",
    9: "invalid_shape",
    10: "invalid_data_type",
}

RUNTIMES = {1: "sequential", 2: "OpenMP", 4: "TBB"}
"""The kinds of threads that need no further calls; others, a thread pool of the caller and SYCL, are refused."""

ISA = {
    0x0: "generic",
    0x1: "sse41",
    0x3: "avx",
    0x7: "avx2",
    0xF: "avx2_vnni",
    0x1F: "avx2_vnni_2",
    0x27: "avx512_core",
    0x67: "avx512_core_vnni",
    0xE7: "avx512_core_bf16",
    0x1EF: "avx512_core_fp16",
    0xFEF: "avx512_core_amx",
    0x1FEF: "avx512_core_amx_fp16",
}

PROP = {"training": 64, "inference": 96, "backward": 128, "backward_data": 160, "backward_weights": 192}
FPMATH = {"strict": 0, "bf16": 1, "f16": 2, "any": 3, "tf32": 4}
SCRATCHPAD_USER = 1

CONVOLUTION = {"direct": 1, "winograd": 2, "auto": 3}
DECONVOLUTION = {"direct": 10, "winograd": 11}
POOLING = {"max": 0x1FF, "avg_include_padding": 0x2FF, "avg_exclude_padding": 0x3FF}
LRN = {"across_channels": 0xAFF, "within_channel": 0xBFF}
SOFTMAX = {"accurate": 0x30000, "log": 0x30001}
RESAMPLING = {"nearest": 0x2FFF0, "linear": 0x2FFF1}

ELTWISE = {
    name: 0x20 + i
    for i, name in enumerate(
        (
            "relu", "tanh", "elu", "square", "abs", "sqrt", "linear", "soft_relu", "hardsigmoid", "logistic", "exp", "gelu_tanh",
            "swish", "log", "clip", "clip_v2", "pow", "gelu_erf", "round", "mish", "hardswish",
        )
    )
} | {
    f"{name}_use_dst_for_bwd": 0x100 + i
    for i, name in enumerate(("relu", "tanh", "elu", "sqrt", "logistic", "exp", "clip_v2"))
}  # fmt: skip
BINARY = {
    name: 0x1FFF0 + i for i, name in enumerate(("add", "mul", "max", "min", "div", "sub", "ge", "gt", "le", "lt", "eq", "ne"))
}
REDUCTION = {
    name: 0x2FFF2 + i
    for i, name in enumerate(
        ("max", "min", "sum", "mul", "mean", "norm_lp_max", "norm_lp_sum", "norm_lp_power_p_max", "norm_lp_power_p_sum")
    )
}
DIRECTION = {"left2right": 1, "right2left": 2, "bidirectional_concat": 3, "bidirectional_sum": 4}

OVERWRITE = 1
"""Flag of a recurrent backward primitive: write the gradients of the weights, which are added to otherwise."""

# Flags of normalizations.
USE_GLOBAL_STATS = 1
USE_SCALE = 2
USE_SHIFT = 4
FUSE_NORM_RELU = 8
FUSE_NORM_ADD_RELU = 16

QUERY_IMPLEMENTATION = 8
QUERY_SIZES = {"strides": 14, "dilations": 15, "padding_l": 16, "padding_r": 17}
QUERY_NUMBER = {"flags": 19, "direction": 29}
QUERY_STRIDES = 14
QUERY_NDIMS = 256
QUERY_DIMS = 257
QUERY_DTYPE = 258
QUERY_FORMAT_KIND = 262
QUERY_INNER_BLOCKS = 263
BLOCKED = 2
FORMAT_KIND_ANY = 1
"""The kind of a format whose strides are known."""

QUERY = {
    "src": 129,
    "diff_src": 130,
    "weights": 131,
    "diff_weights": 132,
    "dst": 133,
    "diff_dst": 134,
    "workspace": 135,
    "scratchpad": 136,
    "argument": 255,
}
