"""Tool calls are found in every form, whatever pieces the text comes in, and nothing else is one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from spd.cli.serve.calls import CallParser
from spd.cli.serve.tools import (
    DEEPSEEK,
    GLM,
    HERMES,
    LLAMA3,
    MISTRAL,
    NAMED,
    QWEN_XML,
    REQUIRED,
    Tools,
    call_form,
)

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
PARIS = {"city": 'Pa"ris}{ \\', "days": 3}
ARGS = json.dumps(PARIS)
Call = tuple[str, Any]
WEATHER_CALL, NOW_CALL = ("get_weather", PARIS), ("now", {})
SEP, CALLS, END = "<｜tool▁sep｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"

CASES: dict[str, tuple[str, str, str, list[Call]]] = {
    "hermes": (
        HERMES,
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ARGS}}}\n</tool_call>',
        "Let me see.\n",
        [WEATHER_CALL],
    ),
    "hermes two, arguments first": (
        HERMES,
        f'<tool_call>\n{{"arguments": {ARGS}, "name": "get_weather"}}\n</tool_call>\n'
        '<tool_call>{"name":"now","arguments":{}}</tool_call>',
        "",
        [WEATHER_CALL, NOW_CALL],
    ),
    "hermes arguments in a string": (
        HERMES,
        f'<tool_call>{{"name": "get_weather", "arguments": {json.dumps(ARGS)}}}</tool_call>',
        "",
        [WEATHER_CALL],
    ),
    "hermes no call": (HERMES, "1 < 2 and <tool_ is no tag", "1 < 2 and <tool_ is no tag", []),
    "hermes no JSON": (HERMES, "a <tool_call>[1]</tool_call> b", "a <tool_call>[1]</tool_call> b", []),
    "hermes cut before a name": (HERMES, 'a <tool_call>{"na', 'a <tool_call>{"na', []),
    "qwen": (
        QWEN_XML,
        'Yes.<tool_call>\n<function=get_weather>\n<parameter=city>\nPa"ris}{ \\\n</parameter>\n'
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
        "Yes.",
        [WEATHER_CALL],
    ),
    "qwen without arguments": (
        QWEN_XML,
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
        "",
        [NOW_CALL],
    ),
    "glm": (
        GLM,
        '<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Pa"ris}{ \\</arg_value>\n'
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        "",
        [WEATHER_CALL, NOW_CALL],
    ),
    "llama": (LLAMA3, f'{{"name": "get_weather", "parameters": {ARGS}}}', "", [WEATHER_CALL]),
    "llama tagged, two": (
        LLAMA3,
        f'<|python_tag|>{{"name": "get_weather", "parameters": {ARGS}}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [WEATHER_CALL, NOW_CALL],
    ),
    "llama JSON that is no call": (LLAMA3, '{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
    "llama text": (LLAMA3, "<b>It is {now}.</b>", "<b>It is {now}.</b>", []),
    "mistral array": (
        MISTRAL,
        f'Hm. [TOOL_CALLS] [{{"name": "get_weather", "arguments": {ARGS}}}, '
        '{"name": "now", "arguments": {}}]',
        "Hm. ",
        [WEATHER_CALL, NOW_CALL],
    ),
    "mistral names": (
        MISTRAL,
        f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{ARGS}[TOOL_CALLS]now{{}}",
        "",
        [WEATHER_CALL, NOW_CALL],
    ),
    "deepseek 3.1": (
        DEEPSEEK,
        f"So:{CALLS}{CALL}get_weather{SEP}{ARGS}{CALL_END}{CALL}now{SEP}{{}}{CALL_END}{END}",
        "So:",
        [WEATHER_CALL, NOW_CALL],
    ),
    "deepseek 3": (
        DEEPSEEK,
        f"{CALLS}{CALL}function{SEP}get_weather\n```json\n{ARGS}\n```{CALL_END}\n"
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALL_END}{END}",
        "",
        [WEATHER_CALL, NOW_CALL],
    ),
    "named": (NAMED, ARGS, "", [WEATHER_CALL]),
    "required": (
        REQUIRED,
        f'[{{"name": "get_weather", "parameters": {ARGS}}}, {{"name": "now", "parameters": {{}}}}]',
        "",
        [WEATHER_CALL, NOW_CALL],
    ),
}


def parse(form: str, pieces: list[str]) -> tuple[str, list[Call]]:
    """Content and calls of a reply that came in pieces."""
    parser = CallParser(Tools(FUNCTIONS, form, named="get_weather" if form == NAMED else None))
    found = [piece for text in pieces for piece in parser.feed(text)]
    found += parser.feed("", final=True)
    content = "".join(piece.text for piece in found if piece.call is None)
    names = [piece.name for piece in found if piece.name is not None]
    arguments = ["".join(piece.text for piece in found if piece.call == i) for i in range(len(names))]
    return content, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_every_form_at_every_boundary(case: str) -> None:
    form, text, content, calls = CASES[case]
    expected = content, calls
    assert parse(form, [text]) == expected
    assert parse(form, list(text)) == expected
    for cut in range(1, len(text)):
        assert parse(form, [text[:cut], text[cut:]]) == expected, text[:cut]
    chance = random.Random(case)
    for _ in range(50):
        cuts = sorted(chance.sample(range(len(text)), min(5, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(form, pieces) == expected, pieces


@pytest.mark.parametrize("case", [case for case, (_, _, _, calls) in CASES.items() if calls])
def test_a_cut_reply_never_completes_arguments(case: str) -> None:
    """What a length limit cut is the beginning of what would have come, in content and in arguments."""
    form, text, content, _ = CASES[case]
    parser = CallParser(Tools(FUNCTIONS, form, named="get_weather" if form == NAMED else None))
    whole = "".join(p.text for p in parser.feed(text, final=True) if p.call == 0)
    for cut in range(len(text)):
        parser = CallParser(Tools(FUNCTIONS, form, named="get_weather" if form == NAMED else None))
        found = parser.feed(text[:cut], final=True)
        said = "".join(piece.text for piece in found if piece.call == 0)
        assert whole.startswith(said), (text[:cut], said)
        told = "".join(piece.text for piece in found if piece.call is None)
        assert told.startswith(content) or content.startswith(told)


def test_arguments_stream_while_they_come() -> None:
    parser = CallParser(Tools(FUNCTIONS, HERMES))
    found = parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Par')
    assert [(piece.name, piece.text) for piece in found] == [("get_weather", ""), (None, '{"city": "Par')]
    assert [piece.text for piece in parser.feed("is")] == ["is"]


@pytest.mark.parametrize(
    ("sign", "form"),
    [
        ("<tool_call> tool.name", HERMES),
        ("[TOOL_CALLS]", MISTRAL),
        ("<｜tool▁calls▁begin｜>", DEEPSEEK),
        ("<tool_call><arg_key>", GLM),
        ("<tool_call>\n<function=name>", QWEN_XML),
        ("<|start_header_id|> parameters", LLAMA3),
    ],
)
def test_a_template_says_which_form(sign: str, form: str) -> None:
    assert call_form(f"{{% if tools %}}{sign}{{% endif %}}") == form


def test_required_calls_are_held_to_their_schemas() -> None:
    """References inside a tool's schema lead where it stands in the grammar's."""
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}}}
    tools = Tools({"plant": {**tree, "$defs": {"leaf": {"type": "integer"}}}}, REQUIRED, parallel=False)
    grammar = tools.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    moved = schema["$defs"]["plant"]["properties"]
    assert moved == {"left": {"$ref": "#/$defs/plant"}, "leaf": {"$ref": "#/$defs/plant/$defs/leaf"}}
    assert schema["maxItems"] == 1


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=now>", "<parameter=city>", "</parameter>", "</function>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"),
    *(
        CALLS,
        CALL,
        SEP,
        CALL_END,
        END,
        '{"name": "now"',
        '"arguments": {',
        "}",
        "[",
        "]",
        ",",
        '"',
        "\\",
        ": ",
    ),
    *('{"name": "now", "parameters": {}}', "now", " text ", "\n", ";", "<", "{", "0", '"x"'),
]


@pytest.mark.parametrize("form", [HERMES, LLAMA3, MISTRAL, DEEPSEEK, NAMED, REQUIRED])
def test_any_text_ends_and_pieces_do_not_matter(form: str) -> None:
    chance = random.Random(form)
    for _ in range(400):
        text = "".join(chance.choices(FRAGMENTS, k=chance.randint(1, 14)))
        told = []
        for pieces in ([text], list(text)):
            parser = CallParser(Tools(FUNCTIONS, form, named="now" if form == NAMED else None))
            found = [p for piece in pieces for p in parser.feed(piece)] + parser.feed("", final=True)
            names = [piece.name for piece in found if piece.name is not None]
            said = ["".join(p.text for p in found if p.call == i) for i in (None, *range(len(names)))]
            told.append((names, said))
        assert told[0] == told[1], text
