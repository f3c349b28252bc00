"""Compare two engines, two devices or two models value by value, and find the first node that diverges.

found = compare("model.onnx", {"x": x}, against="onnxruntime")
found.agrees, found.first, found.rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..devices.device import DeviceLike
from ..engines.command import EngineCommand
from ..engines.local import Foreign
from ..errors import InvalidInput
from ..proto.load import ModelSource
from .comparison import Comparison
from .judge import Judge
from .model import ComparedModel
from .setting import BUDGET, Setting, is_engine, is_saved, saved_values, trusted
from .torch_module import is_torch


def outputs_of(
    model: ModelSource | ComparedModel,
    inputs: Mapping[str, Any],
    ours: Mapping[str, Any],
    against: str | EngineCommand,
    *,
    timeout: float = 60.0,
) -> dict[str, Any]:
    """The values of a trusted side for those that a run returned, from one run of the whole model.

    Args:
        model: a path, a ModelProto, bytes, or a ComparedModel.
        inputs: checked, by name.
        ours: the outputs of the run by name.
        against: an engine, as for `compare`, or the path of an .npz file.
        timeout: seconds for an engine.

    Returns:
        Values by name; without those that are inputs or weights of the model.

    Raises:
        InvalidInput: the file has a value that the run did not return, or none; or `against` is another model (SX320).
        SonnxError: the engine cannot be used (SX901), or returned no outputs (SX900).
    """
    source = ComparedModel.of(model)
    wanted = [n for n in ours if source.producer(n)]
    if is_saved(against):
        found = saved_values(source, Path(against), inputs)
        absent = [n for n in found if n not in ours]
        if absent or not found:
            what = f"it has {absent[0]!r}" if absent else "it has no value that a node makes"
            raise InvalidInput(
                f"{against} must have values that the run returns, {what}", code="SX320",
                hint="--aux NAME returns intermediate values too; `sonnx compare` compares all",
            )  # fmt: skip
        return found
    if not is_engine(against):
        raise InvalidInput(f"a run is compared with an engine or an .npz file, got {against!r}", code="SX320",
                           hint="`sonnx compare` compares two models")  # fmt: skip
    engine = trusted(against, timeout=timeout)
    try:
        part = source.part(source.graph.nodes, inputs, wanted, ours if engine.typed else None)
        return engine.run(part, source.folder, {n: v for n, v in inputs.items() if source.values[n].users})
    finally:
        engine.close()


def compare(
    model: ModelSource | ComparedModel,
    inputs: Any,
    *,
    against: ModelSource | ComparedModel | EngineCommand | Foreign = "onnxruntime",
    device: DeviceLike = "CPU",
    names: Mapping[str, str] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    local: bool = False,
    optimised: bool = False,
    align: bool = True,
    budget: int = BUDGET,
    timeout: float = 60.0,
    progress: Callable[..., None] | None = None,
) -> Comparison:
    """Compare a model's values, node by node, with those of a trusted side.

    Only the live values and the results of one chunk are held at once.  A node that an engine refuses is part of the result.

    Args:
        model: a path (then long weights stay in the file), a ModelProto, bytes, or a ComparedModel.
        inputs: as for `SingaRep.run`.
        against: "onnxruntime" or "reference" (in a child process, with onnxruntime's optimizer off), "sonnx" (the CPU, for
            another `device`), "definition" (for the plans of the CPU: each node by its kernel, the outputs by one plan of the
            whole model), MODULE:CLASS (a class or module with the functions of onnx.backend.base.Backend, whose code runs in a
            child process), torch:MODULE:FUNCTION (a function that returns a torch.nn.Module; its submodules' outputs are aligned
            with the values), an EngineCommand, a `Foreign` (an engine of those names that stays open for other comparisons), the
            path of an .npz file of values by name (only those are compared), or another model, whose values are paired by name.
        device: the device of this side.
        names: names of values in `model` and their names in the other model; they take precedence over equal names.
        rtol: the relative tolerance; by default by dtype and operator, see `Tolerance`.
        atol: the absolute tolerance; by default by dtype and magnitude.
        local: pass the trusted side's inputs to every node, so that errors do not accumulate.
        optimised: run onnxruntime with its optimizer; then only graph outputs are compared.
        align: pair the values of two models by what they compute where names do not; otherwise only by name.
        budget: the maximum bytes of the results of a chunk.
        timeout: the maximum seconds for one chunk on another engine.
        progress: called after each node, with `note=` its name.

    Returns:
        All values that both sides have, and the first diverging node.

    Raises:
        InvalidModel: a model breaks a rule of ONNX.
        UnsupportedModel: a model has an operator that is not implemented.
        InvalidInput: the inputs or names do not match the model.
        DeviceUnavailable: the device cannot be used.
        MissingDependency: onnxruntime is not installed.
        SonnxError: the engine cannot be imported, or its command cannot be run (SX901).

    Example:
        >>> found = compare("model.onnx", {"x": x}, against="onnxruntime")
        >>> found.agrees, found.first
    """
    if local and (is_saved(against) or is_torch(against)):
        raise InvalidInput(
            "local passes the trusted side's inputs to every node, but saved values cannot be computed", code="SX320"
        )
    with Setting(
        model, inputs, against=against, device=device, names=names, rtol=rtol, atol=atol, budget=budget, timeout=timeout,
        optimised=optimised, align=align,
    ) as setting:  # fmt: skip
        judge = Judge(setting, local)
        judge.result.alignment = setting.alignment
        for visit in setting.visits():
            judge.judge(visit)
            if progress:
                progress(note=visit.call.name)
        judge.result.nonfinite = setting.nonfinite(judge.result.rows)
        refusal = setting.refusal(judge.result)
        judge.result.refusal = "" if refusal is None else str(refusal)
        return judge.result
