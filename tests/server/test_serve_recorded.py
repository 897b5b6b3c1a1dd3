"""Conversations in every form of calls: prompts are `transformers`' own, byte for byte, and calls
are read.

The templates are written for this test, with the marks and the means of the families' own.
"""

from __future__ import annotations

import re

import pytest

from spd.conversation.tools.call_check import checked_form
from spd.conversation.tools.call_forms import FALLBACK_FORM, FORMS, call_form
from spd.formats.chat_template import ChatTemplate
from tests.every_template import SPECIAL, cells, read_back

WORDS = {
    "each": "{%- for c in m['tool_calls'] %}",
    "done": "{% endfor -%}",
    "name": "{{ c.function.name }}",
    "arguments": "{{ c['function']['arguments'] | tojson }}",
    "object": '{"name": "«name»", "arguments": «arguments»}',
    "comma": "{{ ', ' if not loop.last }}",
    "array": "[«each»«object»«comma»«done»]",
    "pairs": "{% for key, value in c.function.arguments | items %}",
    "key": "{{ key }}",
    "value": "{{ value if value is string else value | tojson }}",
    "coder": "<function=«name»>\n«pairs»<parameter=«key»>\n«value»\n</parameter>\n{% endfor %}</function>\n",
    "python": "«name»(«pairs»«key»={{ value if value is mapping else value | tojson }}«comma»{% endfor %})",
    "quoted": "{% if value is string %}{{ '<|\"|>' + value + '<|\"|>' }}{% else %}«value»{% endif %}",
}
CALLS = {
    "gpt-oss": "«each»{{- '<|start|>assistant<|channel|>commentary to=functions.' + c.function.name }}"
    "{{- ' <|constrain|>json<|message|>' }}«arguments»<|call|>«done»",
    "Muse-Glimmer": "«each»<|start|>assistant to=«name»<|message|><atem:function_calls>\n"
    '<atem:invoke name="«name»">\n«pairs»<atem:parameter name="«key»">«value»</atem:parameter>\n{% endfor %}'
    "</atem:invoke>\n</atem:function_calls><|eom|>«done»{# to=self #}",
    "Gemma 4": "«each»<|tool_call>call:«name»{{ '{' }}«pairs»«key»:«quoted»{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}<tool_call|>«done»",
    "Kimi K2": "<|tool_calls_section_begin|>«each»<|tool_call_begin|>functions.«name»:{{ loop.index0 }}"
    "<|tool_call_argument_begin|>«arguments»<|tool_call_end|>«done»<|tool_calls_section_end|>",
    "DeepSeek V3": "<｜tool▁calls▁begin｜>«each»{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' }}"
    "{{- c['function']['name'] + '\\n' + '```json' + '\\n' + c['function']['arguments'] + '\\n' + '```' }}"
    "{{- '<｜tool▁call▁end｜>' + ('\\n' if not loop.last else '') }}«done»<｜tool▁calls▁end｜>",
    "DeepSeek V3.1": "<｜tool▁calls▁begin｜>«each»{{- '<｜tool▁call▁begin｜>' + c['function']['name'] }}"
    "{{- '<｜tool▁sep｜>' + c['function']['arguments'] + '<｜tool▁call▁end｜>' }}«done»<｜tool▁calls▁end｜>",
    "MiniMax M2": "{{ '<minimax:tool_call>\\n' }}«each»{{- '<invoke name=\"' + c.function.name + '\">\\n' }}"
    '«pairs»<parameter name="«key»">«value»</parameter>\n{% endfor %}</invoke>\n«done»</minimax:tool_call>',
    "Seed-OSS": "«each»<seed:tool_call>\n<function=«name»>\n«pairs»"
    "<parameter=«key»>{{ value | string }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>«done»",
    "Qwen3-Coder, Qwen3.5": "«each»<tool_call>\n«coder»</tool_call>\n«done»",
    "GLM-4.5, GLM-4.7": "«each»<tool_call>«name»\n«pairs»<arg_key>«key»</arg_key>\n<arg_value>«value»"
    "</arg_value>\n{% endfor %}</tool_call>«done»",
    "Apriel": '{# <tool_call> #}\n<tool_calls>[«each»{{ \'{"name": "\' + c.function.name }}'
    '{{ \'", "arguments": \' }}«arguments»{{ \', "id": "\' + c.id + \'"}\' }}«comma»«done»]</tool_calls>',
    "Hermes, Qwen3": "«each»\n<tool_call>\n«object»\n</tool_call>«done»",
    "LFM2": "{# List of tools: #}<|tool_call_start|>[«each»«python»«comma»«done»]<|tool_call_end|>",
    "GigaChat 3.1": "<|function_call|>«each»«object»«comma»«done»",
    "Granite 3": "<|tool_call|>«array»",
    "Nemotron Nano 2": "<TOOLCALL>«array»</TOOLCALL>",
    "Command R7B, A": '<|START_ACTION|>[\n«each»    {"tool_call_id": "{{ loop.index0 }}", '
    '"tool_name": "«name»", "parameters": «arguments»}«comma»\n«done»]<|END_ACTION|>',
    "Mistral": "«each»[TOOL_CALLS]«name»[ARGS]«arguments»«done»",
    "Mistral before 2025": "[TOOL_CALLS]«array»",
    "Llama 3": "{%- set call = m.tool_calls[0].function -%}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}',
}
DEEPSEEK = (
    "{{ {'user': '<｜User｜>', 'assistant': '<｜Assistant｜>'}.get(m['role'], '') }}",
    "<｜end｜>",
)
FRAMES = {
    "gpt-oss": ("<|start|>{{ m.role }}<|message|>", "<|end|>"),
    "Muse-Glimmer": ("<|start|>{{ m.role }}<|message|>", "<|eot|>"),
    "Kimi K2": ("<|im_{{ m.role }}|>{{ m.get('name') or m.role }}<|im_middle|>", "<|im_end|>"),
    "DeepSeek V3": DEEPSEEK,
    "DeepSeek V3.1": DEEPSEEK,
    "MiniMax M2": ("{{- ']~b]' ~ m.role ~ '\\n' }}", "{{- '[e~[' ~ '\\n' }}"),
    "Mistral": ("[{{ m.role | upper }}]", "[/{{ m.role | upper }}]"),
    "Llama 3": ("<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n", "<|eot_id|>"),
}
TEMPLATE = """{{ bos_token }}
{%- macro shown(tool) -%}<tool>{{ tool.function | tojson() }}</tool>{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor -%}
{%- for tool in tools or [] %}{{ shown(tool) }}
{% endfor -%}
{%- for m in messages -%}
  «begin»
  {%- if m.get('reasoning_content') and loop.index0 > ns.last %}<think>
{{ m.reasoning_content | trim }}
</think>
{% endif -%}
  {{- m.content }}
  {%- if m.get('tool_calls') %}«calls»{% endif -%}
  «end»
{%- endfor -%}
{%- if add_generation_prompt %}{% set m = {'role': 'assistant'} -%}«begin»{% endif -%}
"""


def template_of(form: str, calls: str = "") -> str:
    """Return a template in the style of a form's families, with calls as they write them or as
    `calls`.
    """
    begin, end = FRAMES.get(form, ("<|im_start|>{{ m.role }}\n", "<|im_end|>\n"))
    words = {**WORDS, "begin": begin, "end": end, "calls": calls or CALLS[form]}
    text = TEMPLATE
    if form == "Llama 3" and not calls:  # a call stands where the text would
        text = text.replace("{{- m.content }}", "{{- m.content if not m.get('tool_calls') }}")
    while "«" in text:
        text = re.sub("«([a-z]+)»", lambda word: words[word[1]], text)
    return text


@pytest.mark.covers(count=6)
@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_transformers_own_and_calls_are_read(form: str) -> None:
    """With tools and without; replies as the template writes them, cut at every place."""
    template = template_of(form)
    assert call_form(template) is FORMS[form]
    assert checked_form(ChatTemplate("", {"default": template}, SPECIAL)) is FORMS[form]
    for name, variant, mine, theirs in cells(template):
        assert mine is not None and mine in theirs, (name, variant)
    assert read_back(template) == ("1 calls read" if form == "Llama 3" else "2 calls read")


LOOK_ALIKES = {
    "a mark before each tag": (
        "Hermes, Qwen3",
        '«each»]<]x[>[<tool_call>\n]<]x[>[<invoke name="«name»">«pairs»]<]x[>[<«key»>«value»]<]x[>[</«key»>'
        "{% endfor %}]<]x[>[</invoke>\n]<]x[>[</tool_call>«done»",
    ),
    "a recipient on a line of its own": ("Llama 3", "«each»>>>«name»\n«arguments»«done»"),
    "a tag with its name": ("Llama 3", "«each»<function=«name»>«arguments»</function>«done»"),
}
"""A form, and how calls are written in a template that shows the signs of that form."""


@pytest.mark.parametrize("case", LOOK_ALIKES)
def test_a_template_whose_own_calls_are_not_read_has_no_known_form(case: str) -> None:
    form, calls = LOOK_ALIKES[case]
    template = template_of(form, calls)
    assert call_form(template) is FORMS[form]
    assert checked_form(ChatTemplate("", {"default": template}, SPECIAL)) is FALLBACK_FORM
