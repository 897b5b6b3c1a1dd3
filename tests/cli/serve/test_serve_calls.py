"""Tool calls are found in every form, whatever pieces the text comes in, and nothing else is one."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spd.cli.serve import wishes
from spd.cli.serve.forms import (
    CALL_BEGIN,
    CALL_END,
    FORMS,
    MARKS,
    QUOTE,
    SECTION,
    SEPARATOR,
    CallParser,
    Form,
    Tools,
    call_form,
)
from spd.formats.folder import ModelFolder
from spd.runtime.engine.grammar import GrammarCompiler, GrammarError
from spd.runtime.engine.request import GrammarText
from tests.cli.conftest import SPECIALS, write_tokenizer
from tests.every_template import found

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = {"get_weather": WEATHER, "now": {"type": "object", "additionalProperties": False}}
PARIS = {"city": 'Pa"ris}{ \\', "days": 3}
ARGS = json.dumps(PARIS)
Call = tuple[str, Any]
ONE: list[Call] = [("get_weather", PARIS)]
BOTH: list[Call] = [*ONE, ("now", {})]

OBJECT, NOW = f'{{"name": "get_weather", "arguments": {ARGS}}}', '{"name":"now","arguments":{}}'
REVERSED = f'{{"arguments": {ARGS}, "name": "get_weather"}}'
LLAMA_OBJECT, LLAMA_NOW = (text.replace('"arguments"', '"parameters"') for text in (OBJECT, NOW))
CITY, DAYS = '<parameter=city>\nPa"ris}{ \\\n</parameter>\n', "<parameter=days>\n3\n</parameter>\n"
KEYS = '<arg_key>city</arg_key>\n<arg_value>Pa"ris}{ \\</arg_value>\n'
KEYS += "<arg_key>days</arg_key><arg_value>3</arg_value>"
OWN: list[Call] = [("now", {"a": "\nx\n"})]
LINES = "<parameter=a>\n\nx\n\n</parameter>\n"
LINES_GLM = "now\n<arg_key>a</arg_key>\n<arg_value>\nx\n</arg_value>\n"
JSON, OLD = "```json\n", f"{CALL_BEGIN}function{SEPARATOR}"
KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
KIMI_CALL, KIMI_ARGUMENTS = "<|tool_call_begin|>functions.", "<|tool_call_argument_begin|>"
INVOKED = (
    '<invoke name="get_weather">\n<parameter name="city">Pa"ris}{ \\</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n'
)
ATEM = INVOKED.replace("invoke", "atem:invoke").replace("parameter", "atem:parameter")
ATEM = f"<atem:function_calls>\n{ATEM}</atem:function_calls>"
COMMENTARY = "<|channel|>commentary to=functions."
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def tag(text: str) -> str:
    """A call between tags."""
    return f"<tool_call>\n{text}\n</tool_call>\n"


LFM, LFM_END = "<|tool_call_start|>", "<|tool_call_end|>"
PYTHON = "get_weather(city='Pa\"ris}{ \\\\', days=3)"
VALUES, QUOTED = ("f", {"a": [True, None], "b": {"c": True}}), ("f", {"a": "b, c: <tool_call|>"})
HERMES, QWEN = "Hermes, Qwen3", "Qwen3-Coder, Qwen3.5"
CASES: dict[str, tuple[str, str, str, list[Call]]] = {
    "hermes": (HERMES, f"Let me see.\n{tag(OBJECT)}", "Let me see.", ONE),
    "hermes two, arguments first": (HERMES, tag(REVERSED) + tag(NOW), "", BOTH),
    "hermes arguments in a string": (HERMES, tag(OBJECT.replace(ARGS, json.dumps(ARGS))), "", ONE),
    "hermes a brace too many": (HERMES, tag(OBJECT + "}") + "So.", "\nSo.", ONE),
    "hermes a mark in a string": (
        HERMES,
        tag('{"name": "now", "arguments": {"a": "</tool_call>"}}'),
        "",
        [("now", {"a": "</tool_call>"})],
    ),
    "hermes no call": (HERMES, "1 < 2 and <tool_ is no tag", "1 < 2 and <tool_ is no tag", []),
    "hermes no JSON": (HERMES, "a <tool_call>[1]</tool_call> b", "a <tool_call>[1]</tool_call> b", []),
    "hermes no object": (HERMES, *2 * [tag('{"name": "now", "arguments": [1]}')], []),
    "hermes broken, then whole": (HERMES, tag("{'name") + tag(NOW), tag("{'name").rstrip(), BOTH[1:]),
    "hermes cut before a name": (HERMES, 'a <tool_call>{"na', 'a <tool_call>{"na', []),
    "qwen": (QWEN, "Yes." + tag(f"<function=get_weather>\n{CITY}{DAYS}</function>"), "Yes.", ONE),
    "qwen, marks in a value": (
        QWEN,
        tag("<function=now>\n<parameter=a>\n</parameter> x </tool_call>\n</parameter>\n</function>"),
        "",
        [("now", {"a": "</parameter> x </tool_call>"})],
    ),
    "qwen, newlines of a value's own": (QWEN, tag(f"<function=now>\n{LINES}</function>"), "", OWN),
    "glm, newlines of a value's own": ("GLM-4.5, GLM-4.7", tag(LINES_GLM), "", OWN),
    "qwen without arguments": (QWEN, tag("<function=now>\n</function>"), "", BOTH[1:]),
    "qwen without an end": (QWEN, tag(f"<function=get_weather>\n{CITY}{DAYS}"), "", ONE),
    "qwen cut": (QWEN, *2 * [f"<tool_call>\n<function=get_weather>\n{CITY}".rstrip()], []),
    "seed": (
        "Seed-OSS",
        f"<seed:tool_call><function=get_weather>{CITY}{DAYS}</function></seed:tool_call>",
        "",
        ONE,
    ),
    "glm": ("GLM-4.5, GLM-4.7", tag(f"get_weather\n{KEYS}") + tag("now"), "", BOTH),
    "minimax": (
        "MiniMax M2",
        f'A<minimax:tool_call>\n{INVOKED}<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        "A",
        BOTH,
    ),
    "llama": ("Llama 3", LLAMA_OBJECT, "", ONE),
    "llama tagged, two": ("Llama 3", f"<|python_tag|>{LLAMA_OBJECT}; {LLAMA_NOW}", "", BOTH),
    "llama JSON that is no call": ("Llama 3", *2 * ['{"name": "Ada", "age": 3}'], []),
    "llama text": ("Llama 3", *2 * ["<b>It is {now}.</b>"], []),
    "llama, as Python": ("Llama 3", f"[{PYTHON}, now()]", "", BOTH),
    "llama Python in a text": ("Llama 3", *2 * ["[now()] is what I would call."], []),
    "llama a list": ("Llama 3", *2 * ["[1] says so."], []),
    "lfm": ("LFM2", f"So.{LFM}[{PYTHON}, now()]{LFM_END}", "So.", BOTH),
    "lfm values of JSON": ("LFM2", f"{LFM}[f(a=[true, null], b={{'c': True}})]{LFM_END}", "", [VALUES]),
    "lfm no call": ("LFM2", *2 * [f"{LFM}[{{1}}]{LFM_END} x"], []),
    "granite": ("Granite 3", f"<|tool_call|>[{OBJECT}, {NOW}]", "", BOTH),
    "nemotron": ("Nemotron Nano 2", f"Hm.<TOOLCALL>[{OBJECT}, {NOW}]</TOOLCALL>", "Hm.", BOTH),
    "command": (
        "Command R7B, A",
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {ARGS}}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        "",
        BOTH,
    ),
    "mistral array": ("Mistral before 2025", f"Hm. [TOOL_CALLS] [{OBJECT}, {NOW}]", "Hm.", BOTH),
    "mistral names": (
        "Mistral",
        f"[TOOL_CALLS]get_weather[CALL_ID]abc[ARGS]{ARGS}[TOOL_CALLS]now{{}}",
        "",
        BOTH,
    ),
    "deepseek 3.1": (
        "DeepSeek V3.1",
        f"So:{SECTION[0]}{CALL_BEGIN}get_weather{SEPARATOR}{ARGS}{CALL_END}{CALL_BEGIN}now{SEPARATOR}{{}}{CALL_END}{SECTION[1]}",
        "So:",
        BOTH,
    ),
    "deepseek 3": (
        "DeepSeek V3",
        f"{SECTION[0]}{OLD}get_weather\n{JSON}{ARGS}\n```{CALL_END}\n{OLD}now\n{JSON}{{}}\n```{CALL_END}{SECTION[1]}",
        "",
        BOTH,
    ),
    "kimi": (
        "Kimi K2",
        f"{KIMI[0]}{KIMI_CALL}get_weather:0{KIMI_ARGUMENTS}{ARGS}<|tool_call_end|>"
        f"{KIMI_CALL}now:1{KIMI_ARGUMENTS}{{}}<|tool_call_end|>{KIMI[1]}",
        "",
        BOTH,
    ),
    "gemma": (
        "Gemma 4",
        f'A<|tool_call>call:get_weather{{city:{QUOTE}Pa"ris}}{{ \\{QUOTE},days:3}}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        "A",
        BOTH,
    ),
    "gemma nested": (
        "Gemma 4",
        f"<|tool_call>call:now{{a:[{{b:null,c:{QUOTE}x:y{QUOTE}}},true]}}<tool_call|>",
        "",
        [("now", {"a": [{"b": None, "c": "x:y"}, True]})],
    ),
    "gemma texts of JSON": (
        "Gemma 4",
        '<|tool_call>call:f{a:"b, c: <tool_call|>"}<tool_call|>',
        "",
        [QUOTED],
    ),
    "gemma broken": ("Gemma 4", *2 * ["<|tool_call>call:now{a:b c}<tool_call|>"], []),
    "harmony": (
        "gpt-oss",
        f"{THOUGHT}{COMMENTARY}get_weather <|constrain|>json<|message|>{ARGS}<|call|>",
        "",
        ONE,
    ),
    "harmony, name first": (
        "gpt-oss",
        f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{ARGS}",
        "",
        ONE,
    ),
    "harmony two objects": ("gpt-oss", f"{COMMENTARY}now<|message|>{{}} {{}}", " {}", BOTH[1:]),
    "muse": (
        "Muse-Glimmer",
        f" to=self<|message|>Hm.<|eom|><|start|>assistant to=get_weather<|message|>{ATEM}<|eom|>"
        '<|start|>assistant to=now<|message|><atem:function_calls>\n<atem:invoke name="now">'
        "\n</atem:invoke>\n</atem:function_calls><|eot|>",
        "",
        BOTH,
    ),
    "muse text": ("Muse-Glimmer", " to=user<|message|>Sunny < 3<|eot|>", "Sunny < 3", []),
    "muse broken": ("Muse-Glimmer", f" to=now<|message|>{ATEM[:60]}", ATEM[:60], []),
    "gigachat": ("GigaChat 3.1", f"So.<|function_call|>{OBJECT}", "So.", ONE),
    "harmony text": ("gpt-oss", f"{THOUGHT}<|channel|>final<|message|>Sunny < 3<|return|>", "Sunny < 3", []),
    "harmony no JSON": ("gpt-oss", *2 * [f"{COMMENTARY}now<|message|>{{a"], []),
    "harmony without channels": ("gpt-oss", *2 * ['{"a": 3}'], []),
}


def tools_of(form: str, **wishes: Any) -> Tools:
    """The functions in a form."""
    return Tools(FUNCTIONS, FORMS[form], **wishes)


def parse(form: str, pieces: list[str]) -> tuple[str, list[Call]]:
    """Content and calls of a reply that came in pieces."""
    each = found(tools_of(form), pieces)
    content = "".join(piece.text for piece in each if piece.kind == "text")
    return content, [(str(piece.name), json.loads(piece.text)) for piece in each if piece.kind == "call"]


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
def test_a_cut_reply_holds_whole_calls_only(case: str) -> None:
    """What a length limit cut holds the first calls of what would have come; what is no call is text."""
    form, text, content, calls = CASES[case]
    for cut in range(len(text)):
        told, calls_found = parse(form, [text[:cut]])
        assert calls_found == calls[: len(calls_found)], text[:cut]
        assert told.startswith(content) or content.startswith(told) or calls[0] not in calls_found
        if not calls_found and not FORMS[form].channels:
            assert told.split() == text[:cut].split()


def test_a_call_comes_when_it_is_whole_and_text_that_is_none_at_once() -> None:
    parser = CallParser(tools_of(HERMES))
    assert parser.feed('<tool_call>{"name": "get_weather", "arguments": {"city": "Par') == []
    (piece,) = parser.feed('is"}}')
    assert (piece.name, piece.text) == ("get_weather", '{"city": "Paris"}')
    assert [piece.text for piece in CallParser(tools_of("Llama 3")).feed("{now} it")] == [
        "{now} it"
    ]  # cannot be one


def test_a_template_says_which_form() -> None:
    for name, form in FORMS.items():
        assert call_form(f"{{% if tools %}}{' '.join(form.signs or (form.opening,))}{{% endif %}}") is form, (
            name
        )
    guessed = call_form("nothing")
    assert guessed == FORMS[HERMES] and Tools(FUNCTIONS, guessed).grammar is None


def test_a_call_keeps_the_id_that_the_model_gave() -> None:
    """Kimi's templates show it to the model in place of the name."""
    pieces = CallParser(tools_of("Kimi K2")).feed(CASES["kimi"][1])
    assert [piece.id for piece in pieces] == ["functions.get_weather:0", "functions.now:1"]


def call_text(form: Form, *, required: bool = False) -> str:
    """A call in a form's own marks, which hold it together as a grammar does, with {} for its arguments."""
    call = form.call.replace("NAME", "get_weather").replace("ARGUMENTS", "{}").replace("#", "0")
    opening = "" if form.is_bare and required else form.opening
    text = opening + (f"[{call}]" if form.is_array else call) + form.closing
    return text if form.channels is None else form.channels.call.replace("NAME", "get_weather") + text


def arguments_text(form: Form) -> str:
    """Paris in a form."""
    if (pairs := form.pairs) is None:
        return ARGS
    city = json.dumps(PARIS["city"]) if pairs.quote is None else pairs.quote + PARIS["city"] + pairs.quote
    written = (pairs.text.replace("KEY", key).replace("VALUE", "{}") for key in PARIS)
    return pairs.comma.join(written).replace("{}", city, 1).replace("{}", "3", 1)


def is_allowed(compiler: GrammarCompiler, grammar: GrammarText, ids: list[int]) -> bool:
    """Whether a grammar takes a whole text."""
    matcher = compiler.compile(grammar, (258,))
    with suppress(GrammarError):
        for token in ids:
            matcher.accept(token)
        return bool(matcher.complete)
    return False


def wrong(text: str) -> str:
    """The same with another type of its last argument."""
    return text[::-1].replace("3", "x", 1)[::-1]


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if not form.channels])
def test_a_call_that_may_come_is_held_once_its_mark_has_come(form: str, special: bool, model: Path) -> None:
    """Marks are tokens, special ones or not; before them, and behind calls, any text is allowed."""
    written = FORMS[form]
    marks = sorted(mark for mark in MARKS if mark in "".join((*written[:3], arguments_text(written))))
    write_tokenizer(model, (*SPECIALS, *marks))
    file = json.loads((model / "tokenizer.json").read_text())
    for token in file["added_tokens"]:
        token["special"] = special or token["content"] in SPECIALS
    (model / "tokenizer.json").write_text(json.dumps(file))
    tokenizer = ModelFolder.of(model).tokenizer
    body = {"tools": [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]}
    tools = wishes.tools_of(body, f"tools {' '.join(written.signs or (written.opening,))}", tokenizer)
    grammar = tools.grammar
    assert grammar.after == tokenizer.token_to_id(written.opening) and grammar.optional
    compiler, call = GrammarCompiler(model, 320), call_text(written).replace("{}", arguments_text(written), 1)
    for said, may_be in (
        ("Well", True),
        (f"Well. {call}", True),
        (f"{call} So.", True),
        (f"{call}\n{call}", True),
        (f"{call} So. {call} So.", True),
        (call.replace("get_weather", "get_money"), False),
        (wrong(call), False),
        (f"{call} So. {wrong(call)}", False),
    ):
        assert is_allowed(compiler, grammar, tokenizer.encode(said, parse_special=True)) is may_be, said


@pytest.mark.parametrize("how", ["required", "strict", "auto"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_held_to_their_schemas(form: str, how: str) -> None:
    """What the grammar allows is read as the call; another type or name is not allowed. Marks are texts."""
    tools, written = tools_of(form, required=how == "required", strict=how == "strict"), FORMS[form]
    if (grammar := tools.grammar) is None:
        assert (written.is_bare and how != "required") or (written.channels and how == "auto")
        return
    demo = ModelFolder.named("demo")
    compiler = GrammarCompiler(demo.path, demo.config.vocab_size)
    text = "Well. " * (how != "required" and not written.channels)
    said = call_text(written, required=how == "required").replace("{}", arguments_text(written), 1)
    ends = [(said, True), (said.replace("get_w", "get_m"), False), (wrong(said), False)]
    if text:
        ends += [(f"{said} So.", True), (f"{said} So. {said}", True), (f"{said} So. {wrong(said)}", False)]
    for end, may_be in ends:
        assert is_allowed(compiler, grammar, demo.tokenizer.encode(text + end)) is may_be, end
    told, calls = replies(tools, list(text + said))
    assert [(name, json.loads(one)) for name, one in calls] == ONE and told.strip() == text.strip()


@pytest.mark.parametrize("form", FORMS)
def test_a_reply_is_a_call_or_follows_a_schema(form: str) -> None:
    """Where a format is asked for beside tools; where a call has to come, the format says nothing."""
    schema = {"type": "object", "properties": {"days": {"type": "integer"}}, "required": ["days"]}
    answer, written, demo = GrammarText("schema", json.dumps(schema)), FORMS[form], ModelFolder.named("demo")
    compiler = GrammarCompiler(demo.path, demo.config.vocab_size)
    call = call_text(written).replace("{}", arguments_text(written), 1)
    said = (written.channels.answer if written.channels else "") + '{"days": 3}'
    tools = tools_of(form, answer=answer)
    assert tools.held and tools.grammar is not None and not tools.grammar.optional
    for text, may_be in (
        *((said, True), (call, True), (wrong(said), False), (wrong(call), False)),
        *((said.replace('{"days": 3}', "Well"), False), (call.replace("get_w", "get_m"), False)),
    ):
        assert is_allowed(compiler, tools.grammar, demo.tokenizer.encode(text)) is may_be, text
    assert replies(tools, list(said)) == ('{"days": 3}', []) and len(replies(tools, list(call))[1]) == 1
    assert tools_of(form, answer=answer, required=True).grammar == tools_of(form, required=True).grammar


NUMBERED = {
    "Kimi K2": f"{KIMI[0]}{KIMI_CALL}now:12{KIMI_ARGUMENTS}{{}}<|tool_call_end|>{KIMI[1]}",
    "Command R7B, A": '<|START_ACTION|>[{"tool_call_id": "12", "tool_name": "now", "parameters": {}}]'
    "<|END_ACTION|>",
}


@pytest.mark.parametrize("form", NUMBERED)
def test_calls_are_numbered_through_a_conversation(form: str) -> None:
    """A grammar that began with 0 in each reply would give the same id to calls of several turns."""
    tools, said, demo = tools_of(form, required=True), NUMBERED[form], ModelFolder.named("demo")
    assert tools.grammar is not None
    compiler = GrammarCompiler(demo.path, demo.config.vocab_size)
    assert is_allowed(compiler, tools.grammar, demo.tokenizer.encode(said))
    assert replies(tools, list(said)) == ("", [("now", "{}")])
    for wrong_one in (said.replace("12", "x"), said.replace("12", "")):
        assert not is_allowed(compiler, tools.grammar, demo.tokenizer.encode(wrong_one))


def test_arguments_with_commas_are_held_whichever_there_are() -> None:
    """All that have to come, in their order, with nothing but commas between them."""
    schema = {"type": "object", "properties": {key: {"type": "integer"} for key in "abc"}, "required": ["b"]}
    grammar = Tools({"f": schema, "g": {}}, FORMS["LFM2"], required=True).grammar
    demo = ModelFolder.named("demo")
    compiler = GrammarCompiler(demo.path, demo.config.vocab_size)
    for said, may_be in (
        *((said, True) for said in ("f(b=1)", "f(a=1, b=2)", "f(b=1, c=2)", "f(a=1, b=2, c=3), g()")),
        *((said, False) for said in ("f()", "f(a=1)", "f(a=1b=2)", "f(b=1, )", "f(, b=1)", "f(c=1, b=2)")),
    ):
        text = f"{LFM}[{said}]{LFM_END}"
        assert is_allowed(compiler, grammar, demo.tokenizer.encode(text)) is may_be, said


def replies(tools: Tools, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and calls with their arguments of a reply that a grammar holds."""
    said, calls = "", list[tuple[str, str]]()
    for piece in found(tools, pieces):
        if piece.kind == "text":
            said += piece.text
        elif piece.name:
            calls.append((piece.name, piece.text))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + piece.text
    return said, calls


@pytest.mark.parametrize("form", [name for name, form in FORMS.items() if form.pairs is None])
def test_held_arguments_come_as_they_are_written(form: str) -> None:
    """The name first, whatever the pieces; a cut reply holds them as far as they came."""
    tools, written = tools_of(form, required=True), FORMS[form]
    calls = [
        written.call.replace("NAME", name).replace("ARGUMENTS", said).replace("#", "0")
        for name, said in (("get_weather", ARGS), ("now", "{}"))
    ]
    opening = "" if written.is_bare else written.opening
    if written.between is None:
        calls = [f"{opening}{call}{written.closing}" for call in calls]
        text = ("<|end|><|start|>assistant" if form == "gpt-oss" else "\n").join(calls)
    else:
        text = written.between.join(calls)
        text = opening + (f"[{text}]" if written.is_array else text) + written.closing
    expected = [("get_weather", ARGS), ("now", "{}")]
    for cut in range(len(text) + 1):
        assert replies(tools, [text[:cut], text[cut:]]) == ("", expected), text[:cut]
        _, calls = replies(tools, list(text[:cut]))
        come = text[text.find(ARGS) : cut]
        assert [name for name, _ in calls[:1]] == ["get_weather"][: len(come)], text[:cut]
        assert not come or calls[0][1].partition("<")[0] == come[: len(ARGS)]


FRAGMENTS = [
    *sorted(MARKS),
    *("<function=now>", "<parameter=city>", '<invoke name="now">', '<parameter name="a">'),
    *('{"name": "now"', '"arguments": {', "call:now{", "now(", ")", "a='x'", "to=functions.now"),
    *("}", "[", "]", ",", '"', "\\", ": ", '{"name": "now", "parameters": {}}', "now", " text ", "\n", ";"),
    *("<", "{", "0", '"x"'),
]


@pytest.mark.parametrize("form", FORMS)
def test_any_text_ends_and_pieces_do_not_matter(form: str) -> None:
    chance = random.Random(form)
    for _ in range(200):
        text = "".join(chance.choices(FRAGMENTS, k=chance.randint(1, 14)))
        told = [parse(form, pieces) for pieces in ([text], list(text))]
        assert told[0] == told[1], text
