"""A grammar begins behind thinking, however the model marks it and whether it thinks or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.conversation.prompt import Prompt
from spd.conversation.thinking_grammar import grammar_after_thinking
from spd.conversation.vocabulary import Vocabulary
from spd.errors import SpdError
from spd.formats.chat_template import ChatTemplate
from spd.runtime.engine.grammar import GrammarCompiler, GrammarError
from spd.runtime.engine.request import GrammarSpec, ThinkingTokens
from tests.server.test_serve_thinking import open_tokenizer

SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], '
SCHEMA += '"additionalProperties": false}'
GRAMMARS = {
    "schema": (GrammarSpec("schema", SCHEMA), '{"a": 1}'),
    "regex": (GrammarSpec("regex", "[a-c]/{2}"), "b//"),
    "lark": (GrammarSpec("lark", 'start: "(" start ")" | "start"'), "((start))"),
}
THINK = ("<think>", "</think>")
TOKENS = ("[THINK]", "[/THINK]")
SWITCH = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
LATE = "{% if not thinking %}</think>{% endif %}"


@dataclass(frozen=True)
class ThinkingPrompt:
    """A template and its prompt, and where a reply to it starts: thought, answer or any."""

    template: str
    starts: str
    special: Sequence[str] = ()
    added: Sequence[str] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    prompt: str = ""
    inside: bool = False


def allows(tokenizer: Any, grammar: GrammarSpec, reply: str) -> bool:
    """True if a model may write this reply and end it."""
    state = GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(grammar, (256,))
    assert state is not None
    row = torch.empty(1, (tokenizer.vocab_size + 31) // 32, dtype=torch.int32)
    try:
        for token in tokenizer.encode(reply, parse_special=True):
            state.write_masks((), row)
            if not int(row[0, token // 32]) >> (token % 32) & 1:
                return False
            state.accept_token(token)
    except GrammarError:
        return False
    return state.is_complete


@pytest.mark.parametrize("kind", GRAMMARS)
@pytest.mark.parametrize(
    "case",
    [
        ThinkingPrompt("'<think>'", added=THINK, prompt="<think>\n", inside=True, starts="thought"),
        ThinkingPrompt("'<think>'", prompt="<think>\n", inside=True, starts="thought"),
        ThinkingPrompt(
            "'[THINK]'", special=TOKENS, prompt="[THINK]", inside=True, starts="thought"
        ),
        ThinkingPrompt("'[THINK]'", special=TOKENS, starts="any"),
        ThinkingPrompt("'<think>'", added=THINK, starts="any"),
        ThinkingPrompt("'<think>'", starts="any"),
        ThinkingPrompt("'<think>'", added=THINK, prompt="<think>\n\n</think>\n\n", starts="answer"),
        ThinkingPrompt(SWITCH, added=THINK, starts="thought"),
        ThinkingPrompt(SWITCH, starts="any"),
        ThinkingPrompt(
            SWITCH,
            added=THINK,
            variables={"enable_thinking": False},
            prompt="<think></think>",
            starts="answer",
        ),
        ThinkingPrompt(LATE, added=THINK, prompt="</think>", starts="answer"),
        ThinkingPrompt(LATE, added=THINK, variables={"enable_thinking": True}, starts="thought"),
        ThinkingPrompt("no marks", added=THINK, starts="answer"),
        ThinkingPrompt("no marks", special=TOKENS, starts="answer"),
    ],
)
def test_where_a_grammar_begins(kind: str, case: ThinkingPrompt, tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, case.special, case.added)
    config: Any = None
    chat = ChatTemplate("x", {"default": case.template}, {})
    vocabulary = Vocabulary(config, tokenizer, chat, "x")
    chat_prompt = Prompt(messages=({"role": "user", "content": "Hi"},), variables=case.variables)
    grammar, answer = GRAMMARS[kind]
    composed, begins_inside = grammar_after_thinking(
        grammar=grammar,
        vocabulary=vocabulary,
        prompt=chat_prompt,
        prompt_end=case.prompt,
        inside_thinking=case.inside,
    )
    opening, closing = case.special or THINK
    thought = f"h{{m\n{closing}" if case.inside else f"{opening}h{{m\n{closing}"
    assert begins_inside == (case.starts == "thought")
    assert allows(tokenizer, composed, thought + answer) == (case.starts != "answer")
    assert allows(tokenizer, composed, answer) == (case.starts != "thought")
    assert not allows(tokenizer, composed, f"{thought}{answer[:-1]}"), "the answer is cut"
    assert not allows(tokenizer, composed, f"{thought}?{answer}")


def test_a_call_s_grammar_knows_where_thinking_is(tmp_path: Path) -> None:
    """Its mark is only words in a thought."""
    tokenizer = open_tokenizer(tmp_path, ("<tool_call>", *TOKENS), ())
    config: Any = None
    vocabulary = Vocabulary(config, tokenizer, ChatTemplate("x", {"default": "[THINK]"}, {}), "x")
    begin, end = (tokenizer.special_tokens[name] for name in TOKENS)
    mark = tokenizer.special_tokens["<tool_call>"]
    grammar = GrammarSpec("lark", 'start: "x"', mark, optional=True)
    prompt = Prompt(messages=({"role": "user", "content": "Hi"},))
    for inside in (True, False):
        composed, _ = grammar_after_thinking(
            grammar=grammar,
            vocabulary=vocabulary,
            prompt=prompt,
            prompt_end="",
            inside_thinking=inside,
        )
        assert composed.after == mark and composed.thinking == ThinkingTokens(begin, end, inside)


def test_a_grammar_that_cannot_be_read_is_refused_behind_thinking_too(tmp_path: Path) -> None:
    tokenizer = open_tokenizer(tmp_path, TOKENS, ())
    config: Any = None
    vocabulary = Vocabulary(config, tokenizer, ChatTemplate("x", {"default": "[THINK]"}, {}), "x")
    prompt = Prompt(messages=({"role": "user", "content": "Hi"},))
    grammar, _ = grammar_after_thinking(
        grammar=GrammarSpec("regex", "("),
        vocabulary=vocabulary,
        prompt=prompt,
        prompt_end="",
        inside_thinking=False,
    )
    with pytest.raises(SpdError, match="cannot be used"):
        GrammarCompiler(tokenizer, tokenizer.vocab_size).compile(grammar, ())
