"""What every row of a window is drawn from, as probabilities: the contract and its torch form."""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.sampling import SamplingSteps, SamplingTensors, process_rows


def row_laws(
    logits: Tensor, draft: Tensor, tensors: SamplingTensors, steps: SamplingSteps, usable_vocab: int
) -> Tensor:
    """The law that `sampling.sample_rows` draws each row's token from: [S, R, V], of the logits' type.

    Arguments as there. All of it lies on the likeliest token, ties to the lowest id, where no noise is
    drawn; a row that holds NaN or whose likeliest token is not finite is NaN throughout.
    """
    processed = process_rows(logits, draft, tensors, steps, usable_vocab)
    highest, likeliest = processed.max(dim=-1, keepdim=True)
    certain = torch.zeros_like(processed).scatter_(-1, likeliest, 1.0)
    certain = torch.where(highest.isfinite(), certain, float("nan"))
    if not steps.noise:
        return certain
    return torch.where(tensors.temperature.view(-1, 1, 1) > 0, processed.softmax(dim=-1), certain)
