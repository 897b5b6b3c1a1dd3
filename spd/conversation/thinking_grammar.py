"""Grammars of replies that may think: they apply behind the thinking."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import TYPE_CHECKING

from spd.conversation.channels import lark_json, template_channels
from spd.conversation.prompt import THINKING_SWITCH, Prompt
from spd.formats.thinking import MarkPair, closes_thinking
from spd.runtime.engine.request import GrammarSpec, ThinkingTokens

if TYPE_CHECKING:
    from spd.conversation.vocabulary import Vocabulary


_START = re.compile(r'"(?:[^"\\]|\\.)*"|/(?:[^/\\\n]|\\.)+/|\bstart\b')
"""The first rule of a Lark grammar, and texts in which its name means nothing."""


def grammar_after_thinking(
    grammar: GrammarSpec,
    vocabulary: Vocabulary,
    prompt: Prompt,
    prompt_end: str,
    inside_thinking: bool,
) -> tuple[GrammarSpec, bool]:
    """Return a grammar that applies behind a reply's thinking, and True if the reply begins inside
    it.

    prompt_end: the end of the rendered prompt. A model that always thinks may write anything up to
    the token that ends thinking. One that may think begins with thinking or with the answer.
    """
    template = vocabulary.need_template()
    if (channels := template_channels(template.default)) is not None:
        is_schema = grammar.kind == "schema"
        special = vocabulary.need_tokenizer().special_tokens
        return (
            channels.schema_grammar(grammar, special) if is_schema else grammar
        ), inside_thinking
    pair = vocabulary.marks.thinking[0]
    tokens = vocabulary.thinking_tokens
    if grammar.after is not None:  # it begins with a mark, which inside thinking is plain text
        thinking_tokens = (
            None if tokens is None else ThinkingTokens(tokens[0], tokens[1], inside_thinking)
        )
        return dataclasses.replace(grammar, thinking=thinking_tokens), inside_thinking
    if grammar.optional and not inside_thinking:
        return grammar, inside_thinking
    if inside_thinking:
        if tokens is None:
            return _grammar_with_thinking(grammar, pair, tokens, "opened"), True
        return dataclasses.replace(grammar, after=tokens[1]), True
    if closes_thinking(prompt_end, vocabulary.marks):
        return grammar, False
    if template.thinking_switch is None:
        may_think = pair.opening in template.default or pair.closing in template.default
    else:
        switched = (prompt.variables or {}).get(THINKING_SWITCH)
        may_think = template.thinks_by_default if switched is None else bool(switched)
        if may_think and tokens is not None and not pair.are_tokens:  # it always thinks then
            return dataclasses.replace(grammar, after=tokens[1]), True
    return (_grammar_with_thinking(grammar, pair, tokens, "maybe") if may_think else grammar), False


def _grammar_with_thinking(
    grammar: GrammarSpec, pair: MarkPair, tokens: tuple[int | None, int] | None, thinking: str
) -> GrammarSpec:
    """Return a Lark grammar of thinking, then of the answer that `grammar` describes.

    pair: the marks around thinking. tokens: their ids, None for words. thinking: "opened"
    if the prompt has begun it, "maybe" if the reply may leave it out.
    """
    if grammar.kind == "schema":
        answer = f"answer: {lark_json(json.loads(grammar.text))}"
    elif grammar.kind == "regex":
        escaped = re.sub(
            r"\\.|/", lambda match: match[0] if len(match[0]) > 1 else r"\/", grammar.text
        )
        answer = f"answer: /{escaped}/"
    else:
        answer = _START.sub(
            lambda match: "answer" if match[0] == "start" else match[0], grammar.text
        )
    if tokens is not None and tokens[0] is not None:
        rules = [f"thought: <[{tokens[0]}]> THOUGHT <[{tokens[1]}]>", "THOUGHT: /(.|\\n)*/"]
    else:
        opening = "" if thinking == "opened" else f"\\s*{_escape_in_pattern(pair.opening)}"
        rules = [f"thought[lazy]: /{opening}(.|\\n)*{_escape_in_pattern(pair.closing)}/"]
    start = (
        "start: thought BREAKS answer"
        if thinking == "opened"
        else "start: (thought BREAKS)? answer"
    )
    text = "\n".join([start, *rules, "BREAKS: /\\n{0,2}/", answer])
    return dataclasses.replace(grammar, kind="lark", text=text)


def _escape_in_pattern(mark: str) -> str:
    """Return a mark escaped as a part of a regular expression between slashes."""
    return re.escape(mark).replace("/", r"\/")
