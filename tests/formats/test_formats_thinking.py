"""Marks of thinking and the switch of a template are found by their form, whatever the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from spd.formats.chat_template import ChatTemplate
from spd.formats.thinking import (
    GEMMA_MARKS,
    MarkPair,
    find_mark_tokens,
    find_thinking_marks,
    find_thinking_switch,
    make_past_turn,
    separates_thinking,
    switch_value,
)

PAIRS = (
    ("<think>", "</think>"),
    ("<think:6124c78e>", "</think:6124c78e>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<mm:think>", "</mm:think>"),
    ("<thought>", "</thought>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|thinking_start|>", "<|thinking_end|>"),
)


@pytest.mark.parametrize(("opening", "closing"), PAIRS)
def test_a_pair_is_found_in_the_template_or_the_vocabulary(opening: str, closing: str) -> None:
    other_tokens = ("<s>", "<tool_call>", "</tool_call>", "<|think|>", "</thinking_instructions>")
    text_pair = MarkPair(opening, closing)
    token_pair = MarkPair(opening, closing, are_tokens=True)
    for template in (f"a {opening} b", f"{{{{ x.split('{closing}') }}}}"):
        assert find_thinking_marks(template, (), ()).thinking[0] == text_pair, (
            "one mark in a template says it"
        )
        assert find_thinking_marks(template, other_tokens, other_tokens).thinking[0] == text_pair
    names = (*other_tokens, opening, closing)
    assert find_thinking_marks("", names, other_tokens).thinking[0] == text_pair
    assert find_thinking_marks("", names, names).thinking[0] == token_pair
    assert find_mark_tokens(names) == {opening, closing}
    assert find_mark_tokens(names[:-1]) == set(), "half a pair marks nothing"
    if opening != "<think>":
        without_closing = find_thinking_marks("", names[:-1], names).thinking
        assert [pair.opening for pair in without_closing] == ["<think>", "<|channel>"]


def test_the_pair_of_the_template_comes_first() -> None:
    names = ("<think>", "</think>", "[THINK]", "[/THINK]")
    for mark in ("<think>", "[THINK]"):
        assert find_thinking_marks(f"{{% x %}}{mark}", names, names).thinking[0].opening == mark
    gemma = find_thinking_marks("'<|channel>thought\\n'", ("<|channel>", "<channel|>"), ()).thinking
    assert gemma[0] == MarkPair(GEMMA_MARKS.opening, GEMMA_MARKS.closing, "thought")
    granite = "after 'Here is my thought process:' and 'Here is my response:'"
    assert find_thinking_marks(granite, (), ()).thinking[0].closing == "Here is my response:"


def test_marks_around_the_answer_come_from_the_template() -> None:
    assert find_thinking_marks("<think> <answer>x</answer>", (), ()).answer[0].opening == "<answer>"
    assert find_thinking_marks("<think> <answer>", (), ()).answer == (), "half a pair marks nothing"


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        (
            "{% if enable_thinking is defined and not enable_thinking %}x{% endif %}",
            "enable_thinking",
        ),
        ("{% set enable_thinking = enable_thinking | default(true) %}", "enable_thinking"),
        ("{%- if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{%- if thinking_budget == 0 %}x{% endif %}", "thinking_budget"),
        ("{%- set reasoning = reasoning if reasoning is not undefined else true -%}", "reasoning"),
        ("{% if thinking_mode == 'disabled' %}x{% endif %}", "thinking_mode"),
        ("{{ message.thinking }}{{ 'thinking' }}{# thinking #}", None),
        ("{% set thinking = true %}{% if thinking %}x{% endif %}", None),
        ("{% set ns = namespace(enable_thinking=true) %}{{ ns.enable_thinking }}", None),
        ("enable_thinking", None),
    ],
)
def test_the_switch_is_a_variable_that_the_template_reads(
    template: str, switch: str | None
) -> None:
    assert find_thinking_switch(template) == switch


@pytest.mark.parametrize(
    "switch", ["enable_thinking", "thinking", "thinking_budget", "thinking_mode"]
)
def test_a_template_is_switched_by_its_own_name(switch: str) -> None:
    off = repr(switch_value(switch, False))
    template = f"{{{{ 'off' if {switch} is defined and {switch} == {off} else 'on' }}}}"
    opened = ChatTemplate("x", {"default": template}, {})
    messages = [{"role": "user", "content": "Hi"}]
    assert opened.thinking_switch == switch and opened.thinks_by_default
    assert opened.render(messages) == "on"
    assert opened.render(messages, enable_thinking=False) == "off"
    assert opened.render(messages, enable_thinking=True) == "on"
    explicit = {switch: switch_value(switch, True)}
    assert opened.render(messages, **{"enable_thinking": False, **explicit}) == "on", (
        "its own name wins"
    )


def test_a_template_may_think_only_on_request(tmp_path: Path) -> None:
    template = "{% if not thinking %}</think>{% endif %}"
    assert not ChatTemplate("x", {"default": template}, {}).thinks_by_default


CHUNKS = """{% for block in message['content'] %}{% if block['type'] == 'thinking' %}[THINK]{% endif %}"""


@pytest.mark.parametrize(
    ("template", "is_separate"),
    [
        ("{{ message.reasoning_content }}", True),
        ("{{ message['reasoning_content'] }}", True),
        ("{% set x = message.get('reasoning_content', '') %}", True),
        ("{{ message.thinking }}", True),
        (CHUNKS, True),
        ("{{ message.content.split('</think>')[-1] }}", False),
        ("a word about reasoning_content and thinking", False),
    ],
)
def test_past_thinking_is_written_where_the_template_reads_it(
    template: str, is_separate: bool
) -> None:
    assert separates_thinking(template) == is_separate
    turn = make_past_turn("hm", "Yes", template)
    if template == CHUNKS:
        thought = {"type": "thinking", "thinking": "hm"}
        assert turn == {"content": [thought, {"type": "text", "text": "Yes"}]}
        assert make_past_turn("hm", "", template) == {"content": [thought]}
    else:
        assert turn == {"content": "Yes", "reasoning_content": "hm", "thinking": "hm"}
