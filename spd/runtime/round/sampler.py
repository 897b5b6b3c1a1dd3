"""Every slot's sampling parameters as tensors, and sampling from the logits of target and drafter.

The operations on logits are in `kernels/sampling/sampling.py`; this file passes them the
parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

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

FLOAT_PARAMS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""The parameters that are float32 numbers; with their defaults a step changes nothing."""


class DraftGuide(Protocol):
    """Follows the grammars of slots along the drafts of a round, where the host is the device."""

    def write_masks(self, step: int, rows: Tensor) -> None:
        """Write the masks of the draft at `step` to rows int32 [S, 1, words], in place.

        The drafts before it stand in the round's state. Rows of slots without a grammar stay.
        """


def _call(function: Callable[..., None], *arguments: object) -> None:
    function(*arguments)


class Sampler:
    """Sampling parameters of every slot as tensors, and the sampling of tokens by them."""

    slot_attributes = (  # see `narrow_to_slots`
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
            for name in FLOAT_PARAMS
        }
        self.top_k = torch.zeros(slots, dtype=torch.long, device=device)
        self.seed = torch.zeros(slots, dtype=torch.long, device=device)
        self.in_prompt = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        """True for the tokens of a slot's prompt, [S, V]."""
        self.generated = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        """How often a slot generated each token, [S, V]."""
        self.bias = torch.zeros(slots, vocab_size, dtype=torch.float32, device=device)
        """The values that are added to a slot's logits, [S, V]."""
        self.mask: Tensor | None = None
        """The masks of a slot's next rows, int32 [S, max_draft + 1, words].

        None until one is set.
        """
        self.draft_distributions: Tensor | None = None
        """The distribution of each draft, [S, max_draft, V].

        Only for rules that test probabilities.
        """
        self.guide: DraftGuide | None = None
        """Masks the drafts of rounds with `needs.grammar`; None: drafts are not masked."""
        self.call_host: Callable[..., None] = _call
        """Calls a function of the host within a round, which may be a record of calls."""

    def allocate_draft_distributions(self) -> None:
        """Allocate `draft_distributions`: drafters then sample with noise of their own, and store
        their distributions there for `verify_drafts`.
        """
        shape = (self.state.slots, self.state.max_draft, self.vocab_size)
        self.draft_distributions = torch.zeros(shape, device=self.state.device)

    def admit(
        self, slot: int, params: SamplingParams, prompt: Tensor, generated: Tensor | None = None
    ) -> None:
        """Write a slot's parameters and its history of tokens; its mask then allows every token.

        prompt, generated: ids int64 [n] that penalties count, `generated` before a preemption.
        """
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
        """Write the masks of the rows of a slot's next round, and allocate them at first use.

        rows: int32 [R, words] on the host; the caller does not modify them afterwards.
        """
        if self.mask is None:
            shape = (self.state.slots, self.state.max_draft + 1, mask_width(self.vocab_size))
            self.mask = torch.full(shape, -1, dtype=torch.int32, device=self.state.device)
        self.mask[slot, : rows.shape[0]] = upload(rows, self.state.device)

    def sampling_tensors(
        self, needs: SamplingSteps, usable_vocab: int | None = None
    ) -> SamplingTensors:
        """Return the parameters and histories of all slots that the steps `needs` read.

        usable_vocab: that of a drafter with fewer ids than the target.
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

    def sample_rows(
        self, logits: Tensor, draft: Tensor, needs: SamplingSteps
    ) -> tuple[Tensor, Tensor]:
        """Sample the target's tokens [S, R] from logits [S, R, V], in each row as if the drafts
        before it were accepted.

        The second tensor is True where the logits behind a token are finite.
        """
        positions = self._positions(logits)
        return self.kernels.sample_rows(logits, draft, positions, self.sampling_tensors(needs))

    def verify_drafts(
        self,
        logits: Tensor,
        draft: Tensor,
        num_drafts: Tensor,
        needs: SamplingSteps,
        by_block: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Accept drafts [S, k] by their probability under the target's logits [S, R, V].

        Returns tokens [S, R] as in `draft_verify`, which of them are finite, and the accepted
        drafts [S]. by_block: True for the block rule, False for one draft after the other. The
        drafts were drawn from `draft_distributions`; without these each draft is certain.
        """
        distributions = self.kernels.row_distributions(logits, draft, self.sampling_tensors(needs))
        draft_distributions = self.draft_distributions
        if draft_distributions is not None:
            draft_distributions = draft_distributions[:, : draft.shape[1]]
        positions = self._positions(logits)
        tokens, accepted = self.kernels.verify_drafts(
            target=distributions,
            draft_probs=draft_distributions,
            draft=draft,
            num_drafts=num_drafts,
            seed=self.seed,
            positions=positions,
            by_block=by_block,
        )
        finite = distributions.gather(-1, tokens.clamp(min=0).unsqueeze(-1)).squeeze(-1) > 0
        return tokens, finite, accepted

    def _positions(self, logits: Tensor) -> Tensor:
        """Return the absolute positions [S, R] of the tokens to be drawn from logits [S, R, V]."""
        return self.state.length.unsqueeze(-1) + torch.arange(logits.shape[1], device=logits.device)

    def draw_fused(
        self, runner: ModelRunner, hidden: Tensor, step: int, needs: SamplingSteps
    ) -> tuple[Tensor, Tensor] | None:
        """Sample tokens [S, R] in the model's head from hidden [S, R, hidden], without logits.

        Their positions begin at length + step. The second tensor is True where the logits behind a
        token are finite. None if the head cannot sample, or if a sampling step needs the logits.
        """
        if needs.truncation or needs.penalties or needs.bias or needs.min_length or needs.grammar:
            return None
        draw = Draw(
            seed=self.seed,
            first=self.state.length,
            step=step,
            temperature=self.numbers["temperature"],
            usable_vocab=min(self.usable_vocab, runner.model.vocab_size),
        )
        return runner.sample_in_head(hidden, draw)

    def draw_draft(
        self, runner: ModelRunner, hidden: Tensor, step: int, needs: SamplingSteps
    ) -> Tensor:
        """Sample a drafter's tokens [S, 1] from hidden [S, 1, hidden] with bias and temperature.

        With the target's noise a draft is likely to equal the target's sample, and the text does
        not depend on the draft. The rules that test probabilities need independent noise, so with
        `draft_distributions` the draft has its own.
        """
        is_guided = needs.grammar and self.guide is not None
        draft_needs = SamplingSteps(noise=needs.noise, bias=needs.bias, grammar=is_guided)
        if self.draft_distributions is None:
            fused = self.draw_fused(runner, hidden, step, draft_needs)
            if fused is not None:
                return fused[0]
        return self.draw_from_logits(runner.logits(hidden), step, draft_needs)

    def draw_block_drafts(
        self,
        runner: ModelRunner,
        hidden: Tensor,
        needs: SamplingSteps,
        refine: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        """Sample the tokens [S, k] of a block drafter from hidden [S, k, hidden], as `draw_draft`
        does.

        refine: draws them in turn from logits that each token changes; see `Refiner`. Writes
        `draft_distributions` where these are stored.
        """
        draft_needs = SamplingSteps(noise=needs.noise, bias=needs.bias)
        is_coupled = self.draft_distributions is None
        if is_coupled and refine is None:
            fused = self.draw_fused(runner, hidden, 0, draft_needs)
            if fused is not None:
                return fused[0]
        logits = runner.logits(hidden)
        draw = partial(self.draw_from_logits, draft_needs=draft_needs)
        if refine is not None:
            if draft_needs.bias:  # before candidates are chosen
                logits = logits + self._padded_bias(logits.shape[-1]).unsqueeze(1)
                draft_needs = replace(draft_needs, bias=False)
            return refine(logits, draw=partial(self.draw_from_logits, draft_needs=draft_needs))
        if is_coupled:
            return draw(logits, 0)
        return torch.cat(
            [draw(logits[:, step : step + 1], step) for step in range(logits.shape[1])], 1
        )

    def draw_from_logits(self, logits: Tensor, step: int, draft_needs: SamplingSteps) -> Tensor:
        """Sample a drafter's tokens [S, R] from logits [S, R, V], the first at position length +
        step.

        With `draft_distributions`, R is 1, and the distribution of each token is stored there for
        the active slots. With a guide the grammar masks the logits.
        """
        logits = logits.contiguous()
        no_draft = self.state.draft[:, :0]
        vocab_size = logits.shape[-1]
        usable = min(self.usable_vocab, vocab_size)
        tensors = self.sampling_tensors(draft_needs, usable)
        if tensors.bias is not None:
            tensors = replace(tensors, bias=self._padded_bias(vocab_size))
        if draft_needs.grammar and self.guide is not None:
            words = mask_width(max(self.vocab_size, vocab_size))
            rows = torch.full((self.state.slots, 1, words), -1, dtype=torch.int32)
            target_rows = rows[..., : mask_width(self.vocab_size)]
            self.call_host(self.guide.write_masks, step, target_rows)
            tensors = replace(tensors, mask=rows)
        stream = (
            STREAM_TARGET if self.draft_distributions is None else row_stream(STREAM_DRAFT, step)
        )
        positions = self._positions(logits) + step
        sampled: Tensor
        sampled, finite = self.kernels.sample_rows(logits, no_draft, positions, tensors, stream)
        if self.draft_distributions is not None:
            distributions = self.kernels.row_distributions(logits, no_draft, tensors)
            # A token that is drawn from logits that are not finite counts as certain.
            distributions = torch.where(finite.unsqueeze(-1), distributions, 0).scatter_add_(
                -1, sampled.unsqueeze(-1), (~finite).unsqueeze(-1).to(distributions.dtype)
            )
            # The drafts of an inactive slot wait for their masks, so their distributions stay.
            stored = self.draft_distributions[:, step, :usable]
            is_active = self.state.active.unsqueeze(-1)
            stored.copy_(torch.where(is_active, distributions[:, 0, :usable], stored))
        return sampled

    def _padded_bias(self, vocab_size: int) -> Tensor:
        """Return the slots' biases [S, V] for a drafter's vocabulary, padded as it is."""
        missing = vocab_size - self.bias.shape[1]
        return self.bias if not missing else pad(self.bias, (0, missing)).contiguous()

    def store_certain_distributions(self, k: int) -> None:
        """Store certain distributions for the k drafts of slots that prompt lookup drafted for, not
        a model; do nothing where no distributions are stored.

        Where they are, k is fixed, and lookup continues no drafts of a model.
        """
        if self.draft_distributions is None:
            return
        state = self.state
        stored = self.draft_distributions[:, :k]
        certain = torch.zeros_like(stored).scatter_(-1, state.draft[:, :k].unsqueeze(-1), 1.0)
        is_lookup = (state.active & (state.match > 0)).view(-1, 1, 1)
        stored.copy_(torch.where(is_lookup, certain, stored))
