"""A recorded conversation in the forms of Kimi, MiniMax and DeepSeek: transformers' prompt; calls are read.

The templates are written for this test, with the marks and the means of the families' own.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from spd.cli.serve.forms import FORMS, CallParser, Tools, call_form
from spd.cli.serve.wishes import CHAT, for_template
from spd.formats.chat_template import ChatTemplate

TEMPLATES = {
    "Kimi K2": (
        "{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{%- endif -%}\n"
        "{%- for m in messages -%}\n"
        "  <|im_{{ 'system' if m.role == 'tool' else m.role }}|>{{ m.get('name') or m.role }}<|im_middle|>\n"
        "  {%- if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif -%}\n"
        "  {%- if m.get('reasoning_content') %}<think>{{ m.reasoning_content }}</think>{% endif -%}\n"
        "  {{- m.content }}\n"
        "  {%- if m.get('tool_calls') %}<|tool_calls_section_begin|>{% for c in m.tool_calls -%}\n"
        "    <|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}"
        "<|tool_call_end|>\n"
        "  {%- endfor %}<|tool_calls_section_end|>{% endif -%}\n"
        "  <|im_end|>\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}\n"
    ),
    "MiniMax M2": (
        "{%- macro shown(tool) -%}<tool>{{ tool.function | tojson() }}</tool>{%- endmacro -%}\n"
        "{%- set ns = namespace(last=-1) -%}\n"
        "{%- for m in messages if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endfor -%}\n"
        "{%- for t in tools or [] %}{{ shown(t) }}\n{% endfor -%}\n"
        "{%- for m in messages -%}\n"
        "  {{- ']~b]' ~ m.role ~ '\\n' ~ m.content }}\n"
        "  {%- if m.tool_calls %}{{ '<minimax:tool_call>\\n' }}{% for c in m.tool_calls -%}\n"
        "    {{- '<invoke name=\"' + c.function.name + '\">' }}\n"
        "    {%- for k, v in c.function.arguments | items %}\n"
        "    {{- '<parameter name=\"' + k + '\">' }}{{ v | tojson if v is not string else v }}</parameter>\n"
        "    {%- endfor %}</invoke>\n"
        "  {% endfor %}</minimax:tool_call>{% endif -%}\n"
        "  {{- '[e~[' ~ '\\n' }}\n"
        "{%- endfor -%}\n"
        "{%- if add_generation_prompt %}{{ ']~b]ai' ~ '\\n' ~ '<think>' ~ '\\n' }}{% endif -%}\n"
    ),
    "DeepSeek V3.1": (
        "{% set ns = namespace(first=true) %}{{ bos_token }}{{ tools | tojson if tools else '' }}\n"
        "{%- for message in messages -%}\n"
        "  {{- {'user': '<｜User｜>', 'assistant': '<｜Assistant｜>'}.get(message['role'], '') }}\n"
        "  {{- message['content'] }}\n"
        "  {%- if message['tool_calls'] is defined %}{{ '<｜tool▁calls▁begin｜>' }}\n"
        "    {%- for tool in message['tool_calls'] -%}\n"
        "    {{'<｜tool▁call▁begin｜>' + tool['function']['name'] + '<｜tool▁sep｜>' "
        "+ tool['function']['arguments'] + '<｜tool▁call▁end｜>'}}\n"
        "    {%- endfor %}{{'<｜tool▁calls▁end｜><｜end▁of▁sentence｜>'}}\n"
        "  {%- endif -%}\n"
        "{%- endfor -%}\n"
        "{% if add_generation_prompt %}{{'<｜Assistant｜>'}}"
        "{{ '<think>' if thinking else '</think>' }}{% endif %}"
    ),
}
PARAMETERS = {"type": "object", "properties": {"path": {"type": "string"}, "n": {"type": "integer"}}}
READ = {"name": "read", "description": "Läse <a> & b", "parameters": PARAMETERS}
ARGUMENTS = {"path": 'ä"b\\ <x>', "n": 3}


def call(number: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """A call as a client sends it back."""
    function = {"name": "read", "arguments": json.dumps(arguments)}
    return {"id": f"functions.read:{number}", "type": "function", "function": function}


SAID: list[dict[str, Any]] = [
    {"role": "system", "content": "Be exact.\n"},
    {"role": "user", "content": "Read a & b <x>"},
    {"role": "assistant", "content": "Yes.", "tool_calls": [call(0, ARGUMENTS), call(1, {})]},
    {"role": "tool", "tool_call_id": "functions.read:0", "content": "A\n"},
    {"role": "tool", "tool_call_id": "functions.read:1", "content": "B"},
    {"role": "user", "content": "Go on."},
]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_recorded_conversation(name: str) -> None:
    template = TEMPLATES[name]
    form = call_form(template)
    assert form is FORMS[name]
    messages = [for_template(message, template) for message in CHAT["messages"](SAID, "messages")]
    own = ChatTemplate("test", {"default": template}, {"bos_token": "<B>"})
    for tools in (None, [{"type": "function", "function": READ}]):
        for end in (2, 5, 6):
            asked = {"conversations": [messages[:end]], "tools": tools, "chat_template": template}
            theirs = render_jinja_template(**asked, add_generation_prompt=True, bos_token="<B>")[0][0]
            assert own.render(messages[:end], tools=tools) == theirs
    begin = theirs.index("Yes.")
    said = theirs[begin : theirs.index(form.closing, begin) + len(form.closing)]
    for size in (1, 3, len(said)):
        parser = CallParser(Tools({"read": PARAMETERS}, form))
        pieces = [one for at in range(0, len(said), size) for one in parser.feed(said[at : at + size])]
        pieces += parser.feed("", final=True)
        assert "".join(piece.text for piece in pieces if piece.kind == "text") == "Yes."
        calls = [piece for piece in pieces if piece.kind == "call"]
        assert [(piece.name, json.loads(piece.text)) for piece in calls] == [
            ("read", ARGUMENTS),
            ("read", {}),
        ]
        if name == "Kimi K2":
            assert [piece.id for piece in calls] == ["functions.read:0", "functions.read:1"]
