"""Other engines, each in a child process: onnxruntime can crash on valid inputs, the reference can hang; both are results.

with Oracle("onnxruntime") as oracle:
    outputs = oracle.run(model, {"x": x}, timeout=10)      # {name: array}; raises EngineFailure
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MissingDependency, SonnxError, did_you_mean
from ..io.processes import START, Child, ChildFailure
from .exact_products import with_unsigned_factors

ENGINES = ("onnxruntime", "reference", "sonnx")
"""Names of the engines: onnxruntime on the CPU, onnx's ReferenceEvaluator, and this package."""

_BACKEND = re.compile(r"(?:[^\W\d]\w*\.)*[^\W\d]\w*:(?:[^\W\d]\w*(?:\.[^\W\d]\w*)*)?")


def is_backend(name: str) -> bool:
    """Whether a name has the form MODULE:CLASS of a backend, and is not a file.

    Args:
        name: of an engine.

    Returns:
        Whether it may be a backend; nothing is imported.
    """
    return bool(_BACKEND.fullmatch(name)) and not os.path.lexists(name)


class EngineFailure(SonnxError):
    """An engine returned no outputs (SX900).

    Attributes:
        engine: its name.
        how: "refused" (it raised), "died" or "timeout".
        reason: the engine's own message.
    """

    default_code = "SX900"

    def __init__(self, engine: str, how: str, message: str) -> None:
        """Create the error.

        Args:
            engine: the name of the engine.
            how: "refused" (it raised), "died" or "timeout".
            message: the engine's own message.
        """
        super().__init__(f"{engine} {how}: {message}")
        self.engine, self.how, self.reason = engine, how, message


def unusable(engine: str, why: str) -> SonnxError:
    """Return the error of an engine that cannot be used (SX901).

    Args:
        engine: MODULE:CLASS.
        why: the reason.

    Returns:
        The error, to be raised.
    """
    return SonnxError(
        f"the engine {engine!r} cannot be used: {why}",
        code="SX901",
        hint="MODULE:CLASS must be importable from here and have prepare() or run_model() of onnx.backend.base.Backend",
    )


class Oracle:
    """An engine in a child process, which is restarted after it dies or hangs.

    A context manager: `close` is called at the end of the `with` statement.

    Attributes:
        engine: the name of the engine.
    """

    def __init__(
        self, engine: str, *, device: str = "CPU", optimise: bool = True, exact: bool | None = None, memory: int | None = None
    ) -> None:
        """Choose an engine; the child process starts with the first `run`.

        Args:
            engine: "onnxruntime", "reference" (onnx.reference), "sonnx", or MODULE:CLASS, a class or module with the functions of
                onnx.backend.base.Backend; its code runs in the child process, which imports it from the current folder too.
            device: the device of "sonnx": "CPU", "CUDA", "CUDA:1" or "STRICT".
            optimise: whether onnxruntime may rewrite the graph.
            exact: whether onnxruntime must not saturate sums of 8-bit products (`exact_products`), in models that are passed as
                bytes; None for all runs but optimised ones.
            memory: the maximum address space of the child in bytes; None for no limit.

        Raises:
            SonnxError: the engine is unknown (SX901); one of MODULE:CLASS is imported by `check` or the first run.
            MissingDependency: onnxruntime is not installed.
        """
        if engine not in ENGINES and not is_backend(engine):
            raise SonnxError(f"engine must be one of {', '.join(ENGINES)}, or MODULE:CLASS, got {engine!r}", code="SX901")
        if engine == "onnxruntime" and not _installed("onnxruntime"):
            raise MissingDependency("onnxruntime is not installed", hint="pip install 'sonnx[oracle]'")
        self.engine = engine
        exact = not optimise if exact is None else exact
        self._child = Child(_serve, engine, {"device": device, "optimise": optimise, "exact": exact}, memory=memory)
        self._loaded: object = None

    def __enter__(self) -> Oracle:
        """Return the engine itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the child process."""
        self.close()

    def close(self) -> None:
        """End the child process."""
        self._child.close()

    def check(self) -> None:
        """Import an engine of MODULE:CLASS, in the child process; others need no check.

        Raises:
            SonnxError: it cannot be imported, or lacks the functions of a backend (SX901).
        """
        if self.engine in ENGINES:
            return
        try:
            good, answer = self._child.ask(None, START)
        except ChildFailure as failure:
            good, answer = False, f"its process {'died' if failure.how == 'died' else 'did not answer'}: {failure}"
        if not good:
            raise unusable(self.engine, answer)

    def run(
        self,
        model: bytes | str | Path,
        inputs: Mapping[str, Any],
        *,
        timeout: float = 30.0,
        folder: Path | None = None,
        load_only: bool = False,
    ) -> dict[str, Any]:
        """Run a model; the session of the last model is kept, so that another run of it is cheap.

        Args:
            model: a serialized ModelProto, or the path of a file.
            inputs: arrays by name, with the dtypes and shapes that the model declares.
            timeout: seconds for the answer after the engine's process has started, which may take 120 s more.
            folder: the folder of external data of a model that is passed as bytes; the child reads them.
            load_only: whether to load the model without running it.

        Returns:
            The outputs by name; empty with `load_only`.

        Raises:
            EngineFailure: the engine refuses the model or the inputs, dies, or does not finish in `timeout` seconds (SX900).
        """
        if not self._child.alive:
            self.close()
            self._loaded = None
        again = model == self._loaded
        self._loaded = None
        try:
            good, answer = self._child.ask((None if again else model, None if load_only else dict(inputs), folder), timeout)
        except ChildFailure as failure:
            raise EngineFailure(self.engine, failure.how, str(failure)) from None
        if not good:
            raise EngineFailure(self.engine, "refused", answer)
        self._loaded = model
        return dict(answer)


def _installed(name: str) -> bool:
    from importlib.util import find_spec

    return find_spec(name) is not None


def _serve(engine: str, options: dict[str, Any]) -> Callable[[Any], tuple[bool, Any]]:
    """In the child: create the function that answers (model or None, inputs, folder) by (True, outputs) or (False, message)."""
    warnings.simplefilter("ignore")
    load = {"onnxruntime": _onnxruntime, "reference": _reference, "sonnx": _sonnx}.get(engine, _backend)
    options = options | {"backend": engine}
    if load is _backend:
        os.dup2(2, 1)  # what it prints is not part of our output
        sys.path.append(os.getcwd())
    session: Any = None

    def answer(request: Any) -> tuple[bool, Any]:
        nonlocal session
        try:
            if request is None:
                imported(engine)
                return True, {}
            model, inputs, folder = request
            if model is not None:
                session = load(_whole(model, folder) if folder else model, options)
            return True, {} if inputs is None else session(inputs)
        except BaseException as error:
            session = None if request is None or model is not None else session
            return False, f"{type(error).__name__}: {str(error)[:2000]}"

    return answer


def _whole(model: bytes, folder: Path) -> bytes:
    """Load the external data of a model into it."""
    from onnx import ModelProto

    from ..proto.load import embed

    proto = ModelProto.FromString(model)
    embed(proto, folder)
    return proto.SerializeToString()


def _onnxruntime(model: Any, options: dict[str, Any]) -> Any:
    os.environ.setdefault("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    if not options["optimise"]:
        settings.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    source = model if isinstance(model, bytes) else os.fspath(model)
    if options["exact"] and isinstance(source, bytes):
        source = with_unsigned_factors(source)
    session = onnxruntime.InferenceSession(source, settings, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    return lambda inputs: dict(zip(names, session.run(names, inputs), strict=True))


def _reference(model: Any, options: dict[str, Any]) -> Any:
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(model if isinstance(model, bytes) else os.fspath(model))
    return lambda inputs: dict(zip(session.output_names, session.run(None, inputs), strict=True))


def _sonnx(model: Any, options: dict[str, Any]) -> Any:
    from ..backend import SingaBackend

    rep = SingaBackend.prepare(model, options["device"])
    return lambda inputs: rep.run(inputs).to_dict()


def imported(engine: str) -> Any:
    """Import the class or module that MODULE:CLASS names.

    Args:
        engine: MODULE:CLASS, MODULE: or MODULE.

    Returns:
        The class or module.

    Raises:
        ImportError: there is no such module or class.
        TypeError: it lacks the functions of a backend.
    """
    module, _, path = engine.partition(":")
    found = import_module(module)
    for name in filter(None, path.split(".")):
        if not hasattr(found, name) and hasattr(found, "__path__"):
            import_module(f"{found.__name__}.{name}")
        if not hasattr(found, name):
            names = [n for n in vars(found) if not n.startswith("_")]
            raise ImportError(f"{module} ({getattr(found, '__file__', '')}) has no {name!r}{did_you_mean(name, names)}")
        found = getattr(found, name)
    if not any(callable(getattr(found, name, None)) for name in ("prepare", "run_model")):
        raise TypeError("it has neither prepare(model) nor run_model(model, inputs)")
    return found


def _backend(model: Any, options: dict[str, Any]) -> Any:
    from onnx import ModelProto, load

    backend = imported(options["backend"])
    proto = ModelProto.FromString(model) if isinstance(model, bytes) else load(os.fspath(model))
    weights = {t.name for t in proto.graph.initializer} | {t.values.name for t in proto.graph.sparse_initializer}
    outputs = [o.name for o in proto.graph.output]
    if callable(getattr(backend, "prepare", None)):
        rep = backend.prepare(proto)
        if not callable(getattr(rep, "run", None)):
            raise TypeError(f"prepare(model) must return an object with run(inputs), got a {type(rep).__name__}")
        call = rep.run
    else:
        call = lambda values: backend.run_model(proto, values)  # noqa: E731

    def run(inputs: dict[str, Any]) -> dict[str, Any]:
        found = call([inputs[i.name] for i in proto.graph.input if i.name not in weights or i.name in inputs])
        if not isinstance(found, (tuple, list)):
            raise TypeError(f"run(inputs) must return a tuple with one value for each output, got a {type(found).__name__}")
        if len(found) != len(outputs):
            raise TypeError(f"run(inputs) must return {len(outputs)} values, one for each output, got {len(found)}")
        return {name: _value(name, value) for name, value in zip(outputs, found, strict=True)}

    return run


def _value(name: str, value: Any) -> Any:
    """Check that a value is one that this process can send and the other one can read."""
    if isinstance(value, (list, tuple)):
        return [_value(name, v) for v in value]
    if value is None or isinstance(value, (np.ndarray, np.generic, dict)):
        return value
    raise TypeError(f"the output {name!r} must be a NumPy array, got a {type(value).__module__}.{type(value).__name__}")
