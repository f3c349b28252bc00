"""Values that are sizes: what is known of them before a graph runs."""

from __future__ import annotations

from .rewriter import Rewriter


def sizes(edit: Rewriter) -> int:
    """For any call whose result consists of known sizes, such as Shape and Gather of it, replace the result by a constant."""
    count = 0
    for value, array in edit.known_sizes():
        call = value.producer
        if call is not None and call.has_one_output:
            count += edit.fold(call, {value: array})
    return count
