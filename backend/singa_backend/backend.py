"""The interface of `onnx.backend.base`: `SingaBackend.prepare` returns a `SingaRep`, which runs the model."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, NodeProto, helper
from onnx.backend.base import Backend, BackendRep

from .devices import device as devices
from .devices.device import DeviceLike
from .errors import DeviceUnavailable, InvalidInput, InvalidModel, SonnxError, check_keywords, did_you_mean
from .ir.custom import CustomOperator, scoped
from .ir.graph import Graph, Node
from .ir.reader import read
from .ir.run_order import run_order
from .ir.variants import select, with_states
from .ir.versioned import import_declarations
from .kernels.options import options as plan_options
from .kernels.table import Options
from .limits import Budget, Flag, Limits, check_number, spend
from .plans.caches import shows_cache
from .proto.load import ModelSource, load_model, map_model
from .proto.schemas import newest, plain_domain
from .proto.source import ModelFiles, changed, check_files
from .proto.tensor_data import Maps, ModelFile
from .proto.values import Value
from .rendering import TEXT, html, printable
from .runtime.feeds import convert_input, overlaps_itself
from .session import Session

if TYPE_CHECKING:
    from .adapters.files import AdapterSource
    from .plans.profile import Profile
    from .runtime.origins import Watch

_QUIET = ("rtol", "atol", "init_inputs", "keep_initializers_as_inputs")
"""Keywords that ONNX's test runner and older programs pass to `prepare`, and that have no effect here."""


_new = tuple.__new__

_ALL = -1
_NONE: tuple[str, ...] = ()
"""The defaults of `run`, which it recognizes by identity."""


class Outputs(tuple[Any, ...]):
    """The outputs of a run: a tuple in the model's order, also indexed by name.

    `outputs["name"]` is the output of that name; an unknown name raises KeyError.

    Attributes:
        names: the names of the outputs, in order.
    """

    names: tuple[str, ...]

    def __new__(cls, values: Sequence[Any], names: Sequence[str]) -> Outputs:
        """Create the tuple.

        Args:
            values: the outputs, in order.
            names: their names, as many as there are values.
        """
        self = _new(cls, values)
        self.names = names if type(names) is tuple else tuple(names)
        return self

    def __getitem__(self, key: Any) -> Any:
        """Return an output by name, or by index or slice."""
        if isinstance(key, str):
            try:
                key = self.names.index(key)
            except ValueError:
                raise KeyError(f"an output's name must be one of {', '.join(self.names)}, got {key!r}") from None
        return super().__getitem__(key)

    def __reduce__(self) -> Any:
        """Support pickle and copy."""
        return (Outputs, (tuple(self), self.names))

    def to_dict(self) -> dict[str, Any]:
        """Return the outputs by name.

        Returns:
            A dict from each name to its value, in order.
        """
        return dict(zip(self.names, self, strict=True))


class SingaRep(BackendRep):
    """A model on a device, ready to run any number of times, from any thread.

    Attributes:
        graph: the model as it was read.
        device: the device that it runs on.
        limits: the bounds of a run that does not set its own.
        options: how plans compute.
    """

    _adapters: Mapping[str, Mapping[str, np.ndarray]] = MappingProxyType({})

    def __init__(
        self,
        graph: Graph,
        device: devices.Device,
        limits: Limits | None = None,
        options: Options | None = None,
        *,
        file: ModelFile | None = None,
    ) -> None:
        """Place a graph's initializers on a device.

        Args:
            graph: the graph, as returned by `read`.
            device: the device to run on.
            limits: the bounds of a run that does not set its own; None for `Limits()`.
            options: how plans compute; None for the defaults of `prepare`.
            file: the model file that initializers are read from when they are used; None if they are in memory.
        """
        self.graph = graph
        self.device = device
        self.limits = limits or Limits()
        self.options = options or plan_options()
        self._session = Session(graph, device, self.options, self.limits, file=file)
        self._default_threads = None if options else self.options.threads
        self._source: ModelFiles | None = None
        self._given: dict[str, Any] = {}
        self._received: list[tuple[weakref.ref[np.ndarray] | None, tuple[int, ...]]] | None = None
        self._inputs = tuple(graph.declared_inputs)
        self._output_names = tuple(v.name for v in graph.outputs)
        self._selection = lru_cache(maxsize=64)(partial(selected_part, graph))  # a cached method would keep `self` alive
        self._built = frozenset(self.__dict__)  # a pickle has the other attributes as they are

    @property
    def inputs(self) -> tuple[Value, ...]:
        """The required inputs, in order, with name, kind, dtype and shape."""
        return self._inputs

    @property
    def outputs(self) -> tuple[Value, ...]:
        """The outputs, in order, with name, kind, dtype and shape."""
        return self.graph.declared_outputs

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the main graph, in the order in which they run."""
        return self.graph.nodes

    @property
    def states(self) -> dict[str, np.ndarray]:
        """The initializers by name, as host arrays.

        Raises:
            InvalidModel: the model's file was overwritten (SX110): they can no longer be read.
        """
        self._session.check_file()
        return {**self.graph.states, **{n: self.device.get(v) for n, v in self._given.items()}}

    @property
    def origin(self) -> str:
        """The path of the model's file, or a text that specifies its graph."""
        return f"graph {self.graph.name!r}" if self._source is None else f"file {self._source.path!r}"

    def _rows(self) -> list[tuple[str, str, str]]:
        """For each input and output its role, its name and its type."""
        optional = self.graph.declared_optional_inputs
        roles = (("input", self.inputs), ("optional input", optional), ("output", self.outputs))
        return [(role, v.name, str(replace(v, name=""))[2:]) for role, values in roles for v in values]

    def __repr__(self) -> str:
        """Return the inputs and outputs as a table, and the origin, the size and the device of the model."""
        rows = [tuple(printable(t, 60) for t in row) for row in self._rows()]
        wide = [max((len(row[k]) for row in rows), default=0) for k in (0, 1)]
        table = "".join(f"\n  {role:<{wide[0]}}  {name:<{wide[1]}}  {kind}" for role, name, kind in rows)
        return f"<{self._title()}:{table}>"

    def _repr_html_(self) -> str:
        """Return the same as a table for a notebook."""
        rows = "".join("<tr>" + "".join(f"<td>{html(t)}</td>" for t in row) + "</tr>" for row in self._rows())
        heads = "<tr><th>role</th><th>name</th><th>type</th></tr>"
        return f"<table><caption>{html(self._title())}</caption><thead>{heads}</thead><tbody>{rows}</tbody></table>"

    def _title(self) -> str:
        return printable(f"{type(self).__name__} of {self.origin}, {len(self.graph.nodes):,} nodes, on {self.device}")

    def with_graph(self, graph: Graph) -> SingaRep:
        """Return this model with another form of its graph.

        Args:
            graph: the graph, which computes the same.

        Returns:
            This model if it has this graph, otherwise a new one.
        """
        if graph is self.graph:
            return self
        made = SingaRep(graph, self.device, self.limits, self.options, file=self._session.file)
        made._default_threads, made._source = self._default_threads, self._source
        made.__dict__.update(self._attributes())
        return made

    def with_states(self, values: dict[str, Any]) -> SingaRep:
        """Return the same model with other initializers; the graph is shared.

        Args:
            values: arrays of the device by the name of the initializer; the others are unchanged.

        Returns:
            A new SingaRep.
        """
        made = copy.copy(self)
        made._session = self._session.with_states(values)
        made._given = {**self._given, **values}
        return made

    # --- copies and pickles

    def __copy__(self) -> SingaRep:
        """Return the same model; it shares everything."""
        made = type(self).__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> SingaRep:
        """Return the same model, whose plans are its own; the initializers, which no run changes, are shared."""
        made = self.with_states({})
        memo[id(self)] = made
        made.__dict__.update(copy.deepcopy(self._attributes(), memo))
        return made

    def _attributes(self) -> dict[str, Any]:
        """The attributes that a program has added."""
        return {n: v for n, v in self.__dict__.items() if n not in self._built | {"_built"}}

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle: the paths and SHA-256 of the model's files and what has changed since, or the graph."""
        given = {n: self.device.get(v) for n, v in self._given.items()}
        return {**self._pickled(given), "attributes": self._attributes()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuild the model.

        Raises:
            InvalidModel: its file is missing, or has other contents than the file that it was prepared from (SX112).
            UnsupportedModel: this process does not declare an operator of the model (SX202).
            DeviceUnavailable: this machine does not have its device.
        """
        found, changed = unpickled(state)
        if changed:
            with found.device.active():
                found = found.with_states({n: found.device.put(v) for n, v in changed.items()})
        self.__dict__.update(found.__dict__ | state["attributes"])

    def _pickled(self, changed: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """What `unpickled` needs to prepare this model in another process.

        Args:
            changed: the initializers of the main graph that differ from those of `graph`.
        """
        threads = None if self.options.threads == self._default_threads else self.options.threads
        state = {
            "device": str(self.device),
            "limits": self.limits,
            "options": replace(self.options, threads=0),
            "threads": threads,
        }
        digests = None if self._source is None else self._source.digests()
        if self._source is None or digests is None:
            self._session.check_file()
            if self._source is not None:
                self._source.check_external()
            return {**state, "graph": with_states(self.graph, changed), "changed": {}}
        modules = {n.operator.module for n in self.graph.all_nodes() if n.operator is not None}
        others = sorted(m for m in modules if m.partition(".")[0] != __package__)
        own = scoped([n.operator.declaration for n in self.graph.all_nodes() if n.operator is not None])
        source = {"path": self._source.path, "digests": digests, "modules": others, "operators": list(dict.fromkeys(own))}
        return {**state, **source, "changed": dict(changed)}

    def run(
        self,
        inputs: Any,
        *,
        last_layers: int = _ALL,
        aux_output: Sequence[str] = _NONE,
        limits: Limits | None = None,
        cancel: Flag | None = None,
        validate: bool = False,
        out: Any = None,
        to_host: bool = True,
        adapter: str | None = None,
        **kwargs: Any,
    ) -> Outputs:
        """Run the model.

        Args:
            inputs: a list in the order of `self.inputs`, a dict by name, or one array.  Arrays must have the declared dtype and
                fit the declared shape; Python numbers and lists are converted to the declared dtype.  A sequence is a list of
                arrays, a map a dict, an empty optional None.  Arrays on the model's device are used without a copy, and are not
                changed: those of CuPy, and on CUDA those of other libraries that have `__dlpack__` or
                `__cuda_array_interface__`.
            last_layers: -1 runs all operators, -2 omits the last one, -k the last k - 1 (Constant nodes do not count); L >= 0
                runs operators 0 to L.  If operators are omitted, the outputs are those of the last operator that ran.
            aux_output: the names of intermediate values to return after the outputs.
            limits: the bounds of this run; None for those of `prepare`.
            cancel: a flag, such as a `threading.Event`; if it is set, the run stops at the next node.
            validate: whether to look for NaN and infinity in every value, also in subgraphs and functions.
            out: arrays that receive the outputs: a list in the order of the outputs, in which None stands for a new array, a dict
                by name, or one array.  They must have the dtypes and shapes of the outputs, and share no memory with each other
                or with the model.  They may be inputs of the run.  A run that fails after its checks may have written to them.
            to_host: whether to copy the outputs to the host; otherwise they are arrays of the model's device, except strings and
                dtypes that CuPy lacks.
            adapter: the name of an adapter of `prepare(..., adapters=...)`; None runs the model without one.
            **kwargs: options of ONNX's test runner and of SINGA that have no effect here.

        Returns:
            The outputs in order, also indexed by name: NumPy arrays (or arrays of the device, see `to_host`), lists for
            sequences, dicts for maps, None for an empty optional.  They share no memory with the model or the inputs, except
            those in `out` and caches of generated text: an output that begins with an input may extend its memory, and is
            read-only.  No later run changes it.

        Raises:
            InvalidInput: the inputs or options do not match the model, or an input is on another device, and nothing has run; or
                an array of `out` does not match its output, is read-only, shares memory with itself, another one or the model,
                or was passed with `to_host=False` (SX385), and none was written.
            UnknownKeyword: a keyword is not one of these.
            OperatorError: a node cannot compute with its inputs.
            NonFinite: an OperatorError (SX409): with `validate`, a node made a NaN, or an infinity from finite inputs, or an
                operator passed on a NaN of an input or an initializer.  The error names the first, and has the outputs.
            ResourceExhausted: a limit was reached, or the flag was set.
        """
        if adapter is not None:
            inputs = self._with_adapter(inputs, adapter)
        plain = limits is None and cancel is None and not validate and not kwargs and last_layers is _ALL and aux_output is _NONE
        if plain and (out is None or to_host or self.device.is_host):
            receivers = () if out is None else self._receivers(out, self._output_names)
            planned = self._session.steady(inputs, self.limits, self._weights, to_host, receivers)
            if planned is not None:
                if receivers:
                    _receive(receivers, planned, self._output_names)
                return Outputs(planned, self._output_names)
        return self._run(inputs, last_layers, aux_output, limits, cancel, validate, out, to_host, kwargs)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the adapters that `run` may select."""
        return tuple(self._adapters)

    def _with_adapter(self, inputs: Any, name: str) -> dict[str, Any]:
        """The inputs of a run with an adapter, by name; raises InvalidInput (SX983) if there is none of this name."""
        if name not in self._adapters:
            known = ", ".join(map(repr, self._adapters)) or "none"
            hint = "" if self._adapters else "prepare(model, adapters={name: path}) reads adapters"
            raise InvalidInput(f"adapter must be one of those of prepare ({known}), got {name!r}", code="SX983", hint=hint)
        if not isinstance(inputs, Mapping):
            values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(values) != len(self.graph.inputs):
                self._feeds(inputs)  # raises
            inputs = {v.name: x for v, x in zip(self.graph.inputs, values, strict=True)}
        return {**inputs, **self._adapters[name]}

    def _receivers(self, out: Any, names: Sequence[str]) -> list[np.ndarray | None]:
        """The arrays of `out` in the order of the outputs; raises InvalidInput (SX385) if one cannot be written."""
        if not isinstance(out, (list, tuple, np.ndarray)) and isinstance(out, Mapping):
            unknown = [n for n in out if n not in names]
            if unknown:
                raise _unfit(f"out must have names of outputs, {', '.join(names)}, got {unknown[0]!r}")
            found = [out.get(n) for n in names]
        else:
            found = list(out) if isinstance(out, (list, tuple)) else [out]
            if len(found) != len(names):
                raise _unfit(f"out must have {len(names)} arrays, one for each output ({', '.join(names)}), got {len(found)}")
        if self._known_receivers(found):
            return found
        given = [(n, a) for n, a in zip(names, found, strict=True) if a is not None]
        for name, a in given:
            if not isinstance(a, np.ndarray):
                raise _unfit(f"out must hold NumPy arrays or None, got a {type(a).__name__} for output {name!r}")
            flags = a.flags
            if not flags.writeable:
                raise _unfit(f"the array in out for output {name!r} is read-only")
            if not flags.forc and overlaps_itself(a):
                what = f"the array in out for output {name!r} must have separate memory for each element"
                raise _unfit(f"{what}, got shape {list(a.shape)} with strides {list(a.strides)}", "pass a.copy()")
        for i, (name, a) in enumerate(given):
            for other, b in given[:i]:
                if np.may_share_memory(a, b) and np.shares_memory(a, b):
                    raise _unfit(f"the arrays in out for outputs {other!r} and {name!r} share memory")
        for name, a in given:
            if shows_cache(a):
                raise _unfit(f"the array in out for output {name!r} shows the memory of a cache that a run returned")
            if any(np.may_share_memory(a, state) for state in self._protected()):
                raise _unfit(f"the array in out for output {name!r} shares memory with the model's initializers or constants")
        self._received = [(None, ()) if a is None else (weakref.ref(a), a.strides) for a in found]
        return found

    def _protected(self) -> Iterator[np.ndarray]:
        """The arrays of the host that later runs read: initializers and constants, those of subgraphs included."""
        session = self._session
        held = (v for states in session.states.values() for _, v in states)
        read = () if self.device.is_host else (v for g in session.graphs for v in g.states.values())  # pickles read them
        return (v for v in chain(held, read, session.constants) if isinstance(v, np.ndarray))

    def _known_receivers(self, found: Sequence[np.ndarray | None]) -> bool:
        """Whether these are the arrays of the last run, and as they were then."""
        if self._received is None:
            return False
        for a, (known, strides) in zip(found, self._received, strict=True):
            if a is None:
                if known is not None:
                    return False
            elif known is None or known() is not a or a.strides != strides or not a.flags.writeable:
                return False
        return True

    def _run(
        self,
        inputs: Any,
        last_layers: int,
        aux_output: Sequence[str],
        limits: Limits | None,
        cancel: Flag | None,
        validate: bool,
        out: Any,
        to_host: bool,
        kwargs: dict[str, Any],
    ) -> Outputs:
        """Run the model with all checks."""
        check_keywords("run", kwargs, ("last_layers", "aux_output", "limits", "cancel", "validate", "out", "to_host", *_QUIET))
        check_last_layers(last_layers)
        if not isinstance(aux_output, (str, list, tuple)) or not all(isinstance(n, str) for n in aux_output):
            raise InvalidInput(f"aux_output must be a list of names, got {aux_output!r}", code="SX305")
        graph = self._selection(int(last_layers), (aux_output,) if isinstance(aux_output, str) else tuple(aux_output))
        names = tuple(v.name for v in graph.outputs)
        device = self.device
        if out is not None and not (to_host or device.is_host):
            raise _unfit(f"out must be None with to_host=False: its arrays are on the host, and the outputs stay on {device}")
        receivers = None if out is None else self._receivers(out, names)
        feeds, replaced = self._feeds(inputs)
        budget = Budget(limits or self.limits, cancel, device.memory)
        session = self._configured()
        with device.active():
            replaced = {n: session.feed(n, v) for n, v in replaced.items()}
            placed = [session.feed(v.name, x) for v, x in zip(self.graph.inputs, feeds, strict=True)]
            watch = self._watch(placed, replaced) if validate else None
            try:
                results = session.run(
                    placed, replaced, budget, graph=None if graph is self.graph else graph, observer=watch,
                    weights=self._weights, to_host=to_host, kept=feeds,
                )  # fmt: skip
            except SonnxError as error:
                if watch and watch.origin:
                    error.hint = "; ".join(filter(None, [error.hint, f"before it, {watch.origin}"]))
                raise
            if receivers is not None:
                _receive(receivers, results, names)
            outputs = Outputs(results, names)
        if watch:
            found = outputs if to_host else Outputs(device.get_all(outputs), names)
            watch.finish(found)
            if watch.origin:
                from .runtime.origins import NonFinite

                raise NonFinite.of(watch.origin, found)
        return outputs

    def profile(self, inputs: Any, *, runs: int = 10, limits: Limits | None = None, cancel: Flag | None = None) -> Profile:
        """Measure where the time of a run goes: by step, by node and by operator.

        The model runs twice before the first measurement.  Then runs are measured as a whole and step by step, in turns.

        Args:
            inputs: as for `run`.
            runs: the number of runs of each kind; the times are medians.
            limits: the bounds of each run; None for those of `prepare`.
            cancel: a flag, such as a `threading.Event`; if it is set, the present run stops.

        Returns:
            The times, the work, the kernels that were chosen and why, and the memory.

        Raises:
            InvalidInput: the inputs do not match the model, or `runs` is not a positive integer.
            OperatorError: a node cannot compute with its inputs.
            ResourceExhausted: a limit was reached, or the flag was set.

        Example:
            found = rep.profile({"x": x})
            for step in sorted(found.steps, key=lambda s: -s.seconds)[:5]:
                print(f"{step.share:.0%} {step.kernel} {step.nodes} {step.notes}")
        """
        check_number("runs", runs, 1, whole=True)
        feeds, replaced = self._feeds(inputs)
        session, device = self._configured(), self.device
        with device.active():
            replaced = {n: session.feed(n, v) for n, v in replaced.items()}
            placed = [session.feed(v.name, x) for v, x in zip(self.graph.inputs, feeds, strict=True)]

            def run() -> None:
                SingaRep.run(self, inputs, limits=limits, cancel=cancel)

            run()  # plans may be made for changed weights at the second run only
            run()
            return session.profile(
                placed,
                replaced,
                runs=int(runs),
                budget=lambda: Budget(limits or self.limits, cancel, device.memory),
                run=run,
                weights=self._weights,
            )

    def _configured(self) -> Session:
        """The session, with the options and limits that a program may have set since."""
        self._session.options, self._session.limits = self.options, self.limits
        return self._session

    def _weights(self) -> Any:
        """A value that changes whenever an initializer does; plans hold copies of initializers."""
        return None

    def _watch(self, feeds: Sequence[Any], replaced: Mapping[str, Any]) -> Watch:
        from .runtime.origins import Watch  # only runs with `validate` need it

        session = self._session
        session.load()
        named = dict(zip((v.name for v in self.graph.inputs), feeds, strict=True)) | dict(replaced)
        graphs = {id(g): dict(run_order(g).state_slots) for g in session.graphs}
        states = [(graphs[key][slot], value) for key, held in session.states.items() for slot, value in held]
        return Watch(states, named, self.device.get)

    # --- inputs

    def _feeds(self, inputs: Any) -> tuple[list[Any], dict[str, Any]]:
        graph = self.graph
        if isinstance(inputs, Mapping):
            given = dict(inputs)
            known = {v.name for v in (*graph.inputs, *graph.optional_inputs)}
            unknown = [n for n in given if n not in known]
            missing = [v.name for v in self._inputs if v.name not in given and v.kind != "optional"]
            if unknown or missing:
                hint = did_you_mean(str(unknown[0]), [v.name for v in graph.inputs]) if unknown else ""
                raise InvalidInput(
                    f"the inputs must be {_names(self._inputs)}; "
                    + "; ".join(
                        [f"unknown: {', '.join(map(repr, unknown))}"] * bool(unknown)
                        + [f"missing: {', '.join(map(repr, missing))}"] * bool(missing)
                    )
                    + hint,
                    code="SX301",
                )
        else:
            values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(values) != len(graph.inputs):
                raise InvalidInput(
                    f"the model takes {len(graph.inputs)} inputs ({_names(self._inputs)}), got {len(values)}",
                    code="SX301",
                    hint="pass a list in this order, or a dict by name",
                )
            given = {v.name: x for v, x in zip(graph.inputs, values, strict=True)}
        sizes: dict[str, tuple[int, str]] = {}
        feeds = [convert_input(v, given.get(v.name), sizes, self.device) for v in self._inputs]
        optional = [v for v in graph.declared_optional_inputs if v.name in given] if graph.optional_inputs else []
        return feeds, {v.name: convert_input(v, given[v.name], sizes, self.device) for v in optional}


def unpickled(state: Mapping[str, Any]) -> tuple[SingaRep, dict[str, np.ndarray]]:
    """The model of `SingaRep._pickled`, as it was prepared, and the initializers that differ since."""
    chosen = plan_options(state["threads"], deterministic=state["options"].deterministic)
    default = chosen.threads
    options = replace(state["options"], threads=chosen.threads, adaptive=chosen.adaptive)
    device, limits = devices.restore(state["device"]), state["limits"]
    if "graph" in state:
        with spend(Budget(limits, None, device.memory)):
            made = SingaRep(state["graph"], device, limits, options)
    else:
        import_declarations(state["modules"])
        check_files(state["path"], state["digests"])
        made = _prepared(state["path"], device, limits, None, options, state["operators"])
        if made._source is None or made._source.digests() != state["digests"]:
            raise changed(state["path"], "which was changed while it was read")
    made._default_threads = None if state["threads"] else default
    return made, state["changed"]


def _prepared(
    model: ModelSource,
    device: devices.Device,
    limits: Limits,
    cancel: Flag | None,
    options: Options,
    operators: Sequence[CustomOperator],
    rewrite: Callable[[ModelProto, Path | None], ModelProto] | None = None,
) -> SingaRep:
    """Read a model, rewrite it if requested, and place it on a device."""
    source, maps = ModelFiles.before(model), Maps()
    with spend(Budget(limits, cancel, device.memory)):
        planned = device.type == "CPU" and options.level  # definitions read weights where they are: they must be aligned
        proto, folder, file = map_model(model) if planned else (*load_model(model), None)
        if rewrite is not None:
            proto, source = rewrite(proto, folder), None
        graph = read(proto, folder, file, maps, operators)
    made = SingaRep(graph, device, limits, options, file=file)
    made._source = None if source is None else source.after(maps.read)
    return made


def _adapted(
    model: ModelSource, adapter: Any, adapters: Any
) -> tuple[Callable[[ModelProto, Path | None], ModelProto], Mapping[str, Mapping[str, np.ndarray]] | None]:
    """The rewriting that adds adapters to a model, and the values of its inputs for each by name."""
    from .adapters.files import swappable, with_adapters  # not at the import of the package, which most programs use without

    if adapters is None:
        return with_adapters(model, list(adapter) if isinstance(adapter, (list, tuple)) else [adapter]), None
    if adapter is not None or not isinstance(adapters, Mapping) or not adapters:
        got = "both" if adapter is not None else repr(adapters)[:60]
        raise InvalidInput(f"prepare takes adapter, or adapters by name, got {got}", code="SX983")
    return swappable(model, adapters)


def prepare_rewritten(
    model: ModelSource,
    device: DeviceLike,
    rewrite: Callable[[ModelProto, Path | None], ModelProto] | None,
    *,
    limits: Limits | None = None,
    cancel: Flag | None = None,
    threads: int | None = None,
    precision: str = "float32",
    optimize: int = 2,
    deterministic: bool = False,
    memory: str = "compact",
    operators: Sequence[CustomOperator] = (),
    adapter: Any = None,
    adapters: Any = None,
    **kwargs: Any,
) -> SingaRep:
    """A model as `prepare` reads it, after a rewriting of its ModelProto, whose large tensors may have remained in the file.

    `rewrite` returns the new model for a ModelProto and the folder of its external data; adapters are added to that.  The other
    arguments are those of `prepare`.  The caller reports the warnings of the graph.
    """
    check_keywords("prepare", kwargs, _PREPARE)
    chosen = plan_options(threads, precision, optimize, deterministic, memory=memory)
    place = devices.resolve(device)
    before, feeds = rewrite, None
    if adapter is not None or adapters is not None:
        added, feeds = _adapted(model, adapter, adapters)
        rewrite = added if before is None else lambda m, home: added(before(m, home), home)
    made = _prepared(model, place, limits or Limits(), cancel, chosen, operators, rewrite)
    if feeds is not None:
        made._adapters = feeds
    made._default_threads = chosen.threads if threads is None else None
    return made


def _unfit(text: str, hint: str = "") -> InvalidInput:
    return InvalidInput(text, code="SX385", hint=hint)


def _receive(receivers: Sequence[np.ndarray | None], values: list[Any], names: Sequence[str]) -> None:
    """Copy outputs into the caller's arrays, which take their places; none is written if one does not fit."""
    for name, a, value in zip(names, receivers, values, strict=True):
        if a is None:
            continue
        if not isinstance(value, np.ndarray):
            raise _unfit(f"out must have None for output {name!r}, which is not an array")
        if a.dtype != value.dtype or a.shape != value.shape:
            wanted, there = f"{value.dtype}{list(value.shape)}", f"{a.dtype}{list(a.shape)}"
            raise _unfit(f"the array in out for output {name!r} must be {wanted}, got {there}")
    for i, a in enumerate(receivers):
        if a is not None and a is not values[i]:
            np.copyto(a, values[i])
            values[i] = a


def check_last_layers(last_layers: Any) -> None:
    """Raise InvalidInput (SX304) unless the number of operators to run is an integer."""
    if not isinstance(last_layers, (int, np.integer)):
        raise InvalidInput(f"last_layers must be an integer, got {last_layers!r}", code="SX304")


def selected_part(graph: Graph, last_layers: int, aux_output: tuple[str, ...]) -> Graph:
    """The part of the graph that the options of a run select."""
    nodes: Sequence[Node] = graph.nodes
    outputs = [v.name for v in graph.outputs]
    if last_layers != -1:
        layers = [i for i, n in enumerate(nodes) if (n.domain, n.op_type) != ("", "Constant")]
        n = len(layers)
        keep = n + 1 + last_layers if last_layers < 0 else last_layers + 1
        if not 1 <= keep <= n:
            raise InvalidInput(
                f"last_layers must select 1 to {n} operators, got {last_layers}, which selects {keep}",
                code="SX304",
                hint=f"-1 runs all {n}, -2 omits the last, {-n} runs one; SINGA's code counts one more: its -3 is -2 here",
            )
        nodes = nodes[: layers[keep - 1] + 1]
        outputs = [name for name in nodes[-1].output_names if name] if keep < n else outputs
    made = {name for node in nodes for name in node.output_names if name}
    known = made | {v.name for v in (*graph.inputs, *graph.optional_inputs)} | set(graph.states)
    for name in aux_output:
        if name not in known:
            hint = did_you_mean(name, known)
            raise InvalidInput(f"aux_output must name values of the model's main graph, got {name!r}{hint}", code="SX305")
    return graph if last_layers == -1 and not aux_output else select(graph, nodes, [*outputs, *aux_output])


def model_of(node: NodeProto, opset: int | None) -> ModelProto:
    """A model with one node, whose inputs are those of the model, of any type; the newest opset if it is None."""
    graph = helper.make_graph(
        [node],
        node.name or node.op_type,
        [helper.make_empty_tensor_value_info(n) for n in dict.fromkeys(n for n in node.input if n)],
        [helper.make_empty_tensor_value_info(n) for n in node.output if n],
    )
    domain = plain_domain(node.domain)
    imports = [helper.make_opsetid(domain, opset or newest(domain) or 1)]
    if domain:
        imports.append(helper.make_opsetid("", newest("")))
    return helper.make_model(graph, opset_imports=imports)


def _names(values: Sequence[Value]) -> str:
    return ", ".join(map(str, values)) or "nothing"


_PREPARE = (
    "limits", "cancel", "threads", "precision", "optimize", "deterministic", "memory", "operators", "adapter", "adapters",
    *_QUIET,
)  # fmt: skip
"""The keywords of `prepare`."""


class SingaBackend(Backend):
    """ONNX's backend interface; every error that its methods raise is a SonnxError."""

    @classmethod
    def is_compatible(cls, model: ModelSource, device: DeviceLike = "CPU", **kwargs: Any) -> bool:
        """Return whether `prepare` accepts this model on this device.

        Args:
            model: a ModelProto, its bytes, or the path of its file.
            device: the device, as for `prepare`.
            **kwargs: options of `prepare`.

        Returns:
            False if `prepare` raises a SonnxError, True otherwise.

        Raises:
            UnknownKeyword: a keyword is not one of `prepare`.
        """
        check_keywords("is_compatible", kwargs, _PREPARE)
        try:
            cls.prepare(model, device, **kwargs)
        except SonnxError:
            return False
        return True

    @classmethod
    def prepare(
        cls,
        model: ModelSource,
        device: DeviceLike = "CPU",
        *,
        limits: Limits | None = None,
        cancel: Flag | None = None,
        threads: int | None = None,
        precision: str = "float32",
        optimize: int = 2,
        deterministic: bool = False,
        memory: str = "compact",
        operators: Sequence[CustomOperator] = (),
        adapter: AdapterSource | Sequence[AdapterSource] | None = None,
        adapters: Mapping[str, AdapterSource] | None = None,
        **kwargs: Any,
    ) -> SingaRep:
        """Read a model, check it, and place it on a device.

        Args:
            model: a ModelProto, its bytes, or the path of its file.  External data are read only if a path is passed.
            device: "CPU", "CUDA", "CUDA:1", "STRICT", a `Device`, or a device of `onnx.backend.base`.
            limits: the bounds of reading, and of each run that does not set its own; None for `Limits()`.
            cancel: a flag, such as a `threading.Event`; if it is set, reading stops.
            threads: the number of threads of a run on the CPU; None for SONNX_NUM_THREADS, by default the number of usable cores.
            precision: "float32", or "bf16" to permit products of float32 in bfloat16 on the CPU, with an error of about 0.5 % of
                the largest value.
            optimize: 0 computes every node by its definition, 1 by the fastest kernel, 2 fuses nodes too; on the CPU.
            deterministic: whether equal inputs return equal bits at any number of threads, and on other processors where machine
                code computes every step.
            memory: "speed" to keep weights of few bits in bfloat16, if products may be rounded; on the CPU.
            operators: operators of `define_operator` that only this model has.
            adapter: an adapter that is added to the model, or several, whose changes add: each an `Adapter`, or the path of its
                file (.safetensors, .onnx_adapter) or of PEFT's folder.
            adapters: adapters by name, of which `run(..., adapter=NAME)` selects one; their ranks may differ.
            **kwargs: options of ONNX's test runner and of SINGA that have no effect here.

        Returns:
            The model, ready to run.

        Raises:
            InvalidModel: the model violates ONNX's rules; `problems` lists all violations.
            UnsupportedModel: the model is valid; `problems` lists everything in it that is not implemented.
            DeviceUnavailable: this machine does not have the device.
            ResourceExhausted: a limit was reached, or the flag was set.
            InvalidInput: `threads`, `precision`, `optimize`, `deterministic`, `memory` or SONNX_NUM_THREADS has another value
                (SX384), or `operators` does not hold operators (SX389); or an adapter cannot be read, or does not fit the model
                (SX970 to SX983).
            MissingDependency: files of adapters need the package safetensors (SX700).
            UnknownKeyword: a keyword is not one of these.

        Example:
            rep = SingaBackend.prepare("model.onnx", "CPU")
            outputs = rep.run({"x": x})
        """
        check_keywords("prepare", kwargs, ("device", *_PREPARE))
        made = prepare_rewritten(
            model, device, None, limits=limits, cancel=cancel, threads=threads, precision=precision, optimize=optimize,
            deterministic=deterministic, memory=memory, operators=operators, adapter=adapter, adapters=adapters,
        )  # fmt: skip
        for text in made.graph.warnings:
            warnings.warn(printable(text, TEXT), UserWarning, stacklevel=2)
        return made

    @classmethod
    def run_model(cls, model: ModelSource, inputs: Any, device: DeviceLike = "CPU", **kwargs: Any) -> Outputs:
        """Prepare a model and run it once.

        Args:
            model: a ModelProto, its bytes, or the path of its file.
            inputs: the inputs, as for `SingaRep.run`.
            device: the device, as for `prepare`.
            **kwargs: options of `prepare`; `limits` and `cancel` hold for the run too.

        Returns:
            The outputs in order, also indexed by name.

        Raises:
            InvalidModel: the model violates ONNX's rules.
            UnsupportedModel: something in the model is not implemented.
            DeviceUnavailable: this machine does not have the device.
            InvalidInput: the inputs do not match the model.
            OperatorError: a node cannot compute with its inputs.
            ResourceExhausted: a limit was reached, or the flag was set.
        """
        check_keywords("run_model", kwargs, ("device", *_PREPARE))
        return cls.prepare(model, device, **kwargs).run(inputs, cancel=kwargs.get("cancel"))

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Any, device: DeviceLike = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> Outputs:
        """Run one node.

        Args:
            node: the node.
            inputs: a list in the order of the node's inputs (absent ones omitted), a dict by name, or one array.  Python floats
                become float32, integers int64.
            device: the device, as for `prepare`.
            outputs_info: a (dtype, shape) pair for each output, which the results must have; None for no check.
            **kwargs: `opset_version`, the opset of the node's domain (the newest by default), and options of `prepare`.

        Returns:
            The outputs of the node in order, also indexed by name.

        Raises:
            InvalidModel: the node violates its schema.
            UnsupportedModel: the operator version is not implemented.
            DeviceUnavailable: this machine does not have the device.
            InvalidInput: the inputs do not match the node, or the outputs do not match `outputs_info`.
            OperatorError: the node cannot compute with its inputs.
            ResourceExhausted: a limit was reached, or the flag was set.
        """
        check_keywords("run_node", kwargs, ("device", "outputs_info", "opset_version", *_PREPARE))
        opset = kwargs.pop("opset_version", None)
        if opset is not None and (isinstance(opset, bool) or not isinstance(opset, int) or not 0 < opset < 1 << 31):
            raise InvalidInput(f"opset_version must be a positive integer, got {opset!r}", code="SX323")
        if not isinstance(node, NodeProto):
            raise InvalidModel(f"a node must be a NodeProto, got a {type(node).__name__}", code="SX110")
        names = list(dict.fromkeys(n for n in node.input if n))
        if isinstance(inputs, Mapping):
            given = dict(inputs)
        else:
            values = list(inputs) if isinstance(inputs, (list, tuple)) else [inputs]
            if len(values) == len(node.input) != len(names):
                values = list({n: v for n, v in zip(node.input, values, strict=True) if n}.values())
            if len(values) != len(names):
                raise InvalidInput(f"the node takes {len(names)} inputs ({', '.join(names)}), got {len(values)}", code="SX301")
            given = dict(zip(names, values, strict=True))
        model = model_of(node, opset)
        outputs = cls.prepare(model, device, **kwargs).run({n: _typed(v) for n, v in given.items()})
        for (dtype, shape), value, name in zip(outputs_info or (), outputs, outputs.names, strict=False):
            have = (value.dtype, value.shape) if isinstance(value, np.ndarray) else (type(value).__name__, ())
            if have != (np.dtype(dtype), tuple(shape)):
                there, wanted = f"{have[0]}{list(have[1])}", f"{np.dtype(dtype)}{list(shape)}"
                raise InvalidInput(f"output {name!r} must be {wanted} by outputs_info, got {there}", code="SX306")
        return outputs

    @classmethod
    def supports_device(cls, device: DeviceLike) -> bool:
        """Return whether this machine has a device.

        Args:
            device: the device, as for `prepare`.

        Returns:
            True if `prepare` can place a model on it.
        """
        try:
            devices.resolve(device)
        except DeviceUnavailable:
            return False
        return True


def _typed(value: Any) -> Any:
    """Convert an input without a declared dtype: a Python float to float32, an integer to int64, a list of them to an array."""
    plain = (bool, int, float, complex, str)
    if isinstance(value, list) and value and all(isinstance(v, (*plain, list)) for v in value):
        value = np.asarray(value)
        return value.astype(np.float32) if value.dtype == np.float64 else value
    return np.asarray(value, np.float32) if isinstance(value, float) and not isinstance(value, np.generic) else value


prepare = SingaBackend.prepare
run_model = SingaBackend.run_model
run_node = SingaBackend.run_node
supports_device = SingaBackend.supports_device
is_compatible = SingaBackend.is_compatible
