"""The opset matrix: each operator written at each opset, equal there or refused by name; and the table of writable operators.

problems    the models: ONNX's cases, the same with constants, and drawn ones for every schema version
judge       one model at every opset: written, checked, run and compared, or refused with the minimum opset
run         judges models in several processes
supported   which operators can be written at an opset, by the registry and the writer
page        the matrix as data and as Markdown, compared with what the writer can do now
"""

from .judge import JudgedProblem, Outcome, judge
from .page import contradictions, stale, to_json, write
from .problems import OpsetProblem, listed, models
from .run import run
from .supported import Support, supported_ops

__all__ = ["JudgedProblem", "OpsetProblem", "Outcome", "Support", "contradictions", "judge", "listed", "models", "run", "stale",
           "supported_ops", "to_json", "write"]  # fmt: skip
