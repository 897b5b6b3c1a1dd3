"""Random weights made where they will stand: for speed measurements, never for text."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spd.runtime.load.progress import LoadMeter
from spd.runtime.models.builder import Fill
from spd.runtime.models.weights import EMBEDDING, HEAD

DUMMY_BIAS = 0.02
DUMMY_LOGITS = 3.0
"""Standard deviation of a dummy model's logits: far from uniform, far from certain."""
DUMMY_DOWN = 4.0
"""How much larger an MLP's output is than attention's, whose average over all tokens would
else make a model say one token for ever."""


def dummy_fill(device: str, tied: bool, meter: LoadMeter) -> Fill:
    """Fill with normal numbers, the same ones each time on one kind of device.

    Norms are ones, and products keep the size of what they are given, so that nothing overflows however
    deep the model is, and the likeliest token depends on the text.
    """
    generator = torch.Generator(device).manual_seed(0)

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            if name.endswith("norm.weight"):
                view.fill_(1)
            else:
                view.normal_(0.0, _dummy_std(name, view, tied), generator=generator)
            meter.advance(view.nbytes)

    return fill


def _dummy_std(name: str, view: Tensor, tied: bool) -> float:
    """1 / sqrt(columns), so that a product is as large as its input, but for the two named above."""
    if view.dim() == 1:
        return DUMMY_BIAS
    gain = DUMMY_DOWN if name.endswith("down_proj.weight") else 1.0
    if name == (EMBEDDING if tied else HEAD):
        gain = DUMMY_LOGITS
    return float(gain * view.shape[1] ** -0.5)
