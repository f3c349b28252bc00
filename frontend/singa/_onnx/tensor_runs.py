"""Runs an ONNX model on Tensors: its operators can be recorded on the tape, and its outputs name it as their origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from singa_backend import dtypes
from singa_backend.autodiff import replay
from singa_backend.backend import check_last_layers, selected_part
from singa_backend.errors import InvalidInput
from singa_backend.interpreters.base import Interpreter
from singa_backend.ir.graph import Graph, Node
from singa_backend.ir.run_order import run_order
from singa_backend.proto.values import Value, declared_type
from singa_backend.runtime.failures import rule_errors

from .._core import provenance, random, sync_norm, tape, trace
from .._core.node import Node as TapeNode
from .._core.tensor import Tensor, op
from .imported import SMALL, Imported, constant


def forward(
    model: Imported, inputs: Sequence[Any], aux_output: Sequence[str] = (), last_layers: int = -1, training: bool = False
) -> list[Tensor]:
    """The outputs for these inputs, as Tensors.

    Args:
        model: the model.
        inputs: Tensors or arrays in the order of the graph's inputs; they are cast to the declared dtypes.
        aux_output: names of values to return after the outputs.
        last_layers: the operators to run, as for `SingaRep.run`.
        training: whether BatchNormalization uses the statistics of the batch, and Dropout drops elements.
    """
    with provenance.suspended:  # the origin of the outputs is the model as a whole
        made = _forward(model, inputs, aux_output, last_layers, training)

    def again(xs: list[Any], train: bool) -> Sequence[Any]:
        return forward(model, xs, aux_output, last_layers, train)

    provenance.record(made, "an ONNX model", again, list(inputs), graph=model.graph, parameters=model.parameters)
    return made


def _forward(model: Imported, inputs: Sequence[Any], aux_output: Sequence[str], last_layers: int, training: bool) -> list[Tensor]:
    names = (aux_output,) if isinstance(aux_output, str) else tuple(aux_output)
    check_last_layers(last_layers)
    graph = model.graph if last_layers == -1 and not names else selected_part(model.graph, int(last_layers), names)
    fed = _fed(model, inputs)
    if trace.current() is None:
        with model.device.backend.active():
            model.seen = [_seen(x) for x in fed]
    if trace.current() is None and not tape.training and not training and not model._has_training_nodes:
        return _computed(model, graph, fed)
    every = {**model._constants, **model.parameters, **model.statistics, **_numbers(model)}
    current = trace.current()
    program, constants = run_order(graph), graph.initializers
    if current is not None and tape.training and graph is model.graph and model.device.backend.is_host:
        fused = _fused(model, fed, every)
        program, constants = run_order(fused), fused.initializers
    frame: list[Any] = [None] * program.size
    for slot, name in program.state_slots:
        frame[slot] = every[name] if name in every else constant(name, constants[name].constant, model.device)
    for slot, x in zip(program.input_slots, fed, strict=True):
        frame[slot] = x
    if current is not None:
        for domain, version in graph.opsets.items():
            if domain:  # the nodes of other domains are recorded in the version of the file
                current.writer.builder.domains.setdefault(domain, version)
        current.writer.builder.reserve([*graph.initializers, *(n for node in graph.nodes for n in node.output_names if n)])

    def do(node: Node, values: list[Any], here: list[Any]) -> list[Any]:
        before = None if current is None else current.writer.builder.ir.last
        with rule_errors(node.op_type, node=node.name, opset=node.opset, version=node.version):
            made = visit(model, op, node, values, here, training)
        for y in made:
            if isinstance(y, Tensor) and isinstance(y._creator, TapeNode):
                y._creator.node = y._creator.node or node.name
        if current is None:
            return made
        current.named(before, made, node.output_names, node.name)
        return made

    program.walk(frame, do)
    made = [frame[s] for s in program.output_slots]
    if current is not None:
        for y, output in zip(made, graph.declared_outputs, strict=True):
            current.declared(y, declared_type(output))
    return made


def _fused(model: Imported, fed: Sequence[Any], every: Mapping[str, Tensor]) -> Graph:
    """The graph that a training step records on the host, in which primitive forms of an operator are one call.

    Other devices have no kernels of gradients, and join the nodes of such a form to one kernel.

    Args:
        model: the model.
        fed: the inputs.
        every: the tensor of each initializer.
    """
    graph, backend = model.graph, model.device.backend
    tensors = [(v, x) for v, x in zip(graph.inputs, fed, strict=True) if x is not None and not op.is_sequence(x)]
    types = {v: (op.dtype(x), op.shape(x)) for v, x in tensors}
    parameters = {n: (t._data.dtype, t._data.shape) for n, t in every.items() if not t._is_constant}
    numbers = {n: t._data.tobytes() for n, t in every.items() if t._is_constant and n in model.parameters}
    key = graph, types, parameters, numbers
    if model._fusion is None or model._fusion[0] != key:
        from singa_backend.plans.trained import fused_for_training

        constants = {n: backend.get(t._data) for n, t in every.items() if t._is_constant}
        model._fusion = key, fused_for_training(graph, constants, parameters, types) or graph
    return model._fusion[1]


def _numbers(model: Imported) -> dict[str, Tensor]:
    """The frozen parameters of one element, such as an epsilon, as constants of a step that is being recorded.

    If one changes, or trains, the step is recorded again.  A step that is to be a file has them as inputs.
    """
    recorded, found = trace.current(), {}
    if recorded is not None and model.device.backend.is_host:
        for name, t in model.parameters.items():
            if t._data.size == 1 and not t.stores_grad and not recorded.binds(t):
                trace.depends(t, partial(_state_of, t))
                found[name] = constant(name, t._data.copy(), model.device)
    return found


def _computed(model: Imported, graph: Graph, inputs: Sequence[Any]) -> list[Any]:
    """Without a tape the session of the model runs the graph.

    The values of parameters are inputs of its plan: whatever wrote to them, also to a view of one, is in the next run, and
    training does not invalidate the plan.
    """
    made = model.rep._session.run(
        [None if x is None else x._data for x in inputs],
        {n: t._data for n, t in model.tensors().items()},
        graph=None if graph is model.graph else graph,
    )
    return [None if v is None else Tensor._of(v, model.device, False) for v in made]


def _fed(model: Imported, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of a run as Tensors."""
    declared = model.graph.declared_inputs
    if len(inputs) != len(declared):
        names = ", ".join(map(str, declared)) or "nothing"
        raise InvalidInput(f"the model takes {len(declared)} inputs ({names}), got {len(inputs)}", code="SX301")
    return [_input(model, v, x) for v, x in zip(declared, inputs, strict=True)]


def _input(model: Imported, declared: Value, x: Any) -> Any:
    """An input as a Tensor of the declared dtype; raises InvalidInput if its device, rank or dtype does not fit."""
    if x is None and declared.kind == "optional":
        return None
    if isinstance(x, (list, tuple)) and declared.kind == "sequence":
        tensor = Tensor._of([Tensor(data=v, device=model.device)._data for v in x], model.device, False)
    else:
        tensor = x if isinstance(x, Tensor) else Tensor(data=x, device=model.device, requires_grad=False)
    if str(tensor.device.backend) != str(model.device.backend):
        text = f"input {declared} must be on the device of the model, {model.device.backend}, got {tensor.device.backend}"
        raise InvalidInput(text, code="SX302", hint="write x.to_device(dev)")
    if declared.shape is not None and not op.is_sequence(tensor) and len(tensor.shape) != len(declared.shape):
        text = f"input {declared} must have {len(declared.shape)} axes, got shape {tensor.shape}"
        raise InvalidInput(text, code="SX303")
    if declared.dtype is None or op.is_sequence(tensor) or op.dtype(tensor) == declared.dtype:
        return tensor
    if dtypes.STRING in (declared.dtype, op.dtype(tensor)):
        text = f"input {declared} must have dtype {dtypes.onnx_name(declared.dtype)}, got {dtypes.onnx_name(op.dtype(tensor))}"
        raise InvalidInput(text, code="SX302")
    return op.Cast(tensor, to=dtypes.onnx_code(declared.dtype))


# --- the two operators that depend on the mode


def visit(model: Imported, op: Interpreter[Any], node: Node, inputs: list[Any], frame: list[Any], training: bool) -> list[Any]:
    """Compute a node on Tensors."""
    if node.domain == "" and node.op_type == "BatchNormalization":
        found = _batch_normalization(model, node, inputs, training)
        if found is not None:
            return found
    if node.domain == "" and node.op_type == "Dropout":
        made = _dropout(node, inputs, training)
        if len(made) > 1 and (node.version or 0) < 10:  # the mask has the type of the input
            made[1] = op.Cast(made[1], to=dtypes.onnx_code(op.dtype(inputs[0])))
        return made
    return replay.visit(op, node, inputs, frame, lambda o, n, v, f: visit(model, o, n, v, f, training))


def _batch_normalization(model: Imported, node: Node, inputs: list[Any], training: bool) -> list[Any] | None:
    """Follow the mode of the model, not that of the file; update the running statistics in training."""
    a = node.attributes
    if not a.get("spatial", 1) or len(inputs) < 5:
        return None
    epsilon, momentum = a.get("epsilon", 1e-5), a.get("momentum", 0.9)
    if not training:
        y = op.BatchNormalization(*inputs, epsilon=epsilon, momentum=momentum)
        return [y, inputs[3], inputs[4]][: len(node.outputs)]
    group = sync_norm.current()
    if group is None:
        y, mean, variance = op.BatchNormalization(*inputs, epsilon=epsilon, momentum=momentum, training_mode=1, outputs=3)
    else:
        y, *batch, _ = sync_norm.batch_normalization(group, inputs[0], inputs[1], inputs[2], epsilon)
        mean, variance = (
            op.Add(op.Mul(old, momentum), op.Mul(op.cast(new, old), 1 - momentum))
            for old, new in zip(inputs[3:5], batch, strict=True)
        )
    with tape.no_tape():
        for old, new in zip(inputs[3:], (mean, variance), strict=True):
            if any(old is t for t in model.statistics.values()):
                trace.assign(old, op.cast(new, old).raw, invalidates_tape=False)
    return [y, mean, variance][: len(node.outputs)]


def _dropout(node: Node, inputs: list[Any], training: bool) -> list[Any]:
    """Follow the mode of the model.  A node with a seed uses ONNX's random stream, others that of the device."""
    x = inputs[0]
    if not training:
        return [op.Identity(x), op.Cast(op.full_like(x, 1), to=dtypes.onnx_code(np.bool_))][: len(node.outputs)]
    ratio: Any = inputs[1] if len(inputs) > 1 and inputs[1] is not None else node.attributes.get("ratio", 0.5)
    if node.attributes.get("seed") is not None:
        ratio = ratio if isinstance(ratio, Tensor) else op.constant(ratio, np.float32)
        return list(op.Dropout(x, ratio, True, seed=node.attributes["seed"], outputs=2))[: len(node.outputs)]
    return list(random.dropout(x, ratio))[: len(node.outputs)]


class NodeStep:
    """A node as a function of tensors."""

    def __init__(self, imported: Imported, node: Node) -> None:
        self._imported, self._node = imported, node

    def __call__(self, *xs: Tensor | None) -> tuple[Tensor, ...]:
        # values captured by subgraphs are in the frame of a whole run, which one call does not have
        return tuple(visit(self._imported, op, self._node, list(xs), [], False))

    def __repr__(self) -> str:
        return f"<{self._node}>"


class NodeOperator:
    """A node as a function of Tensors, as ONNX defines it."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def __call__(self, *xs: Tensor | None) -> tuple[Tensor, ...]:
        names = self._node.input_names
        present = [n for n in names if n]
        if len(xs) not in (len(names), len(present)):
            what = f"{self._node.op_type} takes {len(present)} inputs ({', '.join(present)}), got {len(xs)}"
            raise InvalidInput(what, code="SX301")
        for x in xs:
            if x is not None and not isinstance(x, Tensor):
                what = f"the inputs of {self._node.op_type} must be tensors, got a {type(x).__name__}"
                raise InvalidInput(what, code="SX311")
        given = iter(xs)
        values = list(xs) if len(xs) == len(names) else [next(given) if n else None for n in names]
        return tuple(_visit(op, self._node, values, []))

    def __repr__(self) -> str:
        return f"<{self._node}>"


def _visit(op: Interpreter[Any], node: Node, values: list[Any], frame: list[Any]) -> list[Any]:
    return replay.visit(op, node, values, frame, _visit)


def _state_of(t: Tensor) -> tuple[bool, bytes]:
    """What a step that has a number as a constant depends on."""
    return t.stores_grad, t._data.tobytes()


def _seen(x: Any) -> Any:
    """The example of an input: a small one keeps its values, which may be sizes or conditions; another has zeros."""
    if x is None or isinstance(x._data, list):
        return None if x is None else [_seen_array(v) for v in x._data]
    return _seen_array(x._data)


def _seen_array(value: Any) -> Any:
    if value.size <= SMALL:
        return value.copy()  # on its device: few programs need it on the host
    return np.broadcast_to(np.array("" if value.dtype == dtypes.STRING else 0, value.dtype), value.shape)
