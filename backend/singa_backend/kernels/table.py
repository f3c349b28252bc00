"""The table of kernels: by operator and version, each with a predicate in its body.

    @kernel("Conv", 1, 11, 22, on="onednn")
    def conv(site: Site, x: Value, w: Value, b: Value | None = None) -> Value:
        site.require(x.dtype == np.float32, "only float32")
        y = site.new(shape, x.dtype, order=last_order(x.ndim))
        site.emit(lambda: [(execute, arguments)], reads=(x, w), writes=(y,), kernel="brgconv")
        return y

A kernel that does not apply calls `site.refuse(reason)`.  The next one of the table is tried; if all refuse, the definition runs.
The reasons are part of the profile.  A kernel refuses whatever is not valid: the definition then reports the error.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np

from ..domains import Families
from ..ir.declaration import newest_declaration
from ..ir.gradient import GRADIENT
from ..ir.graph import Graph
from ..ir.versioned import VersionedOperator
from .values import FINITE, Bound, Buffer, PlanStep, Value

Made = TypeVar("Made")


class Refused(Exception):
    """A kernel does not apply; the message is the reason."""


class Invalid(Exception):
    """The data of a run are not valid for a step: the definitions compute the run, and report the error."""


@dataclass(frozen=True)
class Options:
    """How a plan may compute.

    Attributes:
        threads: the number of threads of a parallel kernel.
        precision: "float32", or "bf16" if products of float32 may be computed in bfloat16.
        level: 0 for the definitions only, 1 for kernels of single operators, 2 for fused ones too.
        deterministic: whether equal inputs must return equal bits at any number of threads.
        adaptive: whether a run may use one thread instead, while other programs use the cores.
        activation_memory: the bytes of an arena beyond which values are computed again instead of kept; None for no bound.
        ordered: whether inputs and outputs keep their order of axes in memory; otherwise they are in C order.
        memory: "compact", or "speed" if weights may be kept in a second form that some products need.
    """

    threads: int = 1
    precision: str = "float32"
    level: int = 2
    deterministic: bool = False
    adaptive: bool = False
    ordered: bool = False
    activation_memory: int | None = None
    memory: str = "compact"


@dataclass(eq=False)
class Follower:
    """A call that is the only reader of the preceding result, and may be computed in the same step.

    Attributes:
        name: the operator.
        attributes: its attributes.
        inputs: its inputs; None for an absent one, and for the preceding result.
        place: the position of the preceding result in the inputs.
        reusable: the positions of the inputs whose memory may be overwritten.
        version: the schema version.
        sides: the preceding followers, by position, whose results are inputs of this call only: a DequantizeLinear that computes
            the other operand has no place for the preceding result (-1), and is absorbed with this call.
    """

    name: str
    attributes: dict[str, Any]
    inputs: list[Value | None]
    place: int
    version: int
    reusable: frozenset[int] = frozenset()
    sides: dict[int, Follower] = field(default_factory=dict)

    @property
    def other(self) -> Value | None:
        """The other input of a binary operator."""
        rest = [v for i, v in enumerate(self.inputs) if i != self.place]
        return rest[0] if len(rest) == 1 else None


@dataclass(eq=False)
class KernelCache:
    """What kernels make once for a graph.

    Attributes:
        derived: what was computed from constants of the graph, by the key of the constant and what it is: packed weights.
        constants: constants that depend on sizes only, by their kind and sizes.
    """

    derived: dict[tuple[Hashable, Hashable], Any] = field(default_factory=dict)
    constants: dict[Hashable, Value] = field(default_factory=dict)


class Site(ABC):
    """What a kernel sees of the place where it is to be used.

    Attributes:
        operator: the operator at its version.
        name: the operator.
        version: the schema version.
        attributes: its attributes, defaults included.
        outputs: for each output, whether it is used.
        options: how the plan may compute.
        followers: the calls that the kernel may compute too, in order, with `absorb`.
        steps: what the kernel has emitted.
        shared: what belongs to the graph and is shared by its plans: packed weights.
        is_open: whether sizes may differ between runs of the plan.
        trains: whether the plan is of a training step, in which weights change with every run.
        checked: the values that a step has found to be finite, if the kernel is used.
        wanted: what makes the machine code that the kernel would use, by the key of the code.
        notes: for reports, of each step that follows: the primitives that are not trusted, in place of which others are used.
    """

    operator: VersionedOperator
    name: str
    version: int
    attributes: dict[str, Any]
    outputs: tuple[bool, ...]
    options: Options
    followers: Sequence[Follower]
    shared: KernelCache
    is_open = False
    trains = False

    def __init__(self) -> None:
        self.steps: list[PlanStep] = []
        self.absorbed = 0
        self.checked: list[Value] = []
        self.notes: list[str] = []
        self.wanted: dict[str, Callable[[], Any]] = {}

    def refuse(self, reason: str) -> NoReturn:
        """Decline: another kernel or the definition is used."""
        raise Refused(reason)

    def require(self, condition: object, reason: str) -> None:
        """Decline unless the condition holds."""
        if not condition:
            raise Refused(reason)

    def absorb(self, count: int) -> None:
        """Compute this many of the followers too: the returned value is that of the last of them."""
        self.absorbed = count

    def attempt(self, emit: Callable[[], Made]) -> Made | None:
        """What `emit` returns; None if it declines, which leaves no steps."""
        mark = len(self.steps)
        try:
            return emit()
        except Refused:
            del self.steps[mark:]
            return None

    @abstractmethod
    def new(self, shape: Sequence[int], dtype: Any, order: Sequence[int] | None = None, finiteness: int | None = None) -> Value:
        """A new value; `order` lists the axes from the outermost in memory to the innermost, C order by default.

        finiteness: FINITE, INFINITE or NAN; by default the highest of the inputs of the call.
        """

    def grown(self, cache: Value, axis: int, rows: Any) -> Value | None:
        """The value with a cache of the caller and further elements along an axis; None if it cannot grow in its memory."""
        return None

    def present(self, value: Value) -> np.ndarray:
        """The elements of a value now."""
        return value.array

    @abstractmethod
    def scratch(self, nbytes: int) -> Buffer:
        """Memory for the next step only."""

    @abstractmethod
    def kept(self, value: Value, what: Any, make: Callable[[], Value]) -> Value:
        """What `make` returns for a value, made once and used by later calls too: a copy in another memory order."""

    @abstractmethod
    def needs_finite(self) -> None:
        """Note that the kernel agrees with the definition for finite inputs of the model only."""

    def require_finite(self, *values: Value | None) -> None:
        """Decline unless values are finite; in later runs of the plan, values that are not refuse the run.

        Values that are finite whenever the inputs of the model are have no check, and neither have those that were checked.
        """
        self.needs_finite()
        for v in values:
            if v is None or v.finiteness == FINITE or v in self.checked:
                continue
            self.require(self.is_finite(v), "a value is not finite")
            self.emit(partial(_check, v), reads=(v,), writes=(), kernel="numpy.isfinite")
            self.checked.append(v)

    def is_finite(self, value: Value) -> bool:
        """Whether a value is finite now."""
        return is_finite(value.array)

    @abstractmethod
    def reusable(self, place: int) -> bool:
        """Whether the memory of an input may be overwritten: nothing reads it later."""

    @abstractmethod
    def constant(self, array: np.ndarray, key: Any = None) -> Value:
        """A value that is the same in every run."""

    def number(self, size: Any, dtype: np.dtype[Any]) -> Value:
        """A size as a constant of one element, which may have a name."""
        return self.constant(np.array([size], dtype))

    @abstractmethod
    def body(self) -> Graph | None:
        """The body of the call, if it is that of a function or a gradient."""

    @abstractmethod
    def once(self, what: Hashable, make: Callable[[], Made]) -> Made:
        """What `make` returns for the attributes of this call, made once for all plans of the graph."""

    def emit(
        self,
        bind: Callable[[], Bound],
        *,
        reads: Sequence[Value | None],
        writes: Sequence[Value],
        kernel: str,
        scratch: Buffer | None = None,
        keeps: Sequence[Any] = (),
        notes: Sequence[str] = (),
    ) -> None:
        """Add a step; `notes` are for reports."""
        given, remarks = tuple(v for v in reads if v is not None), tuple(dict.fromkeys((*notes, *self.notes)))
        self.steps.append(PlanStep(bind, given, tuple(writes), kernel, (), remarks, scratch, list(keeps)))

    def derived(self, value: Value, what: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns for a constant of the graph, computed once for all plans; for other values once for this plan."""
        if value.key is None:
            return make()
        key, held = (value.key, what), self.shared.derived
        if key not in held:
            held[key] = make()
        return held[key]

    def shared_constant(self, key: Hashable, make: Callable[[], np.ndarray]) -> Value:
        """A constant that kernels of the graph share: what `make` returns, made once for all plans."""
        held = self.shared.constants
        if key not in held:
            held[key] = self.constant(make())
        return held[key]


Body = Callable[..., Any]


class Kernel(NamedTuple):
    """A kernel of the table.

    Attributes:
        body: called with the site and the inputs; returns the outputs, a value or a tuple of values.
        on: what computes: "view", "machine", "onednn", "numpy".
        rank: kernels of lower rank are tried first.
        versions: the schema versions; empty for those with the present meaning.
        takes: "opaque" if inputs may be strings, sequences or maps: an OpaqueValue each, whose kind and shape the body checks;
            "sizes" if the body sees sizes by name in constants, as those of views do; other bodies see data of a run.
    """

    body: Body
    on: str
    rank: int
    versions: frozenset[int]
    takes: str = ""

    @property
    def sees_sizes(self) -> bool:
        """Whether the body sees sizes by name in constants."""
        return self.on == "view" or self.takes == "sizes"

    @property
    def name(self) -> str:
        """The library and the function."""
        return f"{self.on}.{self.body.__name__}"


table: Families[list[Kernel]] = Families("kernels")
"""(domain, operator) -> its kernels, in the order in which they are tried."""

_RANKS = {"view": 0, "machine": 1, "onednn": 2, "numpy": 4}


def kernel(
    name: str,
    *versions: int,
    on: str,
    domain: str = "",
    rank: int | None = None,
    takes: str = "",
) -> Callable[[Body], Body]:
    """Add a function to the table.

    Args:
        name: the operator.
        *versions: the schema versions, each of which is listed; without them those with the present meaning.
        on: "view", "machine", "onednn" or "numpy"; in this order they are tried.
        domain: of the operator.
        rank: the place in the order, if it differs from that of `on`.
        takes: see `Kernel`.
    """
    if on not in _RANKS:
        raise ValueError(f"the library of a kernel must be one of {', '.join(_RANKS)}, got {on!r}")

    def add(body: Body) -> Body:
        key = domain, name
        one = Kernel(body, on, _RANKS[on] if rank is None else rank, frozenset(versions), takes)
        table[key] = sorted([*table.present(key, []), one], key=lambda k: (k.rank, table.place(key, k.body.__module__)))
        return body

    return add


_general: Families[list[Kernel]] = Families("general kernels")
"""("", trait) -> kernels of all operators with the trait."""


def general(*traits: str, on: str) -> Callable[[Body], Body]:
    """Add a function that computes the operators with one of these traits, or refuses."""

    def add(body: Body) -> Body:
        one = Kernel(body, on, _RANKS[on], frozenset())
        for trait in traits:
            _general["", trait] = [*_general.present(("", trait), []), one]
        return body

    return add


TRAINING = "ai.singa.training"
"""The domain of forward calls that return what the kernels of gradients need; only plans have it."""


def _always(attributes: dict[str, Any], needs: Sequence[bool]) -> bool:
    return True


class GradientKernel(NamedTuple):
    """What a gradient kernel needs.

    Attributes:
        versions: the schema versions of the operator; empty for those with the present meaning.
        reads: the inputs of its body: "dy0" is the gradient of the first output, "x1" the second input of the forward call, "y0"
            its first output, "h0" the first value that its forward call in training form returns besides its outputs; the body
            receives None for an absent one whose name ends with "?", such as "x1?", and declines the others.
        takes: whether it may compute the gradient of a call: of its attributes, and which gradients are needed.
        hidden: the number of values that the forward call in training form returns besides its outputs.
    """

    versions: frozenset[int]
    reads: tuple[str, ...]
    takes: Callable[[dict[str, Any], Sequence[bool]], bool]
    hidden: int

    def read(self, dys: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any], hidden: Sequence[Any]) -> list[Any] | None:
        """What the body reads of a call; None if it needs an absent value, or does not read the gradient of an output."""
        groups, values = {"dy": dys, "x": inputs, "y": outputs, "h": hidden}, []
        for what in self.reads:
            kind = what.rstrip("0123456789?")
            at, group = int(what[len(kind) :].rstrip("?")), groups[kind]
            values.append(group[at] if at < len(group) else None)
            if values[-1] is None and not what.endswith("?"):
                return None
        read = {int(what[2:].rstrip("?")) for what in self.reads if what.startswith("dy")}
        return None if any(dy is not None and i not in read for i, dy in enumerate(dys)) else values


gradient_kernels: Families[GradientKernel] = Families("gradient kernels")
"""(domain, operator) -> what the gradient kernel of the operator needs."""


def gradient_kernel(operator: VersionedOperator) -> GradientKernel | None:
    """What the gradient kernel of an operator at its version needs; None if there is none."""
    kernel = gradient_kernels.get((operator.declaration.domain, operator.declaration.name))
    if kernel is None:
        return None
    return kernel if (operator.version in kernel.versions if kernel.versions else operator.is_modern) else None


def gradient(
    name: str,
    *versions: int,
    reads: Sequence[str],
    on: str = "onednn",
    domain: str = "",
    takes: Callable[[dict[str, Any], Sequence[bool]], bool] = _always,
    hidden: int = 0,
) -> Callable[[Body], Body]:
    """Add a kernel of an operator's gradient: it returns the gradient of each input that is needed, and None for the others.

    With `hidden`, a kernel of `training` computes the forward call, and returns so many values after its outputs.

    Args:
        name: the operator.
        *versions: the schema versions.
        reads: see `GradientKernel`.
        on: as for `kernel`.
        domain: of the operator.
        takes: see `GradientKernel`.
        hidden: see `GradientKernel`.
    """
    gradient_kernels[domain, name] = GradientKernel(frozenset(versions), tuple(reads), takes, hidden)
    return kernel(name, *versions, on=on, domain=GRADIENT)


def training(name: str, *versions: int, on: str = "onednn") -> Callable[[Body], Body]:
    """Add a kernel of a forward call in training form, the partner of a kernel of `gradient`."""
    return kernel(name, *versions, on=on, domain=TRAINING)


def kernels_of(domain: str, name: str, version: int) -> list[Kernel]:
    """The kernels of an operator at a version, in the order in which they are tried."""
    declared = newest_declaration("" if domain in (GRADIENT, TRAINING) else domain, name)
    modern = declared is None or version >= declared.meaning_since
    found = [k for k in table.get((domain, name), ()) if (version in k.versions if k.versions else modern)]
    if declared is not None and domain not in (GRADIENT, TRAINING):
        found += dict.fromkeys(k for trait in sorted(declared.traits) for k in _general.get(("", trait), ()))
        found.sort(key=lambda k: k.rank)
    return found


def require_finite(x: np.ndarray) -> None:
    """Raise Invalid unless all elements are finite."""
    if not (x.dtype.kind == "f" and math.isfinite(np.add.reduce(x, None))) and not is_finite(x):
        raise Invalid("a value is not finite")


def is_finite(x: Any) -> bool:
    """Whether a value has no NaN and no infinity."""
    if not isinstance(x, np.ndarray) or x.dtype.kind in "biuOSU":
        return True
    wide = x if x.dtype.kind in "fc" and x.dtype.itemsize > 1 else x.astype(np.float32)
    return bool(np.isfinite(wide).all())


def _check(value: Value) -> Bound:
    return [(require_finite, (value.array,))]


def worst(*values: Value | None) -> int:
    """The highest finiteness of some values."""
    return max((v.finiteness for v in values if v is not None), default=FINITE)
