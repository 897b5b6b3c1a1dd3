"""From logits to tokens for every row of a window: the contract and its torch form.

Order of steps: unusable ids, bias, penalties, minimum length, mask, temperature, top-k, top-p,
min-p; then argmax, with keyed noise at temperatures above zero. A row's result depends on its own
logits, history and keys only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spd.kernels.sampling.philox import STREAM_TARGET, gumbel

NEGATIVE_INFINITY = float("-inf")

MASS_BITS = 32  # a token as likely as the likeliest has the mass 2**32
FLOAT32_LOG2_E = 1.4426950216293335  # rounded to float32, so that every form multiplies alike
LOWEST_EXPONENT = -40.0
EXP2 = (
    # Of 2**f for f in [0, 1], from the highest power down; each a float32 number. Relative error
    # 1e-7.
    0.00021715024195145816,
    0.00124408770352602,
    0.009678063914179802,
    0.05548415333032608,
    0.2402295172214508,
    0.6931470036506653,
    1.0,
)


@dataclass(frozen=True)
class SamplingTensors:
    """Every slot's sampling parameters and history, on the device; S slots, V token ids.

    A field that no row needs is None or False, and its step is skipped, which changes no token.
    """

    temperature: Tensor  # float32 [S]; at 0 and below the likeliest token is drawn
    top_p: Tensor  # float32 [S]; 1 and above keeps all
    min_p: Tensor  # float32 [S]
    repetition_penalty: Tensor  # float32 [S]
    presence_penalty: Tensor  # float32 [S]
    frequency_penalty: Tensor  # float32 [S]
    top_k: Tensor  # int64 [S]; 0 keeps all
    seed: Tensor  # int64 [S]
    bias: Tensor | None  # float32 [S, V], added to the logits
    in_prompt: Tensor | None  # bool [S, V]: the tokens of the prompt
    generated: Tensor | None  # int32 [S, V]: the count of each generated token
    stop_ids: Tensor  # int64 [S, N], -1 where unused
    length: (
        Tensor  # int64 [S]: committed tokens, the prompt's too; the index of the first row's token
    )
    min_length: Tensor | None  # int64 [S]: no stop id is drawn at an index below it
    noise: bool  # False: the likeliest token is drawn in all slots
    truncation: bool  # by top-k, top-p and min-p
    usable_vocab: int  # ids from here on are never drawn
    mask: Tensor | None = None
    """Int32 [S, >= R, words]: bit v & 31 of word v >> 5 is set if token v may be drawn in a row."""


def sample_rows(
    logits: Tensor,
    draft: Tensor,
    positions: Tensor,
    tensors: SamplingTensors,
    stream: int = STREAM_TARGET,
) -> tuple[Tensor, Tensor]:
    """Compute `Kernels.sample_rows` by torch."""
    processed = process_rows(logits, draft, tensors)
    sampled = draw_rows(processed, positions, tensors, stream)
    return sampled, processed.gather(-1, sampled.unsqueeze(-1)).squeeze(-1).isfinite()


def row_distributions(logits: Tensor, draft: Tensor, tensors: SamplingTensors) -> Tensor:
    """Compute `Kernels.row_distributions` by torch."""
    processed = process_rows(logits, draft, tensors)
    highest, likeliest = processed.max(dim=-1, keepdim=True)
    certain = torch.zeros_like(processed).scatter_(-1, likeliest, 1.0)
    certain = torch.where(highest.isfinite(), certain, float("nan"))
    if not tensors.noise:
        return certain
    return torch.where(tensors.temperature.view(-1, 1, 1) > 0, processed.softmax(dim=-1), certain)


def process_rows(logits: Tensor, draft: Tensor, tensors: SamplingTensors) -> Tensor:
    """Return the target's processed logits [S, R, V] for the R = k + 1 rows of draft [S, k]."""
    logits = adjust_rows(logits, draft, tensors)
    if tensors.noise:
        temperature = tensors.temperature.view(-1, 1, 1)
        logits = torch.where(temperature > 0, logits / temperature, logits)
    if tensors.truncation:
        logits = truncate(logits, tensors.top_k, tensors.top_p, tensors.min_p)
    return logits


def adjust_rows(logits: Tensor, draft: Tensor, tensors: SamplingTensors) -> Tensor:
    """Apply the steps before temperature and truncation to logits [S, R, V]."""
    usable_vocab = tensors.usable_vocab
    if usable_vocab < logits.shape[-1]:
        logits = logits.clone()
        logits[..., usable_vocab:] = NEGATIVE_INFINITY
    if tensors.bias is not None:
        logits = logits + tensors.bias.unsqueeze(1)
    if tensors.generated is not None:
        logits = apply_penalties(logits, count_rows(tensors.generated, draft), tensors)
    if tensors.min_length is not None:
        logits = hide_stops(logits, tensors)
    if tensors.mask is not None:
        ids = torch.arange(logits.shape[-1], device=logits.device)
        words = tensors.mask[:, : logits.shape[1]].index_select(-1, ids >> 5)
        logits = logits.masked_fill(
            (words >> (ids & 31).to(torch.int32)) & 1 == 0, NEGATIVE_INFINITY
        )
    return logits


def draw_rows(
    processed: Tensor, positions: Tensor, tensors: SamplingTensors, stream: int = STREAM_TARGET
) -> Tensor:
    """Draw token ids [S, R] at absolute positions [S, R] from processed logits [S, R, V]."""
    if not tensors.noise:
        return processed.argmax(dim=-1)
    seed = tensors.seed.unsqueeze(-1).expand_as(positions)
    noise = gumbel(seed, positions, stream, processed.shape[-1])
    greedy = (tensors.temperature <= 0).view(-1, 1, 1)
    return torch.where(greedy, processed, processed + noise).argmax(dim=-1)


def count_rows(generated: Tensor, draft: Tensor) -> Tensor:
    """Return counts for every row of a window, as if earlier drafts were accepted: int32 [S, k + 1,
    V].

    generated int32 [S, V]; draft int64 [S, k].
    """
    k = draft.shape[1]
    counts = generated.unsqueeze(1).repeat(1, k + 1, 1)
    for i in range(k):
        ones = counts.new_ones(draft.shape[0], k - i, 1)
        counts[:, i + 1 :].scatter_add_(2, draft[:, i, None, None].expand_as(ones), ones)
    return counts


def apply_penalties(logits: Tensor, counts: Tensor, tensors: SamplingTensors) -> Tensor:
    """Return penalised logits [S, R, V] from counts [S, R, V] of generated tokens.

    Repetition divides positive and multiplies negative logits of tokens in the prompt or the output
    (Keskar et al. 2019); presence and frequency subtract for generated tokens only.
    """
    assert tensors.in_prompt is not None
    seen = (counts > 0) | tensors.in_prompt.unsqueeze(1)
    strength = tensors.repetition_penalty.view(-1, 1, 1)
    repeated = torch.where(logits > 0, logits / strength, logits * strength)
    logits = torch.where(seen, repeated, logits)
    logits = logits - tensors.frequency_penalty.view(-1, 1, 1) * counts
    return logits - tensors.presence_penalty.view(-1, 1, 1) * (counts > 0)


def hide_stops(logits: Tensor, tensors: SamplingTensors) -> Tensor:
    """Set stop ids to -inf in rows [S, R, V] whose token would end the text before its minimum
    length."""
    assert tensors.min_length is not None
    rows = torch.arange(logits.shape[1], device=logits.device)
    early = tensors.length.unsqueeze(-1) + rows < tensors.min_length.unsqueeze(-1)
    ids = tensors.stop_ids
    hidden = torch.zeros(ids.shape[0], logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
    hidden.scatter_(1, torch.where(ids < 0, logits.shape[-1], ids), True)
    return logits.masked_fill(early.unsqueeze(-1) & hidden[:, None, :-1], NEGATIVE_INFINITY)


def token_mass(logits: Tensor, highest: Tensor) -> Tensor:
    """Return exp(logits - highest) as an integer multiple of 2**-32, rounded down: int64, like
    logits.

    Every operation is a separate float32 operation or exact, so that all backends compute the same
    integers, and sums of them do not depend on an order. 0 where the difference is NaN or below
    -27.8.
    """
    power = (logits - highest).to(torch.float32) * FLOAT32_LOG2_E
    power = torch.where(power > LOWEST_EXPONENT, power, LOWEST_EXPONENT)
    integer = power.floor()
    fraction = power - integer
    value = torch.full_like(fraction, EXP2[0])
    for coefficient in EXP2[1:]:
        value = value * fraction + coefficient
    return (value * 2.0**MASS_BITS).to(torch.int64) >> (-integer).to(torch.int64)


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set logits [S, R, V] outside top-k, top-p and min-p to -inf; parameters [S].

    Exactly top_k are kept, ties to the lowest id (0 keeps all); top-p adds up by probability, then
    id, and keeps the token that crosses it; min-p is relative to the likeliest. The likeliest is
    always kept. Probabilities are `token_mass`, their sums exact.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    keep = ranks < torch.where(top_k > 0, top_k, logits.shape[-1]).view(-1, 1, 1)
    mass = token_mass(order.values, order.values[..., :1])
    kept_mass = torch.where(keep, mass, 0)
    before = kept_mass.cumsum(dim=-1) - kept_mass
    share = top_p.view(-1, 1, 1)
    limit = (share.double() * kept_mass.sum(dim=-1, keepdim=True).double()).ceil().long()
    keep = keep & ((before < limit) | (share >= 1))
    keep = keep & (mass >= (min_p.view(-1, 1, 1).double() * 2.0**MASS_BITS).ceil().long())
    keep = keep | (ranks == 0)
    kept_logits = torch.where(keep, order.values, NEGATIVE_INFINITY)
    return torch.full_like(logits, NEGATIVE_INFINITY).scatter_(-1, order.indices, kept_logits)
