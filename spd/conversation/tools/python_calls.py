"""The grammar of calls in Python's form, in which a text may have quotes and line breaks without
escapes.

A published template writes a text between quotes without escapes. So the text ends where the next
argument, the next call or the end of all calls follows the quote, and nowhere else. Therefore a
text and the mark behind it are one terminal, and each rule contains all that may follow an
argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Literal, NamedTuple

from spd.conversation.tools.call_forms import Form
from spd.conversation.tools.grammar_rules import GrammarRules
from spd.conversation.tools.pair_grammar import PairGrammar, content_of
from spd.conversation.tools.python_grammar import DOUBLE, PythonGrammar
from spd.conversation.tools.schema_arguments import Argument, ObjectShape, as_json
from spd.conversation.tools.schema_reader import TextShape
from spd.runtime import JsonObject, usable_schema

MAX_KEYS = 1_000
"""Arguments of all functions up to which texts may have quotes without escapes.

Each takes two more rules, and 2,560 of them would take 415 KiB."""
Preceding = Literal["a call's head", "a value"] | TextShape
"""The part before a position; a text there has still to end."""


class _Position(NamedTuple):
    """A position in a call: before one of the keys of an alternative of its arguments."""

    function: str
    alternative: int
    key: int


class PythonCalls:
    """Writes the expression of calls, and adds the rules that it needs."""

    def __init__(
        self,
        form: Form,
        schemas: Mapping[str, JsonObject],
        pairs: PairGrammar,
        *,
        allows_several: bool,
    ) -> None:
        """Resolve the schemas. pairs: writes keys. allows_several: True if a call may follow
        another one.

        Raises UsageError for a schema that no grammar can constrain, unless the grammar is loose.
        """
        for schema in () if pairs.is_loose else schemas.values():
            usable_schema(schema)
        self._form = form
        self._equals = pairs.pairs.text.removeprefix("KEY").removesuffix("VALUE")
        self._pairs = pairs
        self._rules: GrammarRules = pairs.rules
        self._shapes = {name: pairs.shapes(schema) for name, schema in schemas.items()}
        self._schemas = schemas
        self._values = PythonGrammar.within(pairs)
        self._allows_several = allows_several
        alternatives = (shape for shapes in self._shapes.values() for shape in shapes)
        self._holds_quotes = sum(len(shape.listed) for shape in alternatives) <= MAX_KEYS

    def expression(self) -> str:
        """Return the expression of all calls behind the opening mark. Raises UsageError."""
        calls = f'"[" GAP {self._any_call()}'
        self._rules.finish_pending()
        return calls

    def _any_call(self) -> str:
        """Return the rule of a call of any function, and of all behind it."""
        heads = (f"{as_json(self._head(name))} {self._arguments(name)}" for name in self._shapes)
        return self._rules.rule("call", " | ".join(heads))

    def _head(self, name: str) -> str:
        """Return the beginning of a call."""
        return self._form.call.partition("ARGUMENTS")[0].replace("NAME", name)

    def _arguments(self, name: str) -> str:
        """Return the rule of a call behind its head, and of all behind it."""
        return self._rules.pending_rule("p", name, lambda: self._alternatives(name))

    def _alternatives(self, name: str) -> str:
        """Return the expression of the alternatives of a function's arguments, and of all behind
        them.
        """
        count = len(self._shapes[name])
        places = (_Position(name, alternative, 0) for alternative in range(count))
        rules = [self._behind(place, "a call's head") for place in places]
        return " | ".join(rules) or self._pairs.json(self._schemas[name])

    def _behind(self, place: _Position, before: Preceding) -> str:
        """Return the rule of all that follows at a position."""
        key = repr((place, before))
        return self._rules.pending_rule(
            "p", key, lambda: " | ".join(self._following(place, before))
        )

    def _following(self, place: _Position, before: Preceding) -> list[str]:
        """Return the alternatives of all that follows at a position."""
        shape: ObjectShape = self._shapes[place.function][place.alternative]
        names = [*shape.listed]
        if place.key == len(names):
            keys = (
                (self._pairs.other_key(free_keys, shape), free_keys.argument)
                for free_keys in shape.free
            )
            free = [self._pair(key, argument, place, before) for key, argument in keys]
            return [*free, self._rules.pending_rule("p", repr(before), lambda: self._end(before))]
        name = names[place.key]
        following = place._replace(key=place.key + 1)
        pair = self._pair(as_json(name), shape.listed[name], following, before)
        return [pair] if name in shape.required else [pair, self._behind(following, before)]

    def _pair(self, key: str, argument: Argument, following: _Position, before: Preceding) -> str:
        """Return the expression of a key and a value with all behind it."""
        comma = "" if before == "a call's head" else self._pairs.pairs.comma
        mark = f"{as_json(comma)} {key} {as_json(self._equals)}"
        if key.startswith('"'):
            mark = as_json(f"{comma}{json.loads(key)}{self._equals}")
        value_key = repr((argument.schema, following))
        value = self._rules.pending_rule("p", value_key, lambda: self._value(argument, following))
        return f"{self._ended_by(mark, before)} {value}"

    def _ended_by(self, mark: str, before: Preceding) -> str:
        """Return the expression of a mark, with the text before it if there is one."""
        if isinstance(before, str):
            return mark
        if mark.startswith('"') and mark.count('"') == 2:
            end = as_json("'" + json.loads(mark))
        else:
            end = self._rules.rule("T", f'"\'" {mark}')
        return self._rules.rule("t", self._text_start(before), f"[suffix={end}]")

    def _text_start(self, shape: TextShape) -> str:
        """Return the terminal of a text without its end."""
        content = content_of(shape)
        if not shape.is_free:  # what is escaped would count as more than it is
            content += r" & /[^\\]*/"
        return self._rules.rule("T", f'"\'" ({content})')

    def _end(self, before: Preceding) -> str:
        """Return the expression of a call's end and all behind it."""
        closing = self._pairs.literal(self._form.closing)
        bracket = '")" GAP "]" GAP'
        is_token = self._form.closing in self._pairs.tokens
        if isinstance(before, str) or not is_token:
            end = self._ended_by(f"{bracket} {closing}", before)
        else:  # the token ends the terminal
            end = (
                self._rules.rule("T", f'{self._text_start(before)} "\'" {bracket}') + f" {closing}"
            )
        if not self._allows_several:
            return end
        if isinstance(before, str):
            return f'{end} | ")" "," GAP {self._any_call()}'
        heads = ((name, f'")" "," GAP {as_json(self._head(name))}') for name in self._shapes)
        calls = (f"{self._ended_by(head, before)} {self._arguments(name)}" for name, head in heads)
        return " | ".join([end, *calls])

    def _value(self, argument: Argument, following: _Position) -> str:
        """Return the expression of a value and all behind it."""
        values = self._values.non_texts_of(argument)
        alternatives: list[str] = []
        for shape in argument.texts:
            if shape.values is None and self._holds_quotes:
                alternatives.append(self._behind(following, shape))
            else:
                values += self._values.quoted(shape)
                values += (as_json(f"'{value}'") for value in shape.possible_values)
        if argument.texts:
            values.append(self._values.json(argument.of_kinds(frozenset(["string"]))))
        if any(shape.is_free for shape in argument.texts):
            values.append(f'/"{DOUBLE}"/')
        if values or not alternatives:
            value = self._rules.rule("v", " | ".join(values) or self._values.json(argument.schema))
            alternatives.append(f"{value} {self._behind(following, 'a value')}")
        return " | ".join(alternatives)
