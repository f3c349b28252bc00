"""An editable graph: nodes in order, producers and readers of values, constants as arrays, types as far as they are known.

Two rules keep every rewrite simple: **a name never changes its value** (a new value gets a fresh name), and TensorProtos and
AttributeProtos are never changed in place, so a snapshot copies no weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from .index import LONG, NodeEditor, Type
from .ordering import NameList, NodeOrder
from .typed_graph import TypedGraph, constant_node


class GraphEditor(TypedGraph):
    """One graph, or the body of a function, with an index of the producers and readers of its values.

    Attributes:
        context: what the graphs of the model share.
        proto: the message that the graph was read from.
        outer: the graph that contains this one; None for the main graph and for bodies of functions.
        opsets: the imported opset of each domain.
        in_function: whether the graph is in the body of a function.
        inputs: names of the inputs.
        outputs: names of the outputs.
        initializers: tensors by name.
        sparse: sparse tensors by name.
        retyped: new types of outputs whose names changed, by position.
        pinned: values that quantization annotations name; their names must not change.
        nodes: in an order that can be run.
    """

    def insert(self, node: NodeEditor, before: NodeEditor | None = None, after: NodeEditor | None = None) -> None:
        """Insert a new node; at the end if no place is given.

        Args:
            node: the new node.
            before: the node before which to insert it.
            after: the node after which to insert it.
        """
        self._order.insert(node, self._order.after(after) if after is not None else before)
        self._producers.update({o: node for o in node.outputs if o})
        self.attach(node)
        self._changed(lambda: self._take_out(node), node)

    def remove(self, *gone: NodeEditor) -> None:
        """Remove nodes whose values are not in use.

        Args:
            *gone: nodes of this graph.
        """
        for node in gone:
            there = node in self._order.place
            following = self._order.after(node) if there else None
            produced = [o for o in node.outputs if self._producers.get(o) is node]
            self._take_out(node)

            def put_back(
                node: NodeEditor = node, there: bool = there, at: NodeEditor | None = following, made: Any = produced
            ) -> None:
                if there:
                    self._order.insert(node, at)
                self._producers.update(dict.fromkeys(made, node))
                self.attach(node)

            self._changed(put_back, node)

    def _take_out(self, node: NodeEditor) -> None:
        if node in self._order.place:
            self._order.remove(node)
        self._places.pop(node, None)
        self.release(node)
        for o in node.outputs:
            if self._producers.get(o) is node:
                del self._producers[o]

    def _changed(self, undo: Callable[[], None], *nodes: NodeEditor) -> None:
        """Record a change, if a trial records them."""
        trial = self.context.trial
        if trial is not None:
            trial.steps.append(undo)
            trial.touched.update(dict.fromkeys(nodes))

    def touch(self, node: NodeEditor) -> None:
        """Record the operator and the attributes of a node, before they are changed in a trial.

        Args:
            node: a node of this graph.
        """
        op_type, attributes = node.op_type, dict(node.attributes)

        def undo() -> None:
            node.op_type, node.attributes = op_type, attributes

        self._changed(undo, node)

    def rewire(self, node: NodeEditor, inputs: Sequence[str]) -> None:
        """Replace the inputs of a node.

        Args:
            node: a node of this graph.
            inputs: names, "" for an absent input.
        """
        old = node.inputs
        self.release(node)
        node.inputs = list(inputs)
        while node.inputs and not node.inputs[-1] and not node.graphs:
            node.inputs.pop()
        self.attach(node)

        def undo() -> None:
            self.release(node)
            node.inputs = old
            self.attach(node)

        self._changed(undo, node)

    def rename_output(self, node: NodeEditor, i: int, name: str) -> None:
        """Rename an output of a node; readers of the old name do not change.

        Args:
            node: a node of this graph.
            i: the position of the output.
            name: the new name.
        """
        old = node.outputs[i]
        self._rename_output(node, i, name)
        self._changed(lambda: self._rename_output(node, i, old), node)

    def _rename_output(self, node: NodeEditor, i: int, name: str) -> None:
        if self._producers.get(node.outputs[i]) is node:
            del self._producers[node.outputs[i]]
        node.outputs[i] = name
        if name:
            self._producers[name] = node

    def replace(self, old: str, new: str) -> None:
        """Replace a value in all nodes that read it, subgraphs included; outputs of the graph do not change.

        Args:
            old: the name that is read now.
            new: the name to read.
        """
        if old == new:
            return
        readers = self._users.pop(old, {})
        there = self._users.setdefault(new, {})
        both = [node for key, node in readers.items() if key in there] if self.context.trial is not None else []
        for node in readers.values():
            self._substitute(node, old, new)
            for graph in node.graphs.values():
                graph._replace_free(old, new)
        there.update(readers)

        def undo() -> None:
            self._users[old] = readers
            for key in readers:
                there.pop(key, None)
            there.update({id(node): node for node in both})

        self._changed(undo, *readers.values())

    def _substitute(self, node: NodeEditor, old: str, new: str) -> None:
        """Replace a name in the inputs of a node."""
        if len(node.inputs) <= LONG:
            before, node.inputs = node.inputs, [new if n == old else n for n in node.inputs]

            def undo() -> None:
                node.inputs = before

        else:
            index = self._indexed(node)
            places = index.pop(old, [])
            for i in places:
                node.inputs[i] = new
            index.setdefault(new, []).extend(places)

            def undo() -> None:
                self._places.pop(node, None)  # its index is built again when it is used
                for i in places:
                    node.inputs[i] = old

        self._changed(undo, node)

    def _replace_free(self, old: str, new: str) -> None:
        """Replace a value of an outer graph in this graph, its outputs included."""
        if not self.captures(old):
            return
        if old in self.outputs:
            self.name_outputs([new if o == old else o for o in self.outputs])
        self.replace(old, new)

    def name_outputs(self, names: Sequence[str]) -> None:
        """Set the values that are the outputs of this graph.

        Args:
            names: as many as there are outputs.
        """
        before, self.outputs = self.outputs, NameList(names)

        def undo() -> None:
            self.outputs = before

        self._changed(undo)

    def bypass(self, node: NodeEditor, source: str, output: int = 0) -> bool:
        """Replace an output of a node by another value, and remove the node.

        A graph output must keep its name: then the producer of `source` is renamed, unless `source` is an input, an
        initializer, an output itself, or a value of an outer graph.

        Args:
            node: a node of this graph.
            source: the value that replaces the output.
            output: the position of the output; the others must not be in use.

        Returns:
            False if names do not allow it; then nothing changed.
        """
        out = node.outputs[output]
        if out in self.pinned or any(o and self.used(o) for i, o in enumerate(node.outputs) if i != output):
            return False
        if out not in self.outputs:
            self.replace(out, source)
            self.remove(node)
            return True
        maker = self.producer(source)
        if maker is None or source in self.outputs or source in self.pinned:
            return False
        self.remove(node)
        self.rename_output(maker, maker.outputs.index(source), out)
        self.replace(source, out)
        return True

    def add(
        self,
        op_type: str,
        inputs: Sequence[str],
        *,
        before: NodeEditor | None = None,
        after: NodeEditor | None = None,
        like: str = "",
        name: str = "",
        outputs: int = 1,
        type: Type | None = None,
        **attributes: Any,
    ) -> NodeEditor:
        """Insert a new node of ONNX's own domain.

        Args:
            op_type: the operator.
            inputs: names of the inputs.
            before: the node before which to insert it.
            after: the node after which to insert it.
            like: a prefix of the fresh name of the first output, if `name` is empty.
            name: of the first output.
            outputs: the number of outputs.
            type: of the first output.
            **attributes: values by name.

        Returns:
            The new node.
        """
        made = [
            name or self.context.fresh(like or op_type.lower()),
            *(self.context.fresh(op_type.lower()) for _ in range(outputs - 1)),
        ]
        node = NodeEditor(op_type, list(inputs), made, name=self.context.fresh(f"{op_type}_of_{made[0]}"))
        node.set(**attributes)
        self.insert(node, before, after)
        if type is not None:
            self.types[made[0]] = type
        return node

    def trains(self, array: np.ndarray, *names: str) -> bool:
        """Test whether a new constant may be an initializer, which is trainable if it is float.

        Args:
            array: the new constant.
            *names: the constants that it was computed from.

        Returns:
            False for floats that were computed from Constant nodes only.
        """
        return array.dtype.kind != "f" or any(isinstance(self.tensor(n), TensorProto) for n in names)

    def add_constant(self, array: np.ndarray, like: str = "constant", trains: bool = True) -> str:
        """Add a constant: an initializer; in functions, and if it must not be trainable, a Constant node.

        Before IR version 4 an initializer had to be listed as an input too, so it is added to the main graph.

        Args:
            array: the value.
            like: the preferred name.
            trains: whether it may be an initializer; see `trains`.

        Returns:
            The name of the constant.
        """
        name = self.context.fresh(like)
        tensor = numpy_helper.from_array(np.asarray(array), name)
        if self.in_function or not trains:
            self.types[name] = Type(tensor.data_type, tuple(array.shape))
            self.insert(constant_node(name, array), before=self._order.after(None))
            return name
        graph = self.context.main if self.context.ir_version < 4 else self
        graph.types[name] = Type(tensor.data_type, tuple(array.shape))
        graph.initializers[name] = tensor
        if self.context.ir_version < 4:
            graph.inputs.append(name)

        def undo() -> None:
            del graph.initializers[name]
            if self.context.ir_version < 4:
                graph.inputs.remove(name)

        self._changed(undo)
        return name

    # --- snapshots

    def snapshot(self) -> Callable[[], None]:
        """Record the state of this graph and its subgraphs; no weights are copied.

        Returns:
            A function that restores this state.
        """
        mine = (self.nodes, dict(self.initializers), dict(self.sparse), dict(self.retyped))
        names = (list(self.inputs), list(self.outputs))
        parts = [(n, n.op_type, list(n.inputs), list(n.outputs), dict(n.attributes)) for n in self.nodes]
        types = dict(self.types) if self.context.has_types else None
        inner = [g.snapshot() for n in self.nodes for g in n.graphs.values()]

        def restore() -> None:
            for back in inner:
                back()
            nodes, initializers, sparse, retyped = mine
            self._order, self.inputs, self.outputs = NodeOrder(nodes), *map(NameList, names)
            self.initializers, self.sparse, self.retyped = dict(initializers), dict(sparse), dict(retyped)
            for node, op_type, ins, outs, attributes in parts:
                node.op_type, node.inputs, node.outputs, node.attributes = op_type, list(ins), list(outs), dict(attributes)
            if types is None:
                self.context.forget()
            else:
                self.types.clear()
                self.types.update(types)
            self.reindex()

        return restore
