"""What the null device loads in the place of a compiled kernel: a description of its parameters, so that the driver counts bytes.

A line for each kernel, with a word for each parameter: S for a number, P for a pointer, whose array counts as its whole
allocation, and C<size of an element>:<axes>:<access>:<use> for an array of CuPy, which knows its shape and strides.  The access
is e if threads take one element each, r if the kernel indexes the array by itself (it counts whole, once), and g for the array
from which `cupy_take` gathers (as many elements as the result has); the use is r for arrays that are read and w for those that
are written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

_KERNEL = re.compile(r"__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\([^)]*\)\s*)?(?:void\s+)?(\w+)\s*\(([^)]*)\)")
_MACRO = re.compile(r"#define (\w+)\(\w+\)((?:[^\n]*\\\n)*[^\n]*)")
_ARRAY = re.compile(r"(const )?CArray<(.+), (\d+), \d+, \d+> (\w+)")
_SIZES = {
    **dict.fromkeys(("bool", "char", "signed char", "unsigned char"), 1),
    **dict.fromkeys(("short", "unsigned short", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int", "unsigned int", "float"), 4),
    **dict.fromkeys(("long", "unsigned long", "long long", "unsigned long long", "double"), 8),
    **dict.fromkeys(("complex<float>", "thrust::complex<float>"), 8),
    **dict.fromkeys(("complex<double>", "thrust::complex<double>"), 16),
}
"""The bytes of the types of CuPy's kernels."""


def _word(kernel: str, parameter: str) -> str:
    """The description of a parameter."""
    array = _ARRAY.fullmatch(" ".join(parameter.split()))
    if array is None or array[2] not in _SIZES:
        return "P" if "*" in parameter or array else "S"
    constant, kind, axes, name = array.groups()
    access = "e" if name.startswith("_raw_") else "g" if kernel == "cupy_take" else "r"  # CuPy's names
    return f"C{_SIZES[kind]}:{axes}:{access}:{'r' if constant else 'w'}"


def described(source: str, expressions: Sequence[str]) -> tuple[bytes, dict[str, str]]:
    """Describe the kernels of a source.

    Args:
        source: CUDA C++.
        expressions: the kernels that are instances of templates.

    Returns:
        The description, with a zero byte, and the names of the kernels of templates.
    """
    macros = dict(_MACRO.findall(source))
    words = {}
    for name, text in _KERNEL.findall(source):
        macro, called, _ = text.partition("(")
        parameters = macros.get(macro.strip(), "") if called else text
        words[name] = " ".join(_word(name, p) for p in re.split(r",(?![^<]*>)", parameters) if p.strip())
    names = {expression: re.sub(r"\W", "_", expression) for expression in expressions}
    for expression, symbol in names.items():
        words[symbol] = words.get(expression.partition("<")[0], "")
    return ("null:" + "".join(f"{name} {word}\n" for name, word in words.items())).encode() + b"\0", names


def compile_kernels(
    source: str,
    options: Sequence[str] = (),
    arch: str | None = None,
    filename: str = "kern.cu",
    name_expressions: Sequence[str] | None = None,
    *_: Any,
) -> tuple[bytes, dict[str, str]]:
    """Describe CUDA C++; the parameters and the result are those of CuPy's `compile_using_nvrtc`.

    Args:
        source: the text.
        options: ignored.
        arch: ignored.
        filename: ignored.
        name_expressions: kernels that are instances of templates.

    Returns:
        As `described`.
    """
    return described(source, name_expressions or ())
