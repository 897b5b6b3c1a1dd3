"""Counters and latencies by their definitions: by hand, by the clock, and summed over requests."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from spd.kernels.round.commit import FAILED, GOING_ON, read_emission
from spd.runtime import Event, Request, SamplingParams
from spd.runtime.engine.sequence import FINISH_REASONS, Detokenizer, Sequence
from tests.helpers import Patch, Tiny, compute_logits, make_engine, random_prompts, run_all
from tests.runtime.test_runtime_scheduler import sequence_of

PROMPTS = random_prompts(5, 20, 256)


def event_of(
    sequence: Sequence, drafts: int, accepted: int, now: float, reason: int = GOING_ON
) -> Event:
    """Return the event of a round of at most 4 drafts, as the engine reads it from the ring's row."""
    committed_count = 0 if reason == FAILED else accepted + 1
    row = [9, drafts, accepted, committed_count, reason, 4, 0, *range(5), *[7] * 4]
    _, drafts, matched, committed, reason, *_, sampled = read_emission(row)
    return sequence.apply_round(
        tokens=sampled[:committed],
        drafts=drafts,
        matched=matched,
        round_reason=FINISH_REASONS[reason],
        now=now,
    )


def test_metrics_follow_their_definitions() -> None:
    """Rounds of 0, 3, 3 and 2 drafts, of which 0, 3, 1 and 0 are accepted, at 1, 2, 4 and 7 seconds."""
    sequence = sequence_of("a", (1,), 40)
    sequence.arrived_at = 0.25
    for drafts, accepted, now in ((0, 0, 1.0), (3, 3, 2.0), (3, 1, 4.0), (2, 0, 7.0)):
        event = event_of(sequence, drafts, accepted, now)
        assert event.token_ids == tuple(range(accepted + 1))
        assert event.drafted == (*[True] * accepted, False)
    assert sequence.length == 1 + 8
    m = sequence.metrics
    assert (m.rounds, m.num_draft_rounds, m.draft_n, m.draft_n_accepted) == (4, 3, 8, 4)
    assert m.mean_acceptance_length == 1 + 4 / 3 and m.draft_acceptance_rate == 4 / 8
    assert m.tokens_per_round == 8 / 4
    assert m.accepted_per_position == [2, 1, 1] and m.acceptance_histogram == [2, 1, 0, 1]
    assert m.first_token_ms == 750  # one token; seven after it in six seconds, in three emissions
    assert m.time_per_output_token_ms == pytest.approx(6000 / 7)
    assert m.inter_token_latency_ms == pytest.approx(2000)


def test_what_is_cut_away_was_matched_and_not_kept() -> None:
    """A stop string in the second of four tokens.

    And a row without a finite number, which commits none.
    """
    letters = Detokenizer(lambda ids: bytes(97 + token for token in ids), ("b",), 0)
    request = Request("a", (1,), SamplingParams(stop=("b",)))
    sequence = replace(sequence_of("a", (1,), 40), request=request, detokenizer=letters)
    event = event_of(sequence, 3, 3, 1.0)
    assert (event.token_ids, event.text, event.finish_reason) == ((0, 1), "a", "stop")
    m = sequence.metrics
    assert (m.draft_n, m.draft_n_accepted_raw, m.draft_n_accepted) == (3, 3, 2)
    failed = sequence_of("b", (1,), 40)
    event = event_of(sequence=failed, drafts=2, accepted=1, now=1.0, reason=FAILED)
    assert (event.token_ids, event.finish_reason) == ((), "error") and event.error
    m = failed.metrics
    assert (m.draft_n, m.draft_n_accepted_raw, m.draft_n_accepted) == (2, 1, 0)
    assert m.rounds == 1


def test_the_engine_counts_its_rounds_and_forgets_old_requests(
    tiny: Tiny, monkeypatch: Patch
) -> None:
    monkeypatch.setattr("spd.runtime.engine.engine.MAX_FINISHED", 5)
    engine = make_engine(
        tiny("qwen3", layers=2, seed=3), slots=2, spec="ngram", ngram_min=1, draft_max=3, lag=1
    )
    engine.add(Request("gone", PROMPTS[0], SamplingParams()))
    engine.abort("gone")
    engine.step()
    request_metrics = [
        m.metrics
        for m in run_all(engine, PROMPTS, [SamplingParams(max_tokens=9 + i) for i in range(5)])
    ]
    assert (
        max(m.rounds for m in request_metrics)
        <= engine.rounds
        <= sum(m.rounds for m in request_metrics) + 4
    )
    assert request_metrics[4].queue_ms > request_metrics[0].queue_ms, (
        "two slots: the fifth had to wait"
    )
    with pytest.raises(KeyError):
        engine.metrics("gone")


@pytest.mark.parametrize(("spec", "lag"), [("ngram", 0), ("draft", 2)])
def test_logprobs_are_the_models_own_at_every_kind_of_token(
    tiny: Tiny, spec: str, lag: int
) -> None:
    """Accepted, recovered and bonus tokens, each within 1e-5 of a pass over the finished text."""
    target = tiny("qwen3", layers=2, seed=3)
    method_options: dict[str, Any] = (
        {"draft_model": target} if spec == "draft" else {"ngram_min": 1}
    )
    engine = make_engine(target, spec=spec, draft_max=3, lag=lag, slots=5, **method_options)
    params = [
        SamplingParams(
            max_tokens=30, temperature=0.4 * i, seed=i, logprobs=4, presence_penalty=float(i > 2)
        )
        for i in range(5)
    ]
    completions = engine.generate(list(map(Request, "01234", PROMPTS, params)))
    kinds = [drafted for completion in completions for drafted in completion.drafted]
    assert any(kinds) and not all(kinds)
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        scores = compute_logits(engine, (*prompt, *completion.token_ids), 0).log_softmax(-1)
        for i, entry in enumerate(completion.logprobs):
            row = scores[len(prompt) - 1 + i]
            assert abs(float(row[entry.token_id]) - entry.logprob) < 1e-5
            expected = row.topk(4)
            assert [t for t, _ in entry.top] == expected.indices.tolist()
            assert torch.allclose(
                expected.values, torch.tensor([v for _, v in entry.top]), atol=1e-5
            )
