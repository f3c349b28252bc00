"""A model whose nodes are compared: its graph, its weights, and any nodes of it as a separate model."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
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
from ..ir.graph import Node
from ..ir.structure import read_structure
from ..proto import tensor_data
from ..proto.checker import infer_shapes
from ..proto.load import ModelSource, open_light
from ..proto.messages import graphs
from ..proto.schemas import opset_of, plain_domain, schema_version, schemas
from ..proto.values import Value as Declared


class ComparedModel:
    """A model whose nodes run alone or together, and are compared with those of another side.

    Attributes:
        path: of the file, if the model was opened by path.
        proto: the model; if it was opened by path, the bytes of long tensors stay in the file.
        folder: the folder of these bytes.
        graph: its main graph; each node has a name, by default operator and index, and Constants of a tensor are initializers.
        weights: the tensors of the initializers, by name.
        indices: the position of each node in the file.
        values: the values of the main graph by name.
        inputs: the inputs without an initializer.
        optional_inputs: the inputs with an initializer, which may be overridden.
        outputs: names of the outputs.
        results: names of the outputs that nodes return.
    """

    def __init__(self, model: ModelSource) -> None:
        """Read a model.

        Args:
            model: a path, a ModelProto or bytes.

        Raises:
            InvalidModel: the model is not an ONNX file, the nodes have a cycle or a value is not defined (SX101), or a value is
                defined twice (SX102).
        """
        self.path = Path(model) if isinstance(model, (str, os.PathLike)) else None
        self.proto, self.folder = open_light(model)
        self._functions = {(f.domain, f.name): f for f in self.proto.functions}
        functions = {(plain_domain(f.domain), f.name) for f in self.proto.functions}
        self.graph = read_structure(
            self.proto.graph, {plain_domain(o.domain): o.version for o in self.proto.opset_import}, functions
        )
        place = {id(message): i for i, message in enumerate(self.proto.graph.node)}
        self.indices = {node: place[id(node.proto)] for node in self.graph.nodes}
        for node, index in self.indices.items():
            node.name = node.name or f"{node.op_type}_{index}"
            _store(node)
        self.weights: dict[str, TensorProto | SparseTensorProto] = {n: v.constant for n, v in self.graph.initializers.items()}
        declared = [Declared.from_proto(i) for i in self.proto.graph.input]
        self.inputs = tuple(v for v in declared if v.name not in self.weights)
        self.optional_inputs = tuple(v for v in declared if v.name in self.weights)
        self.outputs = tuple(v.name for v in self.graph.outputs)
        self.results = tuple(v.name for v in self.graph.outputs if v.producer is not None)
        self.values = self.graph.values
        undefined = set(self.graph.captured)
        for node in self.graph.nodes if undefined else ():
            for v in node.reads:
                if v in undefined:
                    raise InvalidModel(f"input {v.name!r} is not defined", code="SX101", node=node.name, operator=node.op_type)

    @classmethod
    def of(cls, model: ModelSource | ComparedModel) -> ComparedModel:
        """Convert a model to a ComparedModel.

        Args:
            model: a path, a ModelProto, bytes, or a ComparedModel.

        Returns:
            The ComparedModel itself, or a new one.

        Raises:
            InvalidModel: as for the constructor.
        """
        return model if isinstance(model, ComparedModel) else cls(model)

    def producer(self, name: str) -> Node | None:
        """Return the node that returns a value; None for an input, an initializer and an unknown name.

        Args:
            name: of the value.

        Returns:
            The node.
        """
        value = self.values.get(name)
        return None if value is None else value.producer

    def node(self, name: str) -> Node:
        """Return the node that returns a value.

        Args:
            name: of a value that a node returns.

        Returns:
            The node.
        """
        node = self.values[name].producer
        assert node is not None
        return node

    @cached_property
    def dies(self) -> dict[Node, list[str]]:
        """The values that no later node reads, for each node."""
        last = {v: node for node in self.graph.nodes for v in (*node.results, *node.reads)}
        dies: dict[Node, list[str]] = {}
        for value, node in last.items():
            dies.setdefault(node, []).append(value.name)
        return dies

    @cached_property
    def types(self) -> dict[str, TypeProto]:
        """The types of values, as far as ONNX's inference knows them."""
        graph = infer_shapes(self.proto).model.graph  # best effort: errors of the model are reported when it runs
        return {v.name: v.type for v in (*graph.input, *graph.value_info, *graph.output)}

    def draws(self, node: Node) -> bool:
        """Test whether a node draws random numbers, so that its outputs cannot be compared; Dropout does in training mode.

        Args:
            node: a node of this model.

        Returns:
            Whether its outputs are random.
        """
        if node.op_type != "Dropout":
            return has_trait(node.domain, node.op_type, "random")
        training = node.input(2)
        if training is not None:
            return training.name not in self.weights or bool(self.weight(training.name).any())
        return self.graph.opsets.get("", 1) < 7 and not node.get("is_test")

    def looser(self, node: Node) -> frozenset[str]:
        """Return the operators of a node, of its graphs and functions, that widen the tolerance of its outputs.

        Those that compute in float32, and its own one if its results have a bounded range.

        Args:
            node: a node of this model.

        Returns:
            Their names in the registry of tolerances.
        """
        found, messages, entered = set[str](), [message_of(node)], set[tuple[str, str]]()
        while messages:
            message = messages.pop()
            function = self._functions.get((message.domain, message.op_type))
            if function is None:
                found.add(tolerances.qualified(message.domain, message.op_type))
                messages += [n for g in graphs(message) for n in g.node]
            elif (message.domain, message.op_type) not in entered:
                entered.add((message.domain, message.op_type))
                messages += function.node
        own = tolerances.qualified(node.domain, node.op_type)
        return tolerances.looser(found) | (frozenset([own]) & tolerances.RANGES.keys())

    @cached_property
    def carried(self) -> dict[str, frozenset[str]]:
        """The operators that widen the tolerance of each value; only values that have some.

        Those that compute in float32, of all nodes on which it depends; those of a bounded range, of its node, or of those whose
        values it moves.
        """
        found: dict[str, frozenset[str]] = {}
        for node in self.graph.nodes:
            moves = has_trait(node.domain, node.op_type, "moves")
            read = frozenset[str]().union(*(found[v.name] for v in node.reads if v.name in found))
            operators = self.looser(node) | (read if moves else tolerances.looser(read))
            found |= dict.fromkeys(result_names(node), operators) if operators else {}
        return found

    @cached_property
    def _floats(self) -> dict[str, np.dtype[Any]]:
        """The dtypes of float values, as far as known; empty if the model has floats of one dtype only."""
        graph = self.proto.graph
        codes = {v.type.tensor_type.elem_type for v in (*graph.input, *graph.value_info, *graph.output)}
        codes |= {w.data_type for w in self.weights.values() if isinstance(w, TensorProto)}
        codes |= {node.get(name) for node in self.graph.nodes for name in ("to", "dtype", "output_dtype")} - {None}
        if sum(dtypes.is_code(c) and dtypes.is_float(dtypes.numpy_dtype(c)) for c in codes) < 2:
            return {}
        found = {n: t.tensor_type.elem_type for n, t in self.types.items()}
        found |= {n: w.data_type for n, w in self.weights.items() if isinstance(w, TensorProto)}
        known = {n: dtypes.numpy_dtype(c) for n, c in found.items() if dtypes.is_code(c)}
        return {n: d for n, d in known.items() if dtypes.is_float(d)}

    def rounds(self, nodes: Iterable[Node]) -> np.dtype[Any] | None:
        """Return the narrowest float dtype to which nodes round, if the model has floats of several dtypes.

        Args:
            nodes: nodes of this model.

        Returns:
            The dtype; None if they round nothing, as nodes do that move values without a cast, or if it is not known.
        """
        found = list[np.dtype[Any]]()
        for node in nodes if self._floats else ():
            made, read = ([self._floats[v.name] for v in some if v.name in self._floats] for some in (node.results, node.reads))
            if has_trait(node.domain, node.op_type, "moves") and read:
                made = [d for d in made if tolerances.narrowest((d, *read)) not in read]
            found += made
        return tolerances.narrowest(found) if found else None

    @cached_property
    def _rounded(self) -> dict[str, np.dtype[Any]]:
        """The narrowest float dtype to which each value, or one on which it depends, was rounded, as far as known."""
        found: dict[str, np.dtype[Any]] = {}
        for node in self.graph.nodes if self._floats else ():
            own = self.rounds([node])
            before = [found[v.name] for v in node.reads if v.name in found] + ([own] if own else [])
            found |= dict.fromkeys(result_names(node), tolerances.narrowest(before)) if before else {}
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

    def widened_by(self, tolerance: Tolerance, nodes: Sequence[Node]) -> Tolerance:
        """Return a tolerance with the errors of some nodes only.

        Args:
            tolerance: to widen.
            nodes: nodes of this model.

        Returns:
            The tolerance, with the operators and the narrowest dtype.
        """
        operators = frozenset[str]().union(*map(self.looser, nodes))
        return replace(tolerance, operators=operators, dtype=self.rounds(nodes))

    def attributes(self, node: NodeProto, opsets: Mapping[str, int] | None = None) -> dict[str, AttributeProto]:
        """Return the attributes of a node, also those that it leaves to the defaults of its schema or function.

        Args:
            node: a node of this model.
            opsets: the opsets by which it is read, by domain; by default those of the model.

        Returns:
            The attributes by name, without documentation; nodes of subgraphs have all of theirs too.
        """
        opsets = self.graph.opsets if opsets is None else opsets
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

    def weight_bytes(self, node: Node) -> int:
        """Return the size of the weights that a node reads.

        Args:
            node: a node of this model.

        Returns:
            The bytes, without sparse weights.
        """
        protos = [self.weights[n] for n in read_names(node) if n in self.weights]
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
        nodes: Sequence[Node],
        values: Mapping[str, Any],
        outputs: Sequence[str],
        results: Mapping[str, Any] | None = None,
    ) -> ModelProto:
        """Extract nodes as a model with the opsets, functions and IR version of the whole.

        Args:
            nodes: the nodes, in an order that can be run.
            values: the values to declare as inputs, which may be weights; other weights stay initializers, and their bytes
                stay where they are.
            outputs: the values to declare as outputs.
            results: arrays that determine the types of outputs.

        Returns:
            The model.
        """
        model = ModelProto(ir_version=self.proto.ir_version, producer_name="sonnx")
        model.opset_import.extend(self.proto.opset_import)
        if any(map(self._calls_functions, nodes)):
            model.functions.extend(self.proto.functions)
        graph = model.graph
        graph.name = nodes[0].name if len(nodes) == 1 else self.proto.graph.name or "part"
        for node in nodes:
            graph.node.append(message_of(node))
            graph.node[-1].name = node.name  # engines name nodes in their errors
        for name in outer_names(nodes):
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

    def _calls_functions(self, node: Node) -> bool:
        return bool(self._functions) and (not node.plain or bool(node.bodies))

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


def read_names(node: Node) -> tuple[str, ...]:
    """The names of the values that a node reads, each once: its inputs, then those that its bodies capture."""
    return tuple(dict.fromkeys([v.name for v in node.reads]))


def result_names(node: Node) -> tuple[str, ...]:
    """The names of the values that a node returns."""
    return tuple([o.name for o in node.results])


def message_of(node: Node) -> NodeProto:
    """The message of a node of a model that was read."""
    assert node.proto is not None
    return node.proto


def outer_names(nodes: Sequence[Node]) -> list[str]:
    """The names of the values that nodes read and none of them returns, each once."""
    inner = set(nodes)
    return list(dict.fromkeys(v.name for node in nodes for v in node.reads if v.producer not in inner))


def inner_names(nodes: Iterable[Node]) -> list[str]:
    """The names of the values that nodes return."""
    return [v.name for node in nodes for v in node.results]


def nodes_for(names: Iterable[str], nodes: Sequence[Node], given: Collection[str] = ()) -> list[Node]:
    """The nodes of a sequence that values need, in order.

    Args:
        names: of the values.
        nodes: the nodes, in an order that can be run.
        given: values that are known.
    """
    needed, found = set(names), list[Node]()
    for node in reversed(nodes):
        if any(o.name in needed and o.name not in given for o in node.results):
            needed.update(v.name for v in node.reads)
            found.append(node)
    return found[::-1]


def _store(node: Node) -> None:
    """Replace a Constant node of a tensor by an initializer."""
    found, graph = node.attributes.get("value"), node.graph
    if node.domain or node.op_type != "Constant" or len(node.attributes) != 1 or len(node.results) != 1 or graph is None:
        return
    if isinstance(found, AttributeProto) and found.HasField("t"):
        (value,) = node.results
        graph.remove(node)
        value.constant = found.t
        graph.add_initializer(value)
