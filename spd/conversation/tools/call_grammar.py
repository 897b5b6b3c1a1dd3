"""Grammars that constrain tool calls to their schemas, in the form in which a model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from spd.conversation.channels import lark_json, lark_literal
from spd.conversation.tools.call_forms import FALLBACK_FORM, FORMS, NUMBER, Form
from spd.conversation.tools.gemma_grammar import GemmaGrammar
from spd.conversation.tools.grammar_rules import GAP, GrammarRules, marks, styled
from spd.conversation.tools.pair_grammar import PairGrammar
from spd.conversation.tools.python_calls import PythonCalls
from spd.conversation.tools.python_grammar import PythonInTagsGrammar
from spd.runtime import JsonObject, check_text_size, without_descriptions
from spd.runtime.engine.request import GrammarSpec

Schemas = Mapping[str, JsonObject]
"""JSON schemas of functions' arguments, by name."""
MAX_CALLS = 8
"""Calls in one reply that a grammar allows."""
TEXT_RULE = "TEXT: /(.|\\n)*/"
MAX_CACHED_GRAMMARS = 16
"""Grammars that are cached for later requests with the same tools."""


@dataclass(frozen=True)
class Tools:
    """The functions that a reply may call, or has to call if `required`: any, or `named_function`.

    A grammar constrains calls to their schemas: required calls from the reply's beginning, others
    from the form's opening mark on. For a mark of several tokens the grammar begins with the reply;
    for messages and for calls without a mark it does so only if `strict`. parallel: several calls
    may stand in one reply. tokens: the ids of marks that are special tokens.
    """

    functions: Schemas
    form: Form = FORMS["Hermes, Qwen3"]
    named_function: str | None = None
    required: bool = False
    parallel: bool = True
    strict: bool = False
    tokens: Mapping[str, int] = field(default_factory=dict)
    answer_grammar: GrammarSpec | None = None
    """The schema of a reply that calls nothing; None if it may be any text."""

    @property
    def is_constrained(self) -> bool:
        """True if a grammar constrains a reply from its beginning on."""
        return (
            self.required
            or self.answer_grammar is not None
            or (self.strict and not self.form.is_bare)
        )

    @property
    def trigger_token(self) -> int | None:
        """Return the token behind which a grammar begins; None if it begins with the reply, or
        there is none.
        """
        is_unconditional = self.required or self.answer_grammar is not None
        return (
            None if is_unconditional or self.form.channels else self.tokens.get(self.form.opening)
        )

    @property
    def grammar(self) -> GrammarSpec | None:
        """Return the grammar of calls in the model's own form; None where there is none.

        The first grammar of many functions takes a while, so a server's event loop must not compute
        it. Raises UsageError for a schema that no grammar can constrain.
        """
        form = self.form
        is_unmarked = form.is_bare or form.channels is not None or form is FALLBACK_FORM
        if self.trigger_token is None and not self.is_constrained and is_unmarked:
            return None
        schemas = {name: without_descriptions(schema) for name, schema in self.functions.items()}
        answer = None if self.answer_grammar is None else self.answer_grammar.text
        choice = [self.named_function, self.required, self.parallel, self.strict]
        key = json.dumps([schemas, form, choice, dict(self.tokens), answer])
        check_text_size("lark", key)
        return _cached_grammar(_ToolsByKey(key, self))


@dataclass(frozen=True)
class _ToolsByKey:
    """Tools, compared by their key."""

    key: str
    tools: Tools = field(compare=False)


@lru_cache(MAX_CACHED_GRAMMARS)
def _cached_grammar(keyed: _ToolsByKey) -> GrammarSpec:
    """Return the grammar of tools, from the cache or written anew."""
    tools = keyed.tools
    schemas = {name: without_descriptions(schema) for name, schema in tools.functions.items()}
    return _CallGrammar(tools, schemas).grammar()


class _CallGrammar:
    """Writes the grammar of one set of tools."""

    def __init__(self, tools: Tools, schemas: Schemas) -> None:
        self._tools = tools
        self._form = tools.form
        self._schemas = schemas
        self._rules = GrammarRules()
        self._is_loose = not (tools.required or tools.strict)
        self._has_several = (
            tools.parallel and tools.named_function is None and tools.form.channels is None
        )

    def grammar(self) -> GrammarSpec:
        """Return the complete grammar of the reply, in Lark."""
        tools = self._tools
        is_unconditional = tools.required or tools.answer_grammar is not None
        calls = self._calls_expression()
        lazy: list[str] = []
        if self._form.channels is not None:
            start = self._messages_expression(calls)
        elif is_unconditional:
            opening = "" if self._form.is_bare and tools.required else self._form.opening
            answer = f"| {self._answer_expression}" if self._answer_expression else ""
            start = f"GAP ({self._literal(opening)} {calls} {answer})"
        else:
            start = self._calls_in_text_expression(calls)
            lazy = [f"before[lazy]: /(.|\\n)*{re.escape(self._form.opening)}/"]
        lines = [f"start: {start}", GAP, TEXT_RULE, *lazy, *self._rules.lines]
        return GrammarSpec("lark", "\n".join(lines), tools.trigger_token, not is_unconditional)

    @property
    def _answer_expression(self) -> str:
        """Return the expression of a reply that calls nothing; empty where no schema constrains
        it.
        """
        if self._tools.answer_grammar is None or self._tools.required:
            return ""
        return lark_json(json.loads(self._tools.answer_grammar.text))

    def _calls_expression(self) -> str:
        """Return the expression of all calls behind the first opening mark."""
        form = self._form
        named_function = self._tools.named_function
        names = [*self._schemas] if named_function is None else [named_function]
        if form.pairs is not None and form.pairs.style == "python":
            schemas = {name: self._schemas[name] for name in names}
            pairs = PairGrammar(form.pairs, self._tools.tokens, self._is_loose, self._rules)
            return PythonCalls(form, schemas, pairs, allows_several=self._has_several).expression()
        alternatives = (self._rules.rule("call", self._call_expression(name)) for name in names)
        call = f"({' | '.join(alternatives)})"
        opening = "" if form.is_bare and self._tools.required else form.opening
        closing = "" if form.channels is not None else self._literal(form.closing)
        if form.separator is None:
            call = f"{call} {closing}"
            following = f"GAP {self._literal(opening)} {call}"
            closing = ""
        else:
            gap = "GAP" if form.separator else ""
            following = f"{self._literal(form.separator.strip())} {gap} {call}"
        calls = call
        if self._has_several:
            times = f"{{0,{MAX_CALLS - 1}}}" if self._tools.required else "*"
            calls = f"{call} ({following}){times}"
        if form.is_array:
            calls = f'"[" GAP {calls} GAP "]"'
        return f"{calls} GAP {closing}" if closing else calls

    def _call_expression(self, name: str) -> str:
        """Return the expression of a call of one function, with its message's header if there is
        one.
        """
        form = self._form
        head, tail = form.call.split("ARGUMENTS")
        if form.channels is not None:
            head = form.channels.call_header + form.opening + head
            tail += form.closing
        before, _, behind = head.rpartition("NAME")
        begin = self._with_number(before.replace("NAME", name) + name)
        if form.id_after_name:
            begin += f" ({self._with_number(form.id_after_name)})?"
        end = marks(tail, self._tools.tokens)
        if form.id_after_arguments:
            end = f"({self._with_number(form.id_after_arguments)})? {end}"
        arguments = self._arguments_expression(self._schemas[name])
        return f"{begin} {self._with_number(behind)} {arguments} {end}"

    def _with_number(self, text: str) -> str:
        """Return the expression of marks, with `NUMBER` in the place of a call's number or id."""
        id_ = "/[0-9]+/" if self._form.call.count(NUMBER) else "/[A-Za-z0-9_-]{1,64}/"
        parts = (marks(part, self._tools.tokens) for part in text.split(NUMBER))
        return f" {id_} ".join(parts)

    def _arguments_expression(self, schema: JsonObject) -> str:
        """Return the expression of a function's arguments, and add the rules that it needs."""
        tools = self._tools
        pairs = self._form.pairs
        if pairs is None:
            return lark_json(styled(schema, is_loose=self._is_loose))
        writer = PairGrammar
        if pairs.style == "gemma":
            writer = GemmaGrammar
        elif pairs.literals == "python":
            writer = PythonInTagsGrammar
        return writer(pairs, tools.tokens, self._is_loose, self._rules).arguments(schema)

    def _messages_expression(self, calls: str) -> str:
        """Return the expression of a reply of messages, whose last one is a call or an answer."""
        channels = self._form.channels
        assert channels is not None
        final = f"{self._literal(channels.answer_header)} {self._answer_expression or 'TEXT'}"
        last = calls if self._tools.required else f"({calls} | {final})"
        return f"{channels.thinking_grammar(self._tools.tokens)} {last}"

    def _calls_in_text_expression(self, calls: str) -> str:
        """Return the expression of a reply with calls between texts."""
        opening = self._form.opening
        is_token = opening in self._tools.tokens
        before = f"TEXT {self._literal(opening)}" if is_token else "before"
        start = f"TEXT | {before} {calls}" if self._tools.trigger_token is None else calls
        return f"{start} ({before} {calls})* TEXT" if self._has_several else start

    def _literal(self, text: str) -> str:
        """Return the expression of a text; marks that are special tokens stand by their ids."""
        return lark_literal(text, self._tools.tokens)
