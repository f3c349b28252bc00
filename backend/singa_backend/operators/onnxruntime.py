"""onnxruntime's own operators are declared when the first file names them: nothing else needs the time to import them."""

from __future__ import annotations

from ..proto.schemas import MICROSOFT, declare_later, lax


def _load() -> None:
    from . import microsoft

    assert microsoft


declare_later(MICROSOFT, _load)
lax.update(
    Affine=9,
    Crop=9,
    DynamicSlice=9,
    ImageScaler=9,
    LayerNormalization=16,
    ParametricSoftplus=9,
    Scale=9,
    ScaledTanh=9,
    SimplifiedLayerNormalization=1 << 30,
)
