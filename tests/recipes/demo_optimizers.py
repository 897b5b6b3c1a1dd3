"""The optimizers of the demos' recipe."""

from __future__ import annotations

import torch
from torch import nn

OUTER = ("embed", "gate.weight", "in_proj_a", "in_proj_b")
"""Parts of the names of matrices that are no layer's inner ones."""


def make_optimizers(
    model: nn.Module, scale: float, outer: tuple[str, ...] = OUTER, rate: float = 0.004
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, AdamW at `rate` for outer ones, convolutions and norms."""
    named = list(model.named_parameters())
    inner = {n for n, p in named if p.dim() == 2 and not any(part in n for part in outer)}
    matrices, rest = ([p for n, p in named if (n in inner) == within] for within in (True, False))
    return [
        torch.optim.Muon(matrices, lr=0.006 * scale, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=rate * scale, betas=(0.9, 0.95), weight_decay=0.0),
    ]
