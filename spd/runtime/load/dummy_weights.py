"""Random weights made where they will stand: for speed measurements, never for text."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spd.kernels.linear.few_bits import MIDDLE
from spd.runtime.load.progress import LoadMeter
from spd.runtime.models.builder import Fill
from spd.runtime.models.weights import EMBEDDING, HEAD, PackedSpec

DUMMY_BIAS = 0.02
DUMMY_LOGITS = 3.0
"""Standard deviation of a dummy model's logits: far from uniform, far from certain."""
DUMMY_DOWN = 4.0
"""How much larger an MLP's output is than attention's, whose average over all tokens would
else make a model say one token for ever."""
CODES_STD = {"int4": 4.32, "int8": 73.6, "e2m1": 3.02, "e4m3": 1.0}
"""Standard deviation of what random codes stand for, whose mean is 0."""


def dummy_fill(device: str, tied: bool, meter: LoadMeter, packed: Mapping[str, PackedSpec]) -> Fill:
    """Fill with normal numbers, the same ones each time on one kind of device; matrices in codes with codes.

    Norms are ones, and products keep the size of what they are given, so that nothing overflows however
    deep the model is, and the likeliest token depends on the text.
    """
    generator = torch.Generator(device).manual_seed(0)

    def fill(views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            stem, _, part = name.partition("#")
            if (spec := packed.get(stem)) is not None and views[stem].dtype == torch.uint8:
                std = _dummy_std(stem, views[stem], tied) * (0.5**0.5 if spec.paired else 1.0)
                _fill_packed(view, part, spec, std, generator)
            elif name.endswith("norm.weight"):
                view.fill_(1)
            else:
                view.normal_(0.0, _dummy_std(name, view, tied), generator=generator)
            meter.advance(view.nbytes)

    return fill


def _fill_packed(view: Tensor, part: str, spec: PackedSpec, std: float, generator: torch.Generator) -> None:
    """Fill a matrix's codes, or the scales or zeros beside them, so that its values have this deviation."""
    if part == "scales":
        view.fill_(std / CODES_STD[spec.kind])
    elif part == "zeros":
        view.fill_(MIDDLE[spec.kind])
    elif spec.kind == "e4m3":  # not every byte is a number
        made = torch.randn(view.shape, generator=generator, device=view.device)
        view.copy_(made.to(torch.float8_e4m3fn).view(torch.uint8))
    else:
        view.random_(1, 16 if spec.paired else 256, generator=generator)
        if spec.paired:
            view.bitwise_or_(torch.empty_like(view).random_(1, 16, generator=generator) << 4)


def _dummy_std(name: str, view: Tensor, tied: bool) -> float:
    """1 / sqrt(columns), so that a product is as large as its input, but for the two named above."""
    if view.dim() == 1:
        return DUMMY_BIAS
    gain = DUMMY_DOWN if name.endswith("down_proj.weight") else 1.0
    if name == (EMBEDDING if tied else HEAD):
        gain = DUMMY_LOGITS
    return float(gain * view.shape[1] ** -0.5)
