"""Forms in which models write tool calls: a row of `FORMS` each, with its marks and its text."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from spd.conversation.channels import (
    CALL_HEADER,
    CHANNEL,
    HARMONY,
    MESSAGE,
    MESSAGE_ENDS,
    MUSE,
    Channels,
)

NAME = r"([\w.-]+)"
"""A pattern of a function's name, as a group."""
NUMBER = "#"
"""Stands for a call's number or id in the text of a form."""
QUOTE = '<|"|>'
"""The mark around a text in Gemma's form."""
WORD = r"[\w$.-]+"
"""A pattern of a key without quotes."""
_EDGE = r"""[^\s:,{}\[\]"'<>]"""
BARE_KEY = rf"""{_EDGE}(?:[^\n:,{{}}\[\]"'<>]*{_EDGE})?"""
"""A pattern of a key that Gemma's form can write without marks."""


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""Python's words for JSON's."""
Literals = Literal["json", "words", "python"]
"""The form in which a chat template writes values that are no texts.

As JSON, as JSON but for Python's `True`, `False` and `None` where such a word is the full value, or
as Python."""


class Pairs(NamedTuple):
    """Arguments that are no JSON object: a text with KEY and VALUE for each."""

    text: str
    style: Literal["tags", "python", "gemma"] = "tags"
    """The reader that parses them."""
    quote: str | None = ""
    """The quotes of a VALUE that is a text; None if such a text is JSON."""
    comma: str = ""
    """The text between two pairs."""
    key: str = r'[^\s<>"](?:[^\n<>"]*[^\s<>"])?'
    """A pattern of a KEY that no schema lists."""
    is_sorted: bool = False
    """True if the chat template writes keys in alphabetical order."""
    literals: Literals = "json"


class Form(NamedTuple):
    """A model's form of calls: behind `opening`, and before `closing` where it is not empty."""

    opening: str
    closing: str
    call: str = '{"name": "NAME", "arguments": ARGUMENTS}'
    """A call, with NAME and ARGUMENTS as placeholders, and # for its number in the conversation."""
    pairs: Pairs | None = None
    template_signs: tuple[str, ...] = ()
    """Texts that show the form in a chat template, where the opening mark alone does not."""
    head_pattern: str = "(?!)"
    """A pattern of the text before the arguments where the name is outside of an object.

    It accepts more than `call`: models leave parts out. Groups: the name, an id."""
    separator: str | None = None
    """The text between calls that share their marks; None where each call has its own marks."""
    is_array: bool = False
    """True if calls that share their marks are in an array."""
    is_bare: bool = False
    """True if the opening mark may be missing in a reply that consists of calls."""
    id_after_name: str = ""
    """The text that some templates write behind the name, with # for the call's id."""
    id_after_arguments: str = ""
    """The text that some templates write behind the arguments, with # for the call's id."""
    channels: Channels | None = None
    """The headers of messages, for models whose replies consist of messages."""


SECTION_BEGIN = "<｜tool▁calls▁begin｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK = Form(
    opening=SECTION_BEGIN,
    closing="<｜tool▁calls▁end｜>",
    call=f"{CALL_BEGIN}NAME{SEPARATOR}ARGUMENTS{CALL_END}",
    head_pattern=(
        rf"[\s`]*(?:{CALL_END})?\s*{CALL_BEGIN}\s*(?:\w+\s*{SEPARATOR}\s*)?"
        rf"{NAME}\s*(?:{SEPARATOR}|```json)?\s*(?=\{{)"
    ),
    separator="",
)
KIMI_HEAD = (
    r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>"
    r"\s*(?=(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<)"
    r"([\w.:-]+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
CODER_CALL = "\n<function=NAME>\nARGUMENTS</function>\n"
MISTRAL_HEAD = rf"\s*{NAME}(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{{)"
HERMES = Form(
    opening="<tool_call>",
    closing="</tool_call>",
    call='\n{"name": "NAME", "arguments": ARGUMENTS}\n',
)
FORMS = {
    "gpt-oss": Form(
        opening=CALL_HEADER,
        closing="",
        call=f"NAME <|constrain|>json{MESSAGE}ARGUMENTS",
        template_signs=(CHANNEL, "functions"),
        head_pattern=rf"\s*{NAME}[^{{]*?{re.escape(MESSAGE)}\s*(?=\{{)",
        channels=HARMONY,
    ),
    "Muse-Glimmer": Form(
        opening="<atem:function_calls>",
        closing="</atem:function_calls>",
        call='\n<atem:invoke name="NAME">\nARGUMENTS</atem:invoke>\n',
        pairs=Pairs('<atem:parameter name="KEY">VALUE</atem:parameter>\n'),
        template_signs=("<atem:",),
        channels=MUSE,
    ),
    "Gemma 4": Form(
        opening="<|tool_call>",
        closing="<tool_call|>",
        call="call:NAME{ARGUMENTS}",
        pairs=Pairs("KEY:VALUE", style="gemma", quote=QUOTE, comma=",", key=WORD, is_sorted=True),
    ),
    "Kimi K2": Form(
        opening="<|tool_calls_section_begin|>",
        closing="<|tool_calls_section_end|>",
        call=(
            "<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>ARGUMENTS"
            "<|tool_call_end|>"
        ),
        template_signs=("<|im_middle|>",),
        head_pattern=KIMI_HEAD,
        separator="",
    ),
    "DeepSeek V3": DEEPSEEK._replace(
        call=f"{CALL_BEGIN}function{SEPARATOR}NAME\n```json\nARGUMENTS\n```{CALL_END}",
        template_signs=(SECTION_BEGIN, "```json"),
        separator="\n",
    ),
    "DeepSeek V3.1": DEEPSEEK,
    "MiniMax M2": Form(
        opening="<minimax:tool_call>",
        closing="</minimax:tool_call>",
        call='\n<invoke name="NAME">\nARGUMENTS</invoke>',
        pairs=Pairs('<parameter name="KEY">VALUE</parameter>\n'),
        separator="",
    ),
    "Seed-OSS": Form(
        opening="<seed:tool_call>",
        closing="</seed:tool_call>",
        call=CODER_CALL,
        pairs=Pairs("<parameter=KEY>VALUE</parameter>\n", literals="python"),
    ),
    "Qwen3-Coder, Qwen3.5": HERMES._replace(
        call=CODER_CALL,
        pairs=Pairs("<parameter=KEY>\nVALUE\n</parameter>\n", literals="words"),
        template_signs=("<tool_call>", "<function="),
    ),
    "GLM-4.5, GLM-4.7": HERMES._replace(
        call="NAME\nARGUMENTS",
        pairs=Pairs("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
        template_signs=("<tool_call>", "<arg_key>"),
    ),
    "Apriel": Form(
        opening="<tool_calls>",
        closing="</tool_calls>",
        template_signs=("<tool_calls>[",),
        separator=", ",
        is_array=True,
        id_after_arguments=', "id": "#"',
    ),
    "Hermes, Qwen3": HERMES,
    "LFM2": Form(
        opening="<|tool_call_start|>",
        closing="<|tool_call_end|>",
        call="NAME(ARGUMENTS)",
        pairs=Pairs("KEY=VALUE", style="python", quote=None, comma=", ", key=WORD),
        template_signs=("List of tools: ",),
        separator=", ",
        is_array=True,
    ),
    "GigaChat 3.1": Form(opening="<|function_call|>", closing="", separator=", "),
    "Granite 3": Form(opening="<|tool_call|>", closing="", separator=", ", is_array=True),
    "Nemotron Nano 2": Form(
        opening="<TOOLCALL>", closing="</TOOLCALL>", separator=", ", is_array=True
    ),
    "Command R7B, A": Form(
        opening="<|START_ACTION|>",
        closing="<|END_ACTION|>",
        call='{"tool_call_id": "#", "tool_name": "NAME", "parameters": ARGUMENTS}',
        separator=", ",
        is_array=True,
    ),
    "Mistral": Form(
        opening="[TOOL_CALLS]",
        closing="",
        call="NAME[ARGS]ARGUMENTS",
        template_signs=("[TOOL_CALLS]", "[ARGS]"),
        head_pattern=MISTRAL_HEAD,
        id_after_name="[CALL_ID]#",
    ),
    "Mistral before 2025": Form(
        opening="[TOOL_CALLS]",
        closing="",
        head_pattern=MISTRAL_HEAD,
        separator=", ",
        is_array=True,
        id_after_arguments=', "id": "#"',
    ),
    "Llama 3": Form(
        opening="<|python_tag|>",
        closing="",
        call='{"name": "NAME", "parameters": ARGUMENTS}',
        template_signs=("<|start_header_id|>",),
        separator="; ",
        is_bare=True,
    ),
}
"""Forms by the models that write them; a template's form is the first of which it has every
sign."""
FORM_TEXTS = " ".join(
    f"{form.opening} {form.closing} {form.call} {form.pairs.text if form.pairs else ''}"
    for form in FORMS.values()
)
"""The texts of all forms that may hold marks."""
CALL_MARKS = {
    mark
    for mark in re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", FORM_TEXTS)
    if not re.search("NAME|KEY", mark)
}
CALL_MARKS |= {QUOTE, "[CALL_ID]", "<|channel>", "<channel|>", *MESSAGE_ENDS}
"""Marks that may be special tokens, which have no text of their own."""


FALLBACK_FORM = HERMES._replace()
"""The form if a template shows none: a search for its marks delays no reply."""


def call_form(template: str) -> Form:
    """Return the first form whose signs are in the text of a chat template, else the fallback."""
    for form in FORMS.values():
        if all(sign in template for sign in form.template_signs or (form.opening,)):
            return form
    return FALLBACK_FORM
