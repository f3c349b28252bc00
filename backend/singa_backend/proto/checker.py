"""Run onnx's checker and shape inference in a child process, because a model can crash either."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto, ValueInfoProto

from ..errors import InvalidModel
from .values import Value


@dataclass
class CheckerResult:
    """The result of onnx's checker and shape inference.

    Attributes:
        valid: whether onnx.checker (with full_check) accepts the model; None if it returned no answer.
        message: the checker's message, or the reason why there is no answer.
        inference: the reason why shape inference did not finish; "" if it did.
        values: the inferred values, by the path of the graph and the name of the value.
    """

    valid: bool | None = None
    message: str = ""
    inference: str = ""
    values: dict[str, dict[str, Value]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the checker's answer as plain data.

        Returns:
            The engine's name, whether the model is valid, and the messages of checker and inference.
        """
        return {"engine": "onnx.checker", "valid": self.valid, "message": self.message, "inference": self.inference}


def check_and_infer(model: ModelProto, path: Path | None, timeout: float) -> CheckerResult:
    """Infer the model's shapes and check it; never raises: no answer is a result too.

    Args:
        model: the model.
        path: its file, whose folder holds its external data; None if there is none.
        timeout: seconds that the child process may take.
    """
    try:
        data = model.SerializeToString()
    except Exception as error:
        return CheckerResult(None, f"the model cannot be serialized: {error}", "the model cannot be serialized")
    answers, why = _run(["infer", str(path or "")], data, timeout)
    result = _result(answers, why)
    inferred = answers.get("inference")
    result.inference = inferred["message"] if inferred else why
    for graph, infos in (inferred or {}).get("values", {}).items():
        result.values[graph] = {v.name: v for v in map(_value, infos)}
    return result


def check_file(path: Path, timeout: float = 600.0) -> CheckerResult:
    """Check a model file; never raises.  The result has no values."""
    return _result(*_run(["check", str(path)], b"", timeout))


def _run(arguments: list[str], data: bytes, timeout: float) -> tuple[dict[str, Any], str]:
    """The child's answers by their part, and the reason why some are missing; "" if the child ended normally."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("_checker_child.py")), *arguments]
    why = ""
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=timeout, check=False)
        text = done.stdout
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            why = f"the process died with exit code {done.returncode}" + (f": {last[:300]}" if last else "")
    except subprocess.TimeoutExpired as late:
        text, why = late.stdout or b"", f"no answer within {timeout:g} s"
    answers = {}
    for line in text.splitlines():
        try:
            answer = json.loads(line)
            answers[answer["part"]] = answer
        except ValueError:  # an incomplete line
            continue
    return answers, why


def _result(answers: dict[str, Any], why: str) -> CheckerResult:
    checked = answers.get("checker")
    return CheckerResult(None if checked is None else not checked["message"], checked["message"] if checked else why)


def _value(text: str) -> Value:
    info = ValueInfoProto.FromString(base64.b64decode(text))
    return value_of(info)


def value_of(info: ValueInfoProto) -> Value:
    """The declared value; of unknown type if ONNX does not define the type in the file."""
    try:
        return Value.from_proto(info)
    except InvalidModel:
        return Value(info.name)
