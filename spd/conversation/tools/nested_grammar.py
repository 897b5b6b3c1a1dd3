"""The grammar of values in forms in which objects and lists within arguments are no JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass

from spd.conversation.tools.pair_grammar import PairGrammar
from spd.conversation.tools.schema_arguments import Argument, ArrayShape
from spd.runtime import Json, JsonObject, usable_schema

SCALAR_KINDS = frozenset(["number", "boolean", "null"])
MAX_RULES = 20_000
"""Rules of a grammar: beyond it nested values are JSON.

Combinations of references may be endless.
"""
MAX_ITEMS = 1_000
"""A longer bound of a list is not constrained."""


@dataclass(frozen=True)
class NestedGrammar(PairGrammar):
    """Writes expressions of arguments whose nested keys and texts are in the form's own
    notation.
    """

    def arguments(self, schema: JsonObject) -> str:
        """Return the expression of a function's arguments: see `PairGrammar.arguments`."""
        if not self.is_loose:
            usable_schema(schema)  # refuses a schema that no grammar can constrain
        return super().arguments(schema)

    def value(self, argument: Argument, before: str, behind: str) -> str:
        """Return the expression of a value, with the texts before and behind it in a pair."""
        return f"{self.marks(before)} {self.nested(argument)} {self.marks(behind)}"

    def nested(self, argument: Argument) -> str:
        """Return the name of the rule of a value, which may refer to itself.

        JSON for too many rules.
        """
        if len(self.rules.lines) > MAX_RULES:
            return self.json(argument.schema)
        key = json.dumps(argument.schema)
        return self.rules.recursive_rule("nested", key, lambda: self.alternatives(argument))

    def alternatives(self, argument: Argument) -> str:
        """Return the expression of a value, with an alternative for each of its types."""
        alternatives = [*self.texts_of(argument), *self.non_texts_of(argument)]
        return " | ".join(alternatives) or self.json(argument.schema)

    def non_texts_of(self, argument: Argument) -> list[str]:
        """Return the expressions of a value that is no text."""
        in_json = argument.kinds & SCALAR_KINDS
        if argument.is_irregular:
            in_json = argument.kinds - {"string"}
        scalars: list[str] = []
        if in_json:
            scalars = [self.json(argument.of_kinds(in_json)), *self.literals(argument)]
        return [*scalars, *self.containers_of(argument)]

    def containers_of(self, argument: Argument) -> list[str]:
        """Return the expressions of a value that is an object or a list."""
        if argument.is_irregular:
            return [self.literal(self.value_text(value)) for value in argument.listed_containers]
        return [*map(self._array, argument.arrays), *self.objects_of(argument)]

    @property
    def item_comma(self) -> str:
        """Return the expression of the text between a list's items."""
        return self.literal(self.pairs.comma)

    def texts_of(self, argument: Argument) -> list[str]:
        """Return the expressions of a value that is a text."""
        raise NotImplementedError

    def value_text(self, value: Json) -> str:
        """Return a value as the form writes it."""
        raise NotImplementedError

    def objects_of(self, argument: Argument) -> list[str]:
        """Return the expressions of a value that is an object."""
        return [f'"{{" {self.object(shape)} "}}"' for shape in argument.objects]

    def _array(self, shape: ArrayShape) -> str:
        """Return the expression of a list."""
        min_items = shape.min_items if shape.min_items <= MAX_ITEMS else 0
        max_items = (
            shape.max_items
            if shape.max_items is not None and shape.max_items <= MAX_ITEMS
            else None
        )
        if max_items == 0:
            return '"[" "]"'
        item = self.nested(shape.items)
        repetitions = f"{max(0, min_items - 1)},{'' if max_items is None else max_items - 1}"
        items = f"{item} ({self.item_comma} {item}){{{repetitions}}}"
        return f'"[" {items} "]"' if min_items else f'"[" ({items})? "]"'
