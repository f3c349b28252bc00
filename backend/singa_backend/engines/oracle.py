"""Other engines, each in a child process: onnxruntime can crash on valid inputs, the reference can hang; both are results.

with Oracle("onnxruntime") as oracle:
    outputs = oracle.run(model, {"x": x}, timeout=10)      # {name: array}; raises EngineFailure
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import MissingDependency, SonnxError
from ..processes import Child, ChildFailure

ENGINES = ("onnxruntime", "reference", "sonnx")
"""Names of the engines: onnxruntime on the CPU, onnx's ReferenceEvaluator, and this package."""


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


class Oracle:
    """An engine in a child process, which is restarted after it dies or hangs.

    A context manager: `close` is called at the end of the `with` statement.

    Attributes:
        engine: the name of the engine.
    """

    def __init__(self, engine: str, *, device: str = "CPU", optimise: bool = True, memory: int | None = None) -> None:
        """Choose an engine; the child process starts with the first `run`.

        Args:
            engine: "onnxruntime", "reference" (onnx.reference) or "sonnx".
            device: the device of "sonnx": "CPU", "CUDA", "CUDA:1" or "STRICT".
            optimise: whether onnxruntime may rewrite the graph.
            memory: the maximum address space of the child in bytes; None for no limit.

        Raises:
            SonnxError: the engine is unknown (SX901).
            MissingDependency: onnxruntime is not installed.
        """
        if engine not in ENGINES:
            raise SonnxError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}", code="SX901")
        if engine == "onnxruntime" and not _installed("onnxruntime"):
            raise MissingDependency("onnxruntime is not installed", hint="pip install 'sonnx[oracle]'")
        self.engine = engine
        self._child = Child(_serve, engine, {"device": device, "optimise": optimise}, memory=memory)
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
    load = {"onnxruntime": _onnxruntime, "reference": _reference, "sonnx": _sonnx}[engine]
    session: Any = None

    def answer(request: Any) -> tuple[bool, Any]:
        nonlocal session
        model, inputs, folder = request
        try:
            if model is not None:
                session = load(_whole(model, folder) if folder else model, options)
            return True, {} if inputs is None else session(inputs)
        except BaseException as error:
            session = None if model is not None else session
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
