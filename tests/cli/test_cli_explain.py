"""`spd explain` from the command line, on the demo."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cli.conftest import refused

QUICK = ("--threads", 1, "--ctx", 256, "-n", 40, "--temperature", 0)
ASK = "What does os.path.join do?"


def test_a_trace_is_explained(spd_run: Callable[..., Any], tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    ran = spd_run("generate", *QUICK, "--no-adaptive", "--trace", trace, ASK)
    assert ran.code == 0 and ran.text.strip()
    told = spd_run("explain", trace)
    assert told.code == 0 and "holds no plain rounds" in told.text.replace("\n", " ")
    assert "What limits it is" in told.text.replace("\n", " ")
    assert max(map(len, told.text.splitlines())) <= 80
    assert "mtp k=3" in told.text and "← now" in told.text and "← best" in told.text
    shown = spd_run("explain", trace, "--json").json
    assert shown["method"] == "mtp" and shown["k"] == 3 and shown["rounds"] > 5


def test_traces_of_two_runs_share_their_costs(spd_run: Callable[..., Any], tmp_path: Path) -> None:
    plain, draft = tmp_path / "plain", tmp_path / "draft"
    spd_run("generate", *QUICK, "--spec", "off", "--trace", plain, ASK)
    spd_run("generate", *QUICK, "--draft-max", 2, "--no-adaptive", "--trace", draft, ASK)
    shown = spd_run("explain", plain, draft, "--json").json
    assert shown["plain_measured"] and set(shown["verify_ms"]) == {"1", "3"} and shown["k"] == 2


def test_traces_of_different_drafters_are_not_mixed(spd_run: Callable[..., Any], tmp_path: Path) -> None:
    mtp, lookup = tmp_path / "mtp", tmp_path / "lookup"
    spd_run("generate", *QUICK, "--no-adaptive", "--trace", mtp, ASK)
    spd_run("generate", *QUICK, "--spec", "ngram", "--no-adaptive", "--trace", lookup, ASK)
    told = spd_run("explain", mtp, lookup)
    refused(told, 4, "different ways of drafting")
    assert "mtp, --verify coupled, T 0" in told.err and "ngram" in told.err
    assert spd_run("explain", mtp, mtp).code == 0


def test_refusals(spd_run: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello\nworld\n")
    refused(spd_run("explain", tmp_path / "text"), 2, "line 1 is no round of a trace")
    (tmp_path / "bytes").write_bytes(b"\xff\n")
    refused(spd_run("explain", tmp_path / "bytes"), 2, "is not UTF-8 text")
    (tmp_path / "empty").write_text("")
    refused(spd_run("explain", tmp_path / "empty"), 2, "no rounds beyond a first one")
