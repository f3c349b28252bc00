"""What onnx itself says of a model, asked in a child process: its checker can be killed by a model, and so can its inference."""

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
    """valid: whether onnx.checker (with full_check) accepts the model; None where it gave no answer.  message: its words.

    values: what shape inference knows, by the path of the graph and the name of the value.  inference: why it knows less.
    """

    valid: bool | None = None
    message: str = ""
    inference: str = ""
    values: dict[str, dict[str, Value]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {"engine": "onnx.checker", "valid": self.valid, "message": self.message, "inference": self.inference}


def ask(model: ModelProto, path: Path | None, timeout: float) -> CheckerResult:
    """Have onnx infer shapes and check the model; never raises: no answer is an answer."""
    try:
        data = model.SerializeToString()
    except Exception as error:
        return CheckerResult(None, f"the model cannot be handed over: {error}", "the model cannot be handed over")
    command = [sys.executable, "-P", str(Path(__file__).with_name("_checker_child.py")), str(path or "")]
    why = ""
    try:
        done = subprocess.run(command, input=data, capture_output=True, timeout=timeout, check=False)
        text = done.stdout
        if done.returncode:
            last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
            why = f"the process died with exit code {done.returncode}" + (f": {last[:300]}" if last else "")
    except subprocess.TimeoutExpired as late:
        text, why = late.stdout or b"", f"no answer within {timeout:g} s"
    said = {}
    for line in text.splitlines():
        try:
            answer = json.loads(line)
            said[answer["part"]] = answer
        except ValueError:  # cut off in the middle
            continue
    inferred, checked = said.get("inference"), said.get("checker")
    opinion = CheckerResult(None if checked is None else not checked["message"], checked["message"] if checked else why)
    opinion.inference = inferred["message"] if inferred else why
    for graph, infos in (inferred or {}).get("values", {}).items():
        opinion.values[graph] = {v.name: v for v in map(_value, infos)}
    return opinion


def _value(text: str) -> Value:
    info = ValueInfoProto.FromString(base64.b64decode(text))
    return value_of(info)


def value_of(info: ValueInfoProto) -> Value:
    """The declared value; one of an unknown type where the file gives a type that ONNX does not define."""
    try:
        return Value.from_proto(info)
    except InvalidModel:
        return Value(info.name)


def opinion(path: Path, timeout: float = 600.0) -> str:
    """What onnx's checker, with full_check, has against a model file; "" for nothing.  It runs in a process of its own."""
    text = "import sys, onnx; onnx.checker.check_model(sys.argv[1], full_check=True)"
    try:
        done = subprocess.run([sys.executable, "-P", "-c", text, str(path)], capture_output=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s"
    if not done.returncode:
        return ""
    said = done.stderr.decode(errors="replace").strip()
    return said[said.rfind("\nonnx.") + 1 :][:2000] or f"it died with exit code {done.returncode}"
