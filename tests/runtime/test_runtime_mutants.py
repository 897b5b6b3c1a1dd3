"""Exact distributions (`round_distribution`), equal texts, and the faults that each check catches."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.runtime import Engine, EngineConfig, Request, RoundRecord, SamplingParams
from spd.runtime.engine.metrics import RequestMetrics
from spd.runtime.round.limits import CATCH_UP_TOKENS
from spd.runtime.round.model_runner import ModelRunner
from tests.helpers import Patch
from tests.prompt_lookup import search
from tests.recipes.tiny import write_tiny
from tests.runtime import round_distribution
from tests.runtime import seeded_faults as fault
from tests.runtime.round_distribution import (
    EVERYTHING,
    MIN_TOKENS,
    PENALTIES,
    PLAIN,
    TRUNCATION,
    Case,
    check_distribution,
)
from tests.runtime.target_distribution import DRAFT_DISTRIBUTIONS

PROMPTS = [(3, 1, 4, 1, 5, 9, 2, 6), (5, 5, 5, 7), (60, 2, 33, 4, 60, 2, 33, 4, 60, 2), (11,)]
SHAPE: dict[str, Any] = {
    "vocab": 61,
    "tokenizer": False,
    "hidden": 32,
    "heads": 2,
    "intermediate": 64,
}
SHAPE |= {"max_positions": 1024}
OPTIONS: dict[str, Any] = {"threads": 1, "dtype": "float32", "kernels": "torch", "ctx": 256}
OPTIONS |= {"adaptive": False, "ngram_min": 1}
Texts = list[tuple[int, ...]]
Params = list[SamplingParams]
PAUSES = (4, 0, 4, 4, 0, 0, 3, *[0] * 18, 2, 4)  # One is longer than what is caught up in one pass.
BIASED = SamplingParams(temperature=1.0, logit_bias=((0, 1.5), (2, -1.0)))
STOPPING = SamplingParams(temperature=1.0, stop_token_ids=(2,))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target, an unrelated drafter, and a drafter with the target's first layer and head."""
    folder = tmp_path_factory.mktemp("models")
    write_tiny(folder / "target", **SHAPE)
    write_tiny(folder / "stranger", seed=5, **SHAPE)
    write_tiny(folder / "shallow", layers=1, **SHAPE)
    return folder


def generate(
    models: Path,
    params: Params,
    draft: str,
    prompts: Texts = PROMPTS,
    *,
    lengths: Any = (),
    **config: Any,
) -> tuple[Texts, list[RequestMetrics]]:
    """Return the texts and metrics of a request for each of `params`.

    lengths: the draft lengths of the rounds, repeated.
    """
    folder = models / draft
    spec = (
        {"spec": "draft", "draft_model": folder, "draft_max": 4}
        if folder.exists()
        else {"spec": draft}
    )
    options = {"slots": len(params), **OPTIONS, **spec, **config}
    trace = options.pop("trace", None)
    engine = Engine(EngineConfig(model=models / "target", **options))
    engine.trace = trace
    if lengths:
        engine.draft_length.choose_k = itertools.cycle(lengths).__next__  # type: ignore[method-assign]
    requests = [Request(str(i), prompts[i], p) for i, p in enumerate(params)]
    for request in requests:
        engine.add(request)
    texts: Texts = [()] * len(params)
    for _ in range(40 * len(params)):
        for event in engine.step():
            texts[int(event.request_id)] += event.token_ids
    assert all(texts) and not engine.has_work, "a request did not end"
    counters = [engine.metrics(request.id) for request in requests]
    for m in (
        counters
    ):  # each round commits its accepted drafts and one token, but for a draft that stops
        extra = m.rounds + m.draft_n_accepted - m.completion_tokens
        assert extra in (0, 1), "rounds do not add up to the text"
    return texts, counters


def same_text(models: Path, params: Params, *drafts: str, **config: Any) -> None:
    """Assert that speculation changes not one token."""
    plain, _ = generate(models, params, "off")
    for draft in drafts:
        assert generate(models, params, draft, **config)[0] == plain, f"{draft} changed the text"


def _four(**parameters: Any) -> Params:
    """Return the same parameters for each prompt, with different seeds; 24 tokens."""
    return [SamplingParams(**{"max_tokens": 24, "seed": 70 + i, **parameters}) for i in range(4)]


GREEDY = _four()
SAMPLED = _four(temperature=0.9)
MIXED = [
    SamplingParams(max_tokens=24, repetition_penalty=1.3, frequency_penalty=0.25),
    SamplingParams(
        max_tokens=24, seed=1, temperature=0.9, presence_penalty=1.0, top_k=20, top_p=0.9
    ),
    SamplingParams(
        max_tokens=24, seed=2, temperature=0.9, min_p=0.05, logit_bias=((7, 4.0), (9, -4.0))
    ),
    SamplingParams(
        max_tokens=24, seed=3, temperature=1.2, stop_token_ids=(*range(0, 60, 4),), min_tokens=9
    ),
]


def text_of_batch(models: Path) -> None:
    """Assert that a request's text is the same alone and in a batch."""
    together, _ = generate(models, SAMPLED, "shallow")
    for i in (1, 3):
        alone, _ = generate(models, [SAMPLED[i]], "shallow", [PROMPTS[i]])
        assert alone[0] == together[i], "neighbours changed the text"


def text_beside_inactive_slots(models: Path) -> None:
    """Assert a text next to ended requests, whose pages it takes.

    All slots are run, as on a GPU.
    """
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[2] * 54]
    params = [SamplingParams(max_tokens=6), SamplingParams(max_tokens=6), SAMPLED[0]]
    options: dict[str, Any] = {"slots": 2, "ctx": 1024, "prefix_sharing": False}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "_occupied_slots", lambda self, views: None)
        for draft in ("off", "shallow"):
            alone, _ = generate(models, params[2:], draft, prompts[2:], **options)
            together, _ = generate(models, params, draft, prompts, **options)
            assert alone[0] == together[2], f"{draft}: a silent slot changed the text"


def self_draft_is_accepted(models: Path, tokens: int = 24, least: int = 13, **options: Any) -> None:
    """Assert that no draft is rejected of a drafter that is the target, with the same noise."""
    params = _four(max_tokens=tokens)[:2] + _four(max_tokens=tokens, temperature=0.9)[:2]
    _, counters = generate(models, params, "target", **options)
    for metrics in counters:
        assert metrics.draft_n == metrics.draft_n_accepted >= least, "a right draft was rejected"


def lookup_is_the_definition(models: Path) -> None:
    """Assert that prompt lookup drafts the tokens after the suffix's last occurrence in the text."""
    records: list[RoundRecord] = []
    params = GREEDY[:2] + MIXED[:2]
    texts, _ = generate(models, params, "ngram", trace=records.append, draft_max=4)
    for record in records:
        i = int(record.request)
        text = PROMPTS[i] + texts[i]
        remaining = len(PROMPTS[i]) + 24 - record.position - 1
        expected = search(text[: record.position], 4, 1, 8)[:remaining] if record.round else []
        assert record.draft == expected, "other drafts than the definition's"
    assert sum(len(record.draft) for record in records) > 20


def late_reading(models: Path) -> None:
    """Assert texts with rounds that are read two late, also where requests follow each other in a slot."""
    records: list[RoundRecord] = []
    same_text(models, MIXED, "shallow", lag=2, adaptive=True, slots=2)
    # All but the last end at a stop id, which the host learns late: at a limit they would not run on.
    texts, _ = generate(models, GREEDY, "off")
    stopping = [
        replace(p, stop_token_ids=(text[6],)) for p, text in zip(GREEDY, texts, strict=True)
    ]
    options = {
        "lag": 2,
        "cache_pages": 64,
        "trace": records.append,
    }  # with pages to spare no request waits
    for slots in (1, 2):
        same_text(models, [*stopping[:3], GREEDY[3]], "shallow", slots=slots, **options)
    # A slot's last occupant may have run on for a while; those rounds belong to no request.
    assert all(record.committed for record in records), "a request was told another's round"


CHECKS: dict[str, Callable[[Path], None]] = {
    "distribution": lambda _: check_distribution(Case((2,)), "random", "only-zeros-match"),
    "distribution of two rounds": lambda _: check_distribution(Case((1, 1)), "random"),
    "distribution of bias": lambda _: check_distribution(Case((2,), BIASED), "random"),
    "distribution of penalties": lambda _: check_distribution(Case((2,), PENALTIES), "random"),
    "distribution of penalties over rounds": lambda _: check_distribution(
        Case((1, 1), PENALTIES), "random"
    ),
    "distribution of min_tokens": lambda _: check_distribution(Case((2,), MIN_TOKENS), "random"),
    "distribution of truncation": lambda _: check_distribution(Case((2,), TRUNCATION), "random"),
    "distribution of stops": lambda _: check_distribution(Case((2,), STOPPING), "random"),
    "distribution of stops over rounds": lambda _: check_distribution(
        Case((1, 1), STOPPING), "random"
    ),
    "distribution of limits": lambda _: check_distribution(
        Case((3,), SamplingParams(temperature=1.0, max_tokens=2)), "equal"
    ),
    "distribution of everything": lambda _: check_distribution(
        Case((3,), EVERYTHING), "random", "equal"
    ),
    "distribution of everything over rounds": lambda _: check_distribution(
        Case((1, 1), EVERYTHING), "random", "equal"
    ),
    "distribution of odd drafts": lambda _: check_distribution(
        Case((2,), odd_drafts=True), "equal"
    ),
    "distribution of a head": lambda _: check_distribution(Case((2,), PLAIN, head=True), "random"),
    "distribution of a head, truncation": lambda _: check_distribution(
        Case((2,), TRUNCATION, head=True), "random"
    ),
    "distribution of a head, penalties": lambda _: check_distribution(
        Case((2,), PENALTIES, head=True), "random"
    ),
    "distribution of a head, min_tokens": lambda _: check_distribution(
        Case((2,), MIN_TOKENS, head=True), "random"
    ),
    "distribution of a head, bias": lambda _: check_distribution(
        Case((2,), BIASED, head=True), "random"
    ),
    "distribution of a head, everything": lambda _: check_distribution(
        Case((1, 1), EVERYTHING, head=True), "random"
    ),
    "emissions of failures": lambda _: round_distribution.check_emissions(
        Case((2,), round_distribution.STOPS_AND_LIMIT, 2, masked=True)
    ),
    "text, greedy": lambda m: same_text(m, GREEDY, "target", "stranger"),
    "text, sampled": lambda m: same_text(m, SAMPLED, "target", "shallow"),
    "text, late reading": late_reading,
    "text, pauses": lambda m: same_text(m, MIXED, "shallow", "ngram", lag=1, lengths=PAUSES),
    "text of a batch": text_of_batch,
    "text beside silent slots": text_beside_inactive_slots,
    "self-draft": self_draft_is_accepted,
    "self-draft with pauses": lambda m: self_draft_is_accepted(m, 100, 20, lengths=PAUSES),
    "self-draft to its context's end": lambda m: self_draft_is_accepted(m, 24, 7, draft_ctx=20),
    "drafts of prompt lookup": lookup_is_the_definition,
}
OPERATIONS = "round_commit", "round_window", "draft_step", "committed_window"
commit, window, step, missed = (partial(fault.operation, name) for name in OPERATIONS)
verify = fault.verify
MUTANTS: dict[str, dict[str, fault.Mutation]] = {
    "distribution": {
        "accepted drafts are summed": verify(
            lambda d, s, real: ((d == s[:, :-1]) & real).sum(dim=-1)
        ),
        "num_drafts is ignored": verify(lambda d, s, real: fault.leading(d == s[:, :-1])),
        "one draft more is accepted": verify(fault.one_more),
        "the first draft is always accepted": verify(fault.first_is_free),
        "the draft is emitted for the recovered token": commit(fault.draft_not_recovered),
        "the bonus token comes from row k - 1": commit(fault.bonus_of_row_before),
        "a rejected draft stays": commit(after=fault.rejected_draft_stays),
        "the window begins with the token before the last": window(after=fault.begins_one_early),
        "rows go to the neighbour's pages": window(
            lambda a: {"page_table": a.page_table.roll(1, 0)}
        ),
    },
    "distribution of stops over rounds": {"silent slots commit": commit(fault.silent_slots_speak)},
    "distribution of stops": {"stop ids do not cut the accepted run": fault.stops_in_last_row_only},
    "emissions of failures": {
        "a row that is not finite is kept": commit(lambda a: {"finite": torch.ones_like(a.finite)}),
        "a stop id is kept though its row is not finite": commit(fault.stops_are_finite),
    },
    "distribution of limits": {
        "no limit cuts": window(lambda a: {"length_limit": a.length_limit + 9})
    },
    "distribution of odd drafts": {"unknown ids are fed": window(after=fault.unknown_ids_are_fed)},
    "text beside silent slots": {
        "silent rows are kept": window(after=fault.kept_whatever_they_are)
    },
    "distribution of truncation": {
        "truncation for the first row only": fault.first_row_only(truncation=False)
    },
    "distribution of bias": {"bias for the first row only": fault.first_row_only(bias=None)},
    "distribution of penalties": {
        "penalties do not see the drafts": fault.counts(fault.without_drafts)
    },
    "distribution of penalties over rounds": {
        "committed tokens are not counted": commit(lambda a: {"generated": None}),
        "rejected ones are": commit(
            lambda a: {"generated": None}, fault.rejected_samples_are_counted
        ),
    },
    "distribution of min_tokens": {
        "min_tokens treats every row as the first": fault.hide(torch.zeros_like),
        "min_tokens is one row late": fault.hide(lambda rows: (rows - 1).clamp(min=0)),
    },
    "distribution of a head, truncation": {
        "a drawing head draws what is truncated": fault.head(truncation=False)
    },
    "distribution of a head, penalties": {
        "a drawing head draws what is penalised": fault.head(penalties=False)
    },
    "distribution of a head, min_tokens": {
        "a drawing head draws what is hidden": fault.head(min_length=False)
    },
    "distribution of a head, bias": {"a drawing head draws what is biased": fault.head(bias=False)},
    "distribution of a head": {"a drawing head is one position late": fault.head(late=1)},
    "text, sampled": {
        "noise by row": fault.noise(lambda at: torch.arange(at.shape[1]).expand_as(at)),
        "noise one position off when k > 0": fault.noise(lambda at: at + (at.shape[1] > 1)),
    },
    "text of a batch": {"noise by slot": fault.seed_of_slot},
    "text, greedy": {
        "keys and values one position off": fault.kv_one_off,
        "samples are read a column late": lambda patch: patch.setattr(
            "spd.runtime.engine.engine.Engine._apply", fault.read_a_column_late
        ),
    },
    "text, late reading": {
        "rounds of a slot's last occupant are read": fault.occupants_look_alike,
        "a round is overwritten before it is read": fault.ring_of_one,
    },
    "distribution of two rounds": {
        "a round is told in the next one's row": commit(lambda a: {"counter": a.counter + 1}),
        "the ring stands still": fault.operation("mark_time", lambda a: {"advance": False}),
    },
    "self-draft": {
        "the token before the last is missed": missed(lambda a: {"width": max(1, a.width - 1)}),
        "the drafter draws with the next position's noise": fault.draft_noise_off,
        "the drafter draws without the temperature": fault.draft_without_temperature,
        "drafts are written one column late": step(after=fault.drafts_one_column_late),
        "a draft's keys are kept one position off": step(after=fault.draft_kv_one_off),
    },
    "self-draft to its context's end": {
        "drafts go on behind the draft's context": fault.together(
            step(lambda a: {"draft_limit": a.draft_limit + 99}),
            missed(lambda a: {"draft_limit": a.draft_limit + 99}),
        ),
    },
    "self-draft with pauses": {
        "pauses are not counted": fault.pauses_are_not_counted,
        "a pause is counted from its second round on": fault.pauses_begin_late,
        "pauses are not caught up": fault.catch_up(lambda rounds, again: None),
        "a pause's first token is not caught up": fault.catch_up(
            lambda rounds, again: rounds - 1 - again
        ),
        "a long pause is not caught up": fault.catch_up(
            lambda rounds, again: rounds if rounds < CATCH_UP_TOKENS else None
        ),
    },
    "drafts of prompt lookup": {
        "it proposes one token further on": fault.operation(
            "ngram_lookup", after=fault.one_further
        ),
        "it misses the last token": fault.operation(
            "ngram_lookup", lambda a: {"length": a.length - 1}
        ),
    },
}
WORDS_OF_A_CATCH = (
    "the distribution differs|do not add up|^lengths|^reasons|silent slot|was fed|was kept"
    "|changed the text|rejected"
    "|is told|was told|the ring's row|noise positions|other drafts|did not end"
)


@pytest.mark.covers(count=10)
@pytest.mark.parametrize("check", CHECKS)
def test_the_program_passes(check: str, models: Path) -> None:
    CHECKS[check](models)


@pytest.mark.covers(count=11)
@pytest.mark.parametrize(
    ("check", "mutant"), [(check, name) for check in MUTANTS for name in MUTANTS[check]]
)
def test_the_fault_is_caught(check: str, mutant: str, models: Path, monkeypatch: Patch) -> None:
    MUTANTS[check][mutant](monkeypatch)
    with pytest.raises(AssertionError, match=WORDS_OF_A_CATCH):
        CHECKS[check](models)


@pytest.mark.covers(2)
@pytest.mark.parametrize("draft_distribution", DRAFT_DISTRIBUTIONS)
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
@pytest.mark.parametrize("k", [0, 1, 2, 3])
def test_one_round_has_the_targets_distribution(
    k: int, masked: bool, draft_distribution: str
) -> None:
    check_distribution(Case((k,), seed=k, masked=masked), draft_distribution)


@pytest.mark.covers(count=2)
@pytest.mark.parametrize("ks", [(1, 1), (0, 2), (2, 0, 1), (1, 1, 1)])
def test_rounds_in_a_row_have_the_targets_distribution(ks: tuple[int, ...]) -> None:
    check_distribution(Case(ks, seed=11), "random", "only-zeros-match")


@pytest.mark.covers(2)
@pytest.mark.parametrize("limit", [1, 2, 3, 5])
@pytest.mark.parametrize("stops", [(), (2,), (0, 1)])
def test_texts_cut_by_stop_ids_and_limits_have_the_cut_distribution(
    stops: tuple[int, ...], limit: int
) -> None:
    params = SamplingParams(temperature=1.0, stop_token_ids=stops, max_tokens=limit)
    check_distribution(Case((3,), params, seed=limit), "random", "equal")
    check_distribution(Case((1, 1), params, seed=limit), "random", "equal")


@pytest.mark.covers(2)
@pytest.mark.parametrize(
    "params", [PLAIN, round_distribution.STOPS_AND_LIMIT], ids=["plain", "stops-and-limit"]
)
@pytest.mark.parametrize("odd_drafts", [False, True], ids=["known", "odd"])
@pytest.mark.parametrize("masked", [False, True], ids=["full", "masked"])
def test_every_committed_token_is_the_targets_draw(
    masked: bool, odd_drafts: bool, params: Any
) -> None:
    """With `masked` some samples have no finite logit, stop ids too: they end a text with an error."""
    round_distribution.check_emissions(Case((3,), params, masked=masked, odd_drafts=odd_drafts))
