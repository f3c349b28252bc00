"""A program as an engine: it reads a model and an .npz file of inputs, and writes an .npz file of outputs.

engine = CommandEngine("my_runtime --model {model} {inputs} {outputs}")
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path
from typing import IO, Any

import numpy as np
from onnx import ModelProto, TypeProto

from .. import dtypes
from ..errors import InvalidInput, SonnxError, did_you_mean
from ..io.archives import Arrays, open_arrays
from ..io.files import write_npz
from ..proto.named_arrays import named_arrays
from ..proto.save import save
from .oracle import EngineFailure

PLACES = ("{model}", "{inputs}", "{outputs}")
"""What a command must contain; each is replaced by the path of a file."""

_TAIL = 2000
"""Characters of standard error that an error shows."""


@dataclass(frozen=True)
class EngineCommand:
    """A command line that runs a model, for the argument `against` of `compare`, `bisect` and `differs`.

    It runs without a shell, once for each part of a model, in the current folder.

    Attributes:
        text: the command line, in a shell's quoting, with {model} (an ONNX file), {inputs} (an .npz file with an array for each
            input, by name) and {outputs} (the .npz file that it must write, with an array for each output of the model, by
            name).  A dtype that NumPy lacks, such as bfloat16, is stored as its bytes, in a void dtype of the same width.
    """

    text: str


class CommandEngine:
    """Runs a command for each model; raises SonnxError (SX901) if it cannot be run at all.

    Args:
        text: see `EngineCommand`.
        timeout: seconds for one model.
    """

    typed = True

    def __init__(self, text: str, timeout: float = 60.0) -> None:
        try:
            self.words = shlex.split(text)
        except ValueError as error:
            raise SonnxError(f"the command {text!r} cannot be split into words: {error}", code="SX901") from None
        missing = [p for p in PLACES if not any(p in word for word in self.words)]
        if missing:
            raise SonnxError(
                f"the command of an engine must contain {', '.join(PLACES)}, got {text!r} without {', '.join(missing)}",
                code="SX901",
            )
        if shutil.which(self.words[0]) is None:
            raise SonnxError(
                f"the program of the command is not found or is not executable: {self.words[0]!r}",
                code="SX901",
                hint="the command runs without a shell; begin it with the path of a program",
            )
        self.name = os.path.basename(self.words[0])
        self.timeout = timeout

    def run(self, model: ModelProto, folder: Path | None, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Run the command for a model; raises EngineFailure (SX900)."""
        with tempfile.TemporaryDirectory(prefix="sonnx-") as name:
            paths = [Path(name) / file for file in ("model.onnx", "inputs.npz", "outputs.npz")]
            copy = ModelProto()
            copy.CopyFrom(model)
            save(copy, paths[0], folder=folder, check=False)
            write_npz(paths[1], named_arrays(inputs))
            words = self.words
            for place, path in zip(PLACES, paths, strict=True):
                words = [word.replace(place, str(path)) for word in words]
            with tempfile.TemporaryFile() as errors:
                self._call(words, errors)
                if not paths[2].is_file():
                    raise EngineFailure(self.name, "refused", f"it exited with 0 but did not write {{outputs}}{_tail(errors)}")
            try:
                outputs = read_outputs(paths[2], {o.name: o.type for o in model.graph.output}, exact=True)
            except InvalidInput as error:
                raise EngineFailure(self.name, "refused", error.message) from None
        return checked(self.name, model, outputs)

    def _call(self, words: Sequence[str], errors: IO[bytes]) -> None:
        """Run the words; its standard output is discarded."""
        try:
            process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True
            )
        except OSError as error:
            raise EngineFailure(self.name, "refused", f"it cannot be started: {error}") from None
        try:
            code = process.wait(self.timeout)
        except subprocess.TimeoutExpired:
            raise EngineFailure(self.name, "timeout", f"no answer within {self.timeout:g} s{_tail(errors)}") from None
        finally:
            _end(process)
        if code < 0:
            raise EngineFailure(self.name, "died", f"signal {-code}{_tail(errors)}")
        if code:
            raise EngineFailure(self.name, "refused", f"exit code {code}{_tail(errors)}")

    def close(self) -> None:
        """Do nothing: each command has ended."""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process, if it runs, with those that it started."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if hasattr(os, "killpg"):
                os.killpg(process.pid, signal.SIGKILL)
            else:
                process.kill()
        process.wait()


def _tail(errors: IO[bytes]) -> str:
    errors.seek(max(0, errors.seek(0, os.SEEK_END) - 4 * _TAIL))
    text = errors.read().decode(errors="replace").strip()
    return f"; standard error: {text[-_TAIL:]}" if text else "; standard error is empty"


def read_outputs(path: Path, declared: Mapping[str, TypeProto], *, exact: bool) -> dict[str, Any]:
    """Read values of a model by name.

    Args:
        path: an .npz file.
        declared: the values that the model has, with their types as far as known.
        exact: whether the file must have all of them.

    Raises:
        InvalidInput: the file is damaged (SX307), or its names are not those of values (SX320).
    """
    with open_arrays(path, "SX307") as arrays:
        found: dict[str, Any] = {}
        rest = dict.fromkeys(arrays.names)
        for name, kind in declared.items():
            if kind.HasField("sequence_type"):
                keys = list(takewhile(rest.__contains__, (f"{name}/{i}" for i in count())))
                if keys or exact:
                    found[name] = [_read(arrays, key, kind.sequence_type.elem_type) for key in keys]
            elif name in rest:
                keys, found[name] = [name], _read(arrays, name, kind)
            else:
                continue
            rest = {key: None for key in rest if key not in keys}
    missing = [n for n in declared if n not in found] if exact else []
    if rest:
        name = next(iter(rest))
        message = f"{path.name} has {name!r}, which is not a value of the model{did_you_mean(name, declared)}"
        raise InvalidInput(message, code="SX320")
    if missing:
        names = ", ".join(map(repr, declared))
        message = f"{path.name} must have an array for each of {names}; it has no {missing[0]!r}"
        raise InvalidInput(message, code="SX320")
    return found


def _read(arrays: Arrays, name: str, declared: TypeProto) -> np.ndarray:
    """An array in its declared dtype if it is stored as bytes; strings as objects."""
    code = declared.tensor_type.elem_type
    array = arrays.array(name, dtypes.numpy_dtype(code) if dtypes.is_code(code) else None)
    return array.astype(object) if array.dtype.kind in "US" else array


def checked(engine: str, model: ModelProto, outputs: dict[str, Any]) -> dict[str, Any]:
    """Check the types of an engine's outputs against those that the model declares; raises EngineFailure (SX900)."""
    for declared in model.graph.output:
        value, code = outputs[declared.name], declared.type.tensor_type.elem_type
        what = ""
        if isinstance(value, np.ndarray) and not dtypes.known(value.dtype):
            what = f"has the dtype {value.dtype}, which ONNX does not have"
        elif declared.type.HasField("tensor_type") and not isinstance(value, np.ndarray):
            what = f"is a {type(value).__name__}, and not a NumPy array"
        elif isinstance(value, np.ndarray) and dtypes.is_code(code) and dtypes.onnx_code(value.dtype) != code:
            what = f"is {dtypes.onnx_name(value.dtype)}, but the model declares {dtypes.onnx_name(dtypes.numpy_dtype(code))}"
        if what:
            raise EngineFailure(engine, "refused", f"the output {declared.name!r} {what}")
    return outputs
