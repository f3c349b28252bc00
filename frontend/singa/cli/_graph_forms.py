"""The forms of a generated graph that `singa` makes: converted, exported, as a SONNXModel, and as a program."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from singa_backend.conform.fuzz.graphs.answer import Make
from singa_backend.conform.fuzz.graphs.generate import GraphCase
from singa_backend.ir.reader import read

from .. import codegen, device, sonnx
from .._core.tensor import Tensor


def forms(case: GraphCase) -> Iterator[tuple[str, Make]]:
    """Yield each form's name, and the function that returns its results or its file."""
    for opset in case.others:
        yield f"convert to {opset}", partial(_converted, case, opset)
    yield "SONNXModel", lambda: (_values(sonnx.SONNXModel(case.model).forward(*_tensors(case))), None)
    yield "export", lambda: (None, sonnx.export(_model(case)))
    yield "export by example", lambda: (None, _by_example(case))
    yield "codegen", lambda: (_program(case), None)


def _converted(case: GraphCase, opset: int) -> tuple[None, ModelProto]:
    return None, sonnx.convert(case.model, opset)


def _model(case: GraphCase) -> Any:
    model = sonnx.SONNXModel(case.model)
    model.eval()
    return model


def _by_example(case: GraphCase) -> ModelProto:
    names = [o.name for o in case.model.graph.output]
    made: ModelProto = sonnx.export(
        _model(case), _tensors(case), input_names=[i.name for i in case.model.graph.input], output_names=names
    )
    return made


def _tensors(case: GraphCase) -> list[Tensor]:
    dev = device.get_default_device()
    order = [v.name for v in read(case.model).inputs]
    return [Tensor(data=dev.backend.put(np.array(case.feeds[n])), device=dev, requires_grad=False) for n in order]


def _values(made: Any) -> list[Any]:
    return [None if y is None else y.device.backend.get(y.data) for y in made]


def _program(case: GraphCase) -> list[Any]:
    """Write the graph as a program, and run that."""
    with tempfile.TemporaryDirectory() as folder:
        path, _ = codegen.generate(case.model, "program").write(Path(folder) / "program.py")
        spec = importlib.util.spec_from_file_location("program", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        net = module.Model()
    net.eval()
    made = net.forward(*_tensors(case))
    return _values(made if isinstance(made, tuple) else (made,))
