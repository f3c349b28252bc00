"""Weight-only quantization: constant matrices as 2, 4 or 8 bits by blocks, in onnxruntime's operators MatMulNBits and MatMulBnb4.

Integers, scales and codes are computed in the steps of onnxruntime's MatMulNBitsQuantizer and MatMulBnb4Quantizer, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from .. import limits
from ..dtypes import FOUR_BIT_CODES
from ..errors import InvalidInput
from ..ir.graph import Graph, Node, Value
from ..passes.model import ModelEditor, in_function
from ..proto import tensor_data
from ..proto.load import ModelSource, embed, load_model
from ..proto.messages import imported, unlist_weights
from ..proto.schemas import MICROSOFT
from .options import FORMS, FloatWeight, checked_choice, float_weights, select, why_not

PRODUCTS = ("Gemm", "MatMul")
"""The operators whose weights are quantized."""

_TYPES = {"fp4": 0, "nf4": 1}
"""The `quant_type` of codes of floats."""

_FP4_LIMITS = np.array([0.00260417, 0.0859375, 0.20833333, 0.29166667, 0.4166667, 0.583333, 0.8333333], np.float32)
_FP4_CODES = np.array([0, 1, 6, 7, 4, 5, 2, 3], np.uint8)
"""The limits between magnitudes as bitsandbytes rounds them, and the codes of the magnitudes in their order."""


def quantize_weights(
    model: ModelSource,
    form: str = "int4",
    *,
    block_size: int | None = None,
    symmetric: bool = False,
    operators: Sequence[str] | None = None,
    exclude: Sequence[str] = (),
    exclude_operators: Sequence[str] = (),
    kept: list[FloatWeight] | None = None,
) -> ModelProto:
    """Quantize the constant matrices of MatMul and Gemm by blocks; activations stay float32.

    The products become onnxruntime's operators MatMulNBits (integers) or MatMulBnb4 (codes of floats), also in the graphs of
    Loop, If and Scan.  Matrices that are not float32, or that a caller may override, stay as they are.

    Args:
        model: a ModelProto, its bytes, or the path of its file.
        form: "int2", "int4" or "int8": each block of a column has a scale and a zero point; "nf4": the quantiles of the normal
            distribution (QLoRA), "fp4": floats of 4 bits, with the largest magnitude of each block as its scale.
        block_size: the number of weights of a block, a power of 2 and at least 16; by default 32 for integers and 64 for floats.
        symmetric: whether the zero points of integers are the middle of their range, and not stored.
        operators: the operators to quantize, of "MatMul" and "Gemm"; by default both.
        exclude: regular expressions; nodes whose whole names match one are not quantized.  A node without a name is named by
            its operator and position, such as Conv_3, or its operator and outputs, such as "Conv of 'y'".
        exclude_operators: operators that are not quantized.
        kept: a list that receives the weights that stay float, each with the reason.

    Returns:
        The quantized model; the given one is not changed.

    Raises:
        InvalidInput: an option is not supported, or the model has nothing to quantize (SX397).
        InvalidModel: the model is not valid.

    Example:
        >>> small = quantize_weights("model.onnx", "nf4", exclude=["/lm_head/.*"])
        >>> sonnx.save(small, "small.onnx")
    """
    if not isinstance(form, str) or form not in FORMS:
        raise InvalidInput(f"form must be one of {', '.join(FORMS)}, got {form!r}", code="SX397")
    size = (64 if form in _TYPES else 32) if block_size is None else block_size
    if isinstance(size, bool) or not isinstance(size, int) or size < 16 or size & (size - 1):
        raise InvalidInput(f"block_size must be a power of 2 and at least 16, got {size!r}", code="SX397")
    if symmetric and form in _TYPES:
        raise InvalidInput(f"symmetric is for integers; {form} has no zero points", code="SX397")
    chosen, patterns = checked_choice(PRODUCTS, operators, exclude, exclude_operators)
    proto, folder = load_model(model)
    quantized = ModelProto()
    quantized.CopyFrom(proto)
    embed(quantized, folder)
    unlist_weights(quantized)
    editor = ModelEditor(quantized)
    work = _FewBits(editor, form, size, bool(symmetric))
    nodes = [node for graph in editor.main.walk() for node in graph.nodes]
    at = select(nodes, chosen, patterns)
    reasons: dict[str, str] = {}
    count = 0
    for i, node in enumerate(nodes):
        reason = work.quantize(node) if i in at else why_not(node, PRODUCTS, chosen)
        count += not reason
        reasons |= dict.fromkeys((v.original.name for v in node.inputs if v is not None) if reason else (), reason)
    if not count:
        kinds = ", ".join(sorted(chosen)) or "none"
        what = f"the model has no weights to quantize: constant float32 matrices of these operators ({kinds}), not excluded"
        raise InvalidInput(what, code="SX397")
    work.drop_unused()
    editor.write()
    if MICROSOFT not in imported(quantized.opset_import):
        quantized.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    quantized.producer_name = "sonnx"
    if kept is not None:
        kept += float_weights(proto, editor.main, reasons)
    return quantized


class _FewBits:
    """Replaces products by those with few bits."""

    def __init__(self, editor: ModelEditor, form: str, block: int, symmetric: bool) -> None:
        self.editor, self.form, self.block, self.symmetric = editor, form, block, symmetric
        self.made: dict[tuple[Value, bool], tuple[list[Value], int, int]] = {}
        """The parts of a quantized matrix, K and N, by the matrix and whether it is transposed."""
        self.replaced: list[Value] = []

    def quantize(self, node: Node) -> str:
        """Replace a product; returns the reason why its weight has no quantized form, "" if it is replaced."""
        if not node.plain or (node.is_("Gemm") and (node.get("alpha", 1.0), node.get("transA", 0)) != (1.0, 0)):
            return "the Gemm has alpha or transA"
        read, flipped = node.input(1), bool(node.is_("Gemm") and node.get("transB", 0))
        value = None if read is None else read.original
        while value is not None and (maker := value.producer) is not None and maker.is_("Transpose"):
            if maker.get("perm", (1, 0)) != (1, 0):
                return "its Transpose keeps the order of the axes"
            x, flipped = maker.input(0), not flipped
            value = None if x is None else x.original
        graph = None if value is None else value.graph
        main = self.editor.main
        if (
            read is None
            or value is None
            or graph is None
            or in_function(graph)
            or value in main.inputs
            or value in main.optional_inputs
        ):
            return "it is also an input, so a caller may replace it, or computed in a function"
        constant = self.editor.tensor(value)
        tensor = constant.get("value") if isinstance(constant, Node) else constant
        if (
            not isinstance(tensor, TensorProto)
            or tensor.data_type != TensorProto.FLOAT
            or len(tensor.dims) != 2
            or 0 in tensor.dims
        ):
            return f"it is not the constant float matrix of {node.op_type}"
        if (value, flipped) not in self.made:
            self.made[value, flipped] = self._stored(graph, value.name, tensor, flipped)
        self.replaced.append(read.original)
        self._replace(node, *self.made[value, flipped])
        return ""

    def _stored(self, owner: Graph, name: str, tensor: TensorProto, flipped: bool) -> tuple[list[Value], int, int]:
        """Add the parts of a quantized matrix to the graph that holds it."""
        w = tensor_data.tensor(tensor, None)
        w = w if flipped else w.T  # N x K
        limits.admit(w.shape, np.float32)
        n, k = w.shape
        if self.form in _TYPES:
            codes, absmax = float_codes(w, self.form, self.block)
            parts = [(f"{name}_Bnb4", codes), (f"{name}_absmax", absmax)]
        else:
            bits = FORMS[self.form]
            packed, scales, zeros = block_integers(w, bits, self.block, self.symmetric)
            parts = [(f"{name}_Q{bits}", packed), (f"{name}_scales", scales)]
            parts += [] if zeros is None else [(f"{name}_zero_points", zeros)]
        names = [self.editor.fresh(wish) for wish, _ in parts]
        arrays = zip(names, parts, strict=True)
        return [self.editor.add_initializer(owner, m, numpy_helper.from_array(a, m)) for m, (_, a) in arrays], k, n

    def _replace(self, node: Node, parts: list[Value], k: int, n: int) -> None:
        """Put the product with few bits in place of the node; a bias that it cannot take is added after it."""
        graph, floats = node.graph, self.form in _TYPES
        assert graph is not None
        bias = node.input(2) if node.is_("Gemm") and node.get("beta", 1.0) != 0 else None
        inside = not floats and bias is not None and node.get("beta", 1.0) == 1 and self._is_row(bias, n)
        inputs = [node.input(0), *map(graph.capture, parts)]
        inputs += [*[None] * (5 - len(inputs)), bias] if inside else []
        beta, form = float(node.get("beta", 1.0)), {"quant_type": _TYPES[self.form]} if floats else {"bits": FORMS[self.form]}
        # the node keeps its name and metadata, by which modules are found
        node.change(op_type="MatMulBnb4" if floats else "MatMulNBits", domain=MICROSOFT, attributes={})
        node.set(K=k, N=n, block_size=self.block, **form)
        node.read(inputs)
        if bias is not None and not inside:
            self._add_bias(graph, node, bias, beta)

    def _add_bias(self, graph: Graph, node: Node, bias: Value, beta: float) -> None:
        """Add a Gemm's bias, times beta, after the product."""
        result = node.results[0]
        product = Value(self.editor.fresh(f"{result.name}_product"))
        node.return_(0, product)
        after: Node | None = node
        if beta != 1:
            factor = self.editor.add_constant(graph, np.array(beta, np.float32), "beta", trains=False)
            bias = self.editor.add(graph, "Mul", [bias, factor], after=node)
            after = bias.producer
        self.editor.add(graph, "Add", [product, bias], after=after, output=result)

    def _is_row(self, bias: Value, n: int) -> bool:
        """Whether a bias is a constant of N elements along one axis."""
        array = self.editor.constant(bias)
        return array is not None and array.shape == (n,)

    def drop_unused(self) -> None:
        """Remove the matrices, and their Transposes, that nothing reads any more."""
        for graph in self.editor.all_graphs():
            if graph.owner is not None:
                graph.release_captured()
        for value in self.replaced:
            while value.graph is not None and not value.is_used:
                maker = value.producer
                if maker is not None:
                    value.graph.remove(maker)
                elif value.graph.initializers.get(value.name) is value:
                    value.graph.remove_initializer(value)
                x = maker.input(0) if maker is not None and maker.is_("Transpose") else None
                if x is None:
                    break
                value = x.original


def block_integers(w: np.ndarray, bits: int, block: int, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Quantize the rows of a matrix by blocks, in the arithmetic of onnxruntime's quantizer.

    Args:
        w: float32 (N, K).
        bits: 2, 4 or 8.
        block: the number of elements of a block.
        symmetric: whether zero points are the middle of the range.

    Returns:
        The integers, uint8 (N, blocks, block * bits / 8), those of lower bits first; the scales, float32 (N, blocks); and the
        zero points, packed by rows as uint8, or None.
    """
    n, k = w.shape
    blocks = -(-k // block)
    x = np.zeros((n, blocks * block), np.float32)
    x[:, :k] = w
    x = x.reshape(n, blocks, block)
    top, middle = 2**bits - 1, 2 ** (bits - 1)
    low, high = x.min(axis=2), x.max(axis=2)
    if symmetric:
        scales = np.where(np.abs(high) > np.abs(low), high, low) / np.float32(-middle)
        zeros = np.full((n, blocks), middle, np.float32)
    else:
        low, high = np.minimum(low, np.float32(0)), np.maximum(high, np.float32(0))
        scales = (high - low) / np.float32(top)
        with np.errstate(divide="ignore", invalid="ignore"):
            zeros = np.where(scales == 0, np.float32(0), _rounded(np.clip(-low / scales, 0, top)))
    with np.errstate(divide="ignore"):
        factor = np.where(scales == 0, np.float32(0), np.float32(1) / scales)
    q = np.clip(_rounded(x * factor[..., None] + zeros[..., None]), 0, top).astype(np.uint8)
    q.reshape(n, -1)[:, k:] = 0
    return _packed(q, bits), scales.astype(np.float32), None if symmetric else _packed(zeros.astype(np.uint8), bits, middle)


def _rounded(x: np.ndarray) -> np.ndarray:
    """Round half away from zero, as C's roundf."""
    return np.asarray(np.copysign(np.floor(np.abs(x) + np.float32(0.5)), x))


def _packed(q: np.ndarray, bits: int, fill: int = 0) -> np.ndarray:
    """Pack integers along the last axis into bytes, those of lower bits first."""
    each = 8 // bits
    missing = -q.shape[-1] % each
    q = np.pad(q, [(0, 0)] * (q.ndim - 1) + [(0, missing)], constant_values=fill) if missing else q
    parts = q.reshape(*q.shape[:-1], -1, each) << (np.arange(each, dtype=np.uint8) * np.uint8(bits))
    return np.asarray(np.bitwise_or.reduce(parts, axis=-1))


def float_codes(w: np.ndarray, form: str, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantize a matrix to codes of floats by blocks over its elements, in the arithmetic of bitsandbytes.

    Args:
        w: float32 (N, K).
        form: "fp4" or "nf4".
        block: the number of elements of a block.

    Returns:
        The codes, uint8 (N * K / 2 rounded up), the first of a byte in its high bits; and the largest magnitude of each block.
    """
    size = w.size
    x = np.zeros((-(-size // block), block), np.float32)
    x.reshape(-1)[:size] = np.ascontiguousarray(w).reshape(-1)
    absmax = np.abs(x).max(axis=1)
    with np.errstate(divide="ignore"):
        factor = np.where(absmax == 0, np.float32(0), np.float32(1) / absmax)
    scaled = (x * factor[:, None]).reshape(-1)[:size]
    if form == "nf4":
        table = FOUR_BIT_CODES[1].astype(np.float64)
        codes = np.searchsorted(((table[1:] + table[:-1]) / 2).astype(np.float32), scaled).astype(np.uint8)
    else:
        codes = _FP4_CODES[np.searchsorted(_FP4_LIMITS, np.abs(scaled))] | np.where(scaled < 0, np.uint8(8), np.uint8(0))
    codes = np.pad(codes, (0, size % 2), constant_values=7 if form == "nf4" else 0)  # the code of 0
    return (codes[0::2] << np.uint8(4)) | codes[1::2], absmax
