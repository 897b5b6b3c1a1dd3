"""`spd chat` with plain lines over a fake engine; the tokens and the file of a chat."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from spd.cli.chat.conversation import (
    ChatEncoder,
    Conversation,
    EncodedPrompt,
    SessionStore,
    Turn,
    prompt_spans,
)
from spd.cli.chat.model import ChatModel
from spd.cli.chat.slash import Commands
from spd.cli.reply_view import DraftedTextSplitter
from spd.conversation.vocabulary import Vocabulary, open_vocabulary
from spd.errors import IncompatibleError, NotFoundError, ResourceError, UsageError
from spd.formats.folder import ModelFolder
from spd.kernels.native import build
from spd.runtime.engine.request import Event, ThinkingBudget, derived_seed
from tests.cli import conftest
from tests.cli.conftest import (
    SPECIALS,
    TEMPLATE,
    assert_refused,
    edit_json,
    make_failing,
    read_saved_chat,
    write_tokenizer,
)


@pytest.fixture
def talk(spd_run: Callable, model: Path, script: Any) -> Callable:
    """Return a function that runs a chat over lines: `talk("line", "line", argv=[...])`."""

    def run(*lines: str, argv: Sequence[object] = (), name: str | None = "t") -> Any:
        session = ["-c", name] if name else []
        return spd_run(
            "chat", model, session, argv, stdin="".join(f"{line}\n" for line in lines).encode()
        )

    return run


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that reads the lines of a session file."""
    return lambda name="t": read_saved_chat(tmp_path, name)


def test_lines_in_text_out_and_everything_saved(
    talk: Callable, saved: Callable, script: Any
) -> None:
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
    """It keeps its model, system message and seed; with --no-save its file is unchanged."""
    talk("Hi", argv=["--seed", "5", "-s", "be terse"])
    first = script.request.prompt_ids
    assert talk("Never", argv=["--no-save"]).code == 0
    ran = spd_run("chat", "-c", stdin=b"Again\n")
    assert ran.code == 0 and [turn["user"] for turn in saved()[1:]] == ["Hi", "Again"]
    assert script.request.prompt_ids[: len(first)] == first
    assert saved()[0]["system"] == "be terse" and script.request.params.seed == derived_seed(5, 1)


def test_a_message_that_was_never_answered_is_not_lost(talk, saved, script, monkeypatch) -> None:
    """A lost terminal takes no reply and cannot show the draft, so the message stays in the file."""
    script.fail = ResourceError("out of it", fix=["less"])
    script.pieces = ["a", "b", "c"]
    ran = talk("Hi")
    assert ran.code == 5 and "out of it" in ran.err and ran.text == "a\n"
    assert len(saved()) == 1  # taken back: a person would find it in the editor
    script.fail = None
    monkeypatch.setattr(
        "spd.cli.terminal.sink._write_all", make_failing(OSError(errno.EIO, "gone"))
    )
    assert talk("Hi", name="gone").code == 5
    assert [turn["user"] for turn in saved("gone")[1:]] == ["Hi"]


@dataclass(frozen=True)
class Transcript:
    """Lines of a chat, the user messages that they save, and texts of standard error."""

    lines: list[str]
    argv: list[str]
    messages: list[str]
    """Empty: any."""
    expected: str


@pytest.mark.parametrize(
    "transcript",
    [
        Transcript(
            ["Hi", "/undo", "//slash", "/exit", "never said"],
            argv=[],
            messages=["/slash"],
            expected="took back: Hi",
        ),
        Transcript(["Hi", "/edit", "Better"], argv=[], messages=["Better"], expected=""),
        Transcript(
            ["/file 'a b.txt'", "What?", "Next"],
            argv=["-f", "a b.txt"],
            messages=["text\n\ntext\n\nWhat?", "Next"],
            expected="goes with the next message: a b.txt: 1 line, 4 characters\n",
        ),
        Transcript(
            ["/file a.txt", "/file none", "/file", "What?"],
            argv=[],
            messages=["What?"],
            expected="no file goes with",
        ),
        Transcript(
            ["/file a.txt", "/clear", "/file"],
            argv=[],
            messages=[],
            expected="no file goes with the next message",
        ),
        Transcript(
            ["/file a.txt", "/file"],
            argv=[],
            messages=[],
            expected="goes with the next message: a.txt: 1 line, 4 characters",
        ),
        Transcript(
            ["Hi", "/clear", "Other", "/load t", "More", "/load"],
            argv=[],
            messages=["Hi", "More"],
            expected="  t  Hi",
        ),
        Transcript(["/help"], argv=[], messages=[], expected="\n".join(Commands.names())),
    ],
)
def test_a_transcript_gives_these_messages(transcript, talk, saved, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.txt", "a b.txt"):
        Path(name).write_text("text")
    ran = talk(*transcript.lines, argv=transcript.argv)
    assert ran.code == 0, ran
    assert all(line in ran.err for line in transcript.expected.split("\n")), ran
    sent_messages = [turn["user"] for turn in saved()[1:]] if transcript.messages else []
    assert sent_messages == transcript.messages


def test_regen_draws_with_another_seed_and_more_with_the_same(talk, saved, script) -> None:
    note = "temperature 0 gives one reply"
    assert note in talk("Hi", "/set temperature=0", "/regen", name="greedy").err
    assert note not in talk("Hi", "/set temperature=0.7", "/regen", name="drawn").err
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


def test_parameters_and_the_system_message_change(
    talk: Callable, saved: Callable, script: Any
) -> None:
    set_command = "/set temperature=0.5 top-k=7 stop=END seed=3 max_tokens=9"
    ran = talk("/system be kind", set_command, "Hi", "/set", "/set top_k=auto")
    params = script.request.params
    assert (params.temperature, params.top_k, params.stop, params.max_tokens) == (
        0.5,
        7,
        ("END",),
        9,
    )
    assert params.seed == derived_seed(3, 0) and ran.code == 0 and saved()[0]["system"] == "be kind"
    assert "temperature         0.5 (given)" in ran.err and "top k               20 (gen" in ran.err


def test_thinking_has_a_budget(talk: Callable, script: Any, model: Path) -> None:
    """Thinking before /more counts towards the budget; /think changes and removes it."""
    write_tokenizer(model, (*SPECIALS, "<think>", "</think>"))
    script.finish = "length"
    script.pieces = ["<think>", "hm"]
    talk("Hi", "/more", "/think 9", "Again", "/think on", "Free", argv=["--think", 10])
    first, continued, again, free = (request.thinking for request in script.engine.requests)
    begin = 259
    end = 260
    assert first == ThinkingBudget(10, end, begin) and again == ThinkingBudget(9, end, begin)
    assert continued == ThinkingBudget(6, end, begin, inside=True) and free is None


def test_a_failed_reply_or_load_restores_the_state_before_it(
    talk: Callable, saved: Callable, script: Any
) -> None:
    """A reply stays when /regen fails; the previous engine stays when another does not load."""
    script.on_step = make_failing(ResourceError("out of it", fix=["less"]), at=3)
    assert talk("Hi", "/regen").code == 5
    assert [turn["reply"] for turn in saved()[1:]] == ["Hello wörld!"]
    script.on_load = make_failing(ResourceError("no room", fix=["less"]), at=1)
    script.on_step = None
    ran = talk("Hi", "/spec ngram", "never")
    assert ran.code == 5 and "no room" in ran.err
    assert [engine.config.spec for engine in script.engines[2:]] == ["auto"]


def test_figures_and_a_chat_that_cannot_be_saved_goes_on(talk: Callable, tmp_path: Path) -> None:
    ran = talk("Hi", "/stats", "/stats off", "Again", argv=["--stats"])
    assert ran.err.count(" tok/s · first") == 1 and "drafts 3/12 (25%) · ctx 27/128" in ran.err
    assert "\nrounds            count 3 · with drafts 3 · tokens per round 2.00\n" in ran.err
    drafts = (
        "method draft · draft max 4 · drafted tokens 12 · accepted drafts 3 · acceptance rate 25% ·"
    )
    assert f"\ndrafts            {drafts}" in ran.err
    assert not re.search("num |draft n|predicted| raw", ran.err), "names of JSON fields"
    (tmp_path / "state").rename(tmp_path / "other")
    (tmp_path / "state").write_text("in the way")
    ran = talk("Hi", "Again", name=None)
    assert ran.code == 0 and ran.text.count("Hello") == 2 and ran.err.count("cannot be saved") == 1


def test_the_first_chat_says_that_kernels_are_compiled(talk, script, monkeypatch) -> None:
    models = list[ChatModel]()
    start = ChatModel.start_loading
    seen = list[str]()

    def keep_and_start(model: ChatModel) -> None:
        models.append(model)
        start(model)

    def compile_kernels(progress: Any) -> None:
        fields = {"done": 3, "total": 8}
        build.logger.getChild("compiling").info("compiling C kernels", extra=fields)
        seen.append(models[0].loading_text())

    monkeypatch.setattr(ChatModel, "start_loading", keep_and_start)
    script.on_load = compile_kernels
    assert talk("Hi").code == 0 and seen == ["compiling C kernels [###.....]"]


def test_figures_are_of_the_engine_that_replied(talk, script, monkeypatch) -> None:
    def load_without_drafts(progress: Any) -> None:
        if script.engines:  # /spec has loaded another
            plan = partial(conftest.FakePlan, spec="off")
            monkeypatch.setattr(conftest, "FakePlan", plan)

    script.on_load = load_without_drafts
    ran = talk("Hi", "/spec off", "/stats")
    assert re.search("^spec +off$", ran.err, re.MULTILINE)
    assert "\ndrafts            method draft" in ran.err


def test_drafts_that_do_not_help_are_told_once_in_a_chat(talk: Callable, script: Any) -> None:
    script.draft_fault = "cost"
    assert talk("Hi", "Again").err.count("drafts do not pay here") == 1
    script.draft_fault = ""
    assert "drafts do not pay" not in talk("Hi").err


def test_another_speculation_or_model_leaves_the_drafter_behind(
    talk, script, model, tmp_path
) -> None:
    other = shutil.copytree(model, tmp_path / "other")
    lines = (
        "/spec ngram 3",
        "/spec draft",
        "/spec mtp",
        "/spec off",
        f"/model {other}/",
        "/spec auto",
        f"/model {model}",
    )
    ran = talk(*lines, argv=["--draft-model", model])
    assert ran.code == 0, ran
    assert re.search(rf"^model +{other}/$", ran.err, re.MULTILINE), "as it was typed"
    drafters = [
        (engine.config.spec, engine.config.draft_model is not None) for engine in script.engines
    ]
    specs = ("auto", "ngram", "draft", "mtp", "off", "off", "auto", "auto")
    has_draft_model = (True, False, True, False, False, False, False, True)
    assert drafters == list(zip(specs, has_draft_model, strict=True))
    assert script.engines[1].config.draft_max == 3 and all(
        engine.closed for engine in script.engines
    )


def test_a_damaged_session_and_a_model_without_a_template_are_refused(
    talk, tmp_path, model, script
) -> None:
    talk("Hi")
    (tmp_path / "state" / "spd" / "sessions" / "t.jsonl").write_text("{")
    assert_refused(talk("Again"), 4, "t.jsonl: line 1")
    (model / "tokenizer_config.json").write_text("{}")
    assert_refused(talk("Hi", name=None), 4, "no chat template", "spd generate --raw")


def test_drafted_characters_are_those_whose_last_byte_was() -> None:
    spelled = {1: "ä".encode()[:1], 2: "ä".encode()[1:], 3: b"xy", 4: b""}
    drafted = DraftedTextSplitter(spelled.__getitem__)
    assert (
        list(
            drafted.split_event(
                Event(request_id="0", token_ids=(1,), text="", finish_reason=None, drafted=(False,))
            )
        )
        == []
    )
    assert list(
        drafted.split_event(
            Event(
                request_id="0",
                token_ids=(2, 3),
                text="äx",
                finish_reason=None,
                drafted=(True, False),
            )
        )
    ) == [
        ("ä", True),
        ("x", False),
    ]
    assert list(
        drafted.split_event(
            Event(
                request_id="0",
                token_ids=(4,),
                text="y\ufffd",
                finish_reason="stop",
                drafted=(True,),
            )
        )
    ) == [("y\ufffd", False)]


END = 258
"""<|im_end|>, which the template writes after a reply."""


@pytest.fixture
def encoder(model: Path) -> ChatEncoder:
    """Return an encoder for the byte-level model, in which a token is a byte."""
    return make_encoder(model)


def vocabulary(folder: Path) -> Vocabulary:
    return open_vocabulary("model", ModelFolder(folder))


def make_encoder(folder: Path) -> ChatEncoder:
    return ChatEncoder(vocabulary(folder), {})


def ids_of(text: str, folder: Path, **how: bool) -> tuple[int, ...]:
    return tuple(vocabulary(folder).need_tokenizer().encode(text, **how))


def make_conversation(*turns: Turn, system: str | None = None) -> Conversation:
    return Conversation("model", 1, system, "f", turns=turns)


def test_the_next_turn_begins_with_every_token_of_the_last(
    encoder: ChatEncoder, model: Path
) -> None:
    first = encoder.encode(make_conversation(Turn("Hi")))
    assert first.spans == (("prompt", len(first.ids)),)
    reply = (*ids_of("Hello", model), END)
    second = encoder.encode(make_conversation(Turn("Hi", "Hello", reply, "stop"), Turn("More")))
    assert second.ids[: len(first.ids) + len(reply)] == (*first.ids, *reply)
    new = len(second.ids) - len(first.ids) - len(reply)
    assert second.spans == (*first.spans, ("generated", len(reply)), ("prompt", new))
    assert second.ids == ids_of(second.text, model, parse_special=True)
    cut = encoder.encode(make_conversation(Turn("Hi", "Hello", reply[:-1], "abort"), Turn("More")))
    assert cut.ids == second.ids and cut.spans[1] == ("generated", len(reply) - 1), (
        "the template ends it"
    )


def test_tokens_stay_the_ones_that_were_drawn(model: Path) -> None:
    """A reply keeps its tokens even where encoding its text gives others."""
    library = json.loads((model / "tokenizer.json").read_text())
    library["model"]["vocab"]["lo"] = 261
    library["model"]["merges"] = [["l", "o"]]
    (model / "tokenizer.json").write_text(json.dumps(library))
    drawn = (*ids_of("l", model), *ids_of("o", model))
    encoder = make_encoder(model)
    assert ids_of("lo", model) == (261,)
    first = encoder.encode(make_conversation(Turn("Hi")))
    second = encoder.encode(make_conversation(Turn("Hi", "lo", drawn, "length"), Turn("More")))
    assert second.ids[len(first.ids) :][:2] == drawn


def test_what_was_not_drawn_is_encoded_anew(encoder: ChatEncoder, model: Path) -> None:
    stopped = Turn("Hi", "cut before a stop string", (1, 2, 3), "stop")
    for turn in (Turn("Hi", "edited by hand", (), "edited"), stopped):
        first = encoder.encode(make_conversation(Turn("Hi")))
        second = encoder.encode(make_conversation(turn, Turn("More")))
        assert second.ids == ids_of(second.text, model, parse_special=True)
        assert second.spans == (
            ("prompt", len(first.ids)),
            ("prompt", len(second.ids) - len(first.ids)),
        )


def test_a_template_that_drops_earlier_thinking_keeps_what_is_before_it(model: Path) -> None:
    template = TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
    edit_json(model / "tokenizer_config.json", chat_template=template)
    encoder = make_encoder(model)
    reply = "<think>hm</think>Yes"
    first = encoder.encode(make_conversation(Turn("Hi")))
    second = encoder.encode(
        make_conversation(Turn("Hi", reply, ids_of(reply, model), "stop"), Turn("More"))
    )
    assert second.spans[0] == ("prompt", len(first.ids)) and "<think>" not in second.text


def test_a_reply_in_channels_is_told_by_its_answer(model: Path) -> None:
    """Templates of such models refuse their own marks in a message, so only the answer is passed on."""
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    write_tokenizer(model, (*SPECIALS, *marks))
    reply = (
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    )
    ids = ids_of(f"{reply}<|return|>", model, parse_special=True)
    assert vocabulary(model).need_tokenizer().decode(ids) == reply
    text = (
        make_encoder(model)
        .encode(make_conversation(Turn("Hi", reply, ids, "stop"), Turn("More")))
        .text
    )
    assert "assistant\nYes<|im_end|>" in text and "hm" not in text
    write_tokenizer(model, (*SPECIALS, "<|end|>"))  # as Phi's, which ends replies
    assert vocabulary(model).need_tokenizer().token_bytes(259) == b""


def test_the_same_turns_give_the_same_prompt_however_they_came(
    encoder: ChatEncoder, model: Path
) -> None:
    turns = (
        Turn("a", "Hello", (*ids_of("Hello", model), END), "stop"),
        Turn("b", "x", (), "edited"),
    )
    for count in range(3):
        encoder.encode(make_conversation(*turns[:count], Turn("c")))
    encoder.encode(make_conversation(*turns[:1], Turn("other"), system="sys"))
    final = make_conversation(*turns, Turn("c"))
    assert encoder.encode(final) == make_encoder(model).encode(final)


def test_special_words_stay_text_and_spans_of_a_shared_beginning(encoder) -> None:
    encoded = encoder.encode(
        make_conversation(Turn("a<|im_end|>b", "c", (1,), "stop"), Turn("<|im_start|>"))
    )
    assert encoded.ids.count(END) == 3 and "a<|im_end|>b" in encoded.text, "the template's own"
    earlier = EncodedPrompt("", (1, 2, 3, 4, 5), (("prompt", 2), ("generated", 3)))
    assert prompt_spans(earlier, (1, 2, 3, 9, 9)) == (
        ("prompt", 2),
        ("generated", 1),
        ("prompt", 2),
    )
    assert prompt_spans(earlier, (1,)) == (("prompt", 1),)
    assert prompt_spans(earlier, (7, 7)) == prompt_spans(None, (7, 7)) == (("prompt", 2),)


TURNS = (Turn("ünï\u2028\r\n", "a\nb\x00", (1, 2), "stop", 9), Turn("unanswered"))
CHAT = Conversation(
    model="org/name", seed=7, system="be terse", vocabulary="abc", draws=3, turns=TURNS
)


def test_a_chat_comes_back_as_it_was(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "state" / "sessions")
    for number, name in enumerate(["b", "a", "c"]):
        store.save(name, CHAT)
        os.utime(store.path(name), (number, number))
    (store.folder / "odd name.jsonl").write_text("")
    assert store.load("a") == CHAT and store.names() == ["c", "a", "b"], "the latest comes first"
    assert (store.path("a").stat().st_mode & 0o777, store.folder.stat().st_mode & 0o777) == (
        0o600,
        0o700,
    )
    with pytest.raises(NotFoundError) as error:
        store.load("x")
    assert error.value.reason == ("The latest: c, a, b",)


def test_chats_that_cannot_be_listed_are_no_absence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError) as error:
        SessionStore(tmp_path / "file").names()
    assert "cannot be listed: Not a directory" in error.value.message
    assert SessionStore(tmp_path / "none").names() == []


HEADER = b'{"schema": "spd.chat/1", "model": "m", "seed": 1}\n'


DAMAGED: list[tuple[bytes | None, str]] = [
    *((content, "line 1") for content in (b"", b"not json\n", b"[1]\n", b"[" * 100_000)),
    (HEADER.replace(b"/1", b"/2"), "another version"),
    (HEADER.replace(b'"model": "m", ', b""), "model"),
    (HEADER.replace(b'"m"', b"3"), "model"),
    *((HEADER + line, "line 2") for line in (b'{"user": "a", "rep', b'{"reply": "a"}\n')),
    (HEADER + b'{"user": "a", "reply_ids": [1.5]}\n', "line 2"),
    (HEADER + b"\xff\xfe\n", "utf-8"),
    (None, "not a file"),  # a FIFO is not waited for
]


@pytest.mark.parametrize(("content", "expected"), DAMAGED)
def test_a_damaged_file_is_refused_by_name(
    content: bytes | None, expected: str, tmp_path: Path
) -> None:
    path = SessionStore(tmp_path).path("x")
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(IncompatibleError) as error:
        SessionStore(tmp_path).load("x")
    assert expected in error.value.message and str(path) in error.value.message and error.value.fix


def test_one_chat_is_open_once_under_a_name_that_stays_in_the_folder(tmp_path: Path) -> None:
    first = SessionStore(tmp_path)
    second = SessionStore(tmp_path)
    for name in ("../x", "a/b", "", ".x", "-x", "a\0b", "x" * 101, "a b", "ü"):
        with pytest.raises(UsageError, match="not a name"):
            first.path(name)
    first.lock("x")
    first.lock("x")
    with pytest.raises(UsageError, match="another process"):
        second.lock("x")
    assert second.lock_new() != first.lock_new()
    second.lock("x")
    first.close()
    second.close()
    first.lock("x")
    first.close()
