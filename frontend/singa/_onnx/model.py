"""An ONNX model as a trainable `Model`."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto

from singa_backend.adapters import Adapter
from singa_backend.errors import InvalidInput, check_keywords
from singa_backend.io.places import StrPath
from singa_backend.ir.custom import CustomOperator
from singa_backend.proto.load import ModelSource, embed, load_model

from .._core import trace
from .._core.tensor import Tensor
from ..device import Device, DeviceLike
from ..model import Model
from . import adapted
from .adapted import Adapted, Base
from .imported import Imported
from .tensor_runs import forward


class SONNXModel(Model):
    """An ONNX model as a trainable `Model`, with the float initializers of its main graph as tensors under their ONNX names.

    What trains is what the framework trained: weights, biases, scales, embeddings, learned tokens and positions.  Factors, masks
    and tables are constants, by their use in the graph; they are among the parameters, frozen, and `unfreeze(name)` includes one
    in training.  `trainable_report` states the reason for each.  If a file has no float initializers, its float Constants take
    their place: older exporters of PaddlePaddle write all weights as Constants.  Running means and variances of
    BatchNormalization are states.

    BatchNormalization and Dropout follow the mode of the model, not the mode in the file.  That mode is `autograd.training`,
    which is off when a program begins, until the mode of the model is set: by `train()`, `eval()`, `compile`, or a call with the
    arguments of the `train_one_batch` of a subclass.

    To train, define `train_one_batch` in a subclass and call `set_optimizer`; layers that the subclass adds are trained together
    with the imported parameters.

    Args:
        onnx_model: a ModelProto, its bytes, or the path of its file.
        device: the device of the model, a Device or a name; None for the CPU.
        operators: operators of `define_operator` that only this model has.
        train_constants: whether constants train by default, too.

    Attributes:
        onnx_model: the ModelProto, if `from_onnx` or an importer of a framework created the model; otherwise None.

    Raises:
        InvalidModel: the model violates ONNX's rules; `problems` lists all violations.
        UnsupportedModel: something in the model is not implemented; `problems` lists everything.
        DeviceUnavailable: the device is unknown, or this machine does not have it.
        ResourceExhausted: a limit was reached.

    Example:
        >>> model = sonnx.SONNXModel("net.onnx")
        >>> outputs = model.forward(x)
    """

    onnx_model: ModelProto | None = None
    _adapted: Adapted | None = None

    def __init__(
        self,
        onnx_model: ModelSource,
        device: DeviceLike | None = None,
        *,
        operators: Sequence[CustomOperator] = (),
        train_constants: bool = False,
    ) -> None:
        super().__init__()
        self.imported = Imported(onnx_model, device, operators=operators, train_constants=train_constants)
        self._told_constants = False

    def __getstate__(self) -> dict[str, Any]:
        """The state to pickle; `onnx_model` is read from the model's file, if it is equal to it."""
        state = super().__getstate__()
        source = self.imported.rep._source
        if self.onnx_model is not None and source is not None and source.digests() and _proto(source.path) == self.onnx_model:
            state["onnx_model"] = _OfFile(source.path)
        return state

    def forward(self, *input: Any, aux_output: Sequence[str] = (), **kwargs: Any) -> list[Tensor]:
        """Compute the outputs of the model.

        Args:
            *input: Tensors, or arrays, in the order of the model's inputs; they are cast to the declared dtypes.  None for an
                empty optional.
            aux_output: names of values of the main graph to return after the outputs.
            **kwargs: `last_layers`: -1 (the default) runs all operators, -k omits the last k - 1, L >= 0 runs operators 0 to L;
                Constant nodes do not count.  If operators are omitted, the outputs are those of the last operator that ran.

        Returns:
            A list of Tensors in the order of the model's outputs, also if there is only one.

        Raises:
            InvalidInput: the inputs do not match the model, or `aux_output` or `last_layers` does not select a part of it.
            OperatorError: a node cannot compute with its inputs.
            ResourceExhausted: a limit was reached.
            UnknownKeyword: a keyword is unknown.
        """
        last_layers = kwargs.pop("last_layers", -1)
        check_keywords("forward", kwargs, ("aux_output", "last_layers"))
        trace.depends(self, lambda: self.training)
        return forward(self.imported, input, aux_output, last_layers, training=self.training)

    # --- adapters

    def adapter(self) -> Adapter:
        """Return what `sonnx.lora` added to the model, with the values of the moment.

        Returns:
            The adapter: the factors of each weight, and the other tensors of the file that train or have changed, such as biases
            and running statistics.  Layers that a subclass adds are not in it.

        Raises:
            InvalidInput: the model has no adapter (SX975).
        """
        return self._require_adapted().current(self.imported)

    def load_adapter(self, adapter: Adapter | StrPath, *, any_base: bool = False) -> None:
        """Compute with an adapter, in place of the one that the model has; it alone trains afterwards.

        If both change the same weights by the same scales, only values are copied, and recorded steps and plans remain valid.

        Args:
            adapter: an adapter, or the path of its file.
            any_base: whether to accept an adapter that was trained with other values of the model's tensors; their names and
                shapes must fit.

        Raises:
            InvalidInput: the file is not an adapter (SX970), or it does not fit the model (SX971); nothing has changed.
            InvalidModel: the file of the model was changed since it was read (SX110).
        """
        given = adapted.read(adapter)
        mine = self._adapted
        base = Base.of(self.imported) if mine is None else mine.base
        adapted.check_base(base, given, any_base)
        if mine is not None and mine.set_values(self.imported, given):
            return
        self._adapt(base, given)

    def merged(self) -> ModelProto:
        """Return the model of the file with the adapter in its weights: W + scale B A, computed in float64 and rounded once.

        Returns:
            A ModelProto with the nodes, names and types of the file.

        Raises:
            InvalidInput: the model has no adapter (SX975), or it changes a quantized weight (SX974).
            InvalidModel: the file of the model was changed since it was read (SX110).
        """
        proto, folder = self._merged()
        embed(proto, folder)
        return proto

    def _merged(self) -> tuple[ModelProto, Path | None]:
        """The merged model, and the folder of the external data that it shares with its file."""
        return adapted.merged(self._require_adapted(), self.adapter())

    def _share(self) -> tuple[int, int]:
        """The number of values that train, and of all values of initializers."""
        return adapted.share(self.imported)

    def unmerged(self, *, inputs: bool = False) -> ModelProto:
        """Return the model of the file with the adapter next to its weights.

        Args:
            inputs: whether the factors are the last inputs of the model, with a symbolic rank, and not initializers.  The value
                of an input `NAME.lora_B` is then the scale times B: `singa_backend.adapters.factor_inputs` returns them.

        Returns:
            A ModelProto with standard operators for the adapter.

        Raises:
            InvalidInput: the model has no adapter (SX975).
            InvalidModel: the file of the model was changed since it was read (SX110).
        """
        return adapted.unmerged(self._require_adapted(), self.adapter(), inputs)

    def _require_adapted(self) -> Adapted:
        if self._adapted is None:
            raise InvalidInput(
                "the model has no adapter", code="SX975", hint="add one: sonnx.lora(model), model.load_adapter(path)"
            )
        return self._adapted

    def _adapt(self, base: Base, given: Adapter) -> None:
        """Replace the model of the file by the base with an adapter."""
        self.imported = adapted.with_adapter(self.imported, base, given)
        self._adapted = Adapted.of(base, given)
        self._steps = OrderedDict()
        self._checked = False

    def _input_names(self) -> list[str] | None:
        names = super()._input_names()
        return [v.name for v in self.imported.graph.inputs] if names is None else names

    def _moved(self, dtype: np.dtype[Any] | None, device: Device | None, seen: set[int]) -> list[Callable[[], None]]:
        made = self.imported.moved(dtype, device)

        def move() -> None:
            self.imported.become(made)
            if dtype is not None and self.onnx_model is not None:
                self.onnx_model = made.proto

        return [*super()._moved(dtype, device, seen), move]

    def _origin_lines(self) -> list[str]:
        return [self.imported.rep.origin]

    def get_params(self) -> dict[str, Tensor]:
        """Return the parameters by name, those that are frozen included.

        Returns:
            A dict from name to Tensor: the float initializers of the file under their ONNX names, except running statistics, then
            the parameters of added layers.
        """
        return {**self.imported.parameters, **super().get_params()}

    def get_states(self) -> dict[str, Tensor]:
        """Return the parameters and running statistics by name.

        Returns:
            A dict from name to Tensor: those of the file in the order of its initializers, then those of added layers.
        """
        return {**self.imported.tensors(), **super().get_states()}

    def _constants(self) -> dict[str, str]:
        if self._told_constants:
            return {}
        self._told_constants = True
        mine = self.imported
        return {n: r.reason for n, r in mine.roles.items() if mine.is_fixed(n) and n not in mine.requested}


class _OfFile:
    """A ModelProto in a pickle, in the file with this path."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return _proto, (self._path,)


def _proto(path: str) -> ModelProto:
    return load_model(path)[0]
