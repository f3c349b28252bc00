"""Find the first wrong node: `compare` two engines or models by value, `bisect` to a node, `reduce` a failing model."""

from ..comparison.difference import Difference, Tolerance, difference
from ..engines.command import EngineCommand
from ._old_names import __getattr__ as __getattr__
from .alignment import Alignment, Gap, ValuePair
from .bisect import Reproduction, bisect
from .compare import compare
from .comparison import Comparison, Divergence, NotCompared, Row
from .diff import Change, GraphDifference, diff
from .diff_page import diff_page
from .extract import extract
from .model import ComparedModel
from .reduce import Predicate, Reduction, command, differs, raises, reduce

__all__ = [
    "Alignment",
    "Change",
    "ComparedModel",
    "Comparison",
    "Difference",
    "Divergence",
    "EngineCommand",
    "Gap",
    "GraphDifference",
    "NotCompared",
    "Predicate",
    "Reduction",
    "Reproduction",
    "Row",
    "Tolerance",
    "ValuePair",
    "bisect",
    "command",
    "compare",
    "diff",
    "diff_page",
    "difference",
    "differs",
    "extract",
    "raises",
    "reduce",
]
