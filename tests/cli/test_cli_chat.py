"""`spd chat` with plain lines, around an engine that says a script: turns, commands, files, refusals."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spd.cli.chat.slash import Commands
from spd.cli.text.reply import DraftedText
from spd.errors import ResourceError
from spd.runtime.engine.request import Event, ThinkingBudget, derived_seed
from tests.cli.conftest import SPECIALS, failing, refused, saved_chat, write_tokenizer


@pytest.fixture
def talk(spd_run: Callable, model: Path, script: Any) -> Callable:
    """`talk("line", "line", argv=[...])` runs a chat over these lines."""

    def run(*lines: str, argv: Sequence[object] = (), name: str | None = "t") -> Any:
        session = ["-c", name] if name else []
        return spd_run("chat", model, *session, *argv, stdin="".join(f"{line}\n" for line in lines).encode())

    return run


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The lines of a session file."""
    return lambda name="t": saved_chat(tmp_path, name)


def test_lines_in_text_out_and_everything_saved(talk: Callable, saved: Callable, script: Any) -> None:
    ran = talk("Hi", "", "Again")
    assert (ran.code, ran.text, ran.err) == (0, "Hello wörld!\nHello wörld!\n", "")
    header, *turns = saved()
    assert [turn["user"] for turn in turns] == ["Hi", "Again"]
    assert all(turn["reply"] == "Hello wörld!" and turn["finish"] == "stop" for turn in turns)
    seeds = [request.params.seed for request in script.engine.requests]
    assert seeds == [derived_seed(header["seed"], 0), derived_seed(header["seed"], 1)]
    assert [turn["seed"] for turn in turns] == seeds and header["draws"] == 2
    assert max(header["seed"], *seeds) < 2**53, "what reads JSON may hold numbers as floats"
    assert script.engine.closed


def test_a_chat_goes_on_where_it_ended(spd_run, talk, saved, script) -> None:
    """With its own model, system message and seed; one that is not to be saved stays as it was."""
    talk("Hi", argv=["--seed", "5", "-s", "be terse"])
    first = script.request.prompt_ids
    assert talk("Never", argv=["--no-save"]).code == 0
    ran = spd_run("chat", "-c", stdin=b"Again\n")
    assert ran.code == 0 and [turn["user"] for turn in saved()[1:]] == ["Hi", "Again"]
    assert script.request.prompt_ids[: len(first)] == first
    assert saved()[0]["system"] == "be terse" and script.request.params.seed == derived_seed(5, 1)


def test_a_message_that_was_never_answered_is_not_lost(talk, saved, script, monkeypatch) -> None:
    """A terminal that has gone takes no reply, and does not show the message coming back to be sent again."""
    script.fail, script.pieces = ResourceError("out of it", fix=["less"]), ["a", "b", "c"]
    ran = talk("Hi")
    assert ran.code == 5 and "out of it" in ran.err and ran.text == "a\n"
    assert len(saved()) == 1  # taken back: a person would find it in the editor
    script.fail = None
    monkeypatch.setattr("spd.cli.text.output._write_all", failing(OSError(errno.EIO, "gone")))
    assert talk("Hi", name="gone").code == 5
    assert [turn["user"] for turn in saved("gone")[1:]] == ["Hi"]


@pytest.mark.parametrize(
    ("lines", "argv", "messages", "said"),
    [
        (["Hi", "/undo", "//slash", "/exit", "never said"], [], ["/slash"], "took back: Hi"),
        (["Hi", "/edit", "Better"], [], ["Better"], ""),
        (["/file 'a b.txt'", "What?", "Next"], ["-f", "a b.txt"], ["text\n\ntext\n\nWhat?", "Next"], ""),
        (["/file a.txt", "/file none", "/file", "What?"], [], ["What?"], "next message: no file"),
        (["/file a.txt", "/clear", "/file"], [], [], "next message: no file"),
        (["/file a.txt", "/file"], [], [], "goes with the next message: a.txt: 4 characters"),
        (["Hi", "/clear", "Other", "/load t", "More", "/load"], [], ["Hi", "More"], "  t  Hi"),
        (["/help"], [], [], "\n".join(Commands.names())),
    ],
)
def test_a_transcript(lines, argv, messages, said, talk, saved, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a b.txt"):
        Path(name).write_text("text")
    ran = talk(*lines, argv=argv)
    assert ran.code == 0 and all(words in ran.err for words in said.split("\n")), ran
    assert not messages or [turn["user"] for turn in saved()[1:]] == messages


def test_regen_draws_with_another_seed_and_more_with_the_same(talk, saved, script) -> None:
    talk("Hi", "/regen")
    first, second = script.engine.requests
    assert first.prompt_ids == second.prompt_ids and first.params.seed != second.params.seed
    assert len(saved()) == 2 and saved()[0]["draws"] == 2
    script.finish = "length"
    talk("Hi", "/more", name="m")
    first, second = script.engine.requests
    assert second.params.seed == first.params.seed
    assert len(second.prompt_ids) > len(first.prompt_ids) and second.spans[-1][0] == "generated"
    assert saved("m")[1]["reply"] == "Hello wörld!" * 2 and len(saved("m")) == 2


def test_parameters_and_the_system_message_change(talk: Callable, saved: Callable, script: Any) -> None:
    given = "/set temperature=0.5 top-k=7 stop=END seed=3 max_tokens=9"
    ran = talk("/system be kind", given, "Hi", "/set", "/set top_k=auto")
    params = script.request.params
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (0.5, 7, ("END",), 9)
    assert params.seed == derived_seed(3, 0) and ran.code == 0 and saved()[0]["system"] == "be kind"
    assert "temperature         0.5 (given)" in ran.err and "top k               20 (gen" in ran.err


def test_thinking_has_a_budget(talk: Callable, script: Any, model: Path) -> None:
    """Tokens of thinking that came before /more have been spent; the budget changes and goes."""
    write_tokenizer(model, (*SPECIALS, "<think>", "</think>"))
    script.finish, script.pieces = "length", ["<think>", "hm"]
    talk("Hi", "/more", "/think 9", "Again", "/think on", "Free", argv=["--think", 10])
    first, more, again, free = (request.thinking for request in script.engine.requests)
    begin, end = 259, 260
    assert first == ThinkingBudget(10, end, begin) and again == ThinkingBudget(9, end, begin)
    assert more == ThinkingBudget(6, end, begin, inside=True) and free is None


def test_what_fails_goes_back(talk: Callable, saved: Callable, script: Any) -> None:
    """A reply that was to be said again stays; an engine that does not load leaves the one before it."""
    script.on_step = failing(ResourceError("out of it", fix=["less"]), at=3)
    assert talk("Hi", "/regen").code == 5
    assert [turn["reply"] for turn in saved()[1:]] == ["Hello wörld!"]
    script.on_step, script.on_load = None, failing(ResourceError("no room", fix=["less"]), at=1)
    ran = talk("Hi", "/spec ngram", "never")
    assert ran.code == 5 and "no room" in ran.err
    assert [engine.config.spec for engine in script.engines[2:]] == ["auto"]


def test_figures_and_a_chat_that_cannot_be_saved_goes_on(talk: Callable, tmp_path: Path) -> None:
    ran = talk("Hi", "/stats", "/stats off", "Again", argv=["--stats"])
    assert ran.err.count(" tok/s · first") == 1 and "drafts 3/12 (25%) · ctx 27/128" in ran.err
    assert "draft acceptance rate      0.25\n" in ran.err
    (tmp_path / "state").rename(tmp_path / "other")
    (tmp_path / "state").write_text("in the way")
    ran = talk("Hi", "Again", name=None)
    assert ran.code == 0 and ran.text.count("Hello") == 2 and ran.err.count("cannot be saved") == 1


def test_another_speculation_or_model_leaves_the_drafter_behind(talk, script, model, tmp_path) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    lines = ("/spec ngram 3", "/spec draft", "/spec off", f"/model {other}", "/spec auto", f"/model {model}")
    ran = talk(*lines, argv=["--draft-model", model])
    assert ran.code == 0, ran
    taken = [(engine.config.spec, engine.config.draft_model is not None) for engine in script.engines]
    specs = ("auto", "ngram", "draft", "off", "off", "auto", "auto")
    assert taken == list(zip(specs, (True, False, True, False, False, False, True), strict=True))
    assert script.engines[1].config.draft_max == 3 and all(engine.closed for engine in script.engines)


def test_a_damaged_session_and_a_model_without_a_template_are_refused(talk, tmp_path, model, script) -> None:
    talk("Hi")
    (tmp_path / "state" / "spd" / "sessions" / "t.jsonl").write_text("{")
    refused(talk("Again"), 4, "t.jsonl: line 1")
    (model / "tokenizer_config.json").write_text("{}")
    refused(talk("Hi", name=None), 4, "no chat template", "spd generate --raw")


def test_drafted_characters_are_those_whose_last_byte_was() -> None:
    spelled = {1: "ä".encode()[:1], 2: "ä".encode()[1:], 3: b"xy", 4: b""}
    drafted = DraftedText(spelled.__getitem__)
    assert list(drafted.take(Event("0", (1,), "", None, (False,)))) == []
    assert list(drafted.take(Event("0", (2, 3), "äx", None, (True, False)))) == [("ä", True), ("x", False)]
    assert list(drafted.take(Event("0", (4,), "y\ufffd", "stop", (True,)))) == [("y\ufffd", False)]
