"""Softmax, norms, reductions and elementwise calls by machine code, for what their definitions leave when they are traced.

A row is what a definition reduces.  It is read a few times, once for each reduction that depends on another one.  The elementwise
calls whose results only it reads, and those that follow it, are a part.
"""

from __future__ import annotations

from ..elementwise.compile import available
from ..proto.schemas import LAX, MICROSOFT
from .expressions import ExpressionCall, chained, compute, label_of, replaceable, trace
from .table import Refused, Site, general, kernel, table
from .values import FINITE, REACHED, Value

OPERATORS = (
    "Softmax", "LogSoftmax", "LayerNormalization", "RMSNormalization", "ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin",
    "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "ReduceLogSumExp", "ArgMax", "ArgMin",
    "InstanceNormalization", "MeanVarianceNormalization", "LpNormalization", "BatchNormalization",
    "GlobalAveragePool", "GlobalMaxPool", "DynamicQuantizeLinear",
)  # fmt: skip
"""The operators whose definitions reduce axes."""

OF_MICROSOFT = ("SkipLayerNormalization", "SkipSimplifiedLayerNormalization")
"""Those of onnxruntime."""


@general("unary", "broadcasting", on="machine")
def generated(site: Site, *inputs: Value | None) -> Value | tuple[Value | None, ...]:
    """A call that is elementwise or reduces axes, and as many as possible of those that follow it."""
    site.require(not available(), available())
    if any(site.outputs[1:]):
        terms, values = trace(site, [ExpressionCall(site.operator, site.attributes, inputs, site.outputs)])
        free = replaceable(site, inputs)
        ys = iter(compute(site, terms, values, label_of(site), lambda v: id(v) in free, engine="machine"))
        return tuple(next(ys) if used else None for used in site.outputs)
    terms, values, free = chained(site, inputs)
    for count in range(len(terms), 0, -1):
        site.absorb(count - 1)
        try:
            (y,) = compute(site, terms[count - 1 : count], values, label_of(site), lambda v: id(v) in free, engine="machine")
        except Refused:
            if site.wanted or count == 1:
                raise
            continue
        x = inputs[0]
        if site.name == "Softmax" and not site.absorbed and x is not None and x.low == REACHED:
            y.finiteness = FINITE
        return y
    raise AssertionError


def reduces(domain: str, name: str) -> bool:
    """Whether the definition of an operator reduces axes, for machine code."""
    return table.lists((domain, name), __name__)


for _name in OPERATORS:
    kernel(_name, on="machine")(generated)
for _name in OF_MICROSOFT:
    kernel(_name, on="machine", domain=MICROSOFT)(generated)
kernel("SimplifiedLayerNormalization", on="machine", domain=LAX)(generated)
