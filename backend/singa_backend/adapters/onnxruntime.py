"""Adapters of onnxruntime: the model whose factors are inputs, and the files `.onnx_adapter` with their values.

model = adapter_inputs(model, [adapter])       # runs as the base model; with the values of an adapter, as that
write_onnx_adapter(adapter, "a.onnx_adapter")  # onnxruntime.LoraAdapter().Load(path); RunOptions().add_active_adapter(it)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from onnx import ModelProto, numpy_helper

from ..errors import InvalidInput
from ..io.places import StrPath
from ..passes import ModelEditor
from ..proto import tensor_data
from .adapter import Adapter, LowRank, base_digest
from .flat_file import FILE, read_parameters, write_parameters
from .insert import Insertion, check_fit, factor_inputs, insert, with_head
from .matching import Wanted, match
from .modules import WEIGHT, ModuleParameter, Modules
from .ties import UNTIED, Separation, joint_ties
from .uses import weights

_FACTOR = re.compile(r"(?:base_model\.model\.)?(?P<path>.+)[./]lora_(?P<part>[AB])(?:\.default)?(?:[./](?:weight|MatMul))?")
"""The name of a factor, as this package, PEFT and exporters of onnxruntime's tools write it."""


def adapter_inputs(
    model: ModelProto, adapters: Sequence[Adapter], *, folder: Path | None = None, any_base: bool = False
) -> ModelProto:
    """Return a model with inputs for the factors of adapters, which runs as the base model without them.

    The inputs are those of `insert(..., inputs=True)`, `NAME.lora_A` and `NAME.lora_B` for each weight that an adapter changes,
    with a symbolic rank for each weight.  They have initializers: factors of rank 0 (of a convolution, zeros).  A tensor that
    adapters replace becomes an input with its value in the file.

    Args:
        model: the model, which is not changed.
        adapters: the adapters that are to be used; their shapes except the ranks must agree.
        folder: the folder of the model's external data; None if it has none.
        any_base: whether to accept a model with other tensors than those that an adapter was trained with.

    Returns:
        The new model.

    Raises:
        InvalidInput: an adapter does not fit the model, or replaces a tensor by one of another shape (SX971).
    """
    changes: dict[str, LowRank] = {}
    values: dict[str, np.ndarray] = {}
    base, ties = None if any_base or not any(a.base for a in adapters) else base_digest(model, folder), joint_ties(adapters)
    result = with_head(model, Adapter({}, {}, "", ties), folder)
    editor = ModelEditor(result, folder)
    every = weights(editor)
    for adapter in adapters:
        if type(adapter.settings.get("head")) is int:
            insert(model, adapter, folder=folder, inputs=True, any_base=any_base)  # raises for an adapter that does not fit
        else:
            check_fit(editor, every, adapter, base)
        for name, change in adapter.changes.items():
            first = changes.setdefault(name, change)
            if first.a.shape[1:] != change.a.shape[1:]:
                what = f"the adapters differ in the shape of the change of {name!r}: {first.a.shape} and {change.a.shape}"
                raise InvalidInput(what, code="SX971", hint="merge one of them")
        values |= adapter.values
    check_fit(editor, every, Adapter(changes, {}, "", {}), None)
    for i, (name, change) in enumerate(changes.items()):
        rank, groups = f"lora_rank_{i}", len(change.a) // change.b.shape[1]
        one = Insertion(editor, every[name], change, ranks=(rank, rank if groups == 1 else f"{rank}_of_group"))
        one.add()
        _default(editor, one, (groups, 1) if change.a.ndim > 2 else (0, 0))
    for name, value in values.items():
        _list(editor, name, value)
    editor.write()
    result.ir_version = max(result.ir_version, 4)  # an initializer may be overridden since then
    return result


def _default(editor: ModelEditor, one: Insertion, ranks: Sequence[int]) -> None:
    """Let the inputs of a weight's factors have initializers of zeros with these ranks."""
    editor.main.remove_inputs((one.a, one.b))
    for i, (factor, array) in enumerate(((one.a, one.change.a), (one.b, one.change.b))):
        shape = list(array.shape)
        shape[i] = ranks[i]
        factor.constant = numpy_helper.from_array(np.zeros(shape, array.dtype), factor.name)
        editor.main.add_input(editor.main.add_initializer(factor), optional=True)


def _list(editor: ModelEditor, name: str, value: np.ndarray) -> None:
    """List a tensor that adapters replace among the inputs."""
    stored = editor.stored(name)
    shape = None if stored is None else tuple(stored[1].dims)
    if stored is None or shape != value.shape:
        what = f"tensor {name!r} has shape {shape} in the model and {value.shape} in an adapter"
        raise InvalidInput(f"{what}: it cannot be an input", code="SX971", hint="merge this adapter")
    main, (listed, tensor) = editor.main, stored
    if listed.producer is not None:
        array = tensor_data.tensor(tensor, editor.folder)
        editor.make_initializer(main, listed, numpy_helper.from_array(array, name))
    if listed not in main.optional_inputs:
        main.add_input(listed, optional=True)


def adapter_feeds(adapter: Adapter) -> dict[str, np.ndarray]:
    """Return the values of the inputs of `adapter_inputs`.

    Args:
        adapter: the adapter.

    Returns:
        A, and B times the scale, of each weight, and the tensors that the adapter replaces, by name.
    """
    return factor_inputs(adapter) | adapter.values


def write_onnx_adapter(adapter: Adapter, path: StrPath) -> None:
    """Write an adapter as a file of onnxruntime, whole or not at all.

    The scale is multiplied into B; the settings and the digest of the base are not in the file.

    Args:
        adapter: the adapter.
        path: the path of the file.

    Raises:
        InvalidInput: the adapter has 2 GiB or more (SX982), or the file cannot be written (SX351).
    """
    write_parameters(path, adapter_feeds(adapter))


def read_onnx_adapter(path: StrPath, model: ModelProto, *, folder: Path | None = None) -> Adapter:
    """Read an adapter of onnxruntime for a model that has the weights which it changes.

    Names may be those of `adapter_inputs`, or paths of modules as PEFT and onnxruntime's tools write them, whose A is (in, rank)
    and B (rank, out).

    Args:
        path: the path of the file.
        model: the model.
        folder: the folder of the model's external data; None if it has none.

    Returns:
        The adapter; its scales are 1.

    Raises:
        InvalidInput: the file is damaged (SX982), or a tensor has no counterpart in the model (SX981).
    """
    tensors = read_parameters(path)
    modules = Modules.of(model, folder)
    pairs: dict[str, dict[str, np.ndarray]] = {}
    values: dict[str, np.ndarray] = {}
    for name, array in tensors.items():
        factor = _FACTOR.fullmatch(name)
        if factor is not None:
            pairs.setdefault(factor["path"], {})[factor["part"]] = array
        elif modules.shape(name) is not None:
            values[name] = array
        else:
            raise InvalidInput(f"{Path(path)}: tensor {name!r} is not in the model", code="SX981")
    lacking = [p for p, pair in pairs.items() if set(pair) != {"A", "B"}]
    if lacking:
        raise InvalidInput(f"{Path(path)}: {lacking[0]!r} must have A and B, and has one of them", code=FILE)
    own = {p: pairs[p] for p in pairs if p in modules.uses}
    changes = {p: LowRank(pair["A"], pair["B"], 1.0) for p, pair in own.items()}
    wanted = [Wanted(p.strip("/").replace("/", "."), WEIGHT, "linear") for p in pairs if p not in own]
    parameters = match(modules, wanted, str(path)) if wanted else {}
    names = Separation(modules, ModelEditor(model, folder).fresh)
    for w, p in zip(wanted, [p for p in pairs if p not in own], strict=True):
        changes[names.name(parameters[w])] = _turned(pairs[p], parameters[w], p, path)
    return Adapter(changes, values, "", {UNTIED: names.ties} if names.ties else {})


def _turned(pair: dict[str, np.ndarray], p: ModuleParameter, name: str, path: StrPath) -> LowRank:
    """The factors of onnxruntime's tools, (in, rank) and (rank, out), in PEFT's layout."""
    a, b = pair["A"], pair["B"]
    for x, y in ((a.T, b.T), (a, b)):
        if a.ndim == 2 == b.ndim and x.shape[1] == p.inputs and y.shape == (p.outputs, x.shape[0]):
            return LowRank(np.ascontiguousarray(x), np.ascontiguousarray(y), 1.0)
    what = f"{Path(path)}: A {a.shape} and B {b.shape} of {name!r} do not fit the weight {p.tensor!r}"
    raise InvalidInput(f"{what}, which has {p.inputs} inputs and {p.outputs} outputs", code="SX981")


def bound(model: ModelProto, tensors: Mapping[str, np.ndarray]) -> ModelProto:
    """Return a model with values in place of its inputs of these names.

    Args:
        model: the model, which is not changed.
        tensors: the values by the name of the input.

    Returns:
        The new model.
    """
    result = ModelProto()
    result.CopyFrom(model)
    editor = ModelEditor(result)
    main, values = editor.main, editor.main.values
    main.remove_inputs([values[name] for name in tensors])
    main.remove_initializer(*(main.initializers[name] for name in tensors if name in main.initializers))
    for name, array in tensors.items():
        values[name].constant = numpy_helper.from_array(array, name)
        main.add_initializer(values[name])
    editor.write()
    return result
