"""Prove promise 1, that speculation is invisible.

Tokens, text, finish reason and log-probabilities of a request depend on the weights, the prompt, the
sampling parameters and the seed. They do not depend on the drafter, the number of drafts, the lag or the
other requests. `tests/invisible_matrix.py` lists the runs; each is compared with the target alone, which
decodes the same requests a token a round.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from spd.runtime import Engine, Request, RoundRecord, SamplingParams
from spd.runtime.round.state import RoundState
from tests.helpers import (
    Run,
    assert_same_runs,
    count_accepted,
    count_drafted,
    get_local_queue,
    random_prompts,
    run_all,
)
from tests.invisible_matrix import (
    BLOCKS,
    CELLS,
    FORMS,
    HEADS,
    LAGS,
    MODEL_AND_LOOKUP,
    OF_FAMILIES,
    PROMPTS,
    SAMPLING_PARAMETERS,
    VOCAB,
    WORKLOADS,
    Cell,
    Workload,
)
from tests.page_checks import check_table
from tests.pairs import LOOKUP_LENGTH, Pairs

RunCell = Callable[[Cell], list[Run]]
CHAINED_NAMES = (*MODEL_AND_LOOKUP, "gemma4/assistant+ngram", f"{BLOCKS[0]}+ngram")


def run_workload(engine: Engine, workload: Workload) -> list[Run]:
    """Run the requests of a workload together, as far as the engine has slots."""
    prompts = [prompt for prompt, _ in workload]
    params = [sampling for _, sampling in workload]
    return run_all(engine, prompts, params)


def round_decisions(runs: list[Run]) -> list[list[tuple[list[int], int, int]]]:
    """Return (draft tokens, length of lookup's match, accepted drafts) of each round of each run."""
    return [
        [(record.draft, record.match, record.accepted) for record in run.rounds] for run in runs
    ]


@pytest.fixture(scope="module")
def run_cell(pairs: Pairs) -> RunCell:
    """Return a function that runs a cell, each cell once. A cell with k = 0 is run by the target alone."""
    finished: dict[str, list[Run]] = {}

    def run(cell: Cell) -> list[Run]:
        pair = pairs.get(cell.name)
        speculates = cell.k > 0
        # Pairs with the same target share its runs without drafts.
        key = str(cell) if speculates else f"{pair.model} {cell.work} {cell.form}"
        if key not in finished:
            if speculates:
                engine = cell.engine(pair)
            else:
                engine = pair.make_plain_engine(graphs=False, **FORMS[cell.form])
            finished[key] = run_workload(engine, WORKLOADS[cell.work])
        return finished[key]

    return run


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give `cell` its values; the default lane does not even collect the thousands of slow ones."""
    if "cell" not in metafunc.fixturenames:
        return
    is_default_lane = metafunc.config.getoption("markexpr").startswith("not slow")
    cells = [cell for cell in CELLS if not (is_default_lane and cell.marks)]
    metafunc.parametrize("cell", cells, ids=str)


def test_text_does_not_depend_on_speculation(
    run_cell: RunCell, cell: Cell, request: pytest.FixtureRequest
) -> None:
    """Each cell gives the tokens, text, finish reasons and log-probabilities of the target alone."""
    runs = run_cell(cell)
    target_alone = Cell(cell.work, cell.name, k=0, form=cell.form)
    assert_same_runs(runs, run_cell(target_alone))

    # With a fixed k, lag changes no draft and no acceptance. In the default lane families skip this.
    is_slow = "slow" in request.keywords
    if cell.lag and not cell.changing and (is_slow or not cell.is_of_family):
        assert round_decisions(runs) == round_decisions(run_cell(replace(cell, lag=0)))

    assert_that_speculation_took_place(cell, runs)


def assert_that_speculation_took_place(cell: Cell, runs: list[Run]) -> None:
    """Assert that drafts were made, accepted and rejected, so that equal texts prove something."""
    rounds = [record for run in runs for record in run.rounds]
    if cell.work not in SAMPLING_PARAMETERS:
        lookup_may_miss = cell.method == "ngram" and cell.work != "temperatures"
        assert count_drafted(runs) > 0, "no draft was made"
        assert count_accepted(runs) > 0 or lookup_may_miss, "no draft was accepted"
    if cell.work in ("temperatures", "some", "few") and cell.method in ("draft", *HEADS):
        assert count_accepted(runs) < count_drafted(runs), "no draft was rejected"
        if cell.k > 1 and "/" not in cell.name:
            assert max(record.accepted for record in rounds) > 1, "no round accepted two drafts"
    if cell.name.endswith("+ngram") and not cell.changing and cell.work == "repeating":
        assert_that_both_drafted([record for record in rounds if record.accepted])


def assert_that_both_drafted(accepting_rounds: list[RoundRecord]) -> None:
    """Assert that rounds accepted drafts of lookup, and that others accepted drafts of the model."""
    by_lookup = sum(record.match > 0 for record in accepting_rounds)
    by_model = len(accepting_rounds) - by_lookup
    assert by_lookup > 1, "lookup had no draft accepted"
    assert by_model > 1, "the model had no draft accepted"


@pytest.mark.covers(count=3)
@pytest.mark.parametrize("form", ["float32", "torch"])
@pytest.mark.parametrize("name", CHAINED_NAMES)
def test_lookup_behind_a_model_decides_the_same_at_every_lag(
    pairs: Pairs, run_cell: RunCell, name: str, form: str
) -> None:
    """Two drafts of a model and lookup behind them in every round: text, drafts and acceptances."""
    decisions = []
    for lag in LAGS:
        engine = pairs.get(name).make_engine(
            LOOKUP_LENGTH, lag=lag, adaptive=True, slots=4, **FORMS[form]
        )
        engine.draft_length.choose_k = lambda: LOOKUP_LENGTH  # type: ignore[method-assign]
        engine.draft_length.chained = 2
        runs = run_workload(engine, WORKLOADS["repeating"])
        assert_same_runs(runs, run_cell(Cell("repeating", name, k=0, form=form)))
        decisions.append(round_decisions(runs))
    assert decisions[0] == decisions[1] == decisions[2]
    rounds = [entry for run in decisions[0] for entry in run]
    continued = [accepted for drafts, match, accepted in rounds if match < 0 and len(drafts) > 2]
    drafter, _, _ = name.partition("+")
    if drafter not in BLOCKS:  # whose drafts are random: no text ends with them
        assert any(accepted > 2 for accepted in continued), "lookup had no draft accepted"


@pytest.mark.covers(count=6)
@pytest.mark.parametrize("name", OF_FAMILIES)
def test_a_prefix_hit_is_a_miss(pairs: Pairs, name: str) -> None:
    """A request that finds its prefix in the cache gives the text of one that does not.

    After a first request, one goes on behind its text, and another shares the beginning of its prompt.
    """
    pair = pairs.get(name)
    (prompt,) = random_prompts(1, 75, VOCAB, seed=1)
    params = SamplingParams(max_tokens=70, temperature=0.5, seed=2, ignore_eos=True)
    engine = pair.make_engine(3, lag=1, slots=2)
    (first,) = run_all(engine, [prompt], [params])
    continued = (*prompt, *first.tokens, 5, 6)
    branched = (*prompt[:70], 9, 8, 7)
    later_params = [replace(params, max_tokens=24)] * 2
    runs = run_all(engine, [continued, branched], later_params)

    # Recurrent states are kept behind the first text only, so that the branched prompt finds none.
    is_recurrent = engine.plan.model.config.recurrent is not None
    must_hit = runs[:1] if is_recurrent else runs
    assert all(run.metrics.cached_tokens >= 64 for run in must_hit)
    assert count_drafted(runs) > 0
    without_cache = pair.make_plain_engine(slots=2, prefix_sharing=False)
    assert_same_runs(runs, run_all(without_cache, [continued, branched], later_params))


def test_draft_context_limit(pairs: Pairs) -> None:
    """Drafting ends at the draft model's context limit; the text goes on as without drafts."""
    limit = 48
    k = 4
    max_tokens = 12
    pair = pairs.get("draft")
    lengths = (*range(limit - k, limit + 2), 3 * limit)
    prompts = [random_prompts(1, length, VOCAB, seed=length)[0] for length in lengths]
    params = [
        SamplingParams(temperature=0.8, max_tokens=max_tokens, seed=i) for i in range(len(prompts))
    ]
    expected = run_all(pair.make_plain_engine(), prompts, params)
    for slots in (1, len(prompts)):
        runs = run_all(pair.make_engine(k, slots=slots, draft_ctx=limit), prompts, params)
        assert [run.output for run in runs] == [run.output for run in expected]
        for prompt, run in zip(prompts, runs, strict=True):
            for record in run.rounds[1:]:
                # The draft of position p is computed from p tokens; the model sees at most `limit`.
                assert len(record.draft) <= max(0, limit - record.position + 1)
                last_position = record.position + k
                if last_position <= limit and last_position < len(prompt) + max_tokens:
                    assert len(record.draft) == k
    assert any(record.draft for record in runs[0].rounds)
    assert not any(record.draft for record in runs[-1].rounds)


def test_text_ends_at_every_position_of_the_window(pairs: Pairs) -> None:
    """A length limit and a stop token end the text at their token, wherever in the window it is."""
    (full,) = run_all(
        pairs.get("self").make_plain_engine(), PROMPTS[1:2], [SamplingParams(max_tokens=24)]
    )
    for method in ("self", "draft"):
        engine = pairs.get(method).make_engine(7)
        for length in range(1, 18):
            (run,) = run_all(engine, [PROMPTS[1]], [SamplingParams(max_tokens=length)])
            assert run.tokens == full.tokens[:length]
            assert run.finish_reason == "length"

            stop = full.tokens[length - 1]
            stopped_length = full.tokens.index(stop) + 1
            # A stop token that is also the last allowed token counts as a stop.
            params = SamplingParams(max_tokens=stopped_length, stop_token_ids=(stop,))
            (run,) = run_all(engine, [PROMPTS[1]], [params])
            assert run.tokens == full.tokens[:stopped_length]
            assert run.finish_reason == "stop"


def test_context_ends_the_text(pairs: Pairs) -> None:
    """The text ends with reason "length" where prompt and text fill the context."""
    context = 128
    for prompt_length in (126, 127):
        (prompt,) = random_prompts(1, prompt_length, VOCAB, seed=2)
        for method in ("off", "self", "ngram"):
            engine = pairs.get(method).make_engine(7, ctx=context)
            (run,) = run_all(engine, [prompt], [SamplingParams()])
            assert len(run.tokens) == context - prompt_length
            assert run.finish_reason == "length"


@pytest.mark.parametrize("kind", ["wrong", "out of range", "random length"])
def test_an_adversarial_drafter_changes_nothing(pairs: Pairs, run_cell: RunCell, kind: str) -> None:
    """Drafts of random tokens, of ids outside of the vocabulary and of random number change no text."""
    engine = pairs.get("ngram").make_engine(4, lag=1)
    queue = get_local_queue(engine)
    source = random.Random(0)
    vocab_size = engine.plan.model.config.vocab_size
    out_of_range = [-1, -(2**40), vocab_size + 5, 3, 2**40]
    token_choices = out_of_range if kind == "out of range" else list(range(VOCAB))

    def draft_at_random(state: RoundState, k: int, model_drafts: int, views: object) -> None:
        rows = [[source.choice(token_choices) for _ in range(k)] for _ in range(state.slots)]
        state.draft[:, :k] = torch.tensor(rows)
        state.num_drafts.fill_(source.randrange(k + 1) if kind == "random length" else k)

    queue.round.lookup = SimpleNamespace(draft=draft_at_random, may_draft_more=False)
    runs = run_workload(engine, WORKLOADS["temperatures"])
    assert_same_runs(runs, run_cell(Cell("temperatures", "ngram", k=0)))


def test_abort_frees_the_pages_of_a_running_request(pairs: Pairs) -> None:
    """An abort between rounds frees the request's pages, and the other requests keep their text."""
    pair = pairs.get("draft")
    params = SamplingParams(max_tokens=30)
    (expected,) = run_all(pair.make_plain_engine(), PROMPTS[:1], [params])
    engine = pair.make_engine(3, slots=2, lag=2)
    available_pages = engine.page_table.num_available
    engine.add(Request("aborted", PROMPTS[1], SamplingParams(max_tokens=200)))
    engine.add(Request("running", PROMPTS[0], params))
    events = [event for _ in range(4) for event in engine.step()]
    engine.abort("aborted")
    engine.add(Request("added later", PROMPTS[0], params))
    while engine.has_work:
        events += engine.step()

    finish_reasons = {
        event.request_id: event.finish_reason for event in events if event.finish_reason
    }
    assert finish_reasons == {"aborted": "abort", "running": "length", "added later": "length"}
    for name in ("running", "added later"):
        tokens: list[int] = []
        for event in events:
            if event.request_id == name:
                tokens += event.token_ids
        assert tokens == expected.tokens
    assert engine.page_table.num_available == available_pages
    check_table(engine.page_table)
