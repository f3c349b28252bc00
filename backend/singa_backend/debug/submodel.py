"""A model as calls over named values; any run of calls can be extracted as a separate model."""

from __future__ import annotations

import graphlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from onnx import AttributeProto, ModelProto, NodeProto, SparseTensorProto, TensorProto, TypeProto, ValueInfoProto, helper

from .. import dtypes
from ..backend import SingaBackend
from ..comparison import tolerances
from ..comparison.difference import Tolerance
from ..errors import InvalidModel
from ..ir.declaration import has_trait
from ..proto import tensor_data
from ..proto.checker import infer_shapes
from ..proto.load import ModelSource, open_light
from ..proto.messages import graphs
from ..proto.schemas import opset_of, plain_domain, schema_version, schemas
from ..proto.values import Value


@dataclass(frozen=True, eq=False)
class NodeCall:
    """One node of the main graph.

    Attributes:
        index: its position in the file.
        name: its name, or operator and position.
        proto: its message.
        uses: the values that it reads, including those that its subgraphs capture.
        outputs: the values that it produces.
    """

    index: int
    name: str
    proto: NodeProto
    uses: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def operator(self) -> str:
        """The operator."""
        return self.proto.op_type

    def __str__(self) -> str:
        """Return operator and name."""
        return f"{self.operator} {self.name!r}"


class Source:
    """A model's main graph.

    Attributes:
        path: of the file, if the model was opened by path.
        proto: the model; if it was opened by path, the bytes of long tensors stay in the file.
        folder: the folder of these bytes.
        weights: initializers, and tensors of Constant nodes, by name.
        inputs: the inputs without an initializer.
        optional_inputs: the inputs with an initializer, which may be overridden.
        outputs: names of the outputs.
        calls: the nodes in an order that can be run, without the Constant nodes in `weights`.
        makers: the producer of each value.
    """

    def __init__(self, model: ModelSource) -> None:
        """Read a model.

        Args:
            model: a path, a ModelProto or bytes.

        Raises:
            InvalidModel: the model is not an ONNX file, the nodes have a cycle, or a value is not defined (SX101).
        """
        self.path = Path(model) if isinstance(model, (str, os.PathLike)) else None
        self.proto, self.folder = open_light(model)
        graph = self.proto.graph
        self.weights: dict[str, TensorProto | SparseTensorProto] = {t.name: t for t in graph.initializer}
        self.weights |= {t.values.name: t for t in graph.sparse_initializer}
        declared = [Value.from_proto(i) for i in graph.input]
        self.inputs = tuple(v for v in declared if v.name not in self.weights)
        self.optional_inputs = tuple(v for v in declared if v.name in self.weights)
        self.outputs = tuple(o.name for o in graph.output)
        nodes = []
        for i, node in enumerate(graph.node):
            constant = _constant(node)
            if constant is not None:
                self.weights[node.output[0]] = constant
            else:
                nodes.append((i, node))
        self.calls = tuple(_ordered(nodes))
        self.makers = {n: call for call in self.calls for n in call.outputs}
        known = {v.name for v in self.inputs} | self.weights.keys() | self.makers.keys()
        for call in self.calls:
            for n in call.uses:
                if n not in known:
                    raise InvalidModel(f"input {n!r} is not defined", code="SX101", node=call.name, operator=call.operator)
        self._functions = {(f.domain, f.name): f for f in self.proto.functions}

    @classmethod
    def of(cls, model: ModelSource | Source) -> Source:
        """Convert a model to a Source.

        Args:
            model: a path, a ModelProto, bytes, or a Source.

        Returns:
            The Source itself, or a new one.

        Raises:
            InvalidModel: as for the constructor.
        """
        return model if isinstance(model, Source) else cls(model)

    @cached_property
    def dies(self) -> dict[int, tuple[str, ...]]:
        """The values that no later call reads, for each index in `calls`."""
        last = {n: i for i, call in enumerate(self.calls) for n in (*call.outputs, *call.uses)}
        dies: dict[int, list[str]] = {}
        for name, i in last.items():
            dies.setdefault(i, []).append(name)
        return {i: tuple(names) for i, names in dies.items()}

    @cached_property
    def types(self) -> dict[str, TypeProto]:
        """The types of values, as far as ONNX's inference knows them."""
        graph = infer_shapes(self.proto).model.graph  # best effort: errors of the model are reported when it runs
        return {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}

    def draws(self, call: NodeCall) -> bool:
        """Test whether a node draws random numbers, so that its outputs cannot be compared; Dropout does in training mode.

        Args:
            call: a node of this model.

        Returns:
            Whether its outputs are random.
        """
        if call.operator != "Dropout":
            return has_trait(plain_domain(call.proto.domain), call.operator, "random")
        training = call.proto.input[2] if len(call.proto.input) > 2 else ""
        if training:
            return training not in self.weights or bool(self.weight(training).any())
        opset = next((o.version for o in self.proto.opset_import if o.domain in ("", "ai.onnx")), 1)
        return opset < 7 and not any(a.name == "is_test" and a.i for a in call.proto.attribute)

    def looser(self, call: NodeCall) -> frozenset[str]:
        """Return the operators of a node, of its graphs and functions, that widen the tolerance of its outputs.

        Those that compute in float32, and its own one if its results have a bounded range.

        Args:
            call: a node of this model.

        Returns:
            Their names in the registry of tolerances.
        """
        found, nodes, entered = set[str](), [call.proto], set[tuple[str, str]]()
        while nodes:
            node = nodes.pop()
            function = self._functions.get((node.domain, node.op_type))
            if function is None:
                found.add(tolerances.qualified(node.domain, node.op_type))
                nodes += [n for g in graphs(node) for n in g.node]
            elif (node.domain, node.op_type) not in entered:
                entered.add((node.domain, node.op_type))
                nodes += function.node
        own = tolerances.qualified(call.proto.domain, call.operator)
        return tolerances.looser(found) | (frozenset([own]) & tolerances.RANGES.keys())

    @cached_property
    def carried(self) -> dict[str, frozenset[str]]:
        """The operators that widen the tolerance of each value; only values that have some.

        Those that compute in float32, of all nodes on which it depends; those of a bounded range, of its node, or of those whose
        values it moves.
        """
        found: dict[str, frozenset[str]] = {}
        for call in self.calls:
            moves = has_trait(plain_domain(call.proto.domain), call.operator, "moves")
            read = frozenset[str]().union(*(found[n] for n in call.uses if n in found))
            operators = self.looser(call) | (read if moves else tolerances.looser(read))
            found |= dict.fromkeys(call.outputs, operators) if operators else {}
        return found

    @cached_property
    def _floats(self) -> dict[str, np.dtype[Any]]:
        """The dtypes of float values, as far as known; empty if the model has floats of one dtype only."""
        graph = self.proto.graph
        codes = {v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
        codes |= {w.data_type for w in self.weights.values() if isinstance(w, TensorProto)}
        codes |= {a.i for call in self.calls for a in call.proto.attribute if a.name in ("to", "dtype", "output_dtype")}
        if sum(dtypes.is_code(c) and dtypes.is_float(dtypes.numpy_dtype(c)) for c in codes) < 2:
            return {}
        found = {n: t.tensor_type.elem_type for n, t in self.types.items()}
        found |= {n: w.data_type for n, w in self.weights.items() if isinstance(w, TensorProto)}
        known = {n: dtypes.numpy_dtype(c) for n, c in found.items() if dtypes.is_code(c)}
        return {n: d for n, d in known.items() if dtypes.is_float(d)}

    def rounds(self, calls: Iterable[NodeCall]) -> np.dtype[Any] | None:
        """Return the narrowest float dtype to which nodes round, if the model has floats of several dtypes.

        Args:
            calls: nodes of this model.

        Returns:
            The dtype; None if they round nothing, as nodes do that move values without a cast, or if it is not known.
        """
        found = list[np.dtype[Any]]()
        for call in calls if self._floats else ():
            made, read = ([self._floats[n] for n in names if n in self._floats] for names in (call.outputs, call.uses))
            if has_trait(plain_domain(call.proto.domain), call.operator, "moves") and read:
                made = [d for d in made if tolerances.narrowest((d, *read)) not in read]
            found += made
        return tolerances.narrowest(found) if found else None

    @cached_property
    def _rounded(self) -> dict[str, np.dtype[Any]]:
        """The narrowest float dtype to which each value, or one on which it depends, was rounded, as far as known."""
        found: dict[str, np.dtype[Any]] = {}
        for call in self.calls if self._floats else ():
            own = self.rounds([call])
            before = [found[n] for n in call.uses if n in found] + ([own] if own else [])
            found |= dict.fromkeys(call.outputs, tolerances.narrowest(before)) if before else {}
        return found

    def widened(self, tolerance: Tolerance, value: str) -> Tolerance:
        """Return a tolerance with the errors of all nodes on which a value depends.

        Args:
            tolerance: to widen.
            value: the name of a value of this model.

        Returns:
            The tolerance, with the operators and the narrowest dtype.
        """
        kinds = [d for d in (tolerance.dtype, self._rounded.get(value)) if d is not None]
        operators = tolerance.operators | self.carried.get(value, frozenset[str]())
        return replace(tolerance, operators=operators, dtype=tolerances.narrowest(kinds) if kinds else None)

    def widened_by(self, tolerance: Tolerance, calls: Sequence[NodeCall]) -> Tolerance:
        """Return a tolerance with the errors of some nodes only.

        Args:
            tolerance: to widen.
            calls: nodes of this model.

        Returns:
            The tolerance, with the operators and the narrowest dtype.
        """
        operators = frozenset[str]().union(*map(self.looser, calls))
        return replace(tolerance, operators=operators, dtype=self.rounds(calls))

    def attributes(self, node: NodeProto, opsets: Mapping[str, int] | None = None) -> dict[str, AttributeProto]:
        """Return the attributes of a node, also those that it leaves to the defaults of its schema or function.

        Args:
            node: a node of this model.
            opsets: the opsets by which it is read, by domain; by default those of the model.

        Returns:
            The attributes by name, without documentation; nodes of subgraphs have all of theirs too.
        """
        opsets = {plain_domain(o.domain): o.version for o in self.proto.opset_import} if opsets is None else opsets
        found = {a.name: a for a in self.defaults(node, opsets)} | {a.name: a for a in node.attribute}
        return {name: self._plain(a, opsets) for name, a in found.items()}

    def defaults(self, node: NodeProto, opsets: Mapping[str, int]) -> list[AttributeProto]:
        """Return the attributes that a node has if it does not set them.

        Args:
            node: a node of this model.
            opsets: the opsets by which it is read, by domain.

        Returns:
            The defaults of its schema or function; none of an operator that is not known.
        """
        function = self._functions.get((node.domain, node.op_type))
        if function is not None:
            return list(function.attribute_proto)
        domain = plain_domain(node.domain)
        version = schema_version(domain, node.op_type, opset_of(opsets, domain))
        if version is None:
            return []
        made = []
        for name, known in schemas[domain, node.op_type][version].attributes.items():
            if known.default_value.type != AttributeProto.UNDEFINED:
                made.append(AttributeProto())
                made[-1].CopyFrom(known.default_value)
                made[-1].name = name
        return made

    def _plain(self, attribute: AttributeProto, opsets: Mapping[str, int]) -> AttributeProto:
        """An attribute without documentation, whose graphs have nodes with all attributes."""
        made = AttributeProto()
        made.CopyFrom(attribute)
        made.ClearField("doc_string")
        for graph in ([made.g] if made.HasField("g") else []) + list(made.graphs):
            self.complete(graph.node, opsets)
            graph.ClearField("doc_string")
        return made

    def complete(self, nodes: Iterable[NodeProto], opsets: Mapping[str, int]) -> None:
        """Give nodes all their attributes, in the order of the names.

        Args:
            nodes: nodes of a copy of a graph or function of this model, which are changed.
            opsets: the opsets by which they are read, by domain.
        """
        for node in nodes:
            filled = self.attributes(node, opsets)
            node.ClearField("doc_string")
            del node.attribute[:]
            node.attribute.extend(filled[name] for name in sorted(filled))

    def weight(self, name: str) -> np.ndarray:
        """Read a weight.

        Args:
            name: a key of `weights`.

        Returns:
            The array.

        Raises:
            InvalidModel: the tensor is damaged, or its file is missing.
        """
        proto = self.weights[name]
        return (
            tensor_data.tensor(proto, self.folder) if isinstance(proto, TensorProto) else tensor_data.sparse(proto, self.folder)
        )

    def weight_bytes(self, call: NodeCall) -> int:
        """Return the size of the weights that a node reads.

        Args:
            call: a node of this model.

        Returns:
            The bytes, without sparse weights.
        """
        protos = [self.weights[n] for n in call.uses if n in self.weights]
        return sum(
            tensor_data.byte_size(dtypes.numpy_dtype(p.data_type), tuple(p.dims)) for p in protos if isinstance(p, TensorProto)
        )

    def feeds(self, inputs: Any) -> dict[str, Any]:
        """Check inputs against the model's declared inputs.

        Args:
            inputs: as for `SingaRep.run`.

        Returns:
            The inputs by name.

        Raises:
            InvalidInput: the inputs do not match the declared ones.
        """
        named = set(inputs) if isinstance(inputs, Mapping) else set()
        taken = [i for i in self.proto.graph.input if i.name not in self.weights or i.name in named]
        graph = helper.make_graph([], "inputs", taken, taken)  # a graph of no nodes checks what it is fed
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 1)])
        return SingaBackend.prepare(model).run(inputs).to_dict()

    def part(
        self,
        calls: Sequence[NodeCall],
        values: Mapping[str, Any],
        outputs: Sequence[str],
        results: Mapping[str, Any] | None = None,
    ) -> ModelProto:
        """Extract nodes as a model with the opsets, functions and IR version of the whole.

        Args:
            calls: the nodes, in an order that can be run.
            values: the values to declare as inputs, which may be weights; other weights stay initializers, and their bytes
                stay where they are.
            outputs: the values to declare as outputs.
            results: arrays that determine the types of outputs.

        Returns:
            The model.
        """
        made = {n for call in calls for n in call.outputs}
        model = ModelProto(ir_version=self.proto.ir_version, producer_name="sonnx")
        model.opset_import.extend(self.proto.opset_import)
        if any(self._calls_functions(call.proto) for call in calls):
            model.functions.extend(self.proto.functions)
        graph = model.graph
        graph.name = calls[0].name if len(calls) == 1 else self.proto.graph.name or "part"
        for call in calls:
            graph.node.append(call.proto)
            graph.node[-1].name = call.name  # engines name nodes in their errors
        for name in dict.fromkeys(n for call in calls for n in call.uses if n not in made):
            if name in values:
                graph.input.append(self.info(name, values[name]))
                continue
            weight = self.weights[name]
            if isinstance(weight, TensorProto):
                graph.initializer.append(weight)
                graph.initializer[-1].name = name
            else:
                graph.sparse_initializer.append(weight)
        if self.proto.ir_version < 4:  # then every initializer is an input too
            graph.input.extend(helper.make_tensor_value_info(t.name, t.data_type, t.dims) for t in graph.initializer)
        for name in outputs:
            typed = results is not None and name in results
            graph.output.append(self.info(name, results[name]) if typed and results else ValueInfoProto(name=name))
        return model

    def declare(self, part: ModelProto) -> None:
        """Declare the types of outputs that have none, by ONNX's inference of the part with the shapes of its inputs.

        Args:
            part: of `part`; it is changed.
        """
        bare = [o for o in part.graph.output if not o.HasField("type")]
        inferred = {o.name: o.type for o in infer_shapes(part).model.graph.output} if bare else {}
        for output in bare:
            found = inferred.get(output.name)
            if found is None or not found.WhichOneof("value"):
                found = self.types.get(output.name)
            if found is not None:
                output.type.CopyFrom(found)

    def _calls_functions(self, node: NodeProto) -> bool:
        return bool(self._functions) and (
            (node.domain, node.op_type) in self._functions or any(a.HasField("g") for a in node.attribute)
        )

    def info(self, name: str, value: Any) -> ValueInfoProto:
        """Create the declaration of a value.

        Args:
            name: of the value.
            value: an array, a list, a dict or None.

        Returns:
            Its name, with its type if it is known.
        """
        if isinstance(value, np.ndarray):
            return helper.make_tensor_value_info(name, dtypes.onnx_code(value.dtype), value.shape)
        known = self.types.get(name)
        if known is not None and known.WhichOneof("value") not in (None, "tensor_type"):
            return helper.make_value_info(name, known)
        if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
            element = helper.make_tensor_type_proto(dtypes.onnx_code(value[0].dtype), None)
            return helper.make_value_info(name, helper.make_sequence_type_proto(element))
        return ValueInfoProto(name=name)


def _constant(node: NodeProto) -> TensorProto | None:
    """The tensor of a Constant node; None for other nodes."""
    if (node.op_type, node.domain) != ("Constant", "") or len(node.attribute) != 1 or len(node.output) != 1:
        return None
    attribute: AttributeProto = node.attribute[0]
    return attribute.t if attribute.name == "value" and attribute.HasField("t") else None


def _ordered(nodes: Sequence[tuple[int, NodeProto]]) -> Iterator[NodeCall]:
    """The calls in the file's order if it can be run, otherwise sorted; raises InvalidModel for a cycle."""
    calls = [_call(i, proto) for i, proto in nodes]
    makers = {n: i for i, call in enumerate(calls) for n in call.outputs}
    needs = {i: [makers[n] for n in call.uses if n in makers] for i, call in enumerate(calls)}
    if all(j < i for i, need in needs.items() for j in need):
        return iter(calls)
    try:
        return iter([calls[i] for i in graphlib.TopologicalSorter(needs).static_order()])
    except graphlib.CycleError as error:
        names = ", ".join(repr(calls[i].name) for i in error.args[1][:8])
        raise InvalidModel(f"the graph has a cycle among the nodes {names}", code="SX101") from None


def _call(index: int, proto: NodeProto) -> NodeCall:
    name = proto.name or f"{proto.op_type}_{index}"
    return NodeCall(index, name, proto, tuple(dict.fromkeys(_uses(proto))), tuple(n for n in proto.output if n))


def _uses(node: NodeProto) -> Iterator[str]:
    """The names that a node reads: its inputs, then the values that its subgraphs capture."""
    yield from (n for n in node.input if n)
    for attribute in node.attribute:
        if attribute.HasField("g"):
            graph = attribute.g
            inner = {i.name for i in graph.input} | {n for p in graph.node for n in p.output}
            inner |= {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
            yield from (n for p in graph.node for n in _uses(p) if n not in inner)
            yield from (o.name for o in graph.output if o.name not in inner)
