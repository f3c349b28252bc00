"""Output types of the operators that graphs mostly consist of, in Python: what onnx's own inference returns, without its C++.

A node may come from a file, and onnx's inference of one node can crash or hang the process that calls it.  A rule computes with
Python integers, so it can do neither.  It raises `Unsure` for every call that it does not cover or that is not valid; then
onnx infers the types, in its child process (`proto.checker.infer_node`), which also returns the message of what is wrong.

Elementwise operators are those with the traits "unary", "broadcasting" and "reduction".  The other names are here and not with
the operators, because a rule repeats one function of onnx, not the operator's definition: tests/rewriting/test_shape_rules.py
compares every rule with onnx on drawn nodes of every schema version.  The rules of `Declaration.shapes` know more, such as equal
sizes and the sizes that a value holds, and may not be written to a file in the place of what onnx infers.
"""

from .inference import infer, rule_of

__all__ = ["infer", "rule_of"]
