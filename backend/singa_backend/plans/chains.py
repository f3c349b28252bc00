"""Chains of calls that one kernel may compute: a call, and elementwise calls that are the only readers of its result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..elementwise.compile import available
from ..ir import graph as ir
from ..ir.declaration import has_trait
from ..kernels.rows import reduces
from ..kernels.table import table
from ..proto.schemas import SINGA_DOMAIN
from .flat import has_kernel_only

INTEGER = ("QLinearConv", "QLinearMatMul", "ConvInteger", "MatMulInteger")
"""Operators whose kernels add a quantized value: a DequantizeLinear of the other operand joins their chain."""
LOOKUP = frozenset(["Gather"])
"""Operators whose second input may be the preceding result."""
DRAWN = frozenset(["Less", "Not", "CastLike"])
"""Operators that join the chain of random bits besides those with the trait `epilogue`: they make a mask of them."""
LONGEST = 12
"""The maximum number of calls of a chain."""
WIDEST = 32
"""The maximum number of elementwise calls that are one group."""


def chains(calls: Sequence[ir.Node], outputs: Iterable[ir.Value]) -> list[tuple[ir.Node, ...]]:
    """Group the calls: each group takes the place of its last call, so that all its inputs are known there.

    A call with two single-use operands joins the chain of the operand that is computed last.
    """
    uses: dict[ir.Value | None, int] = dict.fromkeys(outputs, 2)  # never a single use
    maker: dict[ir.Value | None, int] = {}
    for index, call in enumerate(calls):
        for read in call.reads:
            uses[read] = uses.get(read, 0) + 1
        for o in call.results:
            maker[o] = index
    chain_of: dict[int, list[int]] = {}  # index of a call -> the chain that ends with it
    for index, call in enumerate(calls):
        chain_of[index] = [index]
        name = call.op_type
        lookup, drawn = call.is_(*LOOKUP), call.is_(*DRAWN)
        joins = lookup or drawn or has_trait("", name, "epilogue")
        if call.domain or not joins or len(call.results) != 1:
            continue
        # a Gather reads the preceding result by its second input, any other call that is not binary by its first
        places = list(call.inputs) if is_binary(call) else list(call.inputs[lookup:][:1])
        places = [i for i in places if i is not None and i in maker and uses[i] == 1 and len(calls[maker[i]].outputs) == 1]
        places.sort(key=lambda i: (calls[chain_of.get(maker[i], [maker[i]])[0]].is_(*INTEGER), maker[i]), reverse=True)
        for i in places:
            chain = chain_of.get(maker[i])
            if chain is not None and len(chain) < LONGEST and _begins(calls[chain[0]], drawn):
                # the DequantizeLinear of the other operand joins a chain of INTEGER
                side = [maker[j] for j in places if j != i and _reads_result(calls[maker[j]], maker) and maker[j] in chain_of]
                if side and calls[chain[0]].is_(*INTEGER):
                    rest = chain_of.pop(side[0])[:-1]
                    if rest:
                        chain_of[rest[-1]] = rest
                    chain = [*chain, side[0]]
                del chain_of[maker[i]]
                chain_of[index] = [*chain, index]
                break
    return [tuple(calls[i] for i in chain) for _, chain in sorted(chain_of.items())]


def is_elementwise(call: ir.Node) -> bool:
    """Whether a call may be a part of an expression: it computes one value for each place of its inputs."""
    traits = ("unary", "broadcasting")
    return len(call.results) == 1 and not has_kernel_only(call) and any(has_trait(call.domain, call.op_type, t) for t in traits)


def is_expression(call: ir.Node) -> bool:
    """Whether a call may be a part of an expression that reduces axes."""
    return is_elementwise(call) or (reduces(call.domain, call.op_type) and len(call.results) == 1 and not has_kernel_only(call))


def joined(groups: Sequence[tuple[ir.Node, ...]], outputs: Iterable[ir.Value]) -> list[tuple[ir.Node, ...]]:
    """Join groups of expressions: one whose results only another one reads takes its place.

    Args:
        groups: chains, each in the place of its last call.
        outputs: the values that are read elsewhere.

    Returns:
        The groups in order.
    """
    plain = [all(map(is_expression, g)) for g in groups]
    readers = _readers(groups, outputs)
    found: list[list[ir.Node]] = [list(g) for g in groups]
    place = list(range(len(groups)))  # of each group, that of the one that it has joined

    for at in reversed(range(len(groups))):
        by = {place[r] if r >= 0 else r for c in groups[at] for o in c.results for r in readers.get(o, ())} - {at}
        (into,) = by if len(by) == 1 else (-1,)
        if into >= 0 and plain[at] and plain[into] and len(found[at]) + len(found[into]) <= WIDEST:
            found[into], found[at], place[at] = [*found[at], *found[into]], [], into
    return [tuple(g) for g in found if g]


def _readers(groups: Sequence[tuple[ir.Node, ...]], outputs: Iterable[ir.Value]) -> dict[ir.Value, set[int]]:
    """The groups that read each value; -1 is what must not compute it itself."""
    readers: dict[ir.Value, set[int]] = {v: {-1} for v in outputs}
    for at, group in enumerate(groups):
        for call in group:
            for n, i in enumerate(call.reads):
                whole = n == 0 or not reduces(call.domain, call.op_type)  # a scale is not computed once for each row
                readers.setdefault(i, set()).update([at] if whole else [at, -1])
    return readers


def is_binary(call: ir.Node) -> bool:
    """Whether a call of an epilogue may read the result before it by any of its inputs; by the first one otherwise."""
    if call.domain:
        return False
    epilogue, broadcasting = (has_trait("", call.op_type, t) for t in ("epilogue", "broadcasting"))
    return epilogue and broadcasting and call.op_type != "PRelu"  # whose slope is broadcast to the first input


def _begins(call: ir.Node, drawn: bool) -> bool:
    """Whether a chain may begin with a call: there is a kernel, and not one of a gradient, which computes nothing else.

    drawn: whether only a chain of random bits is meant.
    """
    key = (call.domain, call.op_type)
    begins = key in table or (is_elementwise(call) and not available())
    return begins and not has_kernel_only(call) and (not drawn or key == (SINGA_DOMAIN, "Philox"))


def _reads_result(call: ir.Node, maker: dict[ir.Value | None, int]) -> bool:
    """Whether a call is a DequantizeLinear of another call's result."""
    return call.is_("DequantizeLinear") and call.inputs[0] in maker
