"""What the tests of sampling and truncation share: random windows with parameters of every kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from spd.kernels.sampling import sampling
from spd.kernels.sampling.philox import STREAM_TARGET, gumbel
from spd.kernels.sampling.sampling import SamplingTensors, process_rows
from tests.kernels.forms import Form

INFINITY = math.inf
NAN = math.nan


@dataclass(frozen=True)
class Steps:
    noise: bool = True
    truncation: bool = True
    penalties: bool = True
    bias: bool = True
    min_length: bool = True
    grammar: bool = False


EVERY_STEP = Steps(grammar=True)
PLAIN = Steps(truncation=False, penalties=False, bias=False, min_length=False)


def with_steps(tensors: SamplingTensors, steps: Steps, **overrides: Any) -> SamplingTensors:
    """Return the tensors that these steps need, and no others."""
    is_needed = {"bias": steps.bias, "min_length": steps.min_length, "mask": steps.grammar}
    is_needed |= dict.fromkeys(("in_prompt", "generated"), steps.penalties)
    overrides |= {name: None for name, needed in is_needed.items() if not needed}
    return replace(tensors, noise=steps.noise, truncation=steps.truncation, **overrides)


def map_tensors(tensors: SamplingTensors, change: Callable[[Tensor], Tensor]) -> SamplingTensors:
    """Return the parameters with `change` applied to each tensor."""
    changed: dict[str, Any] = {
        name: change(value) for name, value in vars(tensors).items() if isinstance(value, Tensor)
    }
    return replace(tensors, **changed)


class SamplesRows(Protocol):
    """A form of the kernels that draws every row's token."""

    def sample_rows(
        self,
        logits: Tensor,
        draft: Tensor,
        positions: Tensor,
        tensors: SamplingTensors,
        stream: int = STREAM_TARGET,
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Case:
    """Random windows; two are equal if they are one object, for which results are remembered."""

    logits: Tensor
    draft: Tensor
    positions: Tensor
    tensors: SamplingTensors
    usable_vocab: int

    def with_steps(self, steps: Steps) -> SamplingTensors:
        return with_steps(self.tensors, steps, usable_vocab=self.usable_vocab)

    def sample(
        self, ops: SamplesRows, steps: Steps, stream: int = STREAM_TARGET
    ) -> tuple[Tensor, Tensor]:
        """Return the tokens and flags that a form's sampler draws with some steps."""
        return ops.sample_rows(
            self.logits, self.draft, self.positions, self.with_steps(steps), stream
        )

    def only(self, slots: list[int]) -> Case:
        """Return the case of some slots, in another order."""
        tensors = map_tensors(self.tensors, lambda tensor: tensor[slots])
        return Case(
            self.logits[slots],
            self.draft[slots],
            self.positions[slots],
            tensors,
            self.usable_vocab,
        )


@lru_cache(maxsize=128)
def random_case(
    slots: int, k: int, vocab: int, seed: int, device: str, coarse: bool = False
) -> Case:
    """Return random logits, some -inf, on a grid with many ties if coarse, and parameters of every
    kind."""
    g = torch.Generator().manual_seed(seed)

    def pick(*values: float) -> Tensor:
        return torch.tensor(values)[torch.randint(len(values), (slots,), generator=g)]

    def chance(share: float, *shape: int) -> Tensor:
        return torch.rand(shape, generator=g) < share

    logits = 4 * torch.randn(slots, k + 1, vocab, generator=g)
    if coarse:
        logits = (2 * logits).round() / 2
    logits[chance(0.05, slots, k + 1, vocab)] = -INFINITY
    tensors = SamplingTensors(
        temperature=pick(0.0, 0.3, 0.9, 1.0, 1.7, 6.0),
        top_p=pick(1.0, 1.0, 0.02, 0.5, 0.9, 0.99),
        min_p=pick(0.0, 0.0, 0.02, 0.3),
        repetition_penalty=pick(1.0, 0.7, 1.3),
        presence_penalty=pick(0.0, 0.6, -1.1),
        frequency_penalty=pick(0.0, 0.35, -0.2),
        top_k=pick(0, 0, 1, 3, 20, vocab // 2, vocab - 1, vocab, vocab + 7).long(),
        seed=torch.randint(0, 2**63 - 1, (slots,), generator=g),
        bias=torch.where(
            chance(0.1, slots, vocab), 3 * torch.randn(slots, vocab, generator=g), 0.0
        ),
        in_prompt=chance(0.2, slots, vocab),
        generated=torch.randint(0, 4, (slots, vocab), generator=g, dtype=torch.int32)
        * chance(0.2, slots, vocab),
        stop_ids=torch.randint(-1, vocab, (slots, 5), generator=g),
        length=torch.randint(1, 20, (slots,), generator=g),
        min_length=torch.randint(1, 24, (slots,), generator=g),
        noise=True,
        truncation=True,
        usable_vocab=vocab,
        # A row more than there are, of which some allow everything.
        mask=torch.randint(
            -(2**31), 2**31, (slots, k + 2, -(-vocab // 32)), generator=g, dtype=torch.int32
        )
        | -chance(0.3, slots, k + 2, 1).int(),
    )
    # Few different ids, so that windows repeat a draft.
    draft = torch.randint(min(vocab, 3), (slots, k), generator=g)
    positions = torch.randint(2**20, (slots, 1), generator=g) + torch.arange(k + 1)
    tensors = map_tensors(tensors, lambda tensor: tensor.to(device))
    return Case(
        logits.to(device),
        draft.to(device),
        positions.to(device),
        tensors,
        max(1, vocab - vocab // 9),
    )


def slot_count(form: Form, interpreted_count: int) -> int:
    """Return the number of slots: few in the interpreter, which is slow."""
    return (
        10 * interpreted_count
        if form.name != "triton"
        else interpreted_count
        if form.device == "cpu"
        else 100 * interpreted_count
    )


@lru_cache(maxsize=128)
def reference_draws(case: Case, steps: Steps) -> tuple[Tensor, Tensor]:
    """Return the reference's tokens and flags, computed once for all forms of the kernels."""
    return case.sample(sampling, steps)


def assert_same_draws(form: Form, case: Case, steps: Steps) -> Tensor:
    """Assert a form's tokens and flags equal the reference's, except where a last bit of noise
    decides."""
    sampled, finite = case.sample(form.ops, steps)
    expected, expected_finite = reference_draws(case, steps)
    assert sampled.dtype == torch.int64 and finite.dtype == torch.bool
    assert torch.equal(finite, expected_finite)
    if not torch.equal(sampled, expected):
        scores = process_rows(case.logits, case.draft, case.with_steps(steps))
        seed = case.tensors.seed.unsqueeze(-1).expand_as(case.positions)
        noisy = scores + gumbel(seed, case.positions, STREAM_TARGET, scores.shape[-1])
        scores = torch.where(
            (case.tensors.temperature > 0).view(-1, 1, 1) & steps.noise, noisy, scores
        )
        margin = scores.gather(-1, expected[..., None]) - scores.gather(-1, sampled[..., None])
        assert (margin.squeeze(-1)[sampled != expected] < 1e-5).all()
        assert (sampled != expected).float().mean() < 0.01
    return sampled


EXTREMES: dict[str, tuple[list[float], int, float]] = {
    "all equal": ([2.5] * 17, 5, 1.0),
    "all equal, by mass": ([2.5] * 17, 0, 0.5),
    "all equal, both": ([2.5] * 17, 9, 0.4),
    "all equal, more of both": ([2.5] * 5, 4, 0.6),
    "ties over many chunks": ([2.5] * 150, 90, 1.0),
    "a long tail": ([0.0] + [-21.5] * 150, 0, 1.0 - 2.0**-24),
    "infinities by mass": ([1.0, INFINITY, 2.0, INFINITY], 0, 0.5),
    "infinities by both": ([1.0, INFINITY, 2.0, INFINITY], 3, 0.5),
    "not a number, by mass": ([1.0, NAN, 2.0, NAN, INFINITY], 0, 0.5),
    "not a number, by count": ([1.0, NAN, 2.0, NAN, INFINITY], 2, 1.0),
    "one token": ([1.0], 0, 0.5),
    "two zeros": ([-0.0, 0.0, -0.0, 0.0], 2, 1.0),
    "both sides of zero": ([-1e-40, 1e-40, 0.0, -0.0, 2.0, -2.0], 3, 1.0),
    "far apart": ([3e38, -3e38, 1.0, 3e38, -1.0], 3, 0.9),
    "below all bounds": ([50.0, 0.0, -50.0, -1e30, -1e30, -1e30], 5, 1.0),
    "a mass of nothing": ([90.0, 0.0, -5.0, 1.0], 0, 0.999999),
    "hidden tokens": ([-INFINITY, 1.0, -INFINITY, 0.5], 3, 1.0),
    "hidden tokens, by mass": ([-INFINITY, 1.0, -INFINITY, 0.5], 0, 0.7),
    "the smallest share": ([1.0, 3.0, 3.0, 2.0], 0, 1e-9),
    "the largest share": ([1.0, 3.0, 3.0, 2.0], 0, 1.0 - 2.0**-24),
    "on a quarter": ([5.0] * 4, 0, 0.25),
    "past a quarter": ([5.0] * 4, 0, 0.25 + 2.0**-25),
    "neighbouring floats": ([1.0, 1.0 + 2.0**-23, 1.0 - 2.0**-24, 1.0], 2, 1.0),
    "both end in one tie": ([3.0, 2.0, 2.0, 2.0, 2.0], 4, 0.8),
    "half of an odd sum": ([5.0, 5.0, 5.0 - 22.15], 0, 0.5),
    "the next one has the lowest id": ([1.0, 1.1, 1.2], 2, 1.0),
    "k is one": ([4.0, 7.0, 7.0, 1.0], 1, 0.5),
}
