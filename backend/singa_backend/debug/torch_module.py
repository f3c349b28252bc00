"""A PyTorch module as the trusted side: what its submodules and its operators compute, recorded in a child process.

PyTorch is the user's.  The child imports MODULE, calls FUNCTION for the module, and runs it in inference mode without gradients.
Hooks record what each submodule returns and receives.  A dispatch mode records the results of operators; an operator that PyTorch
can also write in smaller ones, such as softmax, is computed a second time by them, for the values between.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import ml_dtypes
import numpy as np

from ..comparison.difference import Tolerance
from ..errors import MissingDependency, SonnxError, did_you_mean
from ..io.processes import START, Child, ChildFailure
from .align import Made
from .lockstep import Values
from .spill import SpillStore

PREFIX = "torch:"

_NAME = re.compile(r"torch:(?:[^\W\d]\w*\.)*[^\W\d]\w*:[^\W\d]\w*(?:\.[^\W\d]\w*)*")


def is_torch(against: Any) -> bool:
    """Whether a trusted side has the form torch:MODULE:FUNCTION."""
    return isinstance(against, str) and bool(_NAME.fullmatch(against))


@dataclass(frozen=True)
class Captured:
    """A tensor that a submodule returned or received, or that an operator in it computed.

    Attributes:
        name: "layers.0.norm", "layers.0.norm[1]" for its second tensor, "layers.0.norm#2" for its second call;
            "layers.0.attend: bmm" for an operator, "layers.0.norm: native_layer_norm/rsqrt" for one of which it consists.
        owner: the path of the submodule that computed it; "" for the module itself.
        kind: the class of that submodule.
        value: an array.
    """

    name: str
    owner: str
    kind: str
    value: np.ndarray


class TorchSide(AbstractContextManager["TorchSide"]):
    """A PyTorch module as a side of an alignment; raises MissingDependency, and SonnxError if it cannot be run (SX901, SX900).

    Args:
        against: torch:MODULE:FUNCTION.
        inputs: the names of the file's inputs, in order.
        budget: the maximum bytes of stored values in memory.
        timeout: seconds for a run.
    """

    def __init__(self, against: str, inputs: Sequence[str], budget: int, timeout: float) -> None:
        if find_spec("torch") is None:
            raise MissingDependency("torch is not installed in this environment", hint="install the PyTorch that runs the module")
        self.name, self.inputs, self.budget, self.timeout = against, inputs, budget, timeout
        self.made: dict[str, Made] = {}
        self.outputs: list[str] = []
        self._stack = ExitStack()
        self._stores: list[SpillStore] = []
        self._child = self._stack.enter_context(Child(_serve, against.removeprefix(PREFIX)))
        self._ask(None, START, "SX901")

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _ask(self, request: Any, timeout: float, code: str) -> Any:
        try:
            good, answer = self._child.ask(request, timeout)
        except ChildFailure as failure:
            good, answer = False, str(failure)
        if not good:
            raise SonnxError(
                f"{self.name} cannot be {'used' if code == 'SX901' else 'run'}: {answer}", code=code,
                hint="torch:MODULE:FUNCTION must return a torch.nn.Module that takes the inputs of the file, in their order or by"
                " their names; MODULE is imported from the current folder too",
            )  # fmt: skip
        return answer

    def run(self, values: Values) -> None:
        """Run the module for a draw of inputs, and keep the values.

        Args:
            values: the inputs by name.
        """
        captured, outputs = self._ask([(n, values[n]) for n in self.inputs if n in values], self.timeout, "SX900")
        store = self._stack.enter_context(SpillStore(self.budget // 4))
        for i, one in enumerate(captured):
            store.put(one.name, one.value)
            if not self._stores:
                self.made[one.name] = Made(i, one.kind, (), one.owner)
        self.outputs = outputs
        self._stores.append(store)

    def stream(self, draw: int) -> Iterator[tuple[str, Any]]:
        for name in self.made:
            if name in self._stores[draw]:
                yield name, self._stores[draw].get(name)

    def value(self, name: str) -> Any:
        """A value of the first draw."""
        return self._stores[0].get(name)

    def constant(self, like: np.ndarray) -> None:
        return None

    def weight(self, name: str) -> np.ndarray | None:
        return None

    def widened(self, tolerance: Tolerance, name: str) -> Tolerance:
        return tolerance

    def described(self, name: str) -> str:
        """A value in words.

        Args:
            name: of a captured tensor.
        """
        made = self.made[name]
        owner = f"submodule {made.scope!r}" if made.scope else "the module itself"
        return f"{name} in PyTorch, computed by {owner} ({made.operator})"


# --- in the child ---------------------------------------------------------------------------------------------------------


def _serve(place: str) -> Callable[[Any], tuple[bool, Any]]:
    """Create the function that answers None or inputs by (True, values) or (False, message)."""
    os.dup2(2, 1)  # what the module prints is not part of our output
    sys.path.append(os.getcwd())
    module: Any = None

    def answer(request: Any) -> tuple[bool, Any]:
        nonlocal module
        try:
            if request is None:
                module = _module(place)
                return True, None
            return True, _run(module, request)
        except BaseException as error:
            return False, f"{type(error).__name__}: {str(error)[:2000]}"

    return answer


def _module(place: str) -> Any:
    """Import and call MODULE:FUNCTION."""
    torch = import_module("torch")
    file, _, path = place.partition(":")
    found: Any = import_module(file)
    for name in path.split("."):
        if not hasattr(found, name):
            names = [n for n in vars(found) if not n.startswith("_")]
            raise ImportError(f"{file} ({getattr(found, '__file__', '')}) has no {name!r}{did_you_mean(name, names)}")
        found = getattr(found, name)
    found = found if isinstance(found, torch.nn.Module) else found()
    if not isinstance(found, torch.nn.Module):
        raise TypeError(f"{place} must return a torch.nn.Module, got a {type(found).__name__}")
    return found.eval()


def _run(module: Any, inputs: list[tuple[str, Any]]) -> tuple[list[Captured], list[str]]:
    """Run the module; returns the captured tensors, and the names of those that it returns."""
    torch = import_module("torch")
    tensors = {name: _tensor(torch, value) for name, value in inputs}
    known = inspect.signature(module.forward).parameters
    recorder = _ModuleRecorder(torch, module)
    with torch.no_grad(), recorder, _operators(torch, recorder), _unfused(torch):
        recorder.given(list(tensors.values()))
        result = module(**tensors) if tensors.keys() <= known.keys() else module(*tensors.values())
    return recorder.captured, recorder.names_of(result)


@contextmanager
def _unfused(torch: Any) -> Iterator[None]:
    """Without the kernels of a whole encoder layer or attention, in which submodules and operators do not occur."""
    mha = torch.backends.mha
    before = mha.get_fastpath_enabled()
    mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        mha.set_fastpath_enabled(before)


def _operators(torch: Any, recorder: _ModuleRecorder) -> Any:
    """Return the mode that records the results of operators."""
    table = import_module("torch._decomp").decomposition_table

    class OperatorMode(import_module("torch.utils._python_dispatch").TorchDispatchMode):  # type: ignore[misc]  # of the user's PyTorch
        inside = ""
        """The operators that are computed by smaller ones, and a slash after each."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs, changes = kwargs or {}, function._schema.is_mutable
            result = function(*args, **kwargs)
            new = recorder.new(result, () if changes else (args, kwargs))
            name = self.inside + function._schema.name.rpartition("::")[2].strip("_")
            if new and not self.inside and not changes and function in table:
                self.inside = f"{name}/"
                with recorder.parts(new), suppress(Exception), self:  # a value between is a help only
                    table[function](*args, **kwargs)
                self.inside = ""
            recorder.computed(name, new)
            return result

    return OperatorMode()


class _ModuleRecorder(AbstractContextManager["_ModuleRecorder"]):
    """Copies each tensor at its first appearance: those of submodules by hooks, and those of operators."""

    def __init__(self, torch: Any, module: Any) -> None:
        self.torch, self.module = torch, module
        self._values: list[Captured | None] = []
        self._seen: dict[tuple[int, int], str] = {}  # a tensor and its version -> its name
        self._places: dict[tuple[int, int, int], int] = {}  # the memory of a tensor of an operator -> its place in the values
        self._kept: list[Any] = []  # so that no identity is used again
        self._calls: dict[str, int] = {}
        self._active: list[tuple[str, str]] = []
        self._hooks: list[Any] = []

    @property
    def captured(self) -> list[Captured]:
        """The tensors, in the order of computation."""
        return [one for one in self._values if one is not None]

    def __enter__(self) -> _ModuleRecorder:
        for path, part in self.module.named_modules():
            self._hooks.append(part.register_forward_pre_hook(self._before(path, type(part).__name__), with_kwargs=True))
            self._hooks.append(part.register_forward_hook(self._after(path), with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def given(self, tensors: Sequence[Any]) -> None:
        """Do not capture the inputs of the module."""
        for tensor in tensors:
            self._kept.append(tensor)
            self._seen[id(tensor), tensor._version] = ""

    def _before(self, path: str, kind: str) -> Callable[..., None]:
        def hook(part: Any, args: Any, kwargs: Any) -> None:
            self._called(path, count=True)
            if self._active:  # computed by the submodule that calls this one
                owner, of = self._active[-1]
                for i, tensor in enumerate(self._tensors((args, kwargs))):
                    self._capture(f"{self._called(path)} (input{f' {i + 1}' if i else ''})", owner, of, tensor)
            self._active.append((path, kind))

        return hook

    def _after(self, path: str) -> Callable[..., None]:
        def hook(part: Any, args: Any, kwargs: Any, result: Any) -> None:
            owner, of = self._active.pop()
            for i, tensor in enumerate(self._tensors(result)):
                self._capture(self._called(path) + (f"[{i}]" if i else ""), owner, of, tensor)

        return hook

    def _called(self, path: str, count: bool = False) -> str:
        """The name of the last call of a submodule or an operator, or of one more."""
        number = self._calls[path] = self._calls.get(path, 0) + count
        return (path or "the module") + (f"#{number}" if number > 1 else "")

    def _capture(self, name: str, owner: str, kind: str, tensor: Any) -> None:
        key = id(tensor), tensor._version
        if key not in self._seen:
            self._seen[key] = name
            self._kept.append(tensor)
            one = Captured(name, owner, kind, _array(self.torch, tensor))
            place = self._places.pop(_memory(tensor), None)
            if place is None:
                self._values.append(one)
            else:  # the name of a submodule says more
                self._values[place] = one

    def new(self, result: Any, read: Any) -> list[Any]:
        """The tensors of a result that do not share the memory of what an operator reads."""
        places = {_memory(t)[0] for t in self._tensors(read)}
        return [t for t in self._tensors(result) if t.numel() and _memory(t)[0] not in places]

    def computed(self, operator: str, tensors: Sequence[Any]) -> None:
        """Record the tensors that an operator has computed."""
        owner, kind = self._active[-1] if self._active else ("", type(self.module).__name__)
        for tensor in tensors:
            self._kept.append(tensor)
            self._places[_memory(tensor)] = len(self._values)
            name = self._called(f"{owner or 'the module'}: {operator}", count=True)
            self._values.append(Captured(name, owner, kind, _array(self.torch, tensor)))

    @contextmanager
    def parts(self, whole: Sequence[Any]) -> Iterator[None]:
        """A context that records the operators of which one consists, without the values that are those of the whole."""
        first, results = len(self._values), [_array(self.torch, t) for t in whole]
        yield
        for place, one in enumerate(self._values[first:], first):
            if one and any(y.shape == one.value.shape and np.allclose(one.value, y, 1e-4, 1e-6, True) for y in results):
                self._values[place] = None

    def names_of(self, result: Any) -> list[str]:
        """The names of the tensors that the module returns."""
        return [self._seen.get((id(t), t._version), "") for t in self._tensors(result)]

    def _tensors(self, tree: Any) -> Iterator[Any]:
        """The tensors in nested tuples, lists, maps and objects with fields, in order."""
        if isinstance(tree, self.torch.Tensor):
            yield tree
        elif isinstance(tree, Mapping):
            for value in tree.values():
                yield from self._tensors(value)
        elif isinstance(tree, (tuple, list)):
            for value in tree:
                yield from self._tensors(value)


def _memory(tensor: Any) -> tuple[int, int, int]:
    """The address of the memory of a tensor, the version of its values, and their number."""
    return tensor.untyped_storage().data_ptr(), tensor._version, tensor.numel()


def _tensor(torch: Any, value: np.ndarray) -> Any:
    if value.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(value.copy())


def _array(torch: Any, tensor: Any) -> np.ndarray:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: np.ndarray = tensor.view(torch.int16).numpy().copy()
        return bits.view(ml_dtypes.bfloat16)
    array: np.ndarray = tensor.numpy().copy()
    return array
