"""The seeded faults of `test_runtime_mutants`, each a patch of one function of the program.

Operations are patched where `load_kernels` looks up their torch form, so that a fault affects both
engines and the enumerated rounds.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from spd.kernels.round import commit as round_commit
from spd.kernels.round import window as round_window
from spd.kernels.round.commit import EMISSION_HEAD, coupled_verify
from spd.kernels.sampling import sampling
from spd.kernels.sampling.sampling import SamplingTensors
from spd.kernels.torch_form import TorchKernels
from spd.runtime.engine.engine import Engine
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.round.local_queue import LocalRoundQueue
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.state import RoundState

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
Arguments = Any
"""An operation's arguments by name, and the fields of records among them, as attributes."""
RECORDS = RoundState, round_window.RoundWindow, round_window.Paging


def fields_of(record: Any) -> dict[str, Any]:
    as_dict = getattr(record, "_asdict", None)
    return vars(record) if as_dict is None else as_dict()


def opened(arguments: dict[str, Any]) -> Arguments:
    """Return the arguments as attributes; a field of several records is the last record's."""
    records = (fields_of(value) for value in arguments.values() if isinstance(value, RECORDS))
    return SimpleNamespace(
        **{name: field for record in records for name, field in record.items()} | arguments
    )


def replaced(arguments: dict[str, Any], changes: dict[str, object]) -> dict[str, Any]:
    """Return the arguments with changes, in which a changed field is set in a copy of its record."""
    arguments = dict(arguments)
    for name, value in changes.items():
        if name in arguments:
            arguments[name] = value
            continue
        owner = [
            key for key, r in arguments.items() if isinstance(r, RECORDS) and name in fields_of(r)
        ][-1]
        if isinstance(arguments[owner], tuple):
            arguments[owner] = arguments[owner]._replace(**{name: value})
        else:
            arguments[owner] = copy.copy(arguments[owner])
            object.__setattr__(arguments[owner], name, value)
    return arguments


def operation(
    name: str,
    before: Callable[[Arguments], dict[str, object]] | None = None,
    after: Callable[[Any, Arguments], Any] | None = None,
) -> Mutation:
    """Return a mutation of an operation's arguments, or of its results."""
    honest = getattr(TorchKernels, name)
    signature = inspect.signature(honest)

    def changed(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        arguments = bound.arguments
        result = honest(**(replaced(arguments, before(opened(arguments))) if before else arguments))
        return after(result, opened(arguments)) if after else result

    return lambda patch: patch.setattr(TorchKernels, name, staticmethod(changed))


def around(owner: Any, name: str, change: Callable[..., Any]) -> Mutation:
    """Return a mutation that replaces a function by `change`, which gets the original as first argument."""

    def apply(patch: Patch) -> None:
        honest = getattr(owner, name)
        signature = inspect.signature(honest)

        def changed(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            return change(honest, *bound.args, **bound.kwargs)

        patch.setattr(owner, name, changed)

    return apply


def instead(owner: Any, name: str) -> Callable[[Callable[..., Any]], Mutation]:
    """Return `around` as a decorator."""
    return lambda change: around(owner, name, change)


def together(*mutations: Mutation) -> Mutation:
    def apply(patch: Patch) -> None:
        for mutation in mutations:
            mutation(patch)

    return apply


def verify(rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Mutation:
    """Return a mutation of the acceptance rule: (draft, sampled, which drafts are real) to accepted."""

    def verify(honest: Any, draft: Tensor, sampled: Tensor, num_drafts: Tensor) -> Tensor:
        return rule(draft, sampled, torch.arange(draft.shape[1]) < num_drafts.unsqueeze(-1))

    return around(round_commit, "coupled_verify", verify)


def leading(flags: Tensor) -> Tensor:
    return flags.long().cumprod(dim=-1).sum(dim=-1)


def one_more(draft: Tensor, sampled: Tensor, real: Tensor) -> Tensor:
    return torch.minimum(leading((draft == sampled[:, :-1]) & real) + 1, real.sum(dim=-1))


def first_is_free(draft: Tensor, sampled: Tensor, real: Tensor) -> Tensor:
    first = torch.arange(draft.shape[1]) == 0
    return leading(((draft == sampled[:, :-1]) | first) & real)


def draft_not_recovered(a: Arguments) -> dict[str, object]:
    accepted = coupled_verify(a.draft, a.sampled, a.num_drafts)
    rejected = accepted < a.num_drafts
    row = accepted.unsqueeze(-1)
    draft = torch.cat((a.draft, a.sampled[:, -1:]), dim=1)
    token = torch.where(rejected[:, None], draft.gather(1, row), a.sampled.gather(1, row))
    return {"sampled": a.sampled.scatter(1, row, token), "accepted": accepted}


def bonus_of_row_before(a: Arguments) -> dict[str, object]:
    accepted = coupled_verify(a.draft, a.sampled, a.num_drafts)
    k = a.draft.shape[1]
    sampled = a.sampled.clone()
    if k:
        sampled[:, k] = torch.where(accepted == k, sampled[:, k - 1], sampled[:, k])
    return {"sampled": sampled, "accepted": accepted}


def silent_slots_speak(a: Arguments) -> dict[str, object]:
    a.active.fill_(True)
    return {}


def rejected_draft_stays(result: None, a: Arguments) -> None:
    accepted = coupled_verify(a.draft, a.sampled, a.num_drafts)
    k = a.draft.shape[1]
    if k:
        at = accepted.clamp(max=k - 1).unsqueeze(-1)
        a.tokens.scatter_(1, a.length.unsqueeze(-1), a.draft.gather(1, at))
        a.length += (accepted < a.num_drafts).long()


def rejected_samples_are_counted(result: None, a: Arguments) -> None:
    if a.generated is not None:
        a.generated.scatter_add_(1, a.sampled, torch.ones_like(a.sampled, dtype=torch.int32))


def stops_are_finite(a: Arguments) -> dict[str, object]:
    return {"finite": a.finite | (a.sampled.unsqueeze(-1) == a.stop_ids.unsqueeze(1)).any(dim=-1)}


@instead(round_commit, "_decide")
def stops_in_last_row_only(decide: Any, sampled: Tensor, *others_: Tensor) -> tuple[Tensor, Tensor]:
    hidden = torch.cat((torch.full_like(sampled[:, :-1], -2), sampled[:, -1:]), dim=1)
    return decide(hidden, *others_)


def read_a_column_late(
    engine: Any, sequence: Any, row: list[int], result: Any, now: float, apply=Engine._apply
) -> None:
    """Read the samples of an emission from one column later."""
    later_row = [*row[:EMISSION_HEAD], *row[EMISSION_HEAD + 1 :]]
    apply(engine, sequence, later_row, result, now)


def ring_of_one(patch: Patch) -> None:
    patch.setattr("spd.runtime.round.state.RING_DEPTH", 1)
    patch.setattr("spd.runtime.round.local_queue.RING_DEPTH", 1)


def unknown_ids_are_fed(window: Any, a: Arguments) -> Any:
    draft = a.draft[:, : a.k].clone()
    ids = torch.cat((window.token_ids[:, :1], draft), dim=1)
    return dataclasses.replace(window, token_ids=ids, draft=draft)


def begins_one_early(window: Any, a: Arguments) -> Any:
    ids = window.token_ids.clone()
    ids[:, :1] = a.tokens.gather(1, (a.length - 2).clamp(min=0).unsqueeze(-1))
    return dataclasses.replace(window, token_ids=ids)


def placed(window: Any, a: Arguments, valid: Tensor, further: int = 0) -> Any:
    """Return the window with its rows at other places of the cache."""
    at = window.positions + further
    slots = round_window.kv_slots(
        page_table=a.page_table,
        positions=at,
        valid=valid,
        page_size=a.page_size,
        trash_slot=a.trash_slot,
    )
    return dataclasses.replace(window, kv_slots=slots)


def kept_whatever_they_are(window: Any, a: Arguments) -> Any:
    return placed(window, a, torch.ones_like(window.valid))


@instead(round_window, "kv_slots")
def kv_one_off(
    kv_slots: Any,
    table: Tensor,
    positions: Tensor,
    valid: Tensor,
    page_size: int,
    trash_slot: int,
) -> Tensor:
    """Shift the rows after a window's first, beyond every prompt; plain decoding has none."""
    later = (torch.arange(positions.shape[1]) > 0) & (positions >= 16)
    return kv_slots(table, positions + later.long(), valid, page_size, trash_slot)


def first_row_only(**step: Any) -> Mutation:
    """Return a mutation by which only first rows get a processing step."""

    def changed(process: Any, logits: Tensor, draft: Tensor, tensors: SamplingTensors) -> Tensor:
        cheap = process(logits, draft, dataclasses.replace(tensors, **step))
        return torch.cat((process(logits, draft, tensors)[:, :1], cheap[:, 1:]), dim=1)

    return around(sampling, "process_rows", changed)


def noise(key: Callable[[Tensor], Tensor]) -> Mutation:
    """Return a mutation that draws the target's noise at other positions."""
    return around(
        sampling,
        "draw_rows",
        lambda draw, processed, at, *arguments: draw(processed, key(at), *arguments),
    )


@instead(Sampler, "admit")
def seed_of_slot(admit: Any, sampler: Sampler, slot: int, *arguments: Any) -> None:
    admit(sampler, slot, *arguments)
    sampler.seed[slot] = slot


def counts(rows: Callable[[Tensor, Tensor], Tensor]) -> Mutation:
    return lambda patch: patch.setattr(sampling, "count_rows", rows)


def without_drafts(generated: Tensor, draft: Tensor) -> Tensor:
    return generated.unsqueeze(1).repeat(1, draft.shape[1] + 1, 1)


def hide(early: Callable[[Tensor], Tensor]) -> Mutation:
    """Return a mutation of the mask of min_tokens that treats row i as row early(i)."""

    def hide(logits: Tensor, tensors: SamplingTensors) -> Tensor:
        rows = early(torch.arange(logits.shape[1]))
        hidden = (torch.arange(logits.shape[2])[:, None] == tensors.stop_ids.unsqueeze(1)).any(
            dim=-1
        )
        masked = tensors.length.unsqueeze(-1) + rows < tensors.min_length.unsqueeze(-1)
        return logits.masked_fill(masked.unsqueeze(-1) & hidden.unsqueeze(1), float("-inf"))

    return lambda patch: patch.setattr(sampling, "hide_stops", hide)


def head(late: int = 0, **needs_not: bool) -> Mutation:
    """Return a mutation of the sampling head: used where it must not be, or `late` positions late."""

    def changed(
        draw: Any, sampler: Sampler, runner: Any, hidden: Tensor, step: int, needs: Any
    ) -> Any:
        return draw(sampler, runner, hidden, step + late, dataclasses.replace(needs, **needs_not))

    return around(Sampler, "draw_fused", changed)


draft_noise_off = around(
    Sampler,
    "draw_draft",
    lambda draw, s, runner, h, step, needs: draw(s, runner, h, step + 1, needs),
)


@instead(Sampler, "draw_draft")
def draft_without_temperature(
    draw: Any, sampler: Sampler, runner: Any, hidden: Tensor, step: int, needs: Any
) -> Tensor:
    with mock.patch.dict(sampler.numbers, temperature=sampler.numbers["temperature"].sign()):
        return draw(sampler, runner, hidden, step, needs)


def drafts_one_column_late(window: Any, a: Arguments) -> Any:
    if a.step == a.k - 1:
        a.draft[:, : a.k] = a.draft[:, : a.k].roll(1, 1)
    return window


def draft_kv_one_off(window: Any, a: Arguments) -> Any:
    return placed(window, a, window.valid, further=1)


def one_further(result: None, a: Arguments) -> None:
    a.draft[:, : a.k - 1] = a.draft[:, 1 : a.k].clone()


def catch_up(change: Callable[[int, int], int | None]) -> Mutation:
    """Return a mutation that catches up another number of tokens, or none.

    change: called with the tokens that are missing, and those that are fed again before them.
    """

    def changed(honest: Any, proposer: DraftModelProposer, rounds: int, views: Any) -> None:
        if (other := change(rounds, proposer.state.max_draft)) is not None:
            honest(proposer, other, views)

    return around(DraftModelProposer, "catch_up", changed)


@instead(LocalRoundQueue, "launch")
def pauses_are_not_counted(launch: Any, queue: LocalRoundQueue, *args: Any) -> Any:
    queue.missing_tokens = 0
    return launch(queue, *args)


@instead(LocalRoundQueue, "launch")
def pauses_begin_late(launch: Any, queue: LocalRoundQueue, k: int, *args: Any) -> Any:
    missing_before = queue.missing_tokens
    pending = launch(queue, k, *args)
    if k and not missing_before:
        queue.missing_tokens = 0
    return pending


@instead(Engine, "read_oldest_round")
def occupants_look_alike(read: Any, engine: Engine) -> None:
    slots = engine.scheduler.slots
    oldest = engine.scheduler.in_flight[0]
    present = [slots[sequence.slot] or sequence for sequence in oldest.sequences]
    engine.scheduler.in_flight[0] = oldest._replace(sequences=present)
    read(engine)
