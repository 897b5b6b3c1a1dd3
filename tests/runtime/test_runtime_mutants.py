"""Seeded faults in the verifier, the round, the sampler and the drafter, each caught by a named check.

A check is either an exact law (`test_runtime_law`) or an equality of whole generations on tiny random
models. Every check passes on the program as it is and must fail under the faults it is named for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.kernels.sampling import SamplingTensors
from spd.runtime import Engine, EngineConfig, Request, SamplingParams
from spd.runtime.metrics import RequestMetrics
from spd.runtime.model_runner import ModelRunner
from spd.runtime.penalties import TokenCounts
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.round import Round
from spd.runtime.sampler import Sampler
from spd.runtime.scheduler import Scheduler
from spd.runtime.state import RoundState
from tests.recipes.tiny import write_tiny
from tests.runtime.test_runtime_law import MIN_TOKENS, PENALTIES, TRUNCATION, Case, check_law

PROMPTS = [(3, 1, 4, 1, 5, 9, 2, 6), (5, 5, 5, 7), (60, 2, 33, 4, 60, 2, 33, 4, 60, 2), (11,)]
SHAPE: dict[str, Any] = {"vocab": 61, "tokenizer": False, "hidden": 32, "heads": 2, "intermediate": 64}
WISHES: dict[str, Any] = {"threads": 1, "dtype": "float32", "ctx": 256, "adaptive": False, "ngram_min": 1}
Texts = list[tuple[int, ...]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target; a drafter that knows nothing of it; one that shares its first layer and head."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target", **SHAPE)
    write_tiny(folder / "stranger", seed=5, **SHAPE)
    write_tiny(folder / "shallow", layers=1, **SHAPE)
    return folder


# -- whole generations -------------------------------------------------------------------------------


def generate(
    models: Path, params: list[SamplingParams], draft: str, prompts: Texts = PROMPTS, **config: Any
) -> tuple[Texts, list[RequestMetrics]]:
    """Texts and counters of one request for each of `params`; `draft` is a folder, "off" or "ngram"."""
    folder = models / draft
    spec = {"spec": "draft", "draft_model": folder, "draft_max": 4} if folder.exists() else {"spec": draft}
    wishes = {"slots": len(params), **WISHES, **spec, **config}
    engine = Engine(EngineConfig(model=models / "target", **wishes))
    requests = [Request(str(i), prompts[i], p) for i, p in enumerate(params)]
    for request in requests:
        engine.add(request)
    texts: Texts = [()] * len(params)
    for _ in range(40 * len(params)):
        for event in engine.step():
            texts[int(event.request_id)] += event.token_ids
    assert all(texts) and not engine.has_work, "a request did not end"
    counters = [engine.metrics(request.id) for request in requests]
    for (
        metrics
    ) in counters:  # each round commits its accepted drafts and one token, but for a draft that stops
        extra = metrics.rounds + metrics.draft_n_accepted - metrics.completion_tokens
        assert extra in (0, 1), "rounds do not add up to the text"
    return texts, counters


def same_text(models: Path, params: list[SamplingParams], *drafts: str, **config: Any) -> None:
    """Assert that speculation changes not one token."""
    plain, _ = generate(models, params, "off")
    for draft in drafts:
        assert generate(models, params, draft, **config)[0] == plain, f"{draft} changed the text"


def _four(**parameters: Any) -> list[SamplingParams]:
    """The same parameters for each prompt, with a seed of its own; 24 tokens."""
    return [SamplingParams(**{"max_tokens": 24, "seed": 70 + i, **parameters}) for i in range(4)]


GREEDY = _four()
SAMPLED = _four(temperature=0.9)
MIXED = [
    SamplingParams(max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.25),
    SamplingParams(max_tokens=24, seed=1, temperature=0.9, presence_penalty=1.0, top_k=20, top_p=0.9),
    SamplingParams(max_tokens=24, seed=2, temperature=0.9, min_p=0.05, logit_bias=((7, 4.0), (9, -4.0))),
    SamplingParams(
        max_tokens=24, seed=3, temperature=1.2, stop_token_ids=tuple(range(0, 60, 4)), min_tokens=9
    ),
]


def text_of_batch(models: Path) -> None:
    """A request's text is the same alone and beside others."""
    together, _ = generate(models, SAMPLED, "shallow")
    for i in (1, 3):
        alone, _ = generate(models, [SAMPLED[i]], "shallow", [PROMPTS[i]])
        assert alone[0] == together[i], "neighbours changed the text"


def self_draft_is_accepted(models: Path) -> None:
    """A drafter that is the target itself, sharing its noise, is never rejected."""
    _, counters = generate(models, GREEDY[:2] + SAMPLED[:2], "target")
    for metrics in counters:
        assert metrics.draft_n == metrics.draft_n_accepted > 12, "a right draft was rejected"


BIASED = SamplingParams(temperature=1.0, logit_bias=((0, 1.5), (2, -1.0)))
STOPPING = SamplingParams(temperature=1.0, stop_token_ids=(2,))
LIMITED = SamplingParams(temperature=1.0, max_tokens=2)

CHECKS: dict[str, Callable[[Path], None]] = {
    "law": lambda _: check_law(Case((2,)), "random", "only-zeros-match"),
    "law of two rounds": lambda _: check_law(Case((1, 1)), "random"),
    "law of temperature": lambda _: check_law(Case((2,), SamplingParams(temperature=0.5)), "random"),
    "law of bias": lambda _: check_law(Case((2,), BIASED), "random"),
    "law of penalties": lambda _: check_law(Case((2,), PENALTIES), "random"),
    "law of penalties over rounds": lambda _: check_law(Case((1, 1), PENALTIES), "random"),
    "law of min_tokens": lambda _: check_law(Case((2,), MIN_TOKENS), "random"),
    "law of truncation": lambda _: check_law(Case((2,), TRUNCATION), "random"),
    "law of stops": lambda _: check_law(Case((2,), STOPPING), "random"),
    "law of stops over rounds": lambda _: check_law(Case((1, 1), STOPPING), "random"),
    "law of limits": lambda _: check_law(Case((3,), LIMITED), "equal"),
    "law of odd drafts": lambda _: check_law(Case((2,), odd_drafts=True), "equal"),
    "text, greedy": lambda m: same_text(m, GREEDY, "target", "stranger"),
    "text, sampled": lambda m: same_text(m, SAMPLED, "target", "shallow"),
    "text, mixed": lambda m: same_text(m, MIXED, "target", "shallow"),
    "text, n-gram": lambda m: same_text(m, GREEDY[:2] + MIXED[:2], "ngram"),
    "text, late reading": lambda m: same_text(m, MIXED, "shallow", lag=2, adaptive=True, slots=2),
    "text of a batch": text_of_batch,
    "self-draft": self_draft_is_accepted,
}


# -- the faults --------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch
Mutation = Callable[[Patch], None]


def _verify(rule: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Mutation:
    """Another rule of acceptance: (draft, sampled, which drafts are real) to accepted."""

    def verify(draft: Tensor, sampled: Tensor, num_drafts: Tensor) -> Tensor:
        return rule(draft, sampled, torch.arange(draft.shape[1]) < num_drafts.unsqueeze(-1))

    return lambda patch: patch.setattr("spd.runtime.round.coupled_verify", verify)


def _leading(flags: Tensor) -> Tensor:
    return flags.long().cumprod(dim=-1).sum(dim=-1)


def _one_more(draft: Tensor, sampled: Tensor, real: Tensor) -> Tensor:
    return torch.minimum(_leading((draft == sampled[:, :-1]) & real) + 1, real.sum(dim=-1))


def _first_is_free(draft: Tensor, sampled: Tensor, real: Tensor) -> Tensor:
    first = torch.arange(draft.shape[1]) == 0
    return _leading(((draft == sampled[:, :-1]) | first) & real)


def _before_commit(change: Callable[[RoundState, Tensor, Tensor], None]) -> Mutation:
    """Change the samples (in place) before they are committed."""

    def apply(patch: Patch) -> None:
        commit = Round._commit

        def changed(self: Round, sampled: Tensor, accepted: Tensor, finite: Tensor) -> Any:
            sampled = sampled.clone()
            change(self.state, sampled, accepted)
            return commit(self, sampled, accepted, finite)

        patch.setattr(Round, "_commit", changed)

    return apply


def _draft_not_recovered(state: RoundState, sampled: Tensor, accepted: Tensor) -> None:
    rejected, row = accepted < state.num_drafts, accepted.unsqueeze(-1)
    draft = torch.cat((state.draft[:, : sampled.shape[1] - 1], sampled[:, -1:]), dim=1)
    sampled.scatter_(1, row, torch.where(rejected[:, None], draft.gather(1, row), sampled.gather(1, row)))


def _bonus_of_row_before(state: RoundState, sampled: Tensor, accepted: Tensor) -> None:
    k = sampled.shape[1] - 1
    if k:
        sampled[:, k] = torch.where(accepted == k, sampled[:, k - 1], sampled[:, k])


def _silent_slots_speak(state: RoundState, sampled: Tensor, accepted: Tensor) -> None:
    state.active.fill_(True)


def _rejected_draft_stays(patch: Patch) -> None:
    commit = Round._commit

    def changed(self: Round, sampled: Tensor, accepted: Tensor, finite: Tensor) -> Any:
        state, k = self.state, sampled.shape[1] - 1
        result = commit(self, sampled, accepted, finite)
        if k:
            extra = (accepted < torch.minimum(state.num_drafts, torch.tensor(k))).long()
            at = accepted.clamp(max=k - 1).unsqueeze(-1)
            state.tokens.scatter_(1, state.length.unsqueeze(-1), state.draft.gather(1, at))
            state.length += extra
        return result

    patch.setattr(Round, "_commit", changed)


def _limit_is_not_seen(patch: Patch) -> None:
    usable = Round._usable_drafts
    patch.setattr(
        Round, "_usable_drafts", lambda self, k: (usable(self, k)[0], self.state.num_drafts.clamp(0, k))
    )


def _unknown_ids_are_fed(patch: Patch) -> None:
    usable = Round._usable_drafts
    patch.setattr(
        Round, "_usable_drafts", lambda self, k: (self.state.draft[:, :k].clone(), usable(self, k)[1])
    )


def _stops_in_last_row_only(patch: Patch) -> None:
    is_stop = RoundState.is_stop

    def changed(self: RoundState, tokens: Tensor) -> Tensor:
        flags = is_stop(self, tokens)
        flags[:, :-1] = False
        return flags

    patch.setattr(RoundState, "is_stop", changed)


def _first_row_only(**step: bool) -> Mutation:
    """A step of the processing that verify rows do not get."""

    def apply(patch: Patch) -> None:
        process = Sampler.process

        def changed(self: Sampler, logits: Tensor, draft: Tensor, needs: Any) -> Tensor:
            cheap = process(self, logits, draft, dataclasses.replace(needs, **step))
            return torch.cat((process(self, logits, draft, needs)[:, :1], cheap[:, 1:]), dim=1)

        patch.setattr(Sampler, "process", changed)

    return apply


def _noise(key: Callable[[Tensor], Tensor]) -> Mutation:
    """The target's noise at other positions than the tokens' own."""

    def apply(patch: Patch) -> None:
        draw = Sampler.draw
        patch.setattr(Sampler, "draw", lambda s, p, positions, needs: draw(s, p, key(positions), needs))

    return apply


def _seed_of_slot(patch: Patch) -> None:
    admit = Sampler.admit

    def changed(self: Sampler, slot: int, params: SamplingParams, prompt: Tensor) -> None:
        admit(self, slot, params, prompt)
        self.seed[slot] = slot

    patch.setattr(Sampler, "admit", changed)


def _counts(rows: Callable[[Tensor, Tensor], Tensor]) -> Mutation:
    return lambda patch: patch.setattr("spd.kernels.sampling.count_rows", rows)


def _without_drafts(generated: Tensor, draft: Tensor) -> Tensor:
    return generated.unsqueeze(1).repeat(1, draft.shape[1] + 1, 1)


def _one_draft_too_many(generated: Tensor, draft: Tensor) -> Tensor:
    counts = _without_drafts(generated, draft)
    for i in range(draft.shape[1]):
        ones = counts.new_ones(len(draft), draft.shape[1] + 1 - i, 1)
        counts[:, i:].scatter_add_(2, draft[:, i, None, None].expand_as(ones).contiguous(), ones)
    return counts


def _commit_counts(change: Callable[[Tensor], Tensor]) -> Mutation:
    def apply(patch: Patch) -> None:
        commit = TokenCounts.commit
        patch.setattr(TokenCounts, "commit", lambda s, tokens, kept: commit(s, tokens, change(kept)))

    return apply


def _hide(early: Callable[[Tensor], Tensor]) -> Mutation:
    """The mask of min_tokens, with row i taken for row early(i)."""

    def hide(logits: Tensor, tensors: SamplingTensors) -> Tensor:
        rows = early(torch.arange(logits.shape[1]))
        hidden = (torch.arange(logits.shape[2])[:, None] == tensors.stop_ids.unsqueeze(1)).any(dim=-1)
        masked = tensors.length.unsqueeze(-1) + rows < tensors.min_length.unsqueeze(-1)
        return logits.masked_fill(masked.unsqueeze(-1) & hidden.unsqueeze(1), float("-inf"))

    return lambda patch: patch.setattr("spd.kernels.sampling.hide_stops", hide)


def _kv_one_off(patch: Patch) -> None:
    slots = ModelRunner._kv_slots

    def changed(self: ModelRunner, page_table: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
        # Rows after a window's first, beyond every prompt: plain decoding has none.
        later = (torch.arange(positions.shape[1]) > 0) & (positions >= 16)
        return slots(self, page_table, positions + later.long(), valid)

    patch.setattr(ModelRunner, "_kv_slots", changed)


def _short_draft_window(patch: Patch) -> None:
    window = DraftModelProposer._committed_window
    patch.setattr(DraftModelProposer, "_committed_window", lambda self, width: window(self, width - 1))


def _draft_noise_off(patch: Patch) -> None:
    draw = Sampler.draw_draft
    patch.setattr(Sampler, "draw_draft", lambda s, logits, at, needs: draw(s, logits, at + 1, needs))


def _occupants_look_alike(patch: Patch) -> None:
    patch.setattr(Scheduler, "next_epoch", lambda self: 1)


MUTANTS: dict[str, tuple[Mutation, str]] = {
    "accepted drafts are summed": (_verify(lambda d, s, real: ((d == s[:, :-1]) & real).sum(dim=-1)), "law"),
    "num_drafts is ignored": (_verify(lambda d, s, real: _leading(d == s[:, :-1])), "law"),
    "drafts are compared with the next row": (
        _verify(lambda d, s, real: _leading((d == s[:, 1:]) & real)),
        "law",
    ),
    "one draft more is accepted": (_verify(_one_more), "law"),
    "the first draft is always accepted": (_verify(_first_is_free), "law"),
    "the draft is emitted for the recovered token": (_before_commit(_draft_not_recovered), "law"),
    "the bonus token comes from row k - 1": (_before_commit(_bonus_of_row_before), "law"),
    "a rejected draft stays": (_rejected_draft_stays, "law"),
    "silent slots commit": (_before_commit(_silent_slots_speak), "law of stops over rounds"),
    "stop ids do not cut the accepted run": (_stops_in_last_row_only, "law of stops"),
    "the length limit does not cut": (_limit_is_not_seen, "law of limits"),
    "unknown ids are fed": (_unknown_ids_are_fed, "law of odd drafts"),
    "temperature for the first row only": (_first_row_only(noise=False), "law of temperature"),
    "truncation for the first row only": (_first_row_only(truncation=False), "law of truncation"),
    "bias for the first row only": (_first_row_only(bias=False), "law of bias"),
    "penalties do not see the drafts": (_counts(_without_drafts), "law of penalties"),
    "penalties see one draft too many": (_counts(_one_draft_too_many), "law of penalties"),
    "committed tokens are not counted": (_commit_counts(torch.zeros_like), "law of penalties over rounds"),
    "rejected samples are counted": (_commit_counts(torch.ones_like), "law of penalties over rounds"),
    "min_tokens treats every row as the first": (_hide(torch.zeros_like), "law of min_tokens"),
    "min_tokens is one row late": (_hide(lambda rows: (rows - 1).clamp(min=0)), "law of min_tokens"),
    "min_tokens is one row early": (_hide(lambda rows: rows + (rows > 0)), "law of min_tokens"),
    "noise by row": (_noise(lambda at: torch.arange(at.shape[1]).expand_as(at)), "text, sampled"),
    "noise one position off when k > 0": (_noise(lambda at: at + (at.shape[1] > 1)), "text, sampled"),
    "noise by slot": (_seed_of_slot, "text of a batch"),
    "keys and values one position off": (_kv_one_off, "text, greedy"),
    "rounds of a slot's last occupant are read": (_occupants_look_alike, "text, late reading"),
    "the draft model misses the token before the last": (_short_draft_window, "self-draft"),
    "the drafter draws with the next position's noise": (_draft_noise_off, "self-draft"),
}

WORDS_OF_A_CATCH = (
    "the law differs|do not add up|^lengths|^reasons|silent slot|was fed|changed the text|rejected"
)


@pytest.mark.parametrize("check", CHECKS)
def test_the_program_passes(check: str, models: Path) -> None:
    CHECKS[check](models)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_fault_is_caught(mutant: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutation, check = MUTANTS[mutant]
    mutation(monkeypatch)
    with pytest.raises(AssertionError, match=WORDS_OF_A_CATCH):
        CHECKS[check](models)
