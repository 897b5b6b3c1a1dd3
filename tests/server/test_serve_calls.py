"""Tool calls are found in every form, whatever pieces the text comes in, and nothing else is
one."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from spd.conversation.tool_choice import function_tool, read_tools
from spd.conversation.tools.call_forms import (
    CALL_MARKS,
    FORMS,
    call_form,
)
from spd.conversation.tools.call_grammar import Tools
from spd.conversation.tools.call_parser import CallParser
from spd.formats.chat_template import ChatTemplate
from spd.formats.folder import ModelFolder
from spd.runtime.engine.grammar import GrammarCompiler
from spd.runtime.engine.json_schema import JsonObject
from spd.runtime.engine.request import GrammarSpec
from tests.cli.conftest import SPECIALS, write_tokenizer
from tests.every_template import split_reply
from tests.helpers import demo_tokenizer
from tests.server.call_cases import (
    ARGS,
    CASES,
    COMMAND_NOW,
    FUNCTIONS,
    KIMI,
    KIMI_ARGUMENTS,
    KIMI_CALL,
    LFM,
    LFM_END,
    ONE,
    WEATHER,
    Call,
    call_text,
    gemma,
    tag,
)
from tests.server.conftest import is_allowed


def case_of(name: str) -> tuple[str, str, str, list[Call]]:
    """Form, reply, text and calls."""
    case = CASES[name]
    begin = name.partition(":")[0]
    form = (
        begin
        if begin in FORMS
        else min((form for form in FORMS if form.startswith(begin)), key=len)
    )
    reply, calls, content = (case, [], case) if isinstance(case, str) else (*case, "")[:3]
    return form, reply, content, calls


def tools_of(form: str, **options: Any) -> Tools:
    """Return the functions in a form."""
    return Tools(FUNCTIONS, FORMS[form], **options)


def parse(form: str, pieces: list[str]) -> tuple[str, list[Call]]:
    """Content and calls of a reply that came in pieces."""
    parsed = split_reply(tools_of(form), pieces)
    content = "".join(piece.text for piece in parsed if piece.kind == "text")
    return content, [
        (str(piece.name), json.loads(piece.text)) for piece in parsed if piece.kind == "call"
    ]


@pytest.mark.covers(count=43)
@pytest.mark.parametrize("case", CASES)
def test_every_form_is_read_at_every_boundary(case: str) -> None:
    form, text, *expected = case_of(case)
    assert parse(form, [text]) == parse(form, list(text)) == tuple(expected)
    chance = random.Random(case)
    cuts = [sorted(chance.sample(range(len(text)), min(5, len(text)))) for _ in range(50)]
    for boundaries in (*([cut] for cut in range(1, len(text))), *cuts):
        pieces = [
            text[a:b] for a, b in zip([0, *boundaries], [*boundaries, len(text)], strict=True)
        ]
        assert parse(form, pieces) == tuple(expected), pieces


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("Hermes, Qwen3", tag(r'{"name": "now", "arguments": {"a": "\ud800"}}')),
        ("LFM2", rf"{LFM}[now(a='\ud800')]{LFM_END}"),
        ("Gemma 4", gemma(r'now{a:"\ud800"}')),
    ],
)
def test_half_a_pair_of_surrogates_can_be_sent(form: str, text: str) -> None:
    """No text in UTF-8 holds one, so it stays escaped."""
    (piece,) = split_reply(tools_of(form), [text])
    assert piece.text.encode() == rb'{"a": "\ud800"}'


@pytest.mark.parametrize("case", [case for case in CASES if case_of(case)[3]])
def test_a_cut_reply_holds_whole_calls_only(case: str) -> None:
    """A reply that a limit cut has the first calls of the full reply; the remaining text is
    text.
    """
    form, text, content, calls = case_of(case)
    for cut in range(len(text)):
        parsed_content, calls_found = parse(form, [text[:cut]])
        assert calls_found == calls[: len(calls_found)], text[:cut]
        assert (
            parsed_content.startswith(content)
            or content.startswith(parsed_content)
            or calls[0] not in calls_found
        )
        if not calls_found and not FORMS[form].channels:
            assert parsed_content.split() == text[:cut].split()


def test_a_call_comes_when_it_is_whole_and_text_that_is_none_at_once() -> None:
    parser = CallParser(tools_of("Hermes, Qwen3"))
    assert parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Par') == []
    (piece,) = parser.feed('is"}}')
    assert (piece.name, piece.text) == ("get_weather", '{"city": "Paris"}')
    (piece,) = CallParser(tools_of("Llama 3")).feed("{now} it")  # cannot be one
    assert piece.text == "{now} it"


def test_a_template_says_which_form_and_a_call_keeps_its_id() -> None:
    """Kimi's templates show it to the model in place of the name."""
    for form in FORMS.values():
        assert (
            call_form(
                f"{{% if tools %}}{' '.join(form.template_signs or (form.opening,))}{{% endif %}}"
            )
            is form
        )
    guessed = call_form("nothing")
    assert guessed == FORMS["Hermes, Qwen3"] and Tools(FUNCTIONS, guessed).grammar is None
    pieces = CallParser(tools_of("Kimi K2")).feed(NUMBERED["Kimi K2"])
    assert [piece.id for piece in pieces] == ["functions.now:12"]


@functools.cache
def demo_compiler() -> GrammarCompiler:
    return GrammarCompiler(demo_tokenizer(), ModelFolder.resolve("demo").config.vocab_size)


def is_accepted(grammar: GrammarSpec | None, text: str) -> bool:
    """Return True if a grammar accepts a text in the tokens of the demo, for which marks are
    texts.
    """
    assert grammar is not None
    return is_allowed(demo_compiler(), grammar, demo_tokenizer().encode(text))


def with_wrong_type(text: str) -> str:
    """Return the same with another type of its last argument."""
    return text[::-1].replace("3", "x", 1)[::-1]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.channels])
def test_a_call_that_may_come_is_held_once_its_mark_has_come(
    form: str, special: bool, model: Path
) -> None:
    """Marks are tokens, special ones or not; before them, and behind calls, any text is allowed."""
    written = FORMS[form]
    call = call_text(written)
    marks = sorted(mark for mark in CALL_MARKS if mark in "".join((*written[:3], call)))
    write_tokenizer(model, (*SPECIALS, *marks))
    file = json.loads((model / "tokenizer.json").read_text())
    for token in file["added_tokens"]:
        token["special"] = special or token["content"] in SPECIALS
    (model / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = ModelFolder.from_path(model).tokenizer
    template = f"tools {' '.join(written.template_signs or (written.opening,))}"
    tools = read_tools(
        [function_tool({"name": "get_weather", "parameters": WEATHER})],
        ChatTemplate("", {"default": template}, {}),
        tokenizer,
    )
    assert tools is not None
    grammar = tools.grammar
    compiler = GrammarCompiler(tokenizer, 320)
    assert grammar.after == tokenizer.token_to_id(written.opening) and grammar.optional
    valid = ("Well", f"Well. {call}", f"{call} So.", f"{call}\n{call}", f"{call} So. {call} So.")
    for reply in (
        *valid,
        call.replace("get_weather", "get_money"),
        with_wrong_type(call),
        f"{call} So. {with_wrong_type(call)}",
    ):
        ids = tokenizer.encode(reply, parse_special=True)
        assert is_allowed(compiler, grammar, ids) is (reply in valid), reply


@pytest.mark.parametrize("tool_choice", ["required", "strict", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_held_to_their_schemas(form: str, tool_choice: str) -> None:
    """A text that the grammar allows is read as the call; another type or name is refused.

    Marks are texts, not tokens.
    """
    tools = tools_of(form, required=tool_choice == "required", strict=tool_choice == "strict")
    written = FORMS[form]
    if (grammar := tools.grammar) is None:
        assert (written.is_bare and tool_choice != "required") or (
            written.channels and tool_choice == "auto"
        )
        return
    text = "Well. " * (tool_choice != "required" and not written.channels)
    call = call_text(written, required=tool_choice == "required")
    ends = [(call, True), (call.replace("get_w", "get_m"), False), (with_wrong_type(call), False)]
    if text:
        ends += [
            (f"{call} So.", True),
            (f"{call} So. {call}", True),
            (f"{call} So. {with_wrong_type(call)}", False),
        ]
    for end, is_valid in ends:
        assert is_accepted(grammar, text + end) is is_valid, end
    content, calls = read_reply(tools, list(text + call))
    assert [(name, json.loads(arguments)) for name, arguments in calls] == ONE
    assert content.strip() == text.strip()


@pytest.mark.parametrize("form", FORMS)
def test_a_reply_is_a_call_or_follows_a_schema(form: str) -> None:
    """Where a format is asked for beside tools; where a call has to come, the format says
    nothing.
    """
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    answer = GrammarSpec("schema", json.dumps(schema))
    written = FORMS[form]
    call = call_text(written)
    answer_text = (written.channels.answer_header if written.channels else "") + '{"days": 3}'
    tools = tools_of(form, answer_grammar=answer)
    assert tools.is_constrained and tools.grammar is not None and not tools.grammar.optional
    invalid = (
        with_wrong_type(answer_text),
        with_wrong_type(call),
        answer_text.replace('{"days": 3}', "Well"),
        call.replace("get_w", "get_m"),
    )
    for text in (answer_text, call, *invalid):
        assert is_accepted(tools.grammar, text) is (text not in invalid), text
    assert (
        read_reply(tools, list(answer_text)) == ('{"days": 3}', [])
        and len(read_reply(tools, list(call))[1]) == 1
    )
    assert (
        tools_of(form, answer_grammar=answer, required=True).grammar
        == tools_of(form, required=True).grammar
    )


NUMBERED = {
    "Kimi K2": f"{KIMI[0]}{KIMI_CALL}now:12{KIMI_ARGUMENTS}{{}}<|tool_call_end|>{KIMI[1]}",
    "Command R7B, A": f"<|START_ACTION|>[{COMMAND_NOW.replace('1', '12', 1)}]<|END_ACTION|>",
}


@pytest.mark.parametrize("form", NUMBERED)
def test_calls_are_numbered_through_a_conversation(form: str) -> None:
    """A grammar that began with 0 in each reply would give the same id to calls of several
    turns.
    """
    tools = tools_of(form, required=True)
    reply = NUMBERED[form]
    assert is_accepted(tools.grammar, reply) and read_reply(tools, list(reply)) == (
        "",
        [("now", "{}")],
    )
    assert not any(is_accepted(tools.grammar, reply.replace("12", other)) for other in ("x", ""))


def test_arguments_with_commas_are_held_whichever_there_are() -> None:
    """All that have to come, in their order, with nothing but commas between them."""
    schema: JsonObject = {
        "type": "object",
        "properties": {key: {"type": "integer"} for key in "abc"},
        "required": ["b"],
    }
    grammar = Tools({"f": schema, "g": {}}, FORMS["LFM2"], required=True).grammar
    valid = ("f(b=1)", "f(a=1, b=2)", "f(b=1, c=2)", "f(a=1, b=2, c=3), g()")
    for calls in (*valid, "f()", "f(a=1)", "f(a=1b=2)", "f(b=1, )", "f(, b=1)", "f(c=1, b=2)"):
        assert is_accepted(grammar, f"{LFM}[{calls}]{LFM_END}") is (calls in valid), calls


def read_reply(tools: Tools, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls with their arguments of a reply that a grammar holds."""
    content = ""
    calls = list[tuple[str, str]]()
    for piece in split_reply(tools, pieces):
        if piece.kind == "text":
            content += piece.text
        elif piece.name:
            calls.append((piece.name, piece.text))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    return content, calls


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if form.pairs is None])
def test_held_arguments_come_as_they_are_written(form: str) -> None:
    """The name first, whatever the pieces; a cut reply holds them as far as they came."""
    tools = tools_of(form, required=True)
    written = FORMS[form]
    calls = [
        written.call.replace("NAME", name).replace("ARGUMENTS", arguments).replace("#", "0")
        for name, arguments in (("get_weather", ARGS), ("now", "{}"))
    ]
    opening = "" if written.is_bare else written.opening
    if written.separator is None:
        calls = [f"{opening}{call}{written.closing}" for call in calls]
        text = ("<|end|><|start|>assistant" if form == "gpt-oss" else "\n").join(calls)
    else:
        text = written.separator.join(calls)
        text = opening + (f"[{text}]" if written.is_array else text) + written.closing
    expected = [("get_weather", ARGS), ("now", "{}")]
    for cut in range(len(text) + 1):
        assert read_reply(tools, [text[:cut], text[cut:]]) == ("", expected), text[:cut]
        _, begun = read_reply(tools, list(text[:cut]))
        come = text[text.find(ARGS) : cut]
        assert [name for name, _ in begun[:1]] == ["get_weather"][: len(come)], text[:cut]
        assert not come or begun[0][1].partition("<")[0] == come[: len(ARGS)]


FRAGMENTS = [
    *sorted(CALL_MARKS),
    "<function=now>",
    "<parameter=city>",
    '<invoke name="now">',
    '<parameter name="a">',
    '{"name": "now"',
    '"arguments": {',
    "call:now{",
    "now(",
    ")",
    "a='x'",
    "to=functions.now",
    "}",
    "[",
    "]",
    ",",
    '"',
    "\\",
    ": ",
    '{"name": "now", "parameters": {}}',
    "now",
    " text ",
    "\n",
    ";",
    "</parameter>",
    "</function>",
    "<arg_key>a</arg_key>",
    "<arg_value>",
    "now\n<arg_key>",
    KIMI_CALL,
    "now:1",
    KIMI_ARGUMENTS,
    "'",
    "now(a='",
    "')]",
    "</invoke>",
    "<",
    "{",
    "0",
    '"x"',
]


@pytest.mark.covers(count=10)
@pytest.mark.parametrize("form", FORMS)
def test_any_text_ends_and_pieces_do_not_matter(form: str) -> None:
    chance = random.Random(form)
    for _ in range(200):
        text = "".join(chance.choices(FRAGMENTS, k=chance.randint(1, 14)))
        parses = [parse(form, pieces) for pieces in ([text], list(text))]
        assert parses[0] == parses[1], text
