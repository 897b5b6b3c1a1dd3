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
    FORMS,
    MARKS,
    QUOTE,
    Form,
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
from tests.server.conftest import is_allowed

KINDS: JsonObject = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER: JsonObject = {
    "type": "object",
    "properties": KINDS,
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS: dict[str, JsonObject] = {
    "get_weather": WEATHER,
    "now": {"type": "object", "additionalProperties": False},
}
CITY_NAME = 'Pa"ris}{ \\'
PARIS = {"city": CITY_NAME, "days": 3}
ARGS = json.dumps(PARIS)
Call = tuple[str, Any]
ONE: list[Call] = [("get_weather", PARIS)]
BOTH: list[Call] = [*ONE, ("now", {})]

OBJECT = f'{{"name": "get_weather", "arguments": {ARGS}}}'
NOW = '{"name":"now","arguments":{}}'
REVERSED = f'{{"arguments": {ARGS}, "name": "get_weather"}}'
LLAMA, LLAMA_NOW = (text.replace('"arguments"', '"parameters"') for text in (OBJECT, NOW))
CITY = '<parameter=city>\nPa"ris}{ \\\n</parameter>\n'
DAYS = "<parameter=days>\n3\n</parameter>\n"
SEED_KEYS = '<parameter=city>Pa"ris}{ \\</parameter>\n<parameter=days>3</parameter>\n'
KEYS = '<arg_key>city</arg_key>\n<arg_value>Pa"ris}{ \\</arg_value>\n'
KEYS += "<arg_key>days</arg_key><arg_value>3</arg_value>"
LINES = "<parameter=a>\n\nx\n\n</parameter>\n"
LINES_GLM = "now\n<arg_key>a</arg_key>\n<arg_value>\nx\n</arg_value>\n"
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
KIMI_CALL = "<|tool_call_begin|>functions."
KIMI_ARGUMENTS = "<|tool_call_argument_begin|>"
LFM = "<|tool_call_start|>"
LFM_END = "<|tool_call_end|>"
PYTHON = "get_weather(city='Pa\"ris}{ \\\\', days=3)"
COMMAND_NOW = '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}'
COMMENTARY = "<|channel|>commentary to=functions."
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
QUOTED = '"b, c: <tool_call|>"'


def tag(text: str) -> str:
    """Return a call between tags."""
    return f"<tool_call>\n{text}\n</tool_call>\n"


def now(**arguments: Any) -> list[Call]:
    """Return the one call of a reply."""
    return [("now", arguments)]


def kimi(name: str, arguments: str) -> str:
    return f"{KIMI_CALL}{name}{KIMI_ARGUMENTS}{arguments}<|tool_call_end|>"


def deepseek(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def gemma(text: str) -> str:
    return f"<|tool_call>call:{text}<tool_call|>"


CASES: dict[str, str | tuple[str, list[Call]] | tuple[str, list[Call], str]] = {
    "Hermes": (f"Let me see.\n{tag(OBJECT)}", ONE, "Let me see."),
    "Hermes: two, arguments first": (tag(REVERSED) + tag(NOW), BOTH),
    "Hermes: arguments in a string": (tag(OBJECT.replace(ARGS, json.dumps(ARGS))), ONE),
    "Hermes: a brace too many": (tag(OBJECT + "}") + "So.", ONE, "\nSo."),
    "Hermes: a mark in a string": (
        tag('{"name": "now", "arguments": {"a": "</tool_call>"}}'),
        now(a="</tool_call>"),
    ),
    "Hermes: no call": "1 < 2 and <tool_ is no tag",
    "Hermes: no JSON": "a <tool_call>[1]</tool_call> b",
    "Hermes: no object": tag('{"name": "now", "arguments": [1]}'),
    "Hermes: broken, then whole": (tag("{'name") + tag(NOW), now(), tag("{'name").rstrip()),
    "Hermes: cut before a name": 'a <tool_call>{"na',
    "Qwen3": ("Yes." + tag(f"<function=get_weather>\n{CITY}{DAYS}</function>"), ONE, "Yes."),
    "Qwen3: marks in a value": (
        tag(
            "<function=now>\n<parameter=a>\n</parameter> x </tool_call>\n</parameter>\n</function>"
        ),
        now(a="</parameter> x </tool_call>"),
    ),
    "Qwen3: newlines of a value's own": (
        tag(f"<function=now>\n{LINES}</function>"),
        now(a="\nx\n"),
    ),
    "Qwen3: without arguments": (tag("<function=now>\n</function>"), now()),
    "Qwen3: without an end": (tag(f"<function=get_weather>\n{CITY}{DAYS}"), ONE),
    "Qwen3: cut": f"<tool_call>\n<function=get_weather>\n{CITY}".rstrip(),
    "GLM": (tag(f"get_weather\n{KEYS}") + tag("now"), BOTH),
    "GLM: newlines of a value's own": (tag(LINES_GLM), now(a="\nx\n")),
    "Llama: tagged, two": (f"<|python_tag|>{LLAMA}; {LLAMA_NOW}", BOTH),
    "Llama: JSON that is no call": '{"name": "Ada", "age": 3}',
    "Llama: text": "<b>It is {now}.</b>",
    "Llama: as Python": (f"[{PYTHON}, now()]", BOTH),
    "Llama: Python in a text": "[now()] is what I would call.",
    "Llama: a list": "[1] says so.",
    "LFM2": (f"So.{LFM}[{PYTHON}, now()]{LFM_END}", BOTH, "So."),
    "LFM2: values of JSON": (
        f"{LFM}[now(a=[true, null], b={{'c': True}})]{LFM_END}",
        now(a=[True, None], b={"c": True}),
    ),
    "LFM2: no call": f"{LFM}[{{1}}]{LFM_END} x",
    "Mistral": (f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{ARGS}[TOOL_CALLS]now{{}}", BOTH),
    "Gemma: nested": (
        gemma(f"now{{a:[{{b:null,c:{QUOTE}x:y{QUOTE}}},true]}}"),
        now(a=[{"b": None, "c": "x:y"}, True]),
    ),
    "Gemma: texts of JSON": (gemma(f"now{{a:{QUOTED}}}"), now(a=json.loads(QUOTED))),
    "Gemma: broken": gemma("now{a:b c}"),
    "gpt-oss": (
        f"{THOUGHT}{COMMENTARY}get_weather <|constrain|>json<|message|>{ARGS}<|call|>",
        ONE,
    ),
    "gpt-oss: first": (
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
        now(),
    ),
    "gpt-oss: on the analysis channel": (
        "<|channel|>analysis to=functions.now<|message|>{}<|call|>",
        now(),
    ),
    "gpt-oss: on the analysis channel, first": (
        f" to=functions.get_weather<|channel|>analysis<|message|>{ARGS}<|call|>",
        ONE,
    ),
    "gpt-oss: on the analysis channel, behind a thought": (
        f"{THOUGHT} to=functions.now<|channel|>analysis code<|message|>{{}}<|call|>",
        now(),
    ),
    "gpt-oss: another recipient on the analysis channel": (
        "<|channel|>analysis to=python<|message|>1<|end|><|start|>assistant"
        "<|channel|>final<|message|>So.",
        [],
        "So.",
    ),
    "gpt-oss: two objects": (f"{COMMENTARY}now<|message|>{{}} {{}}", now(), " {}"),
    "gpt-oss: text": (f"{THOUGHT}<|channel|>final<|message|>Sunny < 3<|return|>", [], "Sunny < 3"),
    "gpt-oss: no JSON": f"{COMMENTARY}now<|message|>{{a",
    "gpt-oss: without channels": '{"a": 3}',
    "Muse: text": (" to=user<|message|>Sunny < 3<|eot|>", [], "Sunny < 3"),
    "Muse: broken": (
        " to=now<|message|><atem:function_calls>\n<atem",
        [],
        "<atem:function_calls>\n<atem",
    ),
    "Kimi: broken, then whole": (
        KIMI[0] + kimi("bad:0", '{"city": "B') + kimi("now:1", "{}") + KIMI[1],
        now(),
        'functions.bad:0{"city": "B',
    ),
    "Kimi: a text before a call": (
        KIMI[0] + " noise " + kimi("now:1", "{}") + KIMI[1] + " So.",
        now(),
        " noise  So.",
    ),
    "Kimi: broken between two": (
        KIMI[0] + kimi("now:0", "{}") + kimi("bad:1", "{x") + kimi("now:2", "{}") + KIMI[1],
        [*now(), *now()],
        "functions.bad:1{x",
    ),
    "DeepSeek V3.1: broken, then whole": (
        f"{DEEPSEEK[0]}{deepseek('bad', '[')}{deepseek('now', '{}')}{DEEPSEEK[1]}",
        now(),
        "bad[",
    ),
    "MiniMax: broken, then whole": (
        '<minimax:tool_call>\n<invoke name="bad">\n<parameter</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        now(),
        '\n<invoke name="bad">\n<parameter\n',
    ),
    "MiniMax: without its mark": (
        'So.\n<invoke name="now">\n<parameter name="a">x</parameter>\n</invoke>',
        now(a="x"),
        "So.",
    ),
    "Granite: broken, then whole": (
        f'<|tool_call|>[{{"name": "bad", "arguments": {{"name": }}}}, {NOW}]',
        now(),
        '[{"name": "bad", "arguments": {"name": }}, ',
    ),
    "Apriel: two, with ids": (
        f'So.\n<tool_calls>[{OBJECT[:-1]}, "id": "a1"}}, {NOW}]</tool_calls>',
        BOTH,
        "So.",
    ),
    "Nemotron: broken, with a person in it": (
        '<TOOLCALL>[{"name": "bad", "arguments": {"a": {"name": "now x"}, }}]</TOOLCALL>',
        [],
        '<TOOLCALL>[{"name": "bad", "arguments": {"a": {"name": "now x"}, }}]</TOOLCALL>',
    ),
    "LFM2: broken, then whole": (
        f"{LFM}[bad(a=), now(a='x')]{LFM_END}",
        now(a="x"),
        "[bad(a=), ",
    ),
    "LFM2: lines in a text": (f"{LFM}[now(a='x\ny', b=1)]{LFM_END}", now(a="x\ny", b=1)),
    "LFM2: lines in a text of three quotes": (
        f'{LFM}[now(a="""it\'s\ny""")]{LFM_END}',
        now(a="it's\ny"),
    ),
    "LFM2: quotes in quotes": (
        f"{LFM}[now(a='sed -n '1,2p' x', b='print(f('1'))')]{LFM_END}",
        now(a="sed -n '1,2p' x", b="print(f('1'))"),
    ),
    "LFM2: what Python has not": (
        f"{LFM}[now(a=07, b={{'x', 'y'}}, c='a\0b', d=0.5, e=0)]{LFM_END}",
        now(a=7, b=["x", "y"], c="a\0b", d=0.5, e=0),
    ),
    "Qwen3: without its mark": (
        f"Yes.\n<function=get_weather>\n{CITY}{DAYS}</function>\n</tool_call> So.",
        ONE,
        "Yes. So.",
    ),
    "Qwen3: two without their marks": (
        f"<function=get_weather>\n{CITY}{DAYS}</function>\n<function=now>\n</function>\n",
        BOTH,
    ),
    "Qwen3: no known function without its mark": "<function=other>\n</function>",
    "Qwen3: a function in a sentence": "Use <function=now> to read it",
    "Qwen3: an end is missing": (
        tag("<function=get_weather>\n<parameter=city>\nOslo\n<parameter=days>\n3\n</function>"),
        [("get_weather", {"city": "Oslo", "days": 3})],
    ),
    "Qwen3: another key in a value": (
        tag("<function=get_weather>\n<parameter=city>\n<parameter=x>\n</parameter>\n</function>"),
        [("get_weather", {"city": "<parameter=x>"})],
    ),
    "Seed: without its mark": (
        f"<function=get_weather>\n{SEED_KEYS}</function>\n</seed:tool_call>",
        ONE,
    ),
    "Seed: blanks of a value's own": (
        "<seed:tool_call>\n<function=now>\n<parameter=a>\n</parameter>\n"
        "<parameter=b>\n x\n</parameter>\n</function>\n</seed:tool_call>",
        now(a="\n", b="\n x\n"),
    ),
    "GLM: without its mark": (f"get_weather\n{KEYS}\n</tool_call>", ONE),
    "GLM: an end is missing": (
        tag(
            "get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo\n"
            "<arg_key>days</arg_key>\n<arg_value>3"
        ),
        [("get_weather", {"city": "Oslo", "days": 3})],
    ),
    "Gemma: a key with blanks": (
        gemma("now{my key:1,b:{c d:[2]}}"),
        [("now", {"my key": 1, "b": {"c d": [2]}})],
    ),
    "GigaChat": (f"So.<|function_call|>{OBJECT}", ONE, "So."),
}
"""A form and what is odd, with a reply, its calls and its text; a reply alone is all text."""


def call_text(form: Form, *, required: bool = False) -> str:
    """Return a call in a form's own marks, which hold it together as a grammar does, for the
    weather in Paris.
    """
    arguments = ARGS
    pairs = form.pairs
    if pairs is not None:
        city = (
            json.dumps(CITY_NAME) if pairs.quote is None else pairs.quote + CITY_NAME + pairs.quote
        )
        written = (pairs.text.replace("KEY", key).replace("VALUE", "{}") for key in PARIS)
        arguments = pairs.comma.join(written).replace("{}", city, 1).replace("{}", "3", 1)
    call = form.call.replace("NAME", "get_weather").replace("#", "0")
    opening = "" if form.is_bare and required else form.opening
    text = opening + (f"[{call}]" if form.is_array else call) + form.closing
    if form.channels is not None:
        text = form.channels.call_header.replace("NAME", "get_weather") + text
    return text.replace("ARGUMENTS", arguments)


CASES |= {form: (call_text(FORMS[form]), ONE) for form in FORMS}


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
    demo = ModelFolder.resolve("demo")
    return GrammarCompiler(demo.tokenizer, demo.config.vocab_size)


def is_accepted(grammar: GrammarSpec | None, text: str) -> bool:
    """Return True if a grammar accepts a text in the tokens of the demo, for which marks are
    texts.
    """
    assert grammar is not None
    return is_allowed(demo_compiler(), grammar, ModelFolder.resolve("demo").tokenizer.encode(text))


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
    marks = sorted(mark for mark in MARKS if mark in "".join((*written[:3], call)))
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
    *sorted(MARKS),
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


@pytest.mark.parametrize("form", FORMS)
def test_any_text_ends_and_pieces_do_not_matter(form: str) -> None:
    chance = random.Random(form)
    for _ in range(200):
        text = "".join(chance.choices(FRAGMENTS, k=chance.randint(1, 14)))
        parses = [parse(form, pieces) for pieces in ([text], list(text))]
        assert parses[0] == parses[1], text
