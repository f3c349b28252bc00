"""Run onnx's checker and shape inference: always in a child process, because a model can crash either.

This is the only module of the project that runs them on a model (tests/backend/test_checker.py).  One child serves this process:
it starts with the first request, is kept, and is replaced after it died or did not answer.  It receives models without the data
of large tensors.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import signal
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import FunctionProto, GraphProto, ModelProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, numpy_helper

from .. import dtypes
from ..errors import InvalidModel
from ..io.processes import Child, ChildFailure
from . import _checker_child, tensor_data
from .messages import graphs, imported
from .schemas import ASSUMED, MICROSOFT, lax, plain_domain, schema_version
from .values import Value

TIMEOUT = 120.0
"""The maximum seconds that the child may take for one request."""

LEAST_TIMEOUT, BYTES_PER_SECOND = 10.0, 20_000
"""The seconds for a small model, and the bytes without large tensors for which it may take one second more."""

MEMORY = 8 << 30
"""The maximum address space of the child in bytes: a small model may require any amount of memory."""

SMALL = 1 << 10
"""Tensors of at most this many bytes are sent with their data, because inference may read shapes from them."""

SMALL_AGAIN = 1 << 20
"""The same bound for a second attempt, after a model was refused without the data of its larger tensors."""

MOST_VALUES = 1 << 16
"""The known values of a node's inputs are sent up to this many bytes."""


@dataclass
class CheckerResult:
    """The result of onnx's checker and shape inference.

    Attributes:
        valid: whether onnx.checker (with full_check) accepts the model; None if it returned no answer.
        message: the checker's message, or the reason why there is no answer.
        inference: the reason why shape inference did not finish; "" if it did.
        values: the inferred values, by the path of the graph and the name of the value.
        structure: whether the checker accepts the model without the inference of its types; None if it returned no answer.
    """

    valid: bool | None = None
    message: str = ""
    inference: str = ""
    values: dict[str, dict[str, Value]] = field(default_factory=dict)
    structure: bool | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the checker's answer as plain data.

        Returns:
            The engine's name, whether the model is valid, and the messages of checker and inference.
        """
        return {"engine": "onnx.checker", "valid": self.valid, "message": self.message, "inference": self.inference}


@dataclass
class Inference:
    """The result of onnx's shape inference.

    Attributes:
        model: the model with the inferred types, without the data of large tensors; if inference did not finish, with the
            declared types only.
        failure: the reason why inference did not finish; "" if it did.
        answered: whether there is an answer: False if the child process died or took too long.
    """

    model: ModelProto
    failure: str = ""
    answered: bool = True


class CheckerProcess:
    """The child process of this process; it starts with the first request.

    Args:
        make: the function that the child calls once.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]] = _checker_child.serve) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._child: Child | None = None
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock, self._child = threading.Lock(), None  # another thread may have held the lock; `Child` closes its pipe

    def ask(self, timeout: float, task: str, *arguments: Any) -> tuple[Any, str]:
        """The child's result, and the reason why there is none; raises ChildFailure."""
        with self._lock:
            if self._child is None:
                self._child = Child(self._make, memory=MEMORY, alone=True)
            elif not self._child.alive:  # something else has killed it: a request to it would fail
                self._child.close()
            try:
                answer: tuple[Any, str] = self._child.ask((task, timeout, arguments), timeout)
            except OSError as error:  # no process, memory or file for the child
                self._child.close()
                raise ChildFailure("died", f"it cannot start: {error}", started=False) from error
            return answer

    @property
    def pid(self) -> int | None:
        """The id of the child process; None if there is none."""
        return None if self._child is None else self._child.pid


process = CheckerProcess()


def check_model(model: ModelProto, timeout: float | None = None, *, types: bool = True) -> CheckerResult:
    """Check a model by onnx's checker, with full_check; never raises: no answer is a result too.

    External data are not read, and their files need not exist.

    Args:
        model: the model.
        timeout: the maximum seconds for each of the two parts, structure and types; None for a bound by the model's size.
        types: whether to check the types, by inference.

    Returns:
        The result, without values.
    """
    found = _checked(model, timeout, types, SMALL)
    refused = found.valid is False and found.structure  # perhaps because inference reads a large tensor
    return _checked(model, timeout, types, SMALL_AGAIN) if refused else found


def _checked(model: ModelProto, timeout: float | None, types: bool, small: int) -> CheckerResult:
    try:
        data = without_data(model, small).SerializeToString()
    except Exception as error:
        return CheckerResult(None, f"the model cannot be serialized: {error}")
    timeout = _timeout(data) if timeout is None else timeout
    result = CheckerResult()
    try:
        _, result.message = process.ask(timeout, "check", data)
        result.structure = not result.message
        if result.structure and types:
            _, result.message = process.ask(timeout, "infer", data, False, True)
        result.valid = not result.message
    except ChildFailure as failure:
        part = "shape inference" if result.structure else "checker"
        result.message = f"onnx's {part} did not finish: {_reason(failure)}"
    return result


def _timeout(data: bytes) -> float:
    """The seconds for a model of this many bytes without large tensors: onnx takes much less, if it does not hang."""
    return min(TIMEOUT, LEAST_TIMEOUT + len(data) / BYTES_PER_SECOND)


def _without_names(message: str) -> str:
    """What the checker says of a fault, without the names and numbers of this model."""
    return re.sub(r"\([^()]*\)|'[^']*'|\"[^\"]*\"|[\w./:]*[:/\d][\w./:]*", "", message.partition("\n")[0])


def require_valid(model: ModelProto, source: ModelProto | None = None) -> str:
    """Check a model that is about to be written.

    Args:
        model: the model.
        source: the model that was read, if `model` was computed from one.

    Returns:
        A warning if its types were not checked, because onnx's inference died or took too long, or if the checker refuses the
        source too; otherwise "".

    Raises:
        InvalidModel: the checker refuses the model, or returned no answer about its structure (SX109).
    """
    found = check_model(_known_to_onnx(model))
    if found.valid is False:
        before = None if source is None else check_model(_known_to_onnx(source))
        if before is not None and before.valid is False and _without_names(before.message) == _without_names(found.message):
            return f"onnx's checker refuses the written model, as it refuses the original one: {found.message[:2000]}"
        raise InvalidModel(f"onnx's checker refuses the model to be written: {found.message[:2000]}", code="SX109")
    if found.valid is None and not found.structure:
        text = f"the model to be written was not checked: {found.message[:2000]}"
        raise InvalidModel(text, code="SX109", hint="check=False (--no-check) writes the model without a check")
    return "" if found.valid else f"the types of the written model were not checked: {found.message[:2000]}"


def _known_to_onnx(model: ModelProto) -> ModelProto:
    """The model; a copy in which operators that onnxruntime reads in ONNX's domain have its own, which onnx does not check."""
    functions = {(plain_domain(f.domain), f.name) for f in model.functions}
    holders: list[ModelProto | FunctionProto] = [model, *model.functions]
    if not any(_lax_nodes(h, functions) for h in holders):
        return model
    copy = without_data(model)
    changed: list[ModelProto | FunctionProto] = [copy, *copy.functions]
    for holder in changed:
        found = _lax_nodes(holder, functions)
        for node in found:
            node.domain = MICROSOFT
        if found and MICROSOFT not in imported(holder.opset_import):
            holder.opset_import.add(domain=MICROSOFT, version=ASSUMED[MICROSOFT])
    return copy


def _lax_nodes(holder: ModelProto | FunctionProto, functions: set[tuple[str, str]]) -> list[NodeProto]:
    """The nodes, also of inner graphs, that call an operator which onnxruntime reads in ONNX's domain at this opset."""
    opset = imported(holder.opset_import).get("", 0)
    pending, found = list(holder.graph.node if isinstance(holder, ModelProto) else holder.node), list[NodeProto]()
    while pending:
        node = pending.pop()
        pending += [inner for graph in graphs(node) for inner in graph.node]
        name = node.op_type
        if plain_domain(node.domain) or ("", name) in functions or opset > lax.get(name, -1):
            continue
        if schema_version("", name, opset) is None:
            found.append(node)
    return found


def check_and_infer(model: ModelProto, timeout: float) -> CheckerResult:
    """Infer the model's shapes and check it; never raises: no answer is a result too.

    Args:
        model: the model.
        timeout: the maximum seconds for each part: inference, structure, types.
    """
    inferred = infer_shapes(model, data_prop=True, timeout=timeout)
    result = check_model(model, timeout)
    result.inference = inferred.failure
    result.values = _values(inferred.model)
    return result


def infer_shapes(model: ModelProto, *, data_prop: bool = False, strict: bool = False, timeout: float | None = None) -> Inference:
    """Infer the types of a model's values by onnx's shape inference; never raises: no answer is a result too.

    Args:
        model: the model, which is not changed.
        data_prop: whether to follow the values of small integer tensors.
        strict: whether an error in one node is a failure; otherwise the types of its outputs are unknown.
        timeout: the maximum seconds; None for a bound by the model's size.

    Returns:
        The model with the types.
    """
    try:
        light = without_data(model)
        data = light.SerializeToString()
    except Exception as error:
        return Inference(model, f"the model cannot be serialized: {error}")
    try:
        found, why = process.ask(_timeout(data) if timeout is None else timeout, "infer", data, data_prop, strict)
        return Inference(light, why) if found is None else Inference(ModelProto.FromString(found))
    except ChildFailure as failure:
        return Inference(light, f"onnx's shape inference did not finish: {_reason(failure)}", False)


@dataclass
class NodeInference:
    """The result of onnx's shape inference of one node.

    Attributes:
        types: the types of its outputs by name; without those that are not known.
        contradiction: why the node cannot compute with the types of its inputs; "" if it can, or if that is not known.
    """

    types: dict[str, TypeProto] = field(default_factory=dict)
    contradiction: str = ""


@dataclass
class Patience:
    """Seconds that the inference of one model may lose to nodes on which onnx crashes or hangs; then their types are unknown."""

    left: float = 10.0


_known: OrderedDict[bytes, tuple[dict[int, bytes], str]] = OrderedDict()
"""The answers for nodes by the digest of the request: the types by the index of the output, and the contradiction."""

_known_lock = threading.Lock()
KNOWN = 1 << 13
"""The maximum number of answers that are kept."""

NODE_TIMEOUT = 5.0
"""Seconds that the child may take for a node without subgraphs, which takes it microseconds."""


def infer_node(
    node: NodeProto,
    version: int,
    types: Mapping[str, TypeProto],
    values: Mapping[str, np.ndarray],
    opset: int,
    patience: Patience,
) -> NodeInference:
    """Infer the types of the outputs of one node; never raises: that nothing is known is a result too.

    Answers are kept by the node's signature: operator, version, attributes, types, known values and equal inputs.

    Args:
        node: the node.
        version: the version of its schema.
        types: the types of the values that the node and its subgraphs read.
        values: the known values of its inputs.
        opset: the version of ai.onnx for the nodes of the subgraphs.
        patience: the time that a child that fails may take.

    Returns:
        The types, and the contradiction; of a node with subgraphs the types only.
    """
    light = NodeProto()
    _copy_node(node, light, SMALL)
    light.ClearField("name")
    light.ClearField("doc_string")
    whole = any(graphs(node))
    if not whole:  # the names of values matter only within subgraphs
        names = {n: f"x{i}" for i, n in enumerate(dict.fromkeys(node.input)) if n}
        light.input[:] = [names.get(n, "") for n in node.input]
        light.output[:] = [f"y{i}" if n else "" for i, n in enumerate(node.output)]
        types = {names[n]: t for n, t in types.items() if n in names}
        values = {names[n]: v for n, v in values.items() if n in names}
    request = (
        version,
        light.SerializeToString(),
        {n: t.SerializeToString() for n, t in types.items()},
        {n: numpy_helper.from_array(v, n).SerializeToString() for n, v in values.items() if v.nbytes <= MOST_VALUES},
        opset,
    )
    key = hashlib.blake2b(pickle.dumps(request), digest_size=16).digest()
    with _known_lock:
        answer = _known.get(key)
        if answer is not None:
            _known.move_to_end(key)
    if answer is None:
        answer = _asked(request, patience, TIMEOUT if whole else NODE_TIMEOUT, list(light.output))
        if answer is None:
            return NodeInference()
        with _known_lock:
            _known[key] = answer
            if len(_known) > KNOWN:
                _known.popitem(last=False)
    found, contradiction = answer
    return NodeInference(
        {node.output[i]: TypeProto.FromString(t) for i, t in found.items() if node.output[i]}, "" if whole else contradiction
    )


def _asked(
    request: tuple[Any, ...], patience: Patience, timeout: float, outputs: list[str]
) -> tuple[dict[int, bytes], str] | None:
    """The child's answer by index; {} for a node on which it dies, None for one on which it takes too long."""
    if patience.left <= 0:
        return None
    start = time.monotonic()
    try:
        found, _ = process.ask(min(timeout, max(patience.left, 1.0)), "node", *request)
    except ChildFailure as failure:
        patience.left -= time.monotonic() - start
        return ({}, "") if failure.how == "died" and failure.started else None
    if found is None:  # the node is not valid, and its types remain unknown
        return {}, ""
    types, contradiction = found
    return {i: types[n] for i, n in enumerate(outputs) if n in types}, contradiction


def function_body(name: str, version: int, node: bytes, types: Sequence[bytes]) -> bytes | None:
    """ONNX's body of an operator of its main domain that depends on the call; None if there is none for this call.

    Args:
        name: the operator.
        version: the version of its schema.
        node: the node, serialized.
        types: the type of each input, serialized; b"" for one that is absent or not known.
    """
    try:
        found, _ = process.ask(NODE_TIMEOUT, "function", name, version, node, list(types))
    except ChildFailure:
        return None
    return None if found is None else bytes(found)


def _reason(failure: ChildFailure) -> str:
    """The failure in words, with the name of a signal."""
    code = failure.exit_code
    if code is None or code >= 0:
        return str(failure) if failure.how != "died" else f"its process died with {failure}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"its process died with {name}"


# --- models without the data of large tensors ---


def without_data(model: ModelProto, small: int = SMALL) -> ModelProto:
    """A copy of a model without the data of tensors of more than `small` bytes, and without references to files."""
    copy = ModelProto()
    for kind, value in model.ListFields():
        if kind.name == "graph":
            copy.graph.SetInParent()
            _copy_graph(value, copy.graph, small)
        elif kind.name == "functions":
            for function in value:
                inner = copy.functions.add()
                for k, v in function.ListFields():
                    if k.name == "node":
                        for node in v:
                            _copy_node(node, inner.node.add(), small)
                    else:
                        _copy_field(inner, k.name, v)
        else:
            _copy_field(copy, kind.name, value)
    return copy


def _copy_graph(graph: GraphProto, copy: GraphProto, small: int) -> None:
    for kind, value in graph.ListFields():
        if kind.name == "node":
            for node in value:
                _copy_node(node, copy.node.add(), small)
        elif kind.name == "initializer":
            for tensor in value:
                _copy_tensor(tensor, copy.initializer.add(), small)
        else:
            _copy_field(copy, kind.name, value)


def _copy_node(node: NodeProto, copy: NodeProto, small: int) -> None:
    if not any(a.HasField("t") or a.HasField("g") or a.tensors or a.graphs for a in node.attribute):
        copy.CopyFrom(node)
        return
    for kind, value in node.ListFields():
        if kind.name != "attribute":
            _copy_field(copy, kind.name, value)
            continue
        for a in value:
            made = copy.attribute.add()
            for k, v in a.ListFields():
                if k.name == "t":
                    made.t.SetInParent()
                    _copy_tensor(v, made.t, small)
                elif k.name == "g":
                    made.g.SetInParent()
                    _copy_graph(v, made.g, small)
                elif k.name == "tensors":
                    for tensor in v:
                        _copy_tensor(tensor, made.tensors.add(), small)
                elif k.name == "graphs":
                    for graph in v:
                        _copy_graph(graph, made.graphs.add(), small)
                else:
                    _copy_field(made, k.name, v)


def _copy_tensor(tensor: TensorProto, copy: TensorProto, small: int) -> None:
    if not _has_large_data(tensor, small):
        copy.CopyFrom(tensor)
        return
    copy.name, copy.data_type, copy.data_location = tensor.name, tensor.data_type, TensorProto.EXTERNAL
    copy.dims.extend(tensor.dims)
    copy.external_data.add(key="location", value=_checker_child.PLACEHOLDER)


def _has_large_data(tensor: TensorProto, small: int) -> bool:
    """Whether a tensor is sent without its data; invalid ones are sent whole, for the checker's message."""
    if not dtypes.is_code(tensor.data_type) or tensor.data_type == TensorProto.STRING:
        return False
    if tensor.data_location == TensorProto.EXTERNAL:
        return any(e.key == "location" for e in tensor.external_data)
    size = tensor_data.byte_size(dtypes.numpy_dtype(tensor.data_type), tuple(map(int, tensor.dims)))
    typed = any(len(getattr(tensor, n)) for n in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data"))
    return size > small and not typed and size <= len(tensor.raw_data)


def _copy_field(copy: Any, name: str, value: Any) -> None:
    if hasattr(value, "CopyFrom"):
        getattr(copy, name).CopyFrom(value)
    elif isinstance(value, (str, bytes, int, float)):
        setattr(copy, name, value)
    else:
        getattr(copy, name).extend(value)


# --- values ---


def _values(model: ModelProto) -> dict[str, dict[str, Value]]:
    """The typed values of every graph, by the graph's path ("" is the main graph, "3.body" a graph of its fourth node)."""
    found: dict[str, dict[str, Value]] = {}
    pending = [("", model.graph)]
    while pending:
        path, graph = pending.pop()
        found[path] = {i.name: value_of(i) for i in (*graph.input, *graph.output, *graph.value_info)}
        for i, node in enumerate(graph.node):
            pending += [(f"{path}/{i}.{a.name}".lstrip("/"), a.g) for a in node.attribute if a.HasField("g")]
    return found


def value_of(info: ValueInfoProto) -> Value:
    """The declared value; of unknown type if ONNX does not define the type in the file."""
    try:
        return Value.from_proto(info)
    except InvalidModel:
        return Value(info.name)
