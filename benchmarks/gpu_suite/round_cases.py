"""The measured kernels of a round that are not a layer's: sampling, verifying, window, commit,
lookup.

See `kernel_cases` for what a case is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch

from benchmarks.gpu_suite.graph_timer import Call
from benchmarks.gpu_suite.kernel_cases import PAGE, Bench, Rows
from spd.kernels.round.commit import emission_width
from spd.kernels.round.window import ENDED, NUM_TIMES, Paging
from spd.kernels.sampling import draft_verify, philox, sampling
from spd.runtime.proposers.ngram import LookupPool
from spd.runtime.round.sampling_params import SamplingSteps

STEPS = {
    "noise": SamplingSteps(noise=True),
    "top-k top-p penalties": SamplingSteps(noise=True, truncation=True, penalties=True),
}


def one_slots_sampling(bench: Bench, vocab: int, steps: SamplingSteps) -> sampling.SamplingTensors:
    """Return one slot's sampling parameters and history."""
    device = bench.timer.device

    def number(value: float) -> torch.Tensor:
        return torch.full((1,), value, device=device)

    return sampling.SamplingTensors(
        temperature=number(0.8),
        top_p=number(0.95),
        min_p=number(0.0),
        repetition_penalty=number(1.1),
        presence_penalty=number(0.1),
        frequency_penalty=number(0.1),
        top_k=bench.integers(1, fill=50),
        seed=bench.integers(1, fill=7),
        bias=None,
        in_prompt=torch.rand(1, vocab, device=device) < 0.01 if steps.penalties else None,
        generated=(torch.rand(1, vocab, device=device) < 0.01).int() if steps.penalties else None,
        stop_ids=bench.integers(1, 24, fill=-1),
        length=bench.integers(1, fill=1000),
        min_length=None,
        noise=steps.noise,
        truncation=steps.truncation,
        usable_vocab=vocab,
    )


def sampling_case(bench: Bench, vocab: int, rows: Sequence[int]) -> Rows:
    """Measure one slot's rows by the separate sampler, and their distributions, against torch."""
    table_rows = Rows()
    device = bench.timer.device
    for count in rows:
        logits = 3 * torch.randn(1, count, vocab, device=device)
        draft = torch.randint(vocab, (1, count - 1), device=device)
        positions = (torch.arange(count, device=device) + 1000)[None]
        for name, steps in STEPS.items():
            tensors = one_slots_sampling(bench, vocab, steps)
            ours, torchs = (
                partial(form.sample_rows, logits, draft, positions, tensors)
                for form in (bench.kernels, sampling)
            )
            table_rows[f"{count} {name}"] = bench.row([ours], logits.nbytes, [torchs])
            ours, torchs = (
                partial(form.row_distributions, logits, draft, tensors)
                for form in (bench.kernels, sampling)
            )
            table_rows[f"{count} law {name}"] = bench.row([ours], logits.nbytes, [torchs])
    return table_rows


def draft_verify_case(bench: Bench, slots: int, k: int, vocab: int) -> Rows:
    """Measure the rules that test drafts, sampled or deterministic, against torch."""
    table_rows = Rows()
    device = bench.timer.device
    target, drafter = (
        torch.randn(slots, rows, vocab, device=device).mul_(3).softmax(-1) for rows in (k + 1, k)
    )
    draft = torch.randint(vocab, (slots, k), device=device)
    positions = (torch.arange(k + 1, device=device) + 1000).expand(slots, k + 1).contiguous()
    num_drafts = bench.integers(slots, fill=k)
    seed = bench.integers(slots, fill=7)
    for name in ("rejection", "block"):
        for kind, laws in (("drawn", drafter), ("certain", None)):
            ours, torchs = (
                partial(
                    form.verify_drafts,
                    target,
                    laws,
                    draft,
                    num_drafts=num_drafts,
                    seed=seed,
                    positions=positions,
                    by_block=name == "block",
                )
                for form in (bench.kernels, draft_verify)
            )
            table_rows[f"{name} {kind}"] = bench.row([ours], None, [torchs])
    return table_rows


def noise_case(bench: Bench, vocab: int, rows: Sequence[int]) -> Rows:
    """Measure Gumbel noise alone, as in the fused draw, against torch."""
    table_rows = Rows()
    form = (
        philox
        if bench.kernels.name == "torch"
        else import_module("benchmarks.gpu_suite.noise_triton")
    )
    for count in rows:
        seed = bench.integers(count, fill=7)
        positions = bench.integers(count, fill=1000)
        ours, torchs = (
            partial(gumbel, seed, positions, 0, vocab) for gumbel in (form.gumbel, philox.gumbel)
        )
        table_rows[str(count)] = bench.row([ours], None, [torchs])
    return table_rows


@dataclass
class Slots:
    """The state that a round's own kernels read and write, for S slots.

    See `spd.runtime.round.state`.
    """

    tokens: torch.Tensor
    length: torch.Tensor
    length_limit: torch.Tensor
    draft: torch.Tensor
    num_drafts: torch.Tensor
    match: torch.Tensor
    draft_limit: torch.Tensor
    draft_cap: torch.Tensor
    active: torch.Tensor
    page_table: torch.Tensor
    stop_ids: torch.Tensor
    ring: torch.Tensor
    times: torch.Tensor
    counter: torch.Tensor

    @classmethod
    def build(cls, bench: Bench, slots: int, k: int, width: int, vocab: int) -> Slots:
        """Build running slots in the middle of their text."""
        device = bench.timer.device
        pages = width // PAGE
        return cls(
            tokens=torch.randint(vocab, (slots, width), device=device),
            length=bench.integers(slots, fill=width // 2),
            length_limit=bench.integers(slots, fill=2**40),
            draft=torch.randint(vocab, (slots, max(1, k)), device=device),
            num_drafts=bench.integers(slots, fill=k),
            match=bench.integers(slots),
            draft_limit=bench.integers(slots, fill=2**40),
            draft_cap=bench.integers(slots, fill=k),
            active=torch.ones(slots, dtype=torch.bool, device=device),
            page_table=torch.arange(slots * pages, device=device).view(slots, pages) + 2,
            stop_ids=bench.integers(slots, 24, fill=-1),
            ring=bench.integers(4, slots, emission_width(k)),
            times=bench.integers(4, NUM_TIMES),
            counter=bench.integers(1),
        )


def round_case(bench: Bench, slots: int, k: int, width: int, vocab: int) -> Rows:
    """Measure the kernels around the two models: window, commit, clock, and a draft model's
    windows."""
    kernels = bench.kernels
    s = Slots.build(bench, slots, k, width, vocab)
    paging = Paging(PAGE, width, 0)
    window = kernels.round_window(s, k, paging, vocab)
    sampled = torch.randint(vocab, (slots, k + 1), device=bench.timer.device)
    finite = torch.ones_like(sampled, dtype=torch.bool)
    calls: dict[str, Call] = {
        "round_window": partial(kernels.round_window, s, k, paging, vocab),
        "mark_time": partial(kernels.mark_time, s.times, s.counter, ENDED, True),
        "committed_window": partial(kernels.committed_window, s, 2, s.active, paging, None),
        "draft_step": partial(kernels.draft_step, s, sampled[:, :1], 0, max(1, k), paging),
        # Last, since every launch moves the lengths on; a row of `width` tokens has room for
        # thousands.
        "round_commit": partial(kernels.round_commit, s, window, sampled, finite),
    }
    return {name: bench.row([call], None) for name, call in calls.items()}


def lookup_case(bench: Bench, slots: int, k: int, widths: Sequence[int], vocab: int) -> Rows:
    """Measure prompt lookup over contexts of several lengths."""
    table_rows = Rows()
    for width in widths:
        s = Slots.build(bench, slots, k, width, vocab)
        call = partial(bench.kernels.ngram_lookup, s, k, 3, 8, width)
        table_rows[str(width)] = bench.row([call], slots * width // 2 * 8)
        pool = LookupPool(width, 3, bench.timer.device)
        pool.add_text(s.tokens[0, :width].tolist())
        call = partial(bench.kernels.pool_lookup, s, pool.texts, k, 3, 8)
        table_rows[f"pool of {width}"] = bench.row([call], None)
    return table_rows
