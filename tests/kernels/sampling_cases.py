"""What the tests of sampling and truncation share: random windows with parameters of every kind."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from spd.kernels.sampling import SamplingTensors

INFINITY, NAN = math.inf, math.nan


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


@dataclass(frozen=True)
class Case:
    logits: Tensor
    draft: Tensor
    positions: Tensor
    tensors: SamplingTensors
    usable_vocab: int

    def arguments(self, steps: Steps) -> tuple[Any, ...]:
        return self.logits, self.draft, self.positions, self.tensors, steps, self.usable_vocab

    def only(self, slots: list[int], rows: slice = slice(None)) -> Case:
        """Some slots, and of k = 0 windows some rows, in an order of their own."""
        tensors = {f.name: getattr(self.tensors, f.name)[slots] for f in fields(SamplingTensors)}
        tensors["mask"] = tensors["mask"][:, rows].contiguous()
        return Case(
            self.logits[slots][:, rows].contiguous(),
            self.draft[slots],
            self.positions[slots][:, rows],
            SamplingTensors(**tensors),
            self.usable_vocab,
        )


def random_case(slots: int, k: int, vocab: int, seed: int, device: str, coarse: bool = False) -> Case:
    """Random logits, some of them -inf, on a grid with many ties if coarse; parameters of every kind."""
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
        bias=torch.where(chance(0.1, slots, vocab), 3 * torch.randn(slots, vocab, generator=g), 0.0),
        in_prompt=chance(0.2, slots, vocab),
        generated=torch.randint(0, 4, (slots, vocab), generator=g, dtype=torch.int32)
        * chance(0.2, slots, vocab),
        stop_ids=torch.randint(-1, vocab, (slots, 5), generator=g),
        length=torch.randint(1, 20, (slots,), generator=g),
        min_length=torch.randint(1, 24, (slots,), generator=g),
        # A row more than there are, of which some allow everything.
        mask=torch.randint(-(2**31), 2**31, (slots, k + 2, -(-vocab // 32)), generator=g, dtype=torch.int32)
        | -chance(0.3, slots, k + 2, 1).int(),
    )
    # Few different ids, so that windows repeat a draft.
    draft = torch.randint(min(vocab, 3), (slots, k), generator=g)
    positions = torch.randint(2**20, (slots, 1), generator=g) + torch.arange(k + 1)
    moved = {f.name: getattr(tensors, f.name).to(device) for f in fields(SamplingTensors)}
    tensors = SamplingTensors(**moved)
    return Case(
        logits.to(device), draft.to(device), positions.to(device), tensors, max(1, vocab - vocab // 9)
    )


def number(device: str, few: int) -> int:
    """How many slots: few where the interpreter takes its time."""
    return few if device == "cpu" else 100 * few
