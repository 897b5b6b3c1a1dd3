"""Lookup in texts of ended requests and earlier sessions: the same tokens, in fewer rounds."""

from __future__ import annotations

import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.errors import UsageError
from spd.formats.demo import demo_folder
from spd.formats.private_texts import find_text_files
from spd.runtime import Engine, Request, SamplingParams
from tests.helpers import (
    Run,
    assert_same_runs,
    count_accepted,
    make_fast_engine,
    make_next_turn,
    run_requests,
)

QUESTION = (5, 9, 13, 17, 21, 9, 6)
OTHER = (30, 31, 32)
POOL = 4096
LENGTH = 40


def sampled(seed: int = 1) -> SamplingParams:
    """Return parameters of a text that hardly repeats itself, the same for the same seed and prompt."""
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=LENGTH, ignore_eos=True)


def session(engine: Engine) -> list[Run]:
    """Return the runs of a chat of two turns, and of one that a compaction leaves with the first question.

    Beside the last runs a request that the pool knows nothing of.
    """
    (first,) = run_requests(engine, [Request("a", QUESTION, sampled())])
    (second,) = run_requests(engine, [make_next_turn(QUESTION, first.tokens, sampled())])
    compacted = [
        Request("b", QUESTION, sampled()),
        Request("c", OTHER, sampled(seed=7)),
    ]
    return [first, second, *run_requests(engine, compacted)]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_turn_that_was_cut_out_is_drafted_from(tiny: Callable[..., Path], lag: int) -> None:
    options: dict[str, Any] = {"slots": 2, "lag": lag}
    plain = session(make_fast_engine(tiny(), **options))
    options |= {"spec": "ngram", "draft_max": 4}
    without = session(make_fast_engine(tiny(), **options))
    pooled = session(make_fast_engine(tiny(), **options, pool_tokens=POOL))
    assert_same_runs(without, plain)
    assert_same_runs(pooled, plain)
    first, _, again, other = pooled
    assert again.tokens == first.tokens and other.tokens != first.tokens
    assert count_accepted([without[2]]) <= LENGTH // 4, "the text itself repeats little"
    assert count_accepted([again]) >= LENGTH // 2
    assert len(again.rounds) < len(without[2].rounds) - LENGTH // 4


def test_what_the_cache_had_is_not_added_again(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_fast_engine(tiny(), spec="ngram", draft_max=4, pool_tokens=POOL)
    added: list[list[int]] = []
    monkeypatch.setattr(engine.round_queue, "remember_text", added.append)
    prompt = tuple(range(1, 100))
    (first,) = run_requests(engine, [Request("a", prompt, sampled())])
    run_requests(engine, [make_next_turn(prompt, first.tokens, sampled())])
    assert added[0] == [*prompt, *first.tokens]
    length = len(prompt) + len(first.tokens) + 3 + LENGTH
    cached = engine.metrics("x").cached_tokens
    assert cached >= 64 and len(added[1]) == length - cached + engine.config.ngram_max


def test_a_later_session_drafts_from_an_earlier_one(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    runs = []
    for lookup in (None, folder, folder):
        spec = "off" if lookup is None else "mtp+ngram"
        engine = make_fast_engine(demo_folder(), spec=spec, lookup=lookup, threads=2)
        assert engine.tokenizer is not None
        ids = tuple(engine.tokenizer.encode("def read_lines(path):"))
        runs += run_requests(engine, [Request("a", ids, sampled())])
        engine.close()
    assert_same_runs(runs[1:], runs[:1] * 2)
    (file,) = find_text_files(folder)
    assert file.stat().st_size == 4 * 2 * (len(ids) + LENGTH + 1)
    assert len(runs[2].rounds) < len(runs[1].rounds)
    assert any(record.match for record in runs[2].rounds)


def test_a_full_disk_ends_the_keeping_and_no_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, and no part of a text is left, which would shift those behind it."""
    folder = tmp_path / "texts"
    engine = make_fast_engine(demo_folder(), spec="ngram", lookup=folder, threads=1)

    def run(name: str) -> int:
        return len(run_requests(engine, [Request(name, QUESTION, sampled())])[0].tokens)

    assert run("a") == LENGTH
    (file,) = find_text_files(folder)
    size = file.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, limits[1]))
    try:
        assert run("b") == run("c") == LENGTH
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert caplog.text.count("--lookup keeps no more texts") == 1
    assert file.stat().st_size == size


def test_a_folder_that_others_may_read_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UsageError, match="others may read it"):
        make_fast_engine(demo_folder(), spec="ngram", lookup=folder)


def test_nothing_is_kept_unless_it_is_asked_for(tiny: Callable[..., Path]) -> None:
    options: dict[str, Any] = {"spec": "ngram", "draft_max": 4}
    engine = make_fast_engine(tiny(), **options)
    runs = [run_requests(engine, [Request("a", QUESTION, sampled())])[0] for _ in range(2)]
    assert runs[0].drafts == runs[1].drafts and engine.plan.pool_tokens == 0
    assert make_fast_engine(tiny(), spec="off", pool_tokens=POOL).plan.pool_tokens == 0
