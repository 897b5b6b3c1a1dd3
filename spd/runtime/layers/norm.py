"""The norm of the residual stream, where it is wanted by itself."""

from __future__ import annotations

from torch import Tensor

from spd.kernels.dispatch import Kernels
from spd.kernels.rms_norm import rms_norm
from spd.runtime.models.base import Residual


def normed(stream: Residual, weight: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
    """The stream [T, hidden] normalised with scales weight [hidden], by its squares where it carries them."""
    if stream.squares is None and kernels.native is None:
        return rms_norm(stream.x, weight, epsilon)
    x: Tensor = kernels.rms_norm_rows(stream.x, stream.squares, weight, epsilon)
    return x
