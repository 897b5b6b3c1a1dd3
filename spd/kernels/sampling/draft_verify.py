"""The two opt-in rules that test a draft's probability instead of drawing the target's own token.

Both keep the target's joint law and say nothing of single tokens: what is emitted depends on the drafts.
Draft, acceptance and residual have streams of noise of their own; one shared by two of them is a bias.
So is a number that two rounds use: a block rejected early has looked at the drafts and tests of positions
that the next round comes to. What a row of the window uses is therefore keyed by the row as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.sampling.philox import STREAM_TARGET, gumbel, random_bits, uniform

STREAM_DRAFT = 1  # the stream a sampled draft is to be drawn with, for its row: see `row_stream`
STREAM_ACCEPTANCE = 2
STREAM_RESIDUAL = 3
NUM_STREAMS = 4
NO_TOKEN = -1


def verify_drafts(
    target: Tensor,
    draft_probs: Tensor | None,
    draft: Tensor,
    num_drafts: Tensor,
    seed: Tensor,
    positions: Tensor,
    by_block: bool,
) -> tuple[Tensor, Tensor]:
    """Compute `Kernels.verify_drafts` by torch."""
    number = torch.arange(1, draft.shape[1] + 1, device=draft.device)
    joint = torch.ones_like(target[:, :, 0])
    if draft_probs is None:
        draft_probs = torch.zeros_like(target[:, :-1]).scatter_(-1, draft.unsqueeze(-1), 1.0)
    if by_block:
        chances, joint = block_chances(target, draft_probs, draft, num_drafts)
    else:
        chances = draft_ratios(target, draft_probs, draft).clamp(max=1)
    passed = acceptance_uniforms(seed, positions[:, :-1]) < chances
    passed = passed & (number <= num_drafts.unsqueeze(-1))
    if by_block:
        accepted = torch.cat((draft.new_zeros(draft.shape[0], 1), number * passed), dim=1).amax(
            dim=-1
        )
    else:
        accepted = passed.long().cumprod(dim=-1).sum(dim=-1)
    at = accepted.unsqueeze(-1)
    scale, position = (each.gather(1, at).squeeze(-1) for each in (joint, positions))
    weights = last_token_weights(target, draft_probs, draft, num_drafts, accepted, scale)
    last = draw_last(weights, accepted < num_drafts, seed, position)
    drafted = torch.where(number <= at, draft, NO_TOKEN)
    tokens = torch.cat((drafted, torch.full_like(at, NO_TOKEN)), dim=1)
    return tokens.scatter(1, at, last.unsqueeze(-1)), accepted


def row_stream(stream: int, row: int) -> int:
    """The stream of a row of the window. A position is in one row only once."""
    return stream + NUM_STREAMS * row


def draft_ratios(target: Tensor, laws: Tensor, draft: Tensor) -> Tensor:
    """How much likelier each draft is under the target than under its drafter: [S, k]; 0 where q is 0."""
    p, q = (each.gather(-1, draft.unsqueeze(-1)).squeeze(-1) for each in (target[:, :-1], laws))
    return torch.where(q > 0, p / q, 0.0)


def block_chances(
    target: Tensor, laws: Tensor, draft: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Each prefix's chance to pass [S, k], and the joint ratios [S, k + 1] that scale its residual."""
    ratios = draft_ratios(target, laws, draft)
    joint = [torch.ones_like(target[:, 0, 0])]
    chances = []
    for i in range(1, draft.shape[1] + 1):
        chance = (joint[-1] * ratios[:, i - 1]).clamp(max=1)
        joint.append(chance)
        if i < draft.shape[1]:
            excess = (chance.unsqueeze(-1) * target[:, i] - laws[:, i]).clamp(min=0).sum(dim=-1)
            whole = excess + 1 - chance
            inner = torch.where(whole > 0, excess / whole, 1.0)
            chance = torch.where(num_drafts > i, inner, chance)
        chances.append(chance)
    return torch.stack(chances, dim=-1) if chances else ratios, torch.stack(joint, dim=-1)


def last_token_weights(
    target: Tensor, laws: Tensor, draft: Tensor, num_drafts: Tensor, accepted: Tensor, scale: Tensor
) -> Tensor:
    """The unnormalised law [S, V] of the token after the accepted drafts.

    The target's row if none was rejected, else what scale [S] times it exceeds the draft's law by; the
    row itself where rounding left no excess.
    """
    at = accepted.view(-1, 1, 1).expand(-1, 1, target.shape[-1])
    p = target.gather(1, at).squeeze(1)
    if not draft.shape[1]:
        return p
    q = laws.gather(1, at.clamp(max=draft.shape[1] - 1)).squeeze(1)
    excess = (scale.unsqueeze(-1) * p - q).clamp(min=0)
    rejected = (accepted < num_drafts).unsqueeze(-1) & (excess > 0).any(dim=-1, keepdim=True)
    return torch.where(rejected, excess, p)


def acceptance_uniforms(seed: Tensor, positions: Tensor) -> Tensor:
    """One float32 uniform, above 0 and below 1, for each position [S, k] under seed [S]."""
    seed = seed.unsqueeze(-1).expand_as(positions)
    rows = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    return uniform(random_bits(seed, positions, STREAM_ACCEPTANCE + NUM_STREAMS * rows, 1)).squeeze(
        -1
    )


def draw_last(weights: Tensor, rejected: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """A token [S] with probability proportional to weights [S, V]; the stream depends on rejected [S]."""
    vocab_size = weights.shape[-1]
    residual = gumbel(seed, position, STREAM_RESIDUAL, vocab_size)
    bonus = gumbel(seed, position, STREAM_TARGET, vocab_size)
    return (weights.log() + torch.where(rejected.unsqueeze(-1), residual, bonus)).argmax(dim=-1)
