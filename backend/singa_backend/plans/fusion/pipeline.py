"""The passes in order, and `fuse`, which runs them until none of them changes anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from ...ir import graph as ir
from ...rewriting.activations import activations, hard_sigmoids, leaky_relus, prelus, softplus
from ...rewriting.affine import channels
from ...rewriting.attention import attentions, scales
from ...rewriting.identity import identity
from ...rewriting.normalization import global_pools, group_norms, layer_norms
from ...rewriting.padding import padding
from ...rewriting.rotary import rotary_embeddings
from ...rewriting.run import run
from ...rewriting.sizes import sizes
from ...rewriting.transposes import transposes
from .additions import additions, windows
from .bodies import bodies
from .constants import branches, constants
from .ensembles import leaf_functions, summed_ensembles
from .facts import Type
from .products import products
from .quantized import quantized_moves, quantized_pairs, quantized_products, quantized_signs, quantized_sums, quantized_tables
from .reshapes import reshapes
from .rewriter import PlanRewriter
from .simpler import squares, sums
from .transposes import cancelled, through_reshapes

Pass = Callable[[PlanRewriter], int]

ROUNDS = 16
"""The number of times that each pass runs at most."""

LEVEL_1: tuple[Pass, ...] = (sizes, constants, branches, identity, sums, padding, channels)
"""Passes that only remove calls."""
LEVEL_2: tuple[Pass, ...] = (
    bodies,
    quantized_signs,
    quantized_moves,
    quantized_pairs,
    quantized_tables,
    leaf_functions,
    summed_ensembles,
    quantized_products,
    transposes,
    through_reshapes,
    cancelled,
    layer_norms,
    group_norms,
    global_pools,
    activations,
    hard_sigmoids,
    leaky_relus,
    prelus,
    softplus,
    squares,
    rotary_embeddings,
    windows,
    additions,
    attentions,
    scales,
    products,
    reshapes,
    quantized_sums,
)
"""Passes that recognize the primitive form of an operator, or join calls."""
PASSES: dict[str, Pass] = {p.__name__: p for p in (*LEVEL_1, *LEVEL_2)}
"""All passes by name, in the order in which they run."""


def fuse(
    graph: ir.Graph, level: int = 2, types: Mapping[ir.Value, Type] | None = None, only: Iterable[str] | None = None
) -> dict[str, int]:
    """Rewrite the nodes of a graph until no pass changes anything.

    Results keep their values, NaN and infinities included; float32 results round differently, by about 1e-5 of the largest one.

    Args:
        graph: the graph of a plan, which is changed.
        level: 0 for nothing, 1 for the passes that only remove calls, 2 for all.
        types: the dtypes and shapes of values that are known, such as those of the inputs: value -> (dtype, shape), in which
            a size is an int, a name that all sizes of one value share, or None.
        only: the names of the passes to run; None for those of the level.

    Returns:
        The number of rewrites of each pass that made any.
    """
    names = set(PASSES if only is None else only)
    passes = [p for p in (*LEVEL_1, *(LEVEL_2 if level > 1 else ())) if p.__name__ in names] if level > 0 else []
    if not passes:
        return {}
    graph.remove_unused()
    edit = PlanRewriter(graph, types)
    done = run([partial(p, edit) for p in passes], ROUNDS)
    return {p.__name__: n for p, n in zip(passes, done.counts, strict=True) if n}
