"""From logits to tokens: one function for every row, speculated or not.

Order: bias, penalties, minimum length, temperature, top-k, top-p, min-p; then argmax, with keyed
noise at temperatures above zero. A row's result depends on its own logits, history and keys only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spd.kernels.philox import STREAM_TARGET, gumbel
from spd.runtime.penalties import TokenCounts, apply_penalties
from spd.runtime.request import SamplingParams
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.state import RoundState

NEGATIVE_INFINITY = float("-inf")


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Logits [S, R, V] with everything outside top-k, top-p and min-p at -inf; parameters [S].

    Exactly top_k are kept, ties to the lowest id (0 keeps all); top-p walks by probability, then id,
    and keeps the token that crosses it; min-p is relative to the likeliest. The likeliest is always kept.
    """
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    ranks = torch.arange(logits.shape[-1], device=logits.device)
    k = torch.where(top_k > 0, top_k, logits.shape[-1]).view(-1, 1, 1)
    keep = ranks < k
    probabilities = torch.where(keep, order.values, NEGATIVE_INFINITY).softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    keep = keep & ((before < top_p.view(-1, 1, 1)) | (top_p.view(-1, 1, 1) >= 1))
    keep = keep & (probabilities >= min_p.view(-1, 1, 1) * probabilities[..., :1])
    keep = keep | (ranks == 0)
    return torch.full_like(logits, NEGATIVE_INFINITY).scatter_(
        -1, order.indices, torch.where(keep, order.values, NEGATIVE_INFINITY)
    )


class Sampler:
    """Sampling parameters of every slot as tensors, and the draw."""

    def __init__(self, state: RoundState, vocab_size: int, usable_vocab: int) -> None:
        slots, device = state.slots, state.device
        self.state, self.vocab_size, self.usable_vocab, self.device = state, vocab_size, usable_vocab, device
        self.numbers = {
            name: torch.full((slots,), neutral, dtype=torch.float32, device=device)
            for name, neutral in (
                ("temperature", 0.0),
                ("top_p", 1.0),
                ("min_p", 0.0),
                ("repetition_penalty", 1.0),
                ("presence_penalty", 0.0),
                ("frequency_penalty", 0.0),
            )
        }
        self.top_k = torch.zeros(slots, dtype=torch.long, device=device)
        self.seed = torch.zeros(slots, dtype=torch.long, device=device)
        self.counts: TokenCounts | None = None
        self.bias: Tensor | None = None

    def admit(self, slot: int, params: SamplingParams, prompt: Tensor) -> None:
        """Write a slot's parameters; prompt int64 [n] feeds the penalties."""
        for name, tensor in self.numbers.items():
            tensor[slot] = getattr(params, name)
        self.top_k[slot] = params.top_k
        self.seed[slot] = params.seed
        if self.bias is not None:
            self.bias[slot] = 0
        if params.logit_bias:
            if self.bias is None:
                self.bias = torch.zeros(self.state.slots, self.vocab_size, device=self.device)
            for token_id, value in params.logit_bias:
                self.bias[slot, token_id] = value
        if SamplerClass.of(params).penalties and self.counts is None:
            self.counts = TokenCounts(self.state.slots, self.vocab_size, self.device)
        if self.counts is not None:
            self.counts.admit(slot, prompt)

    def process(self, logits: Tensor, draft: Tensor, needs: SamplerClass) -> Tensor:
        """The target's processed logits, float32 [S, R, V], for the R = k + 1 rows of draft [S, k]."""
        numbers = self.numbers
        if self.usable_vocab < logits.shape[-1]:
            logits = logits.clone()
            logits[..., self.usable_vocab :] = NEGATIVE_INFINITY
        if needs.bias and self.bias is not None:
            logits = logits + self.bias.unsqueeze(1)
        if needs.penalties and self.counts is not None:
            logits = apply_penalties(
                logits,
                self.counts.rows(draft),
                self.counts.in_prompt,
                numbers["repetition_penalty"],
                numbers["presence_penalty"],
                numbers["frequency_penalty"],
            )
        if needs.min_length:
            logits = self._hide_stops(logits)
        if needs.noise:
            temperature = numbers["temperature"].view(-1, 1, 1)
            logits = torch.where(temperature > 0, logits / temperature, logits)
        if needs.truncation:
            logits = truncate(logits, self.top_k, numbers["top_p"], numbers["min_p"])
        return logits

    def _hide_stops(self, logits: Tensor) -> Tensor:
        """Stop ids at -inf in rows whose token would end the text before its minimum length."""
        rows = torch.arange(logits.shape[1], device=logits.device)
        early = self.state.length.unsqueeze(-1) + rows < self.state.min_length.unsqueeze(-1)
        ids = self.state.stop_ids
        hidden = torch.zeros(ids.shape[0], logits.shape[-1] + 1, dtype=torch.bool, device=logits.device)
        hidden.scatter_(1, torch.where(ids < 0, logits.shape[-1], ids), True)
        return logits.masked_fill(early.unsqueeze(-1) & hidden[:, None, :-1], NEGATIVE_INFINITY)

    def draw(self, processed: Tensor, positions: Tensor, needs: SamplerClass) -> Tensor:
        """Token ids [S, R] at absolute positions [S, R] from processed logits [S, R, V]."""
        if not needs.noise:
            return processed.argmax(dim=-1)
        seed = self.seed.unsqueeze(-1).expand_as(positions)
        noise = gumbel(seed, positions, STREAM_TARGET, processed.shape[-1])
        greedy = (self.numbers["temperature"] <= 0).view(-1, 1, 1)
        return torch.where(greedy, processed, processed + noise).argmax(dim=-1)

    def draw_draft(self, logits: Tensor, positions: Tensor, needs: SamplerClass) -> Tensor:
        """A drafter's tokens [S, R] from its logits [S, R, V']: bias, temperature, the target's noise.

        Sharing the noise makes the draft likely to equal the target's draw; it decides nothing.
        """
        limit = min(self.usable_vocab, logits.shape[-1])
        logits = logits[..., :limit]
        if needs.bias and self.bias is not None:
            logits = logits + self.bias[:, None, :limit]
        if needs.noise:
            temperature = self.numbers["temperature"].view(-1, 1, 1)
            logits = torch.where(temperature > 0, logits / temperature, logits)
        return self.draw(logits, positions, needs)
