"""Tool calls are found in every form, whatever pieces the text comes in, and nothing else is one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from spd.cli.serve.calls import FORMS, MARKS, CallParser, Tools, call_form

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
FUNCTIONS = {"get_weather": WEATHER, "now": {"type": "object", "properties": {}}}
PARIS = {"city": 'Pa"ris}{ \\', "days": 3}
ARGS = json.dumps(PARIS)
TAGGED, LLAMA, MISTRAL, DEEPSEEK = (Tools(FUNCTIONS, form) for form in FORMS)
NAMED, REQUIRED = Tools(FUNCTIONS, named="get_weather"), Tools(FUNCTIONS, required=True)
Call = tuple[str, Any]
WEATHER_CALL, NOW_CALL = ("get_weather", PARIS), ("now", {})
CALLS, END, CALL, CALL_END, SEP = MARKS[-5:]

OBJECT, NOW = f'{{"name": "get_weather", "arguments": {ARGS}}}', '{"name":"now","arguments":{}}'
REVERSED = f'{{"arguments": {ARGS}, "name": "get_weather"}}'
LLAMA_OBJECT, LLAMA_NOW = (text.replace('"arguments"', '"parameters"') for text in (OBJECT, NOW))
CITY, DAYS = '<parameter=city>\nPa"ris}{ \\\n</parameter>\n', "<parameter=days>\n3\n</parameter>\n"
KEYS = '<arg_key>city</arg_key>\n<arg_value>Pa"ris}{ \\</arg_value>\n<arg_key>days</arg_key>'
JSON, OLD = "```json\n", f"{CALL}function{SEP}"
ONE, BOTH = [WEATHER_CALL], [WEATHER_CALL, NOW_CALL]


def tag(text: str) -> str:
    """A call between tags."""
    return f"<tool_call>\n{text}\n</tool_call>\n"


CASES: dict[str, tuple[Tools, str, str, list[Call]]] = {
    "hermes": (TAGGED, f"Let me see.\n{tag(OBJECT)}", "Let me see.\n", ONE),
    "hermes two, arguments first": (TAGGED, tag(REVERSED) + tag(NOW), "", BOTH),
    "hermes arguments in a string": (TAGGED, tag(OBJECT.replace(ARGS, json.dumps(ARGS))), "", ONE),
    "hermes no call": (TAGGED, "1 < 2 and <tool_ is no tag", "1 < 2 and <tool_ is no tag", []),
    "hermes no JSON": (TAGGED, "a <tool_call>[1]</tool_call> b", "a <tool_call>[1]</tool_call> b", []),
    "hermes cut before a name": (TAGGED, 'a <tool_call>{"na', 'a <tool_call>{"na', []),
    "qwen": (
        TAGGED,
        "Yes." + tag(f"<function=get_weather>\n{CITY}{DAYS}</function>"),
        "Yes.",
        [WEATHER_CALL],
    ),
    "qwen without arguments": (TAGGED, tag("<function=now>\n</function>"), "", [NOW_CALL]),
    "glm": (TAGGED, tag(f"get_weather\n{KEYS}<arg_value>3</arg_value>") + tag("now"), "", BOTH),
    "llama": (LLAMA, LLAMA_OBJECT, "", ONE),
    "llama tagged, two": (LLAMA, f"<|python_tag|>{LLAMA_OBJECT}; {LLAMA_NOW}", "", BOTH),
    "llama JSON that is no call": (LLAMA, '{"name": "Ada", "age": 3}', '{"name": "Ada", "age": 3}', []),
    "llama text": (LLAMA, "<b>It is {now}.</b>", "<b>It is {now}.</b>", []),
    "mistral array": (MISTRAL, f"Hm. [TOOL_CALLS] [{OBJECT}, {NOW}]", "Hm. ", BOTH),
    "mistral names": (
        MISTRAL,
        f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{ARGS}[TOOL_CALLS]now{{}}",
        "",
        BOTH,
    ),
    "deepseek 3.1": (
        DEEPSEEK,
        f"So:{CALLS}{CALL}get_weather{SEP}{ARGS}{CALL_END}{CALL}now{SEP}{{}}{CALL_END}{END}",
        "So:",
        BOTH,
    ),
    "deepseek 3": (
        DEEPSEEK,
        f"{CALLS}{OLD}get_weather\n{JSON}{ARGS}\n```{CALL_END}\n{OLD}now\n{JSON}{{}}\n```{CALL_END}{END}",
        "",
        BOTH,
    ),
    "named": (NAMED, ARGS, "", ONE),
    "required": (REQUIRED, f"[{LLAMA_OBJECT}, {LLAMA_NOW}]", "", BOTH),
}


def parse(tools: Tools, pieces: list[str]) -> tuple[str, list[Call]]:
    """Content and calls of a reply that came in pieces."""
    parser = CallParser(tools)
    found = [piece for text in pieces for piece in parser.feed(text)]
    found += parser.feed("", final=True)
    content = "".join(piece.text for piece in found if piece.call is None)
    names = [piece.name for piece in found if piece.name is not None]
    arguments = ["".join(piece.text for piece in found if piece.call == i) for i in range(len(names))]
    return content, [(name, json.loads(text)) for name, text in zip(names, arguments, strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_every_form_at_every_boundary(case: str) -> None:
    tools, text, content, calls = CASES[case]
    expected = content, calls
    assert parse(tools, [text]) == expected
    assert parse(tools, list(text)) == expected
    for cut in range(1, len(text)):
        assert parse(tools, [text[:cut], text[cut:]]) == expected, text[:cut]
    chance = random.Random(case)
    for _ in range(50):
        cuts = sorted(chance.sample(range(len(text)), min(5, len(text))))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert parse(tools, pieces) == expected, pieces


@pytest.mark.parametrize("case", [case for case, (_, _, _, calls) in CASES.items() if calls])
def test_a_cut_reply_never_completes_arguments(case: str) -> None:
    """What a length limit cut is the beginning of what would have come, in content and in arguments."""
    tools, text, content, _ = CASES[case]
    whole = "".join(piece.text for piece in CallParser(tools).feed(text, final=True) if piece.call == 0)
    for cut in range(len(text)):
        found = CallParser(tools).feed(text[:cut], final=True)
        said = "".join(piece.text for piece in found if piece.call == 0)
        assert whole.startswith(said), (text[:cut], said)
        told = "".join(piece.text for piece in found if piece.call is None)
        assert told.startswith(content) or content.startswith(told)


def test_a_call_comes_whole_and_arguments_that_a_grammar_holds_as_they_come() -> None:
    parser = CallParser(TAGGED)
    assert parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Par') == []
    (piece,) = parser.feed('is"}}')
    assert (piece.name, piece.text) == ("get_weather", '{"city": "Paris"}')
    parser = CallParser(NAMED)
    assert [tuple(piece) for piece in parser.feed(' {"ci')] == [('{"ci', 0, "get_weather")]
    assert [tuple(piece) for piece in parser.feed('ty"')] == [('ty"', 0, None)]
    assert [piece.text for piece in CallParser(LLAMA).feed("{now} it")] == ["{now} it"]  # cannot be one


def test_a_template_says_which_form() -> None:
    signs = {"<tool_call> tool.name": TAGGED, "[TOOL_CALLS]": MISTRAL, CALLS: DEEPSEEK}
    for sign, tools in {**signs, "<|start_header_id|> parameters": LLAMA, "nothing": TAGGED}.items():
        assert call_form(f"{{% if tools %}}{sign}{{% endif %}}") is tools.form


def test_required_calls_are_held_to_their_schemas() -> None:
    """References inside a tool's schema lead where it stands in the grammar's."""
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "leaf": {"$ref": "#/$defs/leaf"}}}
    tools = Tools({"plant": {**tree, "$defs": {"leaf": {"type": "integer"}}}}, required=True, parallel=False)
    grammar = tools.grammar
    assert grammar is not None
    schema = json.loads(grammar.text)
    moved = schema["$defs"]["plant"]["properties"]
    assert moved == {"left": {"$ref": "#/$defs/plant"}, "leaf": {"$ref": "#/$defs/plant/$defs/leaf"}}
    assert schema["maxItems"] == 1


FRAGMENTS = [
    *MARKS,
    *(
        "<function=now>",
        "<parameter=city>",
        "</parameter>",
        "</function>",
        '{"name": "now"',
        '"arguments": {',
    ),
    *("}", "[", "]", ",", '"', "\\", ": ", '{"name": "now", "parameters": {}}', "now", " text ", "\n", ";"),
    *("<", "{", "0", '"x"'),
]


@pytest.mark.parametrize("tools", [TAGGED, LLAMA, MISTRAL, DEEPSEEK, NAMED, REQUIRED])
def test_any_text_ends_and_pieces_do_not_matter(tools: Tools) -> None:
    chance = random.Random(str(tools))
    for _ in range(200):
        text = "".join(chance.choices(FRAGMENTS, k=chance.randint(1, 14)))
        told = []
        for pieces in ([text], list(text)):
            parser = CallParser(tools)
            found = [p for piece in pieces for p in parser.feed(piece)] + parser.feed("", final=True)
            names = [piece.name for piece in found if piece.name is not None]
            said = ["".join(p.text for p in found if p.call == i) for i in (None, *range(len(names)))]
            told.append((names, said))
        assert told[0] == told[1], text
