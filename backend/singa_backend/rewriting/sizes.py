"""Values that are sizes: what is known of them before a graph runs."""

from __future__ import annotations

from .view import C, GraphView, V


def sizes(view: GraphView[V, C]) -> int:
    """For any call whose result consists of known sizes, such as Shape and Gather of it, replace the result by a constant."""
    count = 0
    for value, array in view.known_sizes():
        call = view.producer(value)
        if call is not None and view.has_one_output(call):
            count += view.fold(call, {value: array})
    return count
