"""Every slot's sampling parameters as tensors, and the draws of target and drafter from their logits.

What is done to logits stands in `kernels/sampling/sampling.py`; here is whose parameters it is done with.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from spd.kernels.interface import Kernels
from spd.kernels.linear.skinny_linear import Draw
from spd.kernels.sampling.draft_verify import STREAM_DRAFT, row_stream
from spd.kernels.sampling.philox import STREAM_TARGET
from spd.kernels.sampling.sampling import SamplingTensors
from spd.runtime.round.limits import mask_width
from spd.runtime.round.model_runner import ModelRunner
from spd.runtime.round.sampling_params import SamplingParams, SamplingSteps
from spd.runtime.round.state import RoundState
from spd.runtime.round.transfer import upload

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""The parameters that are float32 numbers; their defaults change nothing."""


class Sampler:
    """Sampling parameters of every slot as tensors, and the draw."""

    slot_attributes = (
        "state",
        "numbers",
        "top_k",
        "seed",
        "in_prompt",
        "generated",
        "bias",
        "mask",
        "draft_distributions",
    )

    def __init__(
        self, state: RoundState, vocab_size: int, usable_vocab: int, kernels: Kernels
    ) -> None:
        slots = state.slots
        device = state.device
        self.kernels = kernels
        self.state = state
        self.vocab_size = vocab_size
        self.usable_vocab = usable_vocab
        self.numbers = {
            name: torch.full(
                (slots,), getattr(SamplingParams, name), dtype=torch.float32, device=device
            )
            for name in NUMBERS
        }
        self.top_k = torch.zeros(slots, dtype=torch.long, device=device)
        self.seed = torch.zeros(slots, dtype=torch.long, device=device)
        self.in_prompt, self.generated, self.bias = (
            torch.zeros(slots, vocab_size, dtype=dtype, device=device)
            for dtype in (torch.bool, torch.int32, torch.float32)
        )
        """Which tokens a slot's prompt holds, how often each was generated, and what is added: [S, V]."""
        self.mask: Tensor | None = None
        self.draft_distributions: Tensor | None = None
        """What each draft was drawn from, [S, max_draft, V]; kept only for rules that test it."""

    def allocate_draft_distributions(self) -> None:
        """From now on drafters draw with noise of their own, and what from is kept for `verify`."""
        shape = (self.state.slots, self.state.max_draft, self.vocab_size)
        self.draft_distributions = torch.zeros(shape, device=self.state.device)

    def admit(
        self, slot: int, params: SamplingParams, prompt: Tensor, generated: Tensor | None = None
    ) -> None:
        """Write a slot's parameters; prompt int64 [n] and what was generated before feed the penalties."""
        for name, tensor in self.numbers.items():
            tensor[slot].fill_(getattr(params, name))
        self.top_k[slot].fill_(params.top_k)
        self.seed[slot].fill_(params.seed)
        for table in (self.in_prompt, self.generated, self.bias):
            table[slot].zero_()
        if self.mask is not None:
            self.mask[slot].fill_(-1)
        for token_id, value in params.logit_bias:
            self.bias[slot, token_id].fill_(value)
        self.in_prompt[slot, prompt] = True
        if generated is not None and generated.shape[0]:
            self.generated[slot].scatter_add_(
                0, generated, torch.ones_like(generated, dtype=torch.int32)
            )

    def set_masks(self, slot: int, rows: Tensor) -> None:
        """Let the next round draw only what masks allow: int32 [R, words] on the host, not written again."""
        if self.mask is None:
            shape = (self.state.slots, self.state.max_draft + 1, mask_width(self.vocab_size))
            self.mask = torch.full(shape, -1, dtype=torch.int32, device=self.state.device)
        self.mask[slot, : rows.shape[0]] = upload(rows, self.state.device)

    def tensors(self, needs: SamplingSteps, usable_vocab: int | None = None) -> SamplingTensors:
        """The parameters and histories of all slots, as far as these steps read them.

        usable_vocab: of a drafter, where it knows fewer ids.
        """
        state = self.state
        return SamplingTensors(
            **self.numbers,
            top_k=self.top_k,
            seed=self.seed,
            bias=self.bias if needs.bias else None,
            in_prompt=self.in_prompt if needs.penalties else None,
            generated=self.generated if needs.penalties else None,
            stop_ids=state.stop_ids,
            length=state.length,
            min_length=state.min_length if needs.min_length else None,
            noise=needs.noise,
            truncation=needs.truncation,
            usable_vocab=usable_vocab or self.usable_vocab,
            mask=self.mask if needs.grammar else None,
        )

    def sample(self, logits: Tensor, draft: Tensor, needs: SamplingSteps) -> tuple[Tensor, Tensor]:
        """The target's tokens [S, R] from its logits [S, R, V], and whether each is finite."""
        positions = self._positions(logits)
        return self.kernels.sample_rows(logits, draft, positions, self.tensors(needs))

    def verify(
        self,
        logits: Tensor,
        draft: Tensor,
        num_drafts: Tensor,
        needs: SamplingSteps,
        by_block: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Accept drafts [S, k] by their probability: tokens [S, R], whether each is finite, accepted [S].

        logits [S, R, V]; tokens as in `draft_verify`, by its block rule or one by one. Drafts are tested
        against the laws that are kept, and are certain where none are.
        """
        laws = self.kernels.row_distributions(logits, draft, self.tensors(needs))
        draft_distributions = self.draft_distributions
        if draft_distributions is not None:
            draft_distributions = draft_distributions[:, : draft.shape[1]]
        positions = self._positions(logits)
        tokens, accepted = self.kernels.verify_drafts(
            laws, draft_distributions, draft, num_drafts, self.seed, positions, by_block
        )
        finite = laws.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1) > 0
        return tokens, finite, accepted

    def _positions(self, logits: Tensor) -> Tensor:
        """Absolute positions [S, R] of the tokens that logits [S, R, V] are for."""
        return self.state.length.unsqueeze(-1) + torch.arange(logits.shape[1], device=logits.device)

    def draw_fused(
        self, runner: ModelRunner, hidden: Tensor, step: int, needs: SamplingSteps
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens [S, R] at positions length + step and on, from hidden [S, R, hidden], where a head can draw.

        None where the model has no such head, or where the draw needs the logits themselves. Whether
        each token is finite comes second.
        """
        if needs.truncation or needs.penalties or needs.bias or needs.min_length or needs.grammar:
            return None
        keys = (self.seed, self.state.length, step, self.numbers["temperature"])
        draw = Draw(*keys, min(self.usable_vocab, runner.model.vocab_size))
        return runner.sample(hidden, draw)

    def draw_draft(
        self, runner: ModelRunner, hidden: Tensor, step: int, needs: SamplingSteps
    ) -> Tensor:
        """A drafter's tokens [S, 1] from its hidden [S, 1, hidden]: bias, temperature, the target's noise.

        Sharing the noise makes the draft likely to equal the target's draw; it decides nothing. Where laws
        are kept it would, so that the noise is the draft's own there.
        """
        wanted = SamplingSteps(noise=needs.noise, bias=needs.bias)
        if self.draft_distributions is None:
            drawn = self.draw_fused(runner, hidden, step, wanted)
            if drawn is not None:
                return drawn[0]
        logits = runner.logits(hidden)
        nothing = self.state.draft[:, :0]
        vocab_size = logits.shape[-1]
        usable = min(self.usable_vocab, vocab_size)
        tensors = self.tensors(wanted, usable)
        if tensors.bias is not None and tensors.bias.shape[1] != vocab_size:  # padded otherwise
            bias = pad(tensors.bias, (0, vocab_size - tensors.bias.shape[1])).contiguous()
            tensors = replace(tensors, bias=bias)
        stream = (
            STREAM_TARGET if self.draft_distributions is None else row_stream(STREAM_DRAFT, step)
        )
        sampled: Tensor
        positions = self._positions(logits) + step
        sampled, finite = self.kernels.sample_rows(logits, nothing, positions, tensors, stream)
        if self.draft_distributions is not None:
            laws = self.kernels.row_distributions(logits, nothing, tensors)
            # What no law of its own drew, since its logits are broken, is certain.
            laws = torch.where(finite.unsqueeze(-1), laws, 0).scatter_add_(
                -1, sampled.unsqueeze(-1), (~finite).unsqueeze(-1).to(laws.dtype)
            )
            # A silent slot's drafts wait for their masks, and what they were drawn from with them.
            kept = self.draft_distributions[:, step, :usable]
            kept.copy_(torch.where(self.state.active.unsqueeze(-1), laws[:, 0, :usable], kept))
        return sampled

    def make_certain(self, k: int) -> None:
        """Of k drafts, those that prompt lookup made instead of a model were drawn from nothing."""
        if self.draft_distributions is None:
            return
        state = self.state
        laws = self.draft_distributions[:, :k]
        certain = torch.zeros_like(laws).scatter_(-1, state.draft[:, :k].unsqueeze(-1), 1.0)
        looked_up = (state.active & (state.match > 0)).view(-1, 1, 1)
        laws.copy_(torch.where(looked_up, certain, laws))
