"""`spd verify`: certificates, planted faults, settings to hold against each other; and `spd explain`."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spd.cli.commands.verify import apply_settings
from spd.runtime import EngineConfig
from tests.cli.conftest import refused, write_model
from tests.json_schema import faults
from tests.runtime import seeded_faults as planted


@pytest.fixture
def run(spd_run: Callable[..., Any], tmp_path: Path, random_weights: None) -> Callable[..., Any]:
    """Random weights, whose greedy text would repeat one token: only sampled ones are asked for."""
    target, draft = write_model(tmp_path / "m"), write_model(tmp_path / "d", num_hidden_layers=1)
    (prompts := tmp_path / "prompts.txt").write_text("first\nsecond\n")
    words = ("verify", "-m", target, "--draft-model", draft, "--prompts", prompts, "--temperature", 1.5)
    return lambda *more: spd_run(*words, "--threads", 1, "--dtype", "float32", "-n", 24, *more)


def test_certificates(run) -> None:
    """A rule that promises no text is compared at zero."""
    ran = run("--lag", 1, "--json", "--tokens", 100)
    assert ran.code == 0 and faults(ran.json, "verify") == []
    assert ran.json["passed"] and ran.json["tokens"] >= 100 and ran.json["drafts_accepted"] > 0
    assert set(ran.json["files"]) >= {"config.json", "tokenizer.json", "draft/config.json"}
    assert ran.json["plans"]["reference"]["spec"] == "off" and ran.json["plans"]["candidate"]["lag"] == 1
    ran = run("-n", 8, "--verify", "rejection", "--temperature", "0,0.5")
    assert ran.code == 0, ran
    told = {line[:18].strip(): line[18:] for line in ran.text.splitlines()}
    assert told.items() >= {"temperatures": "0", "untested": "0.5", "tokens": "16", "texts": "2"}.items()


def test_words_and_a_fault(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run()
    assert ran.code == 0 and ran.text.endswith("passed            yes\n") and ran.err == ""
    planted.verify(planted.first_is_free)(monkeypatch)  # in torch's form
    ran = run("--kernels", "torch")
    assert ran.code == 6 and ran.text.endswith("passed            no\n") and "2 of 2 texts differ" in ran.err
    assert re.search(r"differences .* · seed \d+ · .* · margin .* · near tie no\n", ran.text), ran.text


def test_settings_held_against_each_other(tmp_path: Path) -> None:
    config = EngineConfig(model=tmp_path, spec="draft", draft_model=tmp_path, draft_max=3, lag=2)
    plain = apply_settings(config, "spec=off")
    assert (plain.spec, plain.draft_model, plain.draft_max, plain.lag) == ("off", None, None, 2)
    busy = replace(config, tp=2, draft_tp=2, adaptive=True)
    assert apply_settings(busy, "spec=off").draft_tp is apply_settings(busy, "spec=ngram").draft_tp is None
    met = replace(busy, rendezvous=2)
    assert apply_settings(met, "spec=ngram").draft_tp is None
    assert apply_settings(met, "tp=1,draft-tp=auto").rendezvous is None
    other = apply_settings(config, "lag=0, --draft-max=5,adaptive=off,dtype=float32")
    assert (other.lag, other.draft_max, other.adaptive, other.dtype) == (0, 5, False, "float32")
    assert apply_settings(config, "lag=auto").lag is None
    for pair in ("spec=draft,ngram", "spec=draft, ngram", "spec=draft+ngram"):
        both = apply_settings(config, f"{pair},lag=1")
        assert (both.spec, both.draft_model, both.lag) == ("draft+ngram", tmp_path, 1)


QUICK = ("--threads", 1, "--ctx", 256, "-n", 40, "--temperature", 0)
ASK = "What does os.path.join do?"


def test_traces_are_explained(spd_run: Callable[..., Any], tmp_path: Path) -> None:
    """One alone; those of a plain run and of drafts share their costs; those of two methods are not mixed."""

    def traced(name: str, *words: object) -> Path:
        ran = spd_run("generate", *QUICK, *words, "--trace", tmp_path / name, ASK)
        assert ran.code == 0 and ran.text.strip()
        return tmp_path / name

    mtp = traced("mtp", "--no-adaptive")
    told = spd_run("explain", mtp)
    assert told.code == 0 and "holds no plain rounds" in told.text.replace("\n", " ")
    assert "What limits it is" in told.text.replace("\n", " ")
    assert max(map(len, told.text.splitlines())) <= 80
    assert "mtp k=3" in told.text and "← now" in told.text and "← best" in told.text
    shown = spd_run("explain", mtp, "--json").json
    assert shown["method"] == "mtp" and shown["k"] == 3 and shown["rounds"] > 5
    plain, two = traced("plain", "--spec", "off"), traced("two", "--draft-max", 2, "--no-adaptive")
    shown = spd_run("explain", plain, two, "--json").json
    assert shown["plain_measured"] and set(shown["verify_ms"]) == {"1", "3"} and shown["k"] == 2
    told = spd_run("explain", mtp, traced("lookup", "--spec", "ngram", "--no-adaptive"))
    refused(told, 4, "different ways of drafting", "mtp, --verify coupled, T 0", "ngram")
    assert spd_run("explain", mtp, mtp).code == 0
