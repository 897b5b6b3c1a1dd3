"""The grammar of arguments in Gemma's form, in which objects and lists hold pairs and texts, too.

A key stands bare, a text stands between marks, and all else is JSON: `{a:[{b:<|"|>x<|"|>}],c:1}`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from spd.cli.serve.call_forms import BARE_KEY, QUOTE
from spd.cli.serve.pair_grammar import PairGrammar
from spd.cli.serve.schema_arguments import Argument, ArrayShape
from spd.runtime import JsonObject, usable_schema

SCALARS = frozenset(["number", "boolean", "null"])
MAX_RULES = 20_000
"""Rules of a grammar: beyond it nested values are JSON. Combinations of references may be endless."""
MAX_ITEMS = 1_000
"""A longer bound of a list is not held."""


@dataclass(frozen=True)
class GemmaGrammar(PairGrammar):
    """Writes expressions of arguments in which no value but numbers and the like is JSON."""

    def arguments(self, schema: JsonObject) -> str:
        """Return the expression of a function's arguments: see `PairGrammar.arguments`."""
        if not self.options:
            usable_schema(schema)  # refuses what a grammar cannot hold
        return super().arguments(schema)

    def key(self, name: str) -> str:
        """Return the expression of a key; one that would be ambiguous stands between marks."""
        is_bare = re.fullmatch(BARE_KEY, name) is not None
        return super().key(name) if is_bare else self.literal(QUOTE + name + QUOTE)

    def value(self, argument: Argument, before: str, behind: str) -> str:
        """Return the expression of a value, with what stands before and behind it in a pair."""
        return f"{self.literal(before)} {self._value(argument)} {self.literal(behind)}"

    def _value(self, argument: Argument) -> str:
        """Return the rule of a value, which may refer to itself."""
        if len(self.rules.lines) > MAX_RULES:
            return self.json(argument.schema)
        key = json.dumps(argument.schema)
        return self.rules.recursive("gemma", key, lambda: self._alternatives(argument))

    def _alternatives(self, argument: Argument) -> str:
        """Return the expression of a value, with an alternative for each of its types."""
        quote = self.literal(QUOTE)
        alternatives = [f"{quote} {self.text(shape, QUOTE)}" for shape in argument.texts]
        in_json = argument.kinds & SCALARS
        if argument.is_irregular:
            in_json = argument.kinds - {"string"}
        if in_json:
            alternatives.append(self.json(argument.of_kinds(in_json)))
        if "array" in argument.kinds - in_json:
            alternatives += [self._array(shape) for shape in argument.arrays]
        if "object" in argument.kinds - in_json:
            shapes = argument.objects
            alternatives += [f'"{{" {self.object(shape)} "}}"' for shape in shapes]
        return " | ".join(alternatives) or self.json(argument.schema)

    def _array(self, shape: ArrayShape) -> str:
        """Return the expression of a list."""
        least = shape.least if shape.least <= MAX_ITEMS else 0
        most = shape.most if shape.most is not None and shape.most <= MAX_ITEMS else None
        if most == 0:
            return '"[" "]"'
        item = self._value(shape.items)
        more = f"{max(0, least - 1)},{'' if most is None else most - 1}"
        items = f'{item} ("," {item}){{{more}}}'
        return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'
