"""The options of an export, and its report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from singa_backend import passes
from singa_backend.errors import InvalidInput, check_keywords
from singa_backend.opsets.writer import LEAST
from singa_backend.proto.schemas import newest

DEFAULT_OPSET = 18
"""The opset if none is requested and the model did not come from a file; it is raised if operators need a newer one."""


@dataclass
class ExportReport:
    """A report of an export; `str(report)` is a table.

    Attributes:
        operations: the number of calls of each operator, by name.
        attributes: the number of uses of each attribute, by name.
        mapped: the number of calls of each operator that were written.
        unmapped: the number of calls of each operator that could not be written.
        exceptions: the reason for each call that could not be written, one line each.
        opset: the opset of the model.
        ir_version: the IR version of the model.
        passes: the report of the passes; None if the model was not optimized.
        warnings: the warnings, one line each.
        path: the path of the file; None if no file was written.
    """

    operations: Counter[str] = field(default_factory=Counter)
    attributes: Counter[str] = field(default_factory=Counter)
    mapped: Counter[str] = field(default_factory=Counter)
    unmapped: Counter[str] = field(default_factory=Counter)
    exceptions: list[str] = field(default_factory=list)
    opset: int = 0
    ir_version: int = 0
    passes: passes.Report | None = None
    warnings: list[str] = field(default_factory=list)
    path: str | None = None

    def __str__(self) -> str:
        def table(title: str, counts: Counter[str]) -> list[str]:
            return [f"{title}: {counts.total()}", *(f"  {n:<32} {k:>5}" for n, k in sorted(counts.items()))]

        lines = [f"opset {self.opset}, IR version {self.ir_version}", *table("operations", self.operations)]
        lines += [*table("attributes", self.attributes), *table("mapped", self.mapped), *table("unmapped", self.unmapped)]
        lines += [f"exception: {e}" for e in self.exceptions] + [f"warning: {w}" for w in self.warnings]
        lines += [str(self.passes)] if self.passes else []
        return "\n".join([*lines, f"written to {self.path}" if self.path else "not written to a file"])

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data.

        Returns:
            A dict from the name of each field to numbers, strings, lists and dicts, ready for `json.dumps`.
        """
        counts = ("operations", "attributes", "mapped", "unmapped")
        return {**{n: dict(sorted(getattr(self, n).items())) for n in counts}, "exceptions": list(self.exceptions),
                "opset": self.opset, "ir_version": self.ir_version, "warnings": list(self.warnings), "path": self.path,
                "passes": self.passes.to_dict() if self.passes else None}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """The options of an export; the keywords of `to_onnx`, `export`, `convert` and `export_and_check`.

    Attributes:
        opset: the opset of the file, 7 to the newest.  None for the opset of the file that the model came from, otherwise 18,
            raised if operators need a newer one.
        extra_opsets: (domain, version) pairs of custom domains.
        training: whether to write the training form; the inference form by default.
        input_names: the names of the inputs, in order; None for the names of the tensors, or of the file.
        output_names: the names of the outputs, in order; None for the names of the tensors, or of the file.
        dynamic_axes: a dict from an input's name to {axis: symbolic size}, or to a list of axes; these sizes stay open.
        shape_override: a dict from a value's name to its shape; the shapes after it are inferred again.
        keep_initializers_as_inputs: whether to list the initializers among the inputs.
        optimize: True to run all passes, or a list of their names.
        continue_on_error: whether to report operators that cannot be written and write the rest; each is replaced by a
            placeholder of the domain "ai.singa.unwritten".  By default they raise an error.
        check: whether to run onnx's checker on the result, with full_check.
        run: whether `export` runs the file once in onnxruntime, if that is installed, with the example inputs; in a child
            process, and before the file is moved to its place.  Not with `training` or `continue_on_error`.
        external_data: whether to write weights to a separate file; None to do so only above 2 GB.
        lower: whether to write operators of other domains than ONNX's, such as com.microsoft, in ONNX's operators; by default
            those of com.microsoft are kept, and those without attributes become functions.
        functions: whether operators of com.microsoft have function bodies in ONNX's operators, one for each form of a call.
        metadata: entries of the model's metadata_props.
        doc: the doc_string of the model.

    Raises:
        InvalidInput: the opset is not supported, or `extra_opsets` is not a list of pairs (SX323).
    """

    opset: int | None = None
    extra_opsets: Sequence[tuple[str, int]] = ()
    training: bool = False
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: Mapping[str, Any] | None = None
    shape_override: Mapping[str, Sequence[Any]] | None = None
    keep_initializers_as_inputs: bool = False
    optimize: bool | Sequence[str] = False
    continue_on_error: bool = False
    check: bool = True
    run: bool = True
    external_data: bool | None = None
    lower: bool = False
    functions: bool = False
    metadata: Mapping[str, str] | None = None
    doc: str = ""

    def __post_init__(self) -> None:
        if self.opset is not None:
            check_opset("opset", self.opset, LEAST)
        for option in ("input_names", "output_names"):
            names = getattr(self, option)
            if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)):
                raise InvalidInput(f"{option} must be a list of names, got {names!r}", code="SX355")
        pairs = self.extra_opsets
        if not isinstance(pairs, (list, tuple)) or not all(
            isinstance(p, (list, tuple)) and len(p) == 2 and isinstance(p[0], str) and isinstance(p[1], int) for p in pairs
        ):
            raise InvalidInput(f"extra_opsets must be a list of (domain, version) pairs, got {pairs!r}", code="SX323")


def check_opset(what: str, opset: Any, lowest: int) -> int:
    """The opset; raises InvalidInput (SX323) unless it is an integer from `lowest` to the newest opset."""
    top = newest("")
    if isinstance(opset, bool) or not isinstance(opset, (int, np.integer)) or not lowest <= opset <= top:
        raise InvalidInput(f"{what} must be an integer in [{lowest}, {top}], got {opset!r}", code="SX323")
    return int(opset)


def options_of(call: str, options: Mapping[str, Any]) -> Options:
    """The options of a call; raises UnknownKeyword."""
    check_keywords(call, options, (f.name for f in fields(Options)))
    return Options(**options)
