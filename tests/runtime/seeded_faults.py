"""The seeded faults of `test_runtime_mutants`: each a patch of one function of the program.

Operations are patched where `load_kernels` looks for their torch form, so that a fault reaches an
engine's parts and the enumerated rounds alike.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from spd.kernels.dispatch import operation_stems
from spd.kernels.round import commit as round_commit
from spd.kernels.round import window as round_window
from spd.kernels.round.commit import EMISSION_HEAD, Emission, coupled_verify, read_emission
from spd.kernels.sampling import sampling
from spd.kernels.sampling.sampling import SamplingTensors
from spd.runtime.engine.engine import Engine
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.round.round_queue import RoundQueue
from spd.runtime.round.sampler import Sampler
from spd.runtime.round.sampling_params import SamplingParams
from spd.runtime.round.state import RoundState

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]
Arguments = Any
"""An operation's arguments by name, as attributes, and the fields of records among them."""
RECORDS = RoundState, round_window.RoundWindow, round_window.Places


def fields_of(record: Any) -> dict[str, Any]:
    return record._asdict() if isinstance(record, tuple) else vars(record)


def opened(asked: dict[str, Any]) -> Arguments:
    """The arguments; of a name that several records have, the last one's."""
    records = (fields_of(value) for value in asked.values() if isinstance(value, RECORDS))
    return SimpleNamespace(**{name: field for each in records for name, field in each.items()} | asked)


def replaced(asked: dict[str, Any], changes: dict[str, object]) -> dict[str, Any]:
    """The arguments with others in place of some, or with a copy of the record that has a field."""
    asked = dict(asked)
    for name, value in changes.items():
        owner = name
        if name not in asked:
            owner = [at for at, r in asked.items() if isinstance(r, RECORDS) and name in fields_of(r)][-1]
            record = asked[owner]
            if isinstance(record, tuple):
                value = record._replace(**{name: value})  # type: ignore[attr-defined]
            else:
                changed = copy.copy(record)
                object.__setattr__(changed, name, value)
                value = changed
        asked[owner] = value
    return asked


def operation(
    name: str,
    before: Callable[[Arguments], dict[str, object]] | None = None,
    after: Callable[[Any, Arguments], Any] | None = None,
) -> Mutation:
    """Change an operation's arguments, or what it returns and wrote."""
    module = importlib.import_module(f"spd.kernels.{operation_stems()[name]}")
    honest = getattr(module, name)
    signature = inspect.signature(honest)

    def changed(*args: Any) -> Any:
        bound = signature.bind(*args)
        bound.apply_defaults()
        asked = bound.arguments
        result = honest(**(replaced(asked, before(opened(asked))) if before else asked))
        return after(result, opened(asked)) if after else result

    return lambda patch: patch.setattr(module, name, changed)


def together(*mutations: Mutation) -> Mutation:
    def apply(patch: Patch) -> None:
        for mutation in mutations:
            mutation(patch)

    return apply


# -- the verifier ------------------------------------------------------------------------------------


def verify(rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Mutation:
    """Another rule of acceptance: (draft, sampled, which drafts are real) to accepted."""

    def verify(draft: Tensor, sampled: Tensor, num_drafts: Tensor) -> Tensor:
        return rule(draft, sampled, torch.arange(draft.shape[1]) < num_drafts.unsqueeze(-1))

    return lambda patch: patch.setattr(round_commit, "coupled_verify", verify)


def leading(flags: Tensor) -> Tensor:
    return flags.long().cumprod(dim=-1).sum(dim=-1)


def one_more(draft: Tensor, sampled: Tensor, real: Tensor) -> Tensor:
    return torch.minimum(leading((draft == sampled[:, :-1]) & real) + 1, real.sum(dim=-1))


def first_is_free(draft: Tensor, sampled: Tensor, real: Tensor) -> Tensor:
    first = torch.arange(draft.shape[1]) == 0
    return leading(((draft == sampled[:, :-1]) | first) & real)


# -- the commit --------------------------------------------------------------------------------------


def draft_not_recovered(a: Arguments) -> dict[str, object]:
    accepted = coupled_verify(a.draft, a.sampled, a.num_drafts)
    rejected, row = accepted < a.num_drafts, accepted.unsqueeze(-1)
    draft = torch.cat((a.draft, a.sampled[:, -1:]), dim=1)
    token = torch.where(rejected[:, None], draft.gather(1, row), a.sampled.gather(1, row))
    return {"sampled": a.sampled.scatter(1, row, token), "accepted": accepted}


def bonus_of_row_before(a: Arguments) -> dict[str, object]:
    accepted, k = coupled_verify(a.draft, a.sampled, a.num_drafts), a.draft.shape[1]
    sampled = a.sampled.clone()
    if k:
        sampled[:, k] = torch.where(accepted == k, sampled[:, k - 1], sampled[:, k])
    return {"sampled": sampled, "accepted": accepted}


def silent_slots_speak(a: Arguments) -> dict[str, object]:
    a.active.fill_(True)
    return {}


def rejected_draft_stays(result: None, a: Arguments) -> None:
    accepted, k = coupled_verify(a.draft, a.sampled, a.num_drafts), a.draft.shape[1]
    if k:
        at = accepted.clamp(max=k - 1).unsqueeze(-1)
        a.tokens.scatter_(1, a.length.unsqueeze(-1), a.draft.gather(1, at))
        a.length += (accepted < a.num_drafts).long()


def rejected_samples_are_counted(result: None, a: Arguments) -> None:
    if a.generated is not None:
        a.generated.scatter_add_(1, a.sampled, torch.ones_like(a.sampled, dtype=torch.int32))


def stops_are_finite(a: Arguments) -> dict[str, object]:
    return {"finite": a.finite | (a.sampled.unsqueeze(-1) == a.stop_ids.unsqueeze(1)).any(dim=-1)}


def stops_in_last_row_only(patch: Patch) -> None:
    decide = round_commit._decide

    def changed(sampled: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        hidden = sampled.clone()
        hidden[:, :-1] = -2
        return decide(hidden, *rest)

    patch.setattr(round_commit, "_decide", changed)


def read_a_column_late(row: list[int]) -> Emission:
    """The samples of an emission as if they began a column later."""
    return read_emission(row)._replace(sampled=row[EMISSION_HEAD + 1 :])


def ring_of_one(patch: Patch) -> None:
    patch.setattr("spd.runtime.round.state.RING_DEPTH", 1)
    patch.setattr("spd.runtime.round.round_queue.RING_DEPTH", 1)


# -- the window --------------------------------------------------------------------------------------


def unknown_ids_are_fed(window: Any, a: Arguments) -> Any:
    draft = a.draft[:, : a.k].clone()
    ids = torch.cat((window.token_ids[:, :1], draft), dim=1)
    return dataclasses.replace(window, token_ids=ids, draft=draft)


def begins_one_early(window: Any, a: Arguments) -> Any:
    ids = window.token_ids.clone()
    ids[:, :1] = a.tokens.gather(1, (a.length - 2).clamp(min=0).unsqueeze(-1))
    return dataclasses.replace(window, token_ids=ids)


def kept_whatever_they_are(window: Any, a: Arguments) -> Any:
    every = torch.ones_like(window.valid)
    slots = round_window.kv_slots(a.page_table, window.positions, every, a.page_size, a.trash_slot)
    return dataclasses.replace(window, kv_slots=slots)


def kv_one_off(patch: Patch) -> None:
    honest = round_window.kv_slots

    def changed(table: Tensor, positions: Tensor, valid: Tensor, page_size: int, trash: int) -> Tensor:
        # Rows after a window's first, beyond every prompt: plain decoding has none.
        later = (torch.arange(positions.shape[1]) > 0) & (positions >= 16)
        return honest(table, positions + later.long(), valid, page_size, trash)

    patch.setattr(round_window, "kv_slots", changed)


# -- the sampler -------------------------------------------------------------------------------------


def first_row_only(**step: Any) -> Mutation:
    """A step of the processing that verify rows do not get."""

    def apply(patch: Patch) -> None:
        process = sampling.process_rows

        def changed(logits: Tensor, draft: Tensor, tensors: SamplingTensors) -> Tensor:
            cheap = process(logits, draft, dataclasses.replace(tensors, **step))
            return torch.cat((process(logits, draft, tensors)[:, :1], cheap[:, 1:]), dim=1)

        patch.setattr(sampling, "process_rows", changed)

    return apply


def noise(key: Callable[[Tensor], Tensor]) -> Mutation:
    """The target's noise at other positions than the tokens' own."""

    def apply(patch: Patch) -> None:
        draw = sampling.draw_rows

        def changed(processed: Tensor, positions: Tensor, *rest: Any) -> Tensor:
            return draw(processed, key(positions), *rest)

        patch.setattr(sampling, "draw_rows", changed)

    return apply


def seed_of_slot(patch: Patch) -> None:
    admit = Sampler.admit

    def changed(self: Sampler, slot: int, params: SamplingParams, *tokens: Tensor) -> None:
        admit(self, slot, params, *tokens)
        self.seed[slot] = slot

    patch.setattr(Sampler, "admit", changed)


def counts(rows: Callable[[Tensor, Tensor], Tensor]) -> Mutation:
    return lambda patch: patch.setattr(sampling, "count_rows", rows)


def without_drafts(generated: Tensor, draft: Tensor) -> Tensor:
    return generated.unsqueeze(1).repeat(1, draft.shape[1] + 1, 1)


def hide(early: Callable[[Tensor], Tensor]) -> Mutation:
    """The mask of min_tokens, with row i taken for row early(i)."""

    def hide(logits: Tensor, tensors: SamplingTensors) -> Tensor:
        rows = early(torch.arange(logits.shape[1]))
        hidden = (torch.arange(logits.shape[2])[:, None] == tensors.stop_ids.unsqueeze(1)).any(dim=-1)
        masked = tensors.length.unsqueeze(-1) + rows < tensors.min_length.unsqueeze(-1)
        return logits.masked_fill(masked.unsqueeze(-1) & hidden.unsqueeze(1), float("-inf"))

    return lambda patch: patch.setattr(sampling, "hide_stops", hide)


def head(late: int = 0, **needs_not: bool) -> Mutation:
    """The head that draws by itself: used where it must not be, or drawing `late` positions late."""

    def apply(patch: Patch) -> None:
        draw = Sampler.draw_fused

        def changed(self: Sampler, runner: Any, hidden: Tensor, step: int, needs: Any) -> Any:
            return draw(self, runner, hidden, step + late, dataclasses.replace(needs, **needs_not))

        patch.setattr(Sampler, "draw_fused", changed)

    return apply


# -- the drafter and the queue -----------------------------------------------------------------------


def draft_noise_off(patch: Patch) -> None:
    draw = Sampler.draw_draft
    patch.setattr(
        Sampler, "draw_draft", lambda s, runner, h, step, needs: draw(s, runner, h, step + 1, needs)
    )


def draft_without_temperature(patch: Patch) -> None:
    draw = Sampler.draw_draft

    def changed(self: Sampler, *args: Any) -> Tensor:
        with mock.patch.dict(self.numbers, temperature=self.numbers["temperature"].sign()):
            return draw(self, *args)

    patch.setattr(Sampler, "draw_draft", changed)


def drafts_one_column_late(window: Any, a: Arguments) -> Any:
    if a.step == a.k - 1:
        a.draft[:, : a.k] = a.draft[:, : a.k].roll(1, 1)
    return window


def draft_kv_one_off(window: Any, a: Arguments) -> Any:
    slots = round_window.kv_slots(a.page_table, window.positions + 1, window.valid, a.page_size, a.trash_slot)
    return dataclasses.replace(window, kv_slots=slots)


def one_further(result: None, a: Arguments) -> None:
    a.draft[:, : a.k - 1] = a.draft[:, 1 : a.k].clone()


def catch_up(change: Callable[[int], int | None]) -> Mutation:
    """The drafter's cache brought up by another number of rounds, or not at all."""

    def apply(patch: Patch) -> None:
        honest = DraftModelProposer.catch_up

        def changed(self: DraftModelProposer, rounds: int, views: Any) -> None:
            if (other := change(rounds)) is not None:
                honest(self, other, views)

        patch.setattr(DraftModelProposer, "catch_up", changed)

    return apply


def pauses_are_not_counted(patch: Patch) -> None:
    launch = RoundQueue.launch

    def changed(self: RoundQueue, *args: Any) -> Any:
        self.behind = 0
        return launch(self, *args)

    patch.setattr(RoundQueue, "launch", changed)


def pauses_begin_late(patch: Patch) -> None:
    launch = RoundQueue.launch

    def changed(self: RoundQueue, k: int, *args: Any) -> Any:
        behind = self.behind
        ticket = launch(self, k, *args)
        if k and not behind:
            self.behind = 0
        return ticket

    patch.setattr(RoundQueue, "launch", changed)


def occupants_look_alike(patch: Patch) -> None:
    read = Engine._read_oldest

    def changed(self: Engine) -> None:
        slots, oldest = self._scheduler.slots, self._scheduler.in_flight[0]
        present = [slots[sequence.slot] or sequence for sequence in oldest.sequences]
        self._scheduler.in_flight[0] = oldest._replace(sequences=present)
        read(self)

    patch.setattr(Engine, "_read_oldest", changed)
