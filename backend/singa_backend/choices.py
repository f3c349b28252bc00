"""The values that options have, apart from the code that implements them, which takes long to import."""

from __future__ import annotations

FLOATS = ("float16", "bfloat16", "float32", "float64")
"""The dtypes to which `convert` changes floats."""

LAYOUTS = ("channels_first", "channels_last")
"""The layouts of `change_layout`."""

LEAST = 7
"""The minimum opset that can be written: before it, broadcasting was different."""

METHODS = ("minmax", "entropy", "percentile")
"""How the range of an activation is chosen."""

QUANTIZED = ("int8", "uint8")
"""The dtypes of quantized values."""

FORMS = {"int2": 2, "int4": 4, "int8": 8, "fp4": 4, "nf4": 4}
"""The forms of weights, and the bits of each: integers with a scale and a zero point for each block, or codes of floats."""

BIASES = ("none", "all", "lora_only")
"""Which biases train: none, all, or those of the products that an adapter changes."""

TASKS = {
    "check": "whether the model is valid and supported; it is not run",
    "run": "whether the model runs on inputs that are drawn",
    "compare": "every value, node by node, with another engine on inputs that are drawn",
    "conform": "the outputs for the test_data_set_* folders next to the model, under the strict verdict",
}
"""What a sweep does with each file."""

KINDS = ("node", "real", "simple", "pytorch-converted", "pytorch-operator")
"""ONNX's kinds of cases; "real" are the light models in the wheel."""

OURS = "singa_backend:SingaBackend"
"""The backend of this package."""

CASE_RTOL, CASE_ATOL = 1e-3, 1e-7
"""The tolerances of ONNX's test cases for floats of 16 bits and more, and of `sonnx run --data` and `--against`."""

TOTAL = 600.0
"""The seconds that all stages of `sonnx device-check` together may take, unless `CheckSetup` has another number."""
