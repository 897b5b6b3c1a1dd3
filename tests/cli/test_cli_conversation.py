"""A chat's tokens: each turn continues the one before, whatever was taken back; and its file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from spd.cli.chat.conversation import ChatEncoder, Conversation, Encoded, SessionStore, Turn, shared_spans
from spd.cli.text.job import Vocabulary, open_vocabulary
from spd.errors import IncompatibleError, NotFoundError, UsageError
from spd.formats.folder import ModelFolder
from tests.cli.conftest import SPECIALS, TEMPLATE, edit, write_tokenizer

END = 258
"""<|im_end|>, which the template writes after a reply."""


@pytest.fixture
def encoder(model: Path) -> ChatEncoder:
    """An encoder for the byte-level model: a token is a byte."""
    return encoder_of(model)


def vocabulary(folder: Path) -> Vocabulary:
    return open_vocabulary("model", ModelFolder(folder))


def encoder_of(folder: Path) -> ChatEncoder:
    return ChatEncoder(vocabulary(folder), {})


def ids_of(text: str, folder: Path, **how: bool) -> tuple[int, ...]:
    return tuple(vocabulary(folder).need_tokenizer().encode(text, **how))


def talk(*turns: Turn, system: str | None = None) -> Conversation:
    return Conversation("model", 1, system, "f", turns=turns)


def test_the_next_turn_begins_with_every_token_of_the_last(encoder: ChatEncoder, model: Path) -> None:
    first = encoder.encode(talk(Turn("Hi")))
    assert first.spans == (("prompt", len(first.ids)),)
    reply = (*ids_of("Hello", model), END)
    second = encoder.encode(talk(Turn("Hi", "Hello", reply, "stop"), Turn("More")))
    assert second.ids[: len(first.ids) + len(reply)] == (*first.ids, *reply)
    new = len(second.ids) - len(first.ids) - len(reply)
    assert second.spans == (*first.spans, ("generated", len(reply)), ("prompt", new))
    assert second.ids == ids_of(second.text, model, parse_special=True)
    cut = encoder.encode(talk(Turn("Hi", "Hello", reply[:-1], "abort"), Turn("More")))
    assert cut.ids == second.ids and cut.spans[1] == ("generated", len(reply) - 1), "the template ends it"


def test_tokens_stay_the_ones_that_were_drawn(model: Path) -> None:
    """A reply whose tokens are not what encoding its text would give keeps them."""
    library = json.loads((model / "tokenizer.json").read_text())
    library["model"]["vocab"]["lo"], library["model"]["merges"] = 261, [["l", "o"]]
    (model / "tokenizer.json").write_text(json.dumps(library))
    drawn, encoder = (*ids_of("l", model), *ids_of("o", model)), encoder_of(model)
    assert ids_of("lo", model) == (261,)
    first = encoder.encode(talk(Turn("Hi")))
    second = encoder.encode(talk(Turn("Hi", "lo", drawn, "length"), Turn("More")))
    assert second.ids[len(first.ids) :][:2] == drawn


def test_what_was_not_drawn_is_encoded_anew(encoder: ChatEncoder, model: Path) -> None:
    stopped = Turn("Hi", "cut before a stop string", (1, 2, 3), "stop")
    for turn in (Turn("Hi", "edited by hand", (), "edited"), stopped):
        first, second = encoder.encode(talk(Turn("Hi"))), encoder.encode(talk(turn, Turn("More")))
        assert second.ids == ids_of(second.text, model, parse_special=True)
        assert second.spans == (("prompt", len(first.ids)), ("prompt", len(second.ids) - len(first.ids)))


def test_a_template_that_drops_earlier_thinking_keeps_what_is_before_it(model: Path) -> None:
    template = TEMPLATE.replace("message['content']", "message['content'].split('</think>')[-1]")
    edit(model / "tokenizer_config.json", chat_template=template)
    encoder, reply = encoder_of(model), "<think>hm</think>Yes"
    first = encoder.encode(talk(Turn("Hi")))
    second = encoder.encode(talk(Turn("Hi", reply, ids_of(reply, model), "stop"), Turn("More")))
    assert second.spans[0] == ("prompt", len(first.ids)) and "<think>" not in second.text


def test_a_reply_in_channels_is_told_by_its_answer(model: Path) -> None:
    """The templates of such models refuse their own marks in a message; only these marks have a text."""
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    write_tokenizer(model, (*SPECIALS, *marks))
    reply = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes"
    ids = ids_of(f"{reply}<|return|>", model, parse_special=True)
    assert vocabulary(model).need_tokenizer().decode(ids) == reply
    text = encoder_of(model).encode(talk(Turn("Hi", reply, ids, "stop"), Turn("More"))).text
    assert "assistant\nYes<|im_end|>" in text and "hm" not in text
    write_tokenizer(model, (*SPECIALS, "<|end|>"))  # as Phi's, which ends replies
    assert vocabulary(model).need_tokenizer().token_bytes(259) == b""


def test_the_same_turns_give_the_same_prompt_however_they_came(encoder: ChatEncoder, model: Path) -> None:
    turns = (Turn("a", "Hello", (*ids_of("Hello", model), END), "stop"), Turn("b", "x", (), "edited"))
    for count in range(3):
        encoder.encode(talk(*turns[:count], Turn("c")))
    encoder.encode(talk(*turns[:1], Turn("other"), system="sys"))
    final = talk(*turns, Turn("c"))
    assert encoder.encode(final) == encoder_of(model).encode(final)


def test_special_words_stay_text_and_spans_of_a_shared_beginning(encoder) -> None:
    encoded = encoder.encode(talk(Turn("a<|im_end|>b", "c", (1,), "stop"), Turn("<|im_start|>")))
    assert encoded.ids.count(END) == 3  # the template's own: after each message and the reply
    assert "a<|im_end|>b" in encoded.text
    known = Encoded("", (1, 2, 3, 4, 5), (("prompt", 2), ("generated", 3)))
    assert shared_spans(known, (1, 2, 3, 9, 9)) == (("prompt", 2), ("generated", 1), ("prompt", 2))
    assert shared_spans(known, (1,)) == (("prompt", 1),)
    assert shared_spans(known, (7, 7)) == shared_spans(None, (7, 7)) == (("prompt", 2),)


TURNS = (Turn("ünï\u2028\r\n", "a\nb\x00", (1, 2), "stop", 9), Turn("unanswered"))
CHAT = Conversation("org/name", 7, "be terse", "abc", 3, TURNS)


def test_a_chat_comes_back_as_it_was(tmp_path: Path) -> None:
    store = SessionStore(tmp_path / "state" / "sessions")
    for number, name in enumerate(["b", "a", "c"]):
        store.save(name, CHAT)
        os.utime(store.path(name), (number, number))
    (store.folder / "odd name.jsonl").write_text("")
    assert store.load("a") == CHAT and store.names() == ["c", "a", "b"], "the latest comes first"
    assert (store.path("a").stat().st_mode & 0o777, store.folder.stat().st_mode & 0o777) == (0o600, 0o700)
    with pytest.raises(NotFoundError) as error:
        store.load("x")
    assert error.value.reason[0] == "there is: c"


HEADER = b'{"schema": "spd.chat/1", "model": "m", "seed": 1}\n'


DAMAGED: list[tuple[bytes | None, str]] = [
    *((content, "line 1") for content in (b"", b"not json\n", b"[1]\n", b"[" * 100_000)),
    (HEADER.replace(b"/1", b"/2"), "another version"),
    (HEADER.replace(b'"model": "m", ', b""), "model"),
    (HEADER.replace(b'"m"', b"3"), "model"),
    *((HEADER + line, "line 2") for line in (b'{"user": "a", "rep', b'{"reply": "a"}\n')),
    (HEADER + b'{"user": "a", "reply_ids": [1.5]}\n', "line 2"),
    *((HEADER + b"\xff\xfe\n", "utf-8"), (None, "not a file")),  # a FIFO is not waited for
]


@pytest.mark.parametrize(("content", "words"), DAMAGED)
def test_a_damaged_file_is_refused_by_name(content: bytes | None, words: str, tmp_path: Path) -> None:
    path = SessionStore(tmp_path).path("x")
    if content is None:
        os.mkfifo(path)
    else:
        path.write_bytes(content)
    with pytest.raises(IncompatibleError) as error:
        SessionStore(tmp_path).load("x")
    assert words in error.value.message and str(path) in error.value.message and error.value.fix


def test_one_chat_is_open_once_under_a_name_that_stays_in_the_folder(tmp_path: Path) -> None:
    first, second = SessionStore(tmp_path), SessionStore(tmp_path)
    for name in ("../x", "a/b", "", ".x", "-x", "a\0b", "x" * 101, "a b", "ü"):
        with pytest.raises(UsageError, match="not a name"):
            first.path(name)
    first.open("x")
    first.open("x")
    with pytest.raises(UsageError, match="another process"):
        second.open("x")
    assert second.open_new() != first.open_new()
    second.open("x")
    first.close()
    second.close()
    first.open("x")
    first.close()
