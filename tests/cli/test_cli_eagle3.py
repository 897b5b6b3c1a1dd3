"""EAGLE-3 heads from the command line, with the real engine on a tiny pair, and heads that are refused."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.runtime.plan import machine
from tests.cli.conftest import refused
from tests.helpers import edit_weights
from tests.recipes.tiny import VARIANTS, write_tiny
from tests.recipes.tiny_eagle3 import write_tiny_pair

pytestmark = pytest.mark.usefixtures("keep_threads")

Pair = tuple[Path, Path]

Run = Callable[..., Any]
QUICK = ("--raw", "--threads", 1, "--ctx", 256, "-n", 16, "--seed", 3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of two layers and a head that often agrees with it."""
    target = (folder := tmp_path_factory.mktemp("pair")) / "target"
    head = write_tiny_pair(target, folder / "head", kind="copy", aux=(1, 2), target_options={"layers": 2})
    return target, head


def test_auto_takes_the_head_that_is_given_and_the_text_is_plain(spd_run, pair, tmp_path) -> None:
    target, head = pair
    words = ("generate", *QUICK, "-m", target, "--temperature", 0.8, "--json", "abc abc abc")
    plain, trace = spd_run(*words, "--spec", "off").json, tmp_path / "trace"
    shown = spd_run(*words, "--draft-model", head, "--no-adaptive", "--trace", trace).json
    assert shown["token_ids"] == plain["token_ids"]
    counts = shown["metrics"]["speculative_decoding"]
    assert counts["method"] == shown["plan"]["spec"] == "eagle3" and counts["num_spec_tokens"] == 4
    assert 0 < counts["num_accepted_draft_tokens"] < counts["num_draft_tokens"]
    assert shown["plan"]["draft_model"] == str(head) and shown["plan"]["draft_weight_bytes"] > 0
    told = spd_run("explain", trace, "--json").json
    assert (told["method"], told["k"]) == ("eagle3", 4)
    assert "eagle3 k=4" in spd_run("explain", trace).text


def test_inspect(spd_run: Run, pair: Pair) -> None:
    target, head = pair
    alone = spd_run("inspect", head)
    words = "  head            kind eagle3 · target hidden size 64 · draft vocab size 288 · aux layers 1, 2\n"
    assert alone.code == 0 and words in alone.text
    facts = {"target_hidden_size": 64, "draft_vocab_size": 288, "aux_layers": [1, 2]}
    assert spd_run("inspect", head, "--json").json["target"]["head"].items() >= facts.items()
    shown = spd_run("inspect", target, "--draft", head, "--json").json
    assert shown["compatible"] and shown["needs"]["parts"]["draft_weights"] > 0
    assert (shown["speculation"]["method"], shown["speculation"]["draft_max"]) == ("eagle3", 4)


FIT = {
    "draft --draft-model HEAD": (4, "is an EAGLE-3 head, not a model"),
    "eagle3 --draft-model TARGET": (4, "is a model, not an EAGLE-3 head"),
    "eagle3": (2, "--spec eagle3 needs an EAGLE-3 head"),
}


@pytest.mark.parametrize("words", FIT)
def test_words_that_do_not_fit(spd_run: Run, pair: Pair, words: str) -> None:
    places = {"TARGET": pair[0], "HEAD": pair[1]}
    typed = (places.get(word, word) for word in words.split())
    refused(spd_run("generate", "-m", pair[0], "Hi", "--spec", *typed), *FIT[words])


def test_a_head_of_another_target(spd_run: Run, pair: Pair, tmp_path: Path) -> None:
    other = write_tiny(tmp_path / "other", **{**VARIANTS["llama2"], "hidden": 96, "layers": 2})
    ran = spd_run("generate", "-m", other, "--draft-model", pair[1], "Hi")
    refused(ran, 4, "made for another model", "hidden size: head 64, target 96", "--spec ngram")
    shown = spd_run("inspect", other, "--draft", pair[1])
    assert shown.code == 4 and "\ncompatible        no\n" in shown.text


def test_heads_that_are_wrong(spd_run: Run, pair: Pair, tmp_path: Path) -> None:
    """What else is refused is told by the tests of formats and of the runtime."""
    for name in ("fc.weight", "d2t"):
        folder = shutil.copytree(pair[1], tmp_path / name)
        edit_weights(folder, lambda held, name=name: held.pop(name))
        words = ("generate", "-m", pair[0], "--spec", "eagle3", "--draft-model", folder, "--raw", "Hi")
        refused(spd_run(*words), 4, f"'{name}': is missing")


def test_a_refusal_for_memory_names_options_that_exist(spd_run, pair, monkeypatch) -> None:
    monkeypatch.setattr(machine, "free_memory", lambda device: 2**21)
    ran = spd_run("generate", "-m", pair[0], "--draft-model", pair[1], "--ctx", 512, "Hi")
    assert ran.code == 5 and "draft weights" in ran.err and "--spec ngram, without --draft-model" in ran.err
    flags = set(re.findall(r"(?:fix:|^  ) +(--[a-z-]+) ", ran.err, re.MULTILINE))
    known = spd_run("generate", "--help").text
    assert len(flags) > 2 and all(flag in known for flag in flags), flags
