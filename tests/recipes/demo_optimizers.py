"""The optimizers of the demos' recipe."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class FullMuon(torch.optim.Optimizer):
    """`torch.optim.Muon` as the recipe sets it, iterating in float32: few processors have fast bfloat16."""

    def __init__(self, matrices: list[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take one step."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum"] = torch.zeros_like(matrix)
                momentum = state["momentum"].lerp_(matrix.grad, 0.05)
                update = orthogonal(matrix.grad.lerp(momentum, 0.95))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(update, alpha=-group["lr"] * 0.2 * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """Five Newton-Schulz steps (Jordan, 2024): the matrix with its singular values brought near one."""
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


OUTER = ("embed", "gate.weight", "in_proj_a", "in_proj_b")
"""Parts of the names of matrices that are no layer's inner ones."""


def make_optimizers(
    model: nn.Module, scale: float, mixed: bool = True, outer: tuple[str, ...] = OUTER, rate: float = 0.004
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, AdamW at `rate` for outer ones, convolutions and norms."""
    named = list(model.named_parameters())
    inner = {n for n, p in named if p.dim() == 2 and not any(part in n for part in outer)}
    matrices, rest = ([p for n, p in named if (n in inner) == within] for within in (True, False))
    return [
        torch.optim.Muon(matrices, lr=0.006 * scale, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        if mixed
        else FullMuon(matrices, lr=0.006 * scale, weight_decay=0.05),
        torch.optim.AdamW(rest, lr=rate * scale, betas=(0.9, 0.95), weight_decay=0.0),
    ]
