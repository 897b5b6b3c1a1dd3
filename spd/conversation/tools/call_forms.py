"""How models write tool calls: a row of `FORMS` a form, with its marks and its text."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from spd.conversation.channels import (
    CALL,
    CHANNEL,
    ENDS,
    HARMONY,
    MESSAGE,
    MUSE,
    Channels,
)

NAME = r"([\w.-]+)"
NUMBER = "#"
QUOTE = '<|"|>'
WORD = r"[\w$.-]+"
"""An expression of a key that stands bare."""
_EDGE = r"""[^\s:,{}\[\]"'<>]"""
BARE_KEY = rf"""{_EDGE}(?:[^\n:,{{}}\[\]"'<>]*{_EDGE})?"""
"""An expression of a key that Gemma's form can hold without marks."""


PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
"""What Python writes in place of JSON's words."""
Literals = Literal["json", "words", "python"]
"""How a chat template writes values that are no texts: as JSON, as JSON but for Python's `True`,
`False` and `None` where such a word is the whole value, or as Python."""


class Pairs(NamedTuple):
    """Arguments that are no JSON object: a text with KEY and VALUE for each."""

    text: str
    style: Literal["tags", "python", "gemma"] = "tags"
    """Says which reader finds them."""
    quote: str | None = ""
    """What stands around a text as VALUE; None where it is JSON."""
    comma: str = ""
    """What stands between them."""
    key: str = r'[^\s<>"](?:[^\n<>"]*[^\s<>"])?'
    """An expression of a KEY that no schema lists."""
    is_sorted: bool = False
    """True if the chat template writes keys in alphabetical order."""
    literals: Literals = "json"


class Form(NamedTuple):
    """How a model writes calls: behind `opening`, and before `closing` where it is not empty."""

    opening: str
    closing: str
    call: str = '{"name": "NAME", "arguments": ARGUMENTS}'
    """A call, with NAME and ARGUMENTS in their places, and # for its number in the conversation."""
    pairs: Pairs | None = None
    signs: tuple[str, ...] = ()
    """What the chat template of such a model holds, where that is not the opening mark alone."""
    head: str = "(?!)"
    """What is read before arguments where no object holds the name; groups: the name, an id."""
    between: str | None = None
    """What stands between calls that share their marks; None where each has its own."""
    is_array: bool = False
    """True if those stand in an array."""
    is_bare: bool = False
    """True if the opening mark may be missing where a reply is nothing but calls."""
    id_before: str = ""
    """What some templates write behind the name, with # for the call's id."""
    id_behind: str = ""
    """What some templates write behind the arguments, with # for the call's id."""
    channels: Channels | None = None
    """How replies of messages are written."""


SECTION = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN = "<｜tool▁call▁begin｜>"
CALL_END = "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
DEEPSEEK = f"{CALL_BEGIN}NAME{SEPARATOR}ARGUMENTS{CALL_END}"
FENCED = f"{CALL_BEGIN}function{SEPARATOR}NAME\n```json\nARGUMENTS\n```{CALL_END}"
DEEPSEEK_HEAD = (
    rf"[\s`]*(?:{CALL_END})?\s*{CALL_BEGIN}\s*(?:\w+\s*{SEPARATOR}\s*)?"
    rf"{NAME}\s*(?:{SEPARATOR}|```json)?\s*(?=\{{)"
)
KIMI = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_CALL = (
    "<|tool_call_begin|>functions.NAME:#<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"
)
KIMI_HEAD = (
    r"\s*(?:<\|tool_call_end\|>)?\s*<\|tool_call_begin\|>"
    r"\s*(?=(?:functions\.)?([\w.-]+?)(?::\d+)?\s*<)"
    r"([\w.:-]+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)"
)
HARMONY_CALL = f"NAME <|constrain|>json{MESSAGE}ARGUMENTS"
HARMONY_HEAD = rf"\s*{NAME}[^{{]*?{re.escape(MESSAGE)}\s*(?=\{{)"
ATEM = "<atem:function_calls>", "</atem:function_calls>"
ATEM_CALL = '\n<atem:invoke name="NAME">\nARGUMENTS</atem:invoke>\n'
ATEM_PAIRS = Pairs('<atem:parameter name="KEY">VALUE</atem:parameter>\n')
MINIMAX = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE = (
    '\n<invoke name="NAME">\nARGUMENTS</invoke>',
    Pairs('<parameter name="KEY">VALUE</parameter>\n'),
)
TAGS = ("<tool_call>", "</tool_call>")
SEED = ("<seed:tool_call>", "</seed:tool_call>")
CODER_CALL = "\n<function=NAME>\nARGUMENTS</function>\n"
CODER_PAIRS = Pairs("<parameter=KEY>\nVALUE\n</parameter>\n", literals="words")
SEED_PAIRS = Pairs("<parameter=KEY>VALUE</parameter>\n", literals="python")
GLM = "NAME\nARGUMENTS", Pairs("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
LFM = (
    "<|tool_call_start|>",
    "<|tool_call_end|>",
    "NAME(ARGUMENTS)",
    Pairs("KEY=VALUE", "python", None, ", ", WORD),
)
GEMMA = (
    "<|tool_call>",
    "<tool_call|>",
    "call:NAME{ARGUMENTS}",
    Pairs("KEY:VALUE", "gemma", QUOTE, ",", WORD, is_sorted=True),
)
ACTION = '{"tool_call_id": "#", "tool_name": "NAME", "parameters": ARGUMENTS}'
LLAMA = '{"name": "NAME", "parameters": ARGUMENTS}'
MISTRAL = rf"\s*{NAME}(?:\[CALL_ID\][^\[]*)?(?:\[ARGS\])?\s*(?=\{{)"
HERMES = Form(*TAGS, '\n{"name": "NAME", "arguments": ARGUMENTS}\n')
FORMS = {
    "gpt-oss": Form(
        *(CALL, "", HARMONY_CALL), signs=(CHANNEL, "functions"), head=HARMONY_HEAD, channels=HARMONY
    ),
    "Muse-Glimmer": Form(*ATEM, ATEM_CALL, ATEM_PAIRS, signs=("<atem:",), channels=MUSE),
    "Gemma 4": Form(*GEMMA),
    "Kimi K2": Form(*KIMI, KIMI_CALL, signs=("<|im_middle|>",), head=KIMI_HEAD, between=""),
    "DeepSeek V3": Form(
        *SECTION, FENCED, signs=(SECTION[0], "```json"), head=DEEPSEEK_HEAD, between="\n"
    ),
    "DeepSeek V3.1": Form(*SECTION, DEEPSEEK, head=DEEPSEEK_HEAD, between=""),
    "MiniMax M2": Form(*MINIMAX, *INVOKE, between=""),
    "Seed-OSS": Form(*SEED, CODER_CALL, SEED_PAIRS),
    "Qwen3-Coder, Qwen3.5": Form(*TAGS, CODER_CALL, CODER_PAIRS, signs=(*TAGS[:1], "<function=")),
    "GLM-4.5, GLM-4.7": Form(*TAGS, *GLM, signs=(*TAGS[:1], "<arg_key>")),
    "Apriel": Form(
        *("<tool_calls>", "</tool_calls>"),
        signs=("<tool_calls>[",),
        between=", ",
        is_array=True,
        id_behind=', "id": "#"',
    ),
    "Hermes, Qwen3": HERMES,
    "LFM2": Form(*LFM, signs=("List of tools: ",), between=", ", is_array=True),
    "GigaChat 3.1": Form("<|function_call|>", "", between=", "),
    "Granite 3": Form("<|tool_call|>", "", between=", ", is_array=True),
    "Nemotron Nano 2": Form("<TOOLCALL>", "</TOOLCALL>", between=", ", is_array=True),
    "Command R7B, A": Form(
        "<|START_ACTION|>", "<|END_ACTION|>", ACTION, between=", ", is_array=True
    ),
    "Mistral": Form(
        *("[TOOL_CALLS]", "", "NAME[ARGS]ARGUMENTS"),
        signs=("[TOOL_CALLS]", "[ARGS]"),
        head=MISTRAL,
        id_before="[CALL_ID]#",
    ),
    "Mistral before 2025": Form(
        *("[TOOL_CALLS]", ""),
        head=MISTRAL,
        between=", ",
        is_array=True,
        id_behind=', "id": "#"',
    ),
    "Llama 3": Form(
        "<|python_tag|>", "", LLAMA, signs=("<|start_header_id|>",), between="; ", is_bare=True
    ),
}
"""By the models that are known for it; a template's is the first of which it holds every sign."""
WRITTEN = " ".join(
    " ".join((*form[:3], form.pairs.text if form.pairs else "")) for form in FORMS.values()
)
MARKS = {
    mark
    for mark in re.findall(r"<[^<>\s]+>|\[[A-Z_]+\]", WRITTEN)
    if not re.search("NAME|KEY", mark)
}
MARKS |= {QUOTE, "[CALL_ID]", "<|channel>", "<channel|>", *ENDS}
"""What may be special tokens, which have no text of their own."""


FALLBACK_FORM = Form(*HERMES)
"""The form where a template shows none: what may be such a call slows no reply."""


def call_form(template: str) -> Form:
    """Return how a model writes calls, by its chat template."""
    for form in FORMS.values():
        if all(sign in template for sign in form.signs or (form.opening,)):
            return form
    return FALLBACK_FORM
