"""Thinking of every family: told from the answer and counted however tokens come; calls in it
are none."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from spd.conversation.reply import ReplyBuilder
from spd.conversation.thinking import UNANSWERED_NOTE
from spd.conversation.tools.call_forms import FORMS
from spd.conversation.tools.call_grammar import Tools
from spd.formats.thinking import ThinkingMarks, find_thinking_marks
from spd.formats.tokenizer import Tokenizer
from spd.runtime.engine.json_schema import JsonObject
from spd.runtime.engine.request import Event
from spd.runtime.engine.sequence import Detokenizer


class Family(NamedTuple):
    """How a family marks thinking: what its template holds, its tokens, and a reply with the
    parts of it.
    """

    template: str
    special: Sequence[str]
    added: Sequence[str]
    reply: str
    thinking: str = "hm"
    answer: str = "Yes"
    inside: bool = False


MESSAGES = (
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|eom|>",
    "<|eot|>",
)
PLAIN = ("<think>", "</think>")
FAMILIES = {
    "Qwen3, GLM, SmolLM3, LFM2.5": Family(
        "{{ x.split('</think>') }}", (), PLAIN, "<think>\nhm\n</think>\n\nYes"
    ),
    "Qwen3.5, QwQ, R1, Step, MiniMax M2: the template opens it": Family(
        "'<think>\n'", (), PLAIN, "hm\n</think>\n\nYes", inside=True
    ),
    "R1 that opens it once more": Family(
        "'<think>\n'", (), PLAIN, "<think>\nhm\n</think>\n\nYes", inside=True
    ),
    "GLM-4.7, DeepSeek V3.1 without thinking": Family(
        "'</think>'", (), PLAIN, "</think>\n\nYes", thinking=""
    ),
    "Olmo 3, Nemotron Nano 2: marks of several tokens": Family(
        "'<think>'", (), (), "<think>hm</think>\nYes"
    ),
    "a special token": Family("", PLAIN, (), "<think>hm</think>Yes"),
    "Kimi K2 Thinking": Family("'<think></think>'", (), PLAIN, "<think>hm</think>Yes"),
    "Magistral, Ministral 3 Reasoning": Family(
        "'[THINK]' '[/THINK]'", ("[THINK]", "[/THINK]"), (), "[THINK]hm[/THINK]Yes"
    ),
    "Seed-OSS": Family(
        "set a = '<seed:think>'",
        ("<seed:think>", "</seed:think>"),
        (),
        "<seed:think>\nhm</seed:think>\nYes",
    ),
    "Command A Reasoning": Family(
        "<|START_THINKING|>",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        (),
        "<|START_THINKING|>hm<|END_THINKING|><|START_RESPONSE|>Yes<|END_RESPONSE|>",
    ),
    "Command A Reasoning, its template opens it": Family(
        "<|START_THINKING|>",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        (),
        "hm<|END_THINKING|>Yes",
        inside=True,
    ),
    "Gemma 4": Family(
        "'<|channel>thought\n<channel|>'",
        ("<|channel>", "<channel|>"),
        (),
        "<|channel>thought\nhm\n<channel|>Yes<channel|>",
    ),
    "Gemma 4, an empty thought": Family(
        "", ("<|channel>", "<channel|>"), (), "<|channel>thought<channel|>Yes", thinking=""
    ),
    "Gemma 4 that thinks between words": Family(
        "",
        ("<|channel>", "<channel|>"),
        (),
        "<|channel>thought\nh<channel|>Y<|channel>thought\nm<channel|>es",
    ),
    "gpt-oss": Family(
        "<|channel|>",
        MESSAGES,
        (),
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes<|return|>",
    ),
    "Muse-Glimmer": Family(
        "<atem:",
        MESSAGES,
        (),
        " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Yes<|eot|>",
    ),
    "Granite 3.3": Family(
        "between <think></think> and between <response></response>",
        (),
        (),
        "<think>hm</think><response>Yes</response>",
    ),
    "Granite 3.2": Family(
        "after 'Here is my thought process:' and after 'Here is my response:'",
        (),
        (),
        "Here is my thought process:\nhm\nHere is my response:\nYes",
    ),
    "Hunyuan": Family(
        "'<answer>' '</answer>' '<think>'",
        (),
        (),
        "<think>\nhm\n</think>\n<answer>\nYes\n</answer>",
    ),
    "ERNIE 4.5 without thinking": Family(
        "'<think>' '<response>' '</response>'",
        (),
        PLAIN,
        "<response>\nYes\n</response>",
        thinking="",
    ),
    "Apriel": Family(
        "'Here are my reasoning steps:\n' '[BEGIN FINAL RESPONSE]' '[END FINAL RESPONSE]'",
        (),
        (),
        "hm\n[BEGIN FINAL RESPONSE]\nYes\n[END FINAL RESPONSE]",
        inside=True,
    ),
    "closed twice": Family("", (), PLAIN, "<think>hm</think>Yes</think>!", answer="Yes</think>!"),
    "closed twice by a token": Family(
        "", ("[THINK]", "[/THINK]"), (), "[THINK]hm[/THINK]Yes[/THINK]!", answer="Yes!"
    ),
    "an answer about marks": Family(
        template="",
        special=(),
        added=PLAIN,
        reply="It writes <think>a</think>.",
        thinking="",
        answer="It writes <think>a</think>.",
    ),
    "blanks of an answer": Family(
        template="", special=(), added=PLAIN, reply=" \n Yes\n", thinking="", answer=" \n Yes\n"
    ),
    "no thought": Family(
        template="", special=(), added=PLAIN, reply="<think>\n\n</think>\n\nYes", thinking=""
    ),
}


def open_tokenizer(folder: Path, special: Sequence[str], added: Sequence[str]) -> Tokenizer:
    """Return a tokenizer of bytes with further tokens, special ones and others."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|im_end|>", *special])
    library.add_tokens([AddedToken(name, normalized=False, special=False) for name in added])
    folder.mkdir(parents=True, exist_ok=True)
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer.open(folder)


def marks_of(template: str, tokenizer: Tokenizer) -> ThinkingMarks:
    return find_thinking_marks(template, tokenizer.added_tokens, tokenizer.special_tokens)


def events(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    size: int,
    stops: Sequence[str] = (),
    reason: str = "stop",
) -> Iterator[Event]:
    """Yield the events of a reply with `size` tokens a round; it ends at the first stop string."""
    detokenizer = Detokenizer(tokenizer.decode_bytes, stops, 0)
    for start in range(0, max(1, len(ids)), size):
        round_ids = list[int]()
        for token in ids[start : start + size]:
            round_ids.append(token)
            if detokenizer.push(token):
                break
        ends = detokenizer.stop is not None or start + size >= len(ids)
        text = detokenizer.take_text(final=ends)
        yield Event(
            "",
            tuple(round_ids),
            text,
            ("stop" if detokenizer.stop is not None else reason) if ends else None,
        )
        if ends:
            return


Parts = list[tuple[str, str, str]]
"""The kind, name and text of each."""
Collected = tuple[Parts, Parts, int, str | None, Any]


def collect_reply(choice: ReplyBuilder, reply_events: Iterator[Event]) -> Collected:
    """Return the parts of a reply as a stream tells them and as a whole, and all that is counted
    and noted.
    """
    streamed = dict[int, tuple[str, str, str]]()
    for event in reply_events:
        for part, text, begins in choice.add_event(event):
            assert begins == (part.index not in streamed)
            _, _, before = streamed.get(part.index, ("", "", ""))
            streamed[part.index] = (part.kind, part.name, before + text)
    complete: Parts = [(part.kind, part.name, part.text) for part in choice.parts]
    return (
        [*streamed.values()],
        complete,
        choice.reasoning_tokens,
        choice.stop_string,
        choice.notes_field,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_thinking_of_every_family_is_split(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    tokenizer = open_tokenizer(tmp_path, family.special, family.added)
    marks = marks_of(family.template, tokenizer)
    ids = tokenizer.encode(family.reply, parse_special=True)
    collected = list[Collected]()
    for size in (1, 2, 3, 5, len(ids)):
        choice = ReplyBuilder(0, family.inside, None, tokenizer, marks=marks)
        collected.append(collect_reply(choice, events(tokenizer, ids, size)))
        message = choice.message()
        thought = message.get("reasoning_content", "")
        answer = message["content"]
        assert (thought, answer) == (family.thinking, family.answer), size
    assert all(other == collected[0] for other in collected)
    streamed, complete, count, _, notes = collected[0]
    assert streamed == complete and notes == {}
    assert bool(family.thinking) <= bool(count)


FORM = FORMS["Hermes, Qwen3"]
LOOKUP: dict[str, JsonObject] = {
    "lookup": {"type": "object", "properties": {"n": {"type": "integer"}}}
}
CALL = '<tool_call>\n{"name": "lookup", "arguments": {"n": 1}}\n</tool_call>'
WORDS: tuple[str, ...] = (
    "a",
    "ü",
    "\n",
    "\n\n",
    "</",
    "<",
    "think>",
    "<think>",
    "</think>",
    "[THINK]",
    "[/THINK]",
)
WORDS += ("END", "E", "<tool_call>", CALL, "€", "<|channel>thought\n", "<channel|>", "to=self")


@pytest.mark.parametrize("seed", range(40))
def test_no_grouping_of_tokens_changes_a_reply(seed: int, tmp_path: Path) -> None:
    """Marks, calls, stop strings and letters of several bytes, cut anywhere by the rounds."""
    rng = random.Random(seed)
    special = ("[THINK]", "[/THINK]", "<|channel>", "<channel|>")
    calls = ("<tool_call>", "</tool_call>")
    tokenizer = open_tokenizer(tmp_path, (*special, *calls) if seed % 2 else special, PLAIN)
    marks = marks_of("{{ '<think>' }}", tokenizer)
    for _ in range(25):
        text = "".join(rng.choices(WORDS, k=rng.randint(1, 14)))
        ids = tokenizer.encode(text, parse_special=True)
        stops = ("END", "\n\n\n")[: rng.randint(0, 2)]
        tools = Tools(LOOKUP, FORM) if rng.random() < 0.7 else None
        inside = rng.choice((True, False, None))
        reason = rng.choice(("stop", "length"))
        collected = [
            collect_reply(
                ReplyBuilder(0, inside, tools, tokenizer, marks=marks),
                events(tokenizer=tokenizer, ids=ids, size=size, stops=stops, reason=reason),
            )
            for size in (1, 2, 5, len(ids))
        ]
        for other in collected:
            assert other == collected[0], (text, stops, inside)
            assert other[0] == other[1], "a stream tells what the whole holds"


def test_thinking_is_counted_up_to_its_closing_mark(tmp_path: Path) -> None:
    """Tokens up to the closing mark, with it; the opening one is the template's or none."""
    tokenizer = open_tokenizer(tmp_path, (), PLAIN)
    for text, inside, tokens in (
        ("hm</think>Yes", True, 3),
        ("<think>hm</think>Yes", False, 3),
        ("Yes", False, 0),
        ("hm", True, 2),
        ("<think>hm</think>Yes", None, 0),
    ):
        ids = tokenizer.encode(text, parse_special=True)
        for size in (1, 2, 5, len(ids)):
            choice = ReplyBuilder(0, inside, None, tokenizer, marks=marks_of("", tokenizer))
            collect_reply(choice, events(tokenizer, ids, size))
            assert choice.reasoning_tokens == tokens, (text, size)


def test_a_special_token_of_a_call_stands_where_it_was_written(tmp_path: Path) -> None:
    """Although the text behind it is held back, for it may begin a stop string."""
    tokenizer = open_tokenizer(tmp_path, ("<tool_call>", "</tool_call>"), PLAIN)
    ids = tokenizer.encode(f"ü\n{CALL}", parse_special=True)
    for size in (1, 2, 5, len(ids)):
        choice = ReplyBuilder(0, False, Tools(LOOKUP, FORM), tokenizer)
        collect_reply(choice, events(tokenizer, ids, size, ("\n{y",)))
        assert [(part.kind, part.text) for part in choice.parts] == [
            ("text", "ü"),
            ("call", '{"n": 1}'),
        ]


UNKNOWN = CALL.replace("lookup", "other")


@pytest.mark.parametrize(
    ("text", "inside", "reason", "called", "noted"),
    [
        (f"I read it.\n{CALL}", True, "stop", True, False),
        (f"I read it.\n{CALL}\n{CALL}\n", True, "stop", True, False),
        (f"<think>\n{CALL}", False, "stop", True, False),
        (f"{CALL}\nBut no.", True, "stop", False, True),
        (f"I read it.\n{UNKNOWN}", True, "stop", False, True),
        (f"I read it.\n{CALL}", True, "length", False, True),
        (f"I may {CALL}</think>Yes", True, "stop", False, False),
        (f"I may {CALL}</think>", True, "stop", False, True),
        (f"hm</think>{CALL}", True, "stop", True, False),
        ("I read", True, "stop", False, True),
        ("I read", True, "length", False, True),
        ("", True, "stop", False, True),
        ("Yes", False, "stop", False, False),
        ("", False, "stop", False, False),
    ],
)
def test_a_call_that_ends_thinking_counts(text, inside, reason, called, noted, tmp_path) -> None:
    """It counts where the reply ends with it before thinking does; an empty answer is noted."""
    tokenizer = open_tokenizer(tmp_path, (), PLAIN)
    ids = tokenizer.encode(text, parse_special=True)
    for size in (1, 5, max(1, len(ids))):
        choice = ReplyBuilder(0, inside, Tools(LOOKUP, FORM), tokenizer)
        streamed, complete, _, _, notes = collect_reply(
            choice, events(tokenizer, ids, size, reason=reason)
        )
        assert streamed == complete and bool(choice.calls) == called
        assert {part.text for part in choice.calls} <= {'{"n": 1}'}
        assert notes == ({"notes": [UNANSWERED_NOTE]} if noted else {})


@pytest.mark.parametrize(
    ("form", "special", "reply"),
    [
        (
            "Mistral",
            ("[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"),
            '[THINK]maybe [TOOL_CALLS]lookup[ARGS]{"n":2}[/THINK][TOOL_CALLS]lookup[ARGS]{"n": 1}',
        ),
        (
            "Command R7B, A",
            ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
            '<|START_THINKING|>hm<|END_THINKING|><|START_ACTION|>[{"tool_call_id": "0", "tool_name": '
            '"lookup", "parameters": {"n": 1}}]<|END_ACTION|>',
        ),
        (
            "Gemma 4",
            ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
            "<|channel>thought\n<|tool_call>call:lookup{n:2}<tool_call|><channel|>"
            "<|tool_call>call:lookup{n:1}<tool_call|>",
        ),
    ],
)
def test_a_call_that_is_only_thought_about_is_none(form, special, reply, tmp_path) -> None:
    tokenizer = open_tokenizer(tmp_path, special, ())
    ids = tokenizer.encode(reply, parse_special=True)
    for size in (1, 2, 5, len(ids)):
        tools = Tools(LOOKUP, FORMS[form])
        choice = ReplyBuilder(0, False, tools, tokenizer, marks=marks_of("", tokenizer))
        collect_reply(choice, events(tokenizer, ids, size))
        assert [part.text.replace(" ", "") for part in choice.calls] == ['{"n":1}']
        assert choice.text_of("text").strip() == ""
