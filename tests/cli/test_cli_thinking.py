"""Thinking and answer are separated in text, JSON, on a terminal and in a chat.

--think; grammars.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spd.conversation.thinking import UNANSWERED_NOTE
from spd.conversation.thinking_splitter import ThinkingSplitter, split_thinking
from spd.runtime.engine.request import ThinkingBudget
from tests.cli.cli_processes import run_on_terminal, slow_program, start
from tests.cli.conftest import SPECIALS, TEMPLATE, edit_json, make_program, write_tokenizer
from tests.json_schema import faults

OPENED = TEMPLATE.replace("assistant\\n'", "assistant\\n<think>\\n'")
SCHEMA = '{"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]'
SCHEMA += ', "additionalProperties": false}'


def set_template(folder: Path, template: str) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=template)


CHANNELS = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>"


@dataclass(frozen=True)
class RawReply:
    """What a model wrote, and the thinking and the answer in it."""

    text: str
    inside: bool | None
    """True if the prompt opens the thinking."""
    thinking: str | None
    answer: str


REPLIES = [
    RawReply("<think>\nhm\n</think>\n\nYes\n", inside=False, thinking="hm", answer="Yes\n"),
    RawReply("hm</think>Yes", inside=True, thinking="hm", answer="Yes"),
    RawReply("<think>hm</think>Yes", inside=True, thinking="hm", answer="Yes"),
    RawReply("No <think>x", inside=False, thinking=None, answer="No <think>x"),
    RawReply("<thin", inside=False, thinking=None, answer="<thin"),
    RawReply(" \n<think>a</thin", inside=False, thinking="a</thin", answer=""),
    RawReply("<think></think>Yes", inside=False, thinking="", answer="Yes"),
    RawReply("a</think>Yes</think>", inside=None, thinking=None, answer="a</think>Yes</think>"),
    RawReply(" plain ", inside=False, thinking=None, answer=" plain "),
    RawReply("", inside=False, thinking=None, answer=""),
    RawReply(f"{CHANNELS}Yes", inside=False, thinking="hm", answer="Yes"),
    RawReply("<|channel>thought\nhm\n<channel|>Yes", inside=False, thinking="hm", answer="Yes"),
    RawReply("<|channel|>final<|message|>Yes", inside=False, thinking=None, answer="Yes"),
    RawReply(
        " to=self<|message|>hm<|eom|><|start|>assistant to=user<|message|>Yes",
        inside=False,
        thinking="hm",
        answer="Yes",
    ),
    RawReply(
        "<|channel|>analysis<|message|>hm",
        inside=None,
        thinking=None,
        answer="<|channel|>analysis<|message|>hm",
    ),
]


@pytest.mark.parametrize("cut", [1, 3, 100])
@pytest.mark.parametrize("reply", REPLIES)
def test_thinking_is_told_from_the_answer(reply: RawReply, cut: int) -> None:
    splitter = ThinkingSplitter(reply.inside)
    text = reply.text
    thinking = reply.thinking
    parts = [part for i in range(0, len(text), cut) for part in splitter.feed(text[i : i + cut])]
    parts += splitter.feed("", final=True)
    assert "".join(part for is_thinking, part in parts if is_thinking) == (thinking or "")
    assert "".join(part for is_thinking, part in parts if not is_thinking) == reply.answer
    stripped_thinking = thinking and thinking.strip("\n")
    assert split_thinking(text, reply.inside) == (stripped_thinking, reply.answer)


@pytest.mark.parametrize("option", ["--stats", "--json", "--raw"])
@pytest.mark.parametrize("reply", [REPLIES[i] for i in (0, 2, 3, 5)])
def test_a_pipe_gets_the_answer(reply, option, ask, model, script) -> None:
    set_template(model, OPENED if reply.inside else TEMPLATE)
    text = reply.text
    thinking = reply.thinking
    answer = reply.answer
    script.pieces = [text[i : i + 5] for i in range(0, len(text), 5)] or [""]
    ran = ask(option)
    if option == "--raw":
        thinking = None
        answer = text
    has_no_answer = thinking is not None and not answer
    assert (
        ran.code == 0 and ("ended while thinking, without an answer" in ran.err) == has_no_answer
    ), ran
    if option == "--json":
        assert (ran.json["reasoning"], ran.json["text"]) == (
            thinking and thinking.strip("\n"),
            answer,
        )
    else:
        assert ran.text == answer + "\n" * (not answer.endswith("\n"))


THINKING = make_program(
    """pieces=["<thi", "nk>", "h\\x1b[2Jm\\n", "so", "</th", "ink>", "\\n\\nYes"]"""
)


def test_a_terminal_gets_thinking_dimmed(model: Path) -> None:
    """So with the answer in a file; hidden thinking is not shown."""
    thought = "\x1b[2mh\\x1b[2Jm\x1b[0m\n\x1b[2mso\x1b[0m\n\n"
    out = model / "out"
    for argv, expected in (
        ([], f"{thought}Yes\n"),
        (["--think", "hide"], "Yes\n"),
        (["-o", out], thought),
    ):
        status, text = run_on_terminal("generate", "-m", model, "Hi", argv, code=THINKING)
        assert (status, text.rpartition("\r")[2]) == (0, expected)
    assert out.read_text() == "Yes\n"


def test_a_reader_that_leaves_while_it_thinks(model: Path) -> None:
    """Nothing is written while it thinks, so only polling the pipe detects it."""
    set_template(model, OPENED)
    process = start(slow_program(model, pieces=10**6))
    process.stdout.close()
    try:
        assert process.wait(100) == 141 and process.stderr.read() == b""
    finally:
        process.kill()


def test_a_chat_without_a_terminal_says_the_answer(
    spd_run: Callable, model: Path, script: Any
) -> None:
    script.pieces = ["<think>hm", "m</think>", "\nYes"]
    ran = spd_run("chat", model, "--no-save", stdin=b"Hi\nAgain\n")
    assert (ran.code, ran.text, ran.err) == (0, "Yes\nYes\n", "")
    set_template(model, "{{ enable_thinking }} " + TEMPLATE)
    spd_run("chat", model, "--no-save", stdin=f"/think off\n/model {model}\nHi\n".encode())
    prompt = script.engine.tokenizer.decode(script.request.prompt_ids)
    assert prompt.startswith("False"), "another model is asked the same"
    script.pieces = ["<think>hm"]
    script.finish = "length"
    assert spd_run("chat", model, "--no-save", stdin=b"Hi\n/more\n").text == ""


def test_a_chat_says_that_only_thinking_came(spd_run: Callable, model: Path, script: Any) -> None:
    """The note appears if the model stopped by itself without an answer, not at a limit."""
    for pieces, finish, noted in (
        (["<think>hm"], "stop", True),
        (["<think>hm</think>\n"], "stop", True),
        (["<think>hm</think>Yes"], "stop", False),
        (["Yes"], "stop", False),
        (["<think>hm"], "length", False),
    ):
        script.pieces = pieces
        script.finish = finish
        ran = spd_run("chat", model, "--no-save", stdin=b"Hi\n")
        assert (UNANSWERED_NOTE in ran.err) == noted, (pieces, ran)


CHUNKS = TEMPLATE.replace(
    "message['content'] +",
    "(message['content'] if message['content'] is string else 'CHUNKS') +",
).replace(
    "{%- for message in messages -%}",
    "{%- for message in messages -%}{%- if message['content'] is not string -%}"
    "{%- for block in message['content'] -%}{%- if block['type'] == 'thinking' -%}"
    "{{- '[THINK]' + block['thinking'] + '[/THINK]' -}}{%- else -%}{{- block['text'] -}}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}",
)
FIELD = TEMPLATE.replace(
    "message['content'] +",
    "('<think>' + message.reasoning_content + '</think>' if message.reasoning_content else '') + "
    "message['content'] +",
)


@dataclass(frozen=True)
class PastTurn:
    """A template, its special tokens, a reply, and a part of the next turn's prompt."""

    template: str
    special: tuple[str, ...]
    reply: str
    expected: str


@pytest.mark.parametrize(
    "turn",
    [
        PastTurn(
            CHUNKS,
            special=("[THINK]", "[/THINK]"),
            reply="[THINK]hm[/THINK]\nYes",
            expected="[THINK]hm[/THINK]Yes",
        ),
        PastTurn(
            TEMPLATE,
            special=("[THINK]", "[/THINK]"),
            reply="[THINK]hm[/THINK]\nYes",
            expected="assistant\nYes<|im_end|>",
        ),
        PastTurn(
            FIELD,
            special=(),
            reply="<think>\nhm\n</think>\n\nYes",
            expected="assistant\n<think>hm</think>Yes<|im_end|>",
        ),
        PastTurn(
            TEMPLATE,
            special=(),
            reply="<think>\nhm</think>\nYes",
            expected="assistant\n<think>\nhm</think>\nYes<|im_end|>",
        ),
        PastTurn(
            FIELD,
            special=(),
            reply="No <think>a</think>",
            expected="assistant\nNo <think>a</think><|im_end|>",
        ),
    ],
)
def test_a_past_turn_has_its_thinking_where_the_template_wants_it(
    turn, model, spd_run, script
) -> None:
    write_tokenizer(model, (*SPECIALS, *turn.special))
    set_template(model, turn.template)
    script.pieces = [turn.reply]
    assert spd_run("chat", model, "--no-save", stdin=b"Hi\nAgain\n").code == 0
    prompt = script.engine.tokenizer.decode(script.request.prompt_ids, skip_special=False)
    assert turn.expected in prompt
    for mark in turn.special if "THINK" in turn.expected else ():
        assert script.engine.tokenizer.token_to_id(mark) in script.request.prompt_ids


def test_a_budget_ends_thinking_by_the_model_s_own_token(spd_run, model, script) -> None:
    pairs = (("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
    for opening, closing in (*pairs, ("<|START_THINKING|>", "<|END_THINKING|>")):
        write_tokenizer(model, (*SPECIALS, opening, closing))
        begin = len(SPECIALS) + 256
        end = len(SPECIALS) + 257
        for template, inside in ((TEMPLATE, False), (OPENED.replace("<think>", opening), True)):
            set_template(model, template)
            script.pieces = ["Yes"]
            assert spd_run("generate", "-m", model, "--think", 7, "Hi").code == 0
            assert script.request.thinking == ThinkingBudget(7, end, begin, inside)


def test_a_shape_stands_in_the_channel_of_the_answer(
    spd_run: Callable, model: Path, script: Any
) -> None:
    """Models like gpt-oss may think first."""
    write_tokenizer(model, (*SPECIALS, "<|start|>", "<|channel|>", "<|message|>", "<|end|>"))
    set_template(model, "{# <|channel|> #}" + TEMPLATE)
    script.pieces = [CHANNELS, '{"a": 1}']
    ran = spd_run("generate", "-m", model, "--schema", SCHEMA, "--json", "Hi")
    assert (ran.json["reasoning"], ran.json["text"]) == ("hm", '{"a": 1}')
    assert script.request.grammar.kind == "lark" and "analysis" in script.request.grammar.text
    spd_run("generate", "-m", model, "--schema", SCHEMA, "--raw", "Hi")
    assert script.request.grammar.kind == "schema"


@dataclass(frozen=True)
class ThinkOption:
    """A value of --think, and the template variable and the budget that it sets."""

    value: str
    enabled: bool | None
    tokens: int | None


@pytest.mark.covers(count=4)
@pytest.mark.parametrize(
    "option",
    [
        ThinkOption("off", enabled=False, tokens=None),
        ThinkOption("hide", enabled=True, tokens=None),
        ThinkOption("7", enabled=True, tokens=7),
        ThinkOption("auto", enabled=None, tokens=None),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_think_sets_the_template_variable_and_the_budget(
    option, inside, spd_run, model, script
) -> None:
    write_tokenizer(model, (*SPECIALS, "<think>", "</think>"))
    set_template(model, "{{ enable_thinking }} " + (OPENED if inside else TEMPLATE))
    script.pieces = ["</think>"] * inside + ["Yes"]
    arguments = ("-m", model, "--think", option.value)
    prompt = spd_run("generate", arguments, "--dry-run", "Hi").text
    assert prompt.startswith(
        "True" if option.enabled else "False" if option.enabled is False else "<"
    )
    for command in (["generate"], ["chat", "--no-save"]):
        ran = spd_run(command, arguments, stdin=b"Hi" + b"\n" * len(command[1:]))
        assert (ran.code, ran.err) == (0, ""), ran
        budget = None if option.tokens is None else ThinkingBudget(option.tokens, 260, 259, inside)
        assert script.request.thinking == budget
        assert (
            script.engine.tokenizer.decode(script.request.prompt_ids, skip_special=False) == prompt
        )


def test_a_template_that_cannot_be_asked_is_told(
    spd_run: Callable, model: Path, script: Any
) -> None:
    for command, stdin in (("generate", b"Hi"), ("chat", b"Hi\n")):
        ran = spd_run(command, "-m", model, "--think", "off", stdin=stdin)
        assert ran.code == 0 and ran.err.startswith(
            "note: this chat template has no enable_thinking: "
        )
        ran = spd_run(command, "-m", model, "--think", "7", stdin=stdin)
        assert ran.code == 4 and "for models that end it with a token </think>" in ran.err


@pytest.fixture(scope="module")
def thinker(tiny: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model of random weights whose template opens thinking and whose last two ids are its marks."""
    folder = tmp_path_factory.mktemp("thinker") / "m"
    shutil.copytree(tiny("qwen3", layers=1), folder)
    path = folder / "tokenizer.json"
    loaded = json.loads(path.read_text())
    vocabulary = loaded["model"]["vocab"]
    flags = loaded["added_tokens"][0]
    for mark in ("</think>", "<think>"):
        name, number = max(
            vocabulary.items(), key=lambda item: item[1] if item[0][:2] != "</" else -1
        )
        del vocabulary[name], loaded["model"]["merges"][-1]
        vocabulary[mark] = number
        loaded["added_tokens"].append({**flags, "id": number, "content": mark, "special": False})
    path.write_text(json.dumps(loaded))
    set_template(folder, OPENED)
    return folder


BASE = ["generate", "--threads", 1, "--ctx", 256, "--temperature", 0, "--set=ignore_eos=on"]


def test_budget_and_schema_give_the_same_text_with_drafts(spd_run: Callable, thinker: Path) -> None:
    """The reply is four tokens of thinking, then JSON.

    The same with drafts, as object and as line.
    """
    argv = [*BASE, "-m", thinker, "-n", 60, "--think", 4, "--schema", SCHEMA]
    ran = spd_run(argv, "--json", "--spec", "off", "Hi")
    reply = ran.json
    assert ran.code == 0 and json.loads(reply["text"])["a"] in (1, 22)
    assert reply["reasoning"] and len(reply["token_ids"]) > 5 and reply["token_ids"][4] == 319
    details = {"reasoning_tokens": 5}  # four, and the one that ends them
    assert reply["usage"]["completion_tokens_details"] == details
    assert spd_run(argv, "--spec", "ngram", "Hi").text == reply["text"] + "\n"
    for drafts in (1, 5, 16):
        again = spd_run(argv, "--json", "--spec", "ngram", "--draft-max", drafts, "Hi").json
        assert again["token_ids"] == reply["token_ids"]
        assert again["usage"]["completion_tokens_details"] == details
    line = json.loads(spd_run(argv, "--jsonl", stdin=b'{"prompt": "Hi"}\n').text)
    for name in ("text", "reasoning", "finish_reason", "token_ids"):
        assert line[name] == reply[name]


@pytest.mark.parametrize(
    ("code", "argv", "expected"),
    [
        (
            10,
            ["--schema", SCHEMA, "-n", 6],
            "error: the text ended before the schema was complete: -n 6 was reached",
        ),
        (
            10,
            ["--grammar", "/[a-z]{60}/", "-n", 6],
            "error: the text ended before the regex was complete: -n 6 was reached",
        ),
        (
            10,
            ["--grammar", "start: /[a-z]{500}/", "--ctx", 64],
            "error: the text ended before the grammar was complete: the context is full",
        ),
        (
            10,
            ["--schema", SCHEMA, "-n", 60, "--stop", '"a"'],
            "error: the text ended before the schema was complete: a stop text or token came",
        ),
        (0, ["--grammar", "/[a-z]+/", "-n", 6], ""),
        (0, ["-n", 1], "the reply ended while thinking, without an answer: -n 1 was reached"),
    ],
)
def test_what_ended_early_says_so(code, argv, expected, spd_run, thinker) -> None:
    """A text that breaks its grammar has an exit code of its own, with --json too."""
    command = [*BASE, "-m", thinker, "--think", 0, "--spec", "off", *argv, "Hi"]
    ran = spd_run(command, "--json")
    assert ran.code == code and expected in ran.err and bool(ran.err) == bool(expected), ran
    assert ran.json["finish_reason"] == ("stop" if "--stop" in argv else "length")
    plain = spd_run(command)
    assert (plain.code, plain.err) == (ran.code, ran.err)
    assert plain.text.removesuffix("\n") == ran.json["text"]


def test_a_line_that_ended_early_is_an_error(spd_run, thinker) -> None:
    """Text and finish reason stay next to the error; a grammar that may end anywhere gives none."""
    shapes = {"schema": json.loads(SCHEMA)}, {"regex": "[a-z]{60}"}, {"regex": "[a-z]+"}
    lines = [json.dumps({"prompt": "Hi", "params": {"max_tokens": 6, **reply}}) for reply in shapes]
    argv = [*BASE, "-m", thinker, "--think", 0, "--spec", "off", "--jsonl"]
    ran = spd_run(argv, stdin="\n".join(lines).encode())
    replies = [json.loads(line) for line in ran.out.splitlines()]
    assert [fault for reply in replies for fault in faults(reply, "generate.line")] == []
    assert ran.code == 7 and "2 of 3 lines failed" in ran.err
    assert [reply["finish_reason"] for reply in replies] == ["length"] * 3
    assert all(reply["text"] for reply in replies)
    errors = [reply.get("error", {}) for reply in replies]
    assert [error.get("code") for error in errors] == ["incomplete", "incomplete", None]
    assert "the schema was complete: -n 6 was reached" in errors[0]["message"]


def test_the_reply_follows_what_was_asked_for(spd_run, tiny, tmp_path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(SCHEMA)
    lark = tmp_path / "grammar.lark"
    lark.write_text('start: "on" | "off"\n')
    for flags, pattern in (
        (["--grammar", "/[x-z]{3,5}/"], "[x-z]{3,5}"),
        (["--schema", schema], r'\s*\{\s*"a"\s*:\s*(1|22)\s*\}\s*'),
        *((["--grammar", grammar], "on|off") for grammar in (lark, '?start: "on" | "off"')),
    ):
        reply = spd_run(BASE[:-1], "-n", 60, "-m", tiny("qwen3", layers=1), "Hi", flags)
        assert reply.code == 0 and re.fullmatch(pattern, reply.text.removesuffix("\n")), reply
