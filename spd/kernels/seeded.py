"""Random numbers that are the same in each run: dummy weights, and rows that arithmetic is tried on."""

from __future__ import annotations

import torch


def seeded_generator(device: torch.device | str = "cpu") -> torch.Generator:
    """Return torch's generator on a device, with seed 0."""
    # torch's own import does this, but for the part that `spd/__main__.py` defers.
    import torch._prims.rng_prims

    return torch.Generator(device).manual_seed(0)
