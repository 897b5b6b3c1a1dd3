"""Every slot's sampling parameters as tensors, and the draws of target and drafter from their logits.

What is done to logits stands in `kernels/sampling.py`; here is whose parameters it is done with.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from spd.kernels.dispatch import Kernels
from spd.kernels.sampling import SamplingTensors, draw_rows, process_rows
from spd.runtime.grammar import mask_width
from spd.runtime.model_runner import ModelRunner
from spd.runtime.penalties import TokenCounts
from spd.runtime.request import SamplingParams
from spd.runtime.sampler_class import SamplerClass
from spd.runtime.state import RoundState
from spd.runtime.transfer import upload


class Sampler:
    """Sampling parameters of every slot as tensors, and the draw."""

    def __init__(self, state: RoundState, vocab_size: int, usable_vocab: int, kernels: Kernels) -> None:
        slots, device = state.slots, state.device
        self.kernels = kernels
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
        self.mask: Tensor | None = None

    def admit(
        self, slot: int, params: SamplingParams, prompt: Tensor, generated: Tensor | None = None
    ) -> None:
        """Write a slot's parameters; prompt int64 [n] and what was generated before feed the penalties."""
        for name, tensor in self.numbers.items():
            tensor[slot].fill_(getattr(params, name))
        self.top_k[slot].fill_(params.top_k)
        self.seed[slot].fill_(params.seed)
        if self.bias is not None:
            self.bias[slot].fill_(0)
        if self.mask is not None:
            self.mask[slot].fill_(-1)
        if params.logit_bias:
            if self.bias is None:
                self.bias = torch.zeros(self.state.slots, self.vocab_size, device=self.device)
            for token_id, value in params.logit_bias:
                self.bias[slot, token_id].fill_(value)
        if SamplerClass.of(params).penalties and self.counts is None:
            self.counts = TokenCounts(self.state.slots, self.vocab_size, self.device)
        if self.counts is not None:
            self.counts.admit(slot, prompt, generated)

    def allow(self, slot: int, rows: Tensor) -> None:
        """Let the next round draw only what masks allow: int32 [R, words] on the host, not written again."""
        if self.mask is None:
            words = mask_width(self.vocab_size)
            shape = (self.state.slots, self.state.max_draft + 1, words)
            self.mask = torch.full(shape, -1, dtype=torch.int32, device=self.device)
        self.mask[slot, : rows.shape[0]] = upload(rows, self.device)

    def tensors(self, needs: SamplerClass) -> SamplingTensors:
        """The parameters and histories of all slots, as far as these steps read them."""
        state, counts = self.state, self.counts if needs.penalties else None
        return SamplingTensors(
            **self.numbers,
            top_k=self.top_k,
            seed=self.seed,
            bias=self.bias if needs.bias else None,
            in_prompt=counts.in_prompt if counts is not None else None,
            generated=counts.generated if counts is not None else None,
            stop_ids=state.stop_ids,
            length=state.length,
            min_length=state.min_length,
            mask=self.mask if needs.grammar else None,
        )

    def process(self, logits: Tensor, draft: Tensor, needs: SamplerClass) -> Tensor:
        """The target's processed logits, float32 [S, R, V], for the R = k + 1 rows of draft [S, k]."""
        return process_rows(logits, draft, self.tensors(needs), needs, self.usable_vocab)

    def draw(self, processed: Tensor, positions: Tensor, needs: SamplerClass) -> Tensor:
        """Token ids [S, R] at absolute positions [S, R] from processed logits [S, R, V]."""
        return draw_rows(processed, positions, self.tensors(needs), needs)

    def sample(self, logits: Tensor, draft: Tensor, needs: SamplerClass) -> tuple[Tensor, Tensor]:
        """The target's tokens [S, R] from its logits [S, R, V], and whether each is finite."""
        rows = torch.arange(logits.shape[1], device=logits.device)
        positions = self.state.length.unsqueeze(-1) + rows
        drawn: tuple[Tensor, Tensor] = self.kernels.sample_rows(
            logits, draft, positions, self.tensors(needs), needs, self.usable_vocab
        )
        return drawn

    def draw_fused(
        self, runner: ModelRunner, hidden: Tensor, step: int, needs: SamplerClass
    ) -> tuple[Tensor, Tensor] | None:
        """Tokens [S, R] at positions length + step and on, from hidden [S, R, hidden], where a head can draw.

        None where the model has no such head, or where the draw needs the logits themselves. Whether
        each token is finite comes second.
        """
        if needs.truncation or needs.penalties or needs.bias or needs.min_length or needs.grammar:
            return None
        return runner.sample(
            hidden,
            min(self.usable_vocab, runner.model.vocab_size),
            self.seed,
            self.state.length,
            step,
            self.numbers["temperature"],
        )

    def draw_draft(self, runner: ModelRunner, hidden: Tensor, step: int, needs: SamplerClass) -> Tensor:
        """A drafter's tokens [S, 1] from its hidden [S, 1, hidden]: bias, temperature, the target's noise.

        Sharing the noise makes the draft likely to equal the target's draw; it decides nothing.
        """
        wanted = SamplerClass(noise=needs.noise, bias=needs.bias)
        drawn = self.draw_fused(runner, hidden, step, wanted)
        if drawn is not None:
            return drawn[0]
        logits = runner.logits(hidden)
        vocab_size, state = logits.shape[-1], self.state
        sampled: Tensor = self.kernels.sample_rows(
            logits,
            state.draft[:, :0],
            (state.length + step).unsqueeze(-1),
            replace(self.tensors(wanted), bias=self._bias_over(vocab_size) if wanted.bias else None),
            wanted,
            min(self.usable_vocab, vocab_size),
        )[0]
        return sampled

    def _bias_over(self, vocab_size: int) -> Tensor | None:
        """The bias of a model with that many ids, which may be padded otherwise than the target's: [S, V]."""
        if self.bias is None or self.bias.shape[1] == vocab_size:
            return self.bias
        return pad(self.bias, (0, vocab_size - self.bias.shape[1])).contiguous()
