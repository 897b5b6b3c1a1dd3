"""A checkpoint of which some tensors are read in part only, as a rank needs them."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spd.formats.checkpoint import Checkpoint
from spd.runtime.models.shards import Cuts


class TensorSource(Protocol):
    """Where tensors are read from by name."""

    def read(self, name: str) -> Tensor:
        """The tensor, or the part of it that is wanted."""
        ...


class SlicedReader:
    """Reads through memory-mapped files, so that only the pages of what is taken are touched."""

    def __init__(self, checkpoint: Checkpoint, cuts: Cuts) -> None:
        self.checkpoint, self.cuts = checkpoint, cuts

    def read(self, name: str) -> Tensor:
        """See `TensorSource`."""
        cut, whole = self.cuts.get(name), self.checkpoint.read(name)
        if cut is None:
            return whole
        parts = cut.of(whole)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
