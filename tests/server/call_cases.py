"""Replies with tool calls in every form, with the calls and the text that they hold."""

from __future__ import annotations

import json
from typing import Any

from spd.conversation.tools.call_forms import (
    FORMS,
    QUOTE,
    Form,
)
from spd.runtime.engine.json_schema import JsonObject

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
    "Qwen3: another key in the last value": (
        tag(
            "<function=get_weather>\n<parameter=days>\n3\n</parameter>\n"
            "<parameter=city>\nuse <parameter=x>y\n</parameter>\n</function>"
        ),
        [("get_weather", {"days": 3, "city": "use <parameter=x>y"})],
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
