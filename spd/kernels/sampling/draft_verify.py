"""The two opt-in rules that test a draft's probability instead of drawing the target's token.

Both preserve the target's joint distribution, but single tokens depend on the drafts. Drafts,
acceptance and residuals have separate streams of noise; one shared by two of them would be a bias.
So would be a random number that two rounds use: a block rejected early has used the drafts and
tests of positions that the next round reaches. The noise of a window's row is therefore keyed by
the row as well.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.sampling.philox import STREAM_TARGET, gumbel, random_bits, uniform

STREAM_DRAFT = 1  # the stream of sampled drafts; `row_stream` gives that of a row
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
    scale = joint.gather(1, at).squeeze(-1)
    position = positions.gather(1, at).squeeze(-1)
    weights = last_token_weights(
        target=target,
        draft_probs=draft_probs,
        draft=draft,
        num_drafts=num_drafts,
        accepted=accepted,
        scale=scale,
    )
    last = draw_last(weights, accepted < num_drafts, seed, position)
    drafted = torch.where(number <= at, draft, NO_TOKEN)
    tokens = torch.cat((drafted, torch.full_like(at, NO_TOKEN)), dim=1)
    return tokens.scatter(1, at, last.unsqueeze(-1)), accepted


def row_stream(stream: int, row: int) -> int:
    """Return the stream of a row of the window. A position is in one row only once."""
    return stream + NUM_STREAMS * row


def draft_ratios(target: Tensor, draft_probs: Tensor, draft: Tensor) -> Tensor:
    """Return p / q of each draft, target over draft model: [S, k]; 0 where q is 0."""
    ids = draft.unsqueeze(-1)
    p = target[:, :-1].gather(-1, ids).squeeze(-1)
    q = draft_probs.gather(-1, ids).squeeze(-1)
    return torch.where(q > 0, p / q, 0.0)


def block_chances(
    target: Tensor, draft_probs: Tensor, draft: Tensor, num_drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """Return each prefix's chance to pass [S, k], and the joint ratios [S, k + 1] of its
    residual."""
    ratios = draft_ratios(target, draft_probs, draft)
    joint = [torch.ones_like(target[:, 0, 0])]
    chances = []
    for i in range(1, draft.shape[1] + 1):
        chance = (joint[-1] * ratios[:, i - 1]).clamp(max=1)
        joint.append(chance)
        if i < draft.shape[1]:
            excess = (
                (chance.unsqueeze(-1) * target[:, i] - draft_probs[:, i]).clamp(min=0).sum(dim=-1)
            )
            total = excess + 1 - chance
            inner = torch.where(total > 0, excess / total, 1.0)
            chance = torch.where(num_drafts > i, inner, chance)
        chances.append(chance)
    return torch.stack(chances, dim=-1) if chances else ratios, torch.stack(joint, dim=-1)


def last_token_weights(
    target: Tensor,
    draft_probs: Tensor,
    draft: Tensor,
    num_drafts: Tensor,
    accepted: Tensor,
    scale: Tensor,
) -> Tensor:
    """Return the unnormalised distribution [S, V] of the token after the accepted drafts.

    It is the target's row p if no draft was rejected, else max(scale * p - q, 0) with scale [S] and
    the draft's distribution q; p where rounding left no excess.
    """
    at = accepted.view(-1, 1, 1).expand(-1, 1, target.shape[-1])
    p = target.gather(1, at).squeeze(1)
    if not draft.shape[1]:
        return p
    q = draft_probs.gather(1, at.clamp(max=draft.shape[1] - 1)).squeeze(1)
    excess = (scale.unsqueeze(-1) * p - q).clamp(min=0)
    rejected = (accepted < num_drafts).unsqueeze(-1) & (excess > 0).any(dim=-1, keepdim=True)
    return torch.where(rejected, excess, p)


def acceptance_uniforms(seed: Tensor, positions: Tensor) -> Tensor:
    """Return a float32 uniform, above 0 and below 1, for each position [S, k] under seed [S]."""
    seed = seed.unsqueeze(-1).expand_as(positions)
    rows = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    return uniform(random_bits(seed, positions, STREAM_ACCEPTANCE + NUM_STREAMS * rows, 1)).squeeze(
        -1
    )


def draw_last(weights: Tensor, rejected: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """Draw a token [S] with probability proportional to weights [S, V].

    The stream depends on rejected [S].
    """
    vocab_size = weights.shape[-1]
    residual = gumbel(seed, position, STREAM_RESIDUAL, vocab_size)
    bonus = gumbel(seed, position, STREAM_TARGET, vocab_size)
    return (weights.log() + torch.where(rejected.unsqueeze(-1), residual, bonus)).argmax(dim=-1)
