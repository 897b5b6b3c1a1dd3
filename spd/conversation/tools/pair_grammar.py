"""The grammar of arguments that are written as pairs of a key and a value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from spd.conversation.channels import lark_json, lark_literal
from spd.conversation.tools.call_forms import Pairs
from spd.conversation.tools.grammar_rules import GrammarRules, marks, regex, styled
from spd.conversation.tools.schema_arguments import (
    Argument,
    Arguments,
    FreeKeys,
    ObjectShape,
    as_json,
)
from spd.conversation.tools.schema_reader import TextShape
from spd.runtime import Json, JsonObject, closed_schema, full_match_pattern, references

MAX_LENGTH = 10_000
"""Characters: a longer bound of a text is not constrained."""


@dataclass(frozen=True)
class PairGrammar:
    """Writes expressions of arguments, and adds the rules that they need."""

    pairs: Pairs
    tokens: Mapping[str, int]
    """The ids of marks that are tokens."""
    is_loose: bool
    """True if parts of a schema that no grammar can constrain are ignored."""
    rules: GrammarRules

    def arguments(self, schema: JsonObject) -> str:
        """Return the expression of a function's arguments. Raises UsageError as `shapes` does."""
        shapes = self.shapes(schema)
        if not shapes:  # the grammar is refused for this schema
            return self.json(schema)
        return f"({' | '.join(self.object(shape) for shape in shapes)})"

    def shapes(self, schema: JsonObject) -> list[ObjectShape]:
        """Return the alternatives of a function's arguments.

        Raises UsageError where none fit the schema, unless the grammar is loose.
        """
        if any(True for _ in references(schema)):
            closed = closed_schema(styled(schema, is_loose=self.is_loose))
            schema = closed if isinstance(closed, dict) else schema
        shapes = Arguments(schema).shapes
        return shapes or (Arguments({"type": "object"}).shapes if self.is_loose else [])

    def object(self, shape: ObjectShape) -> str:
        """Return the expression of one alternative: its keys in their order, then others."""
        comma = self.marks(self.pairs.comma)
        first_pairs = ""
        later_pairs = ""  # pairs behind another pair, each with a comma before it
        if shape.free:
            free = " | ".join(
                self._pair(self.other_key(keys, shape), keys.argument) for keys in shape.free
            )
            other = self.rules.rule("other", free)
            later_pairs = f"({comma} {other})*"
            first_pairs = f"({other} {later_pairs})?"
        for name, argument in reversed(self._in_order(shape.listed)):
            pair = self._pair(self.key(name), argument)
            remaining_rule = self.rules.rule("rest", later_pairs) if later_pairs else ""
            if name in shape.required:
                first_pairs = f"{pair} {remaining_rule}"
                later_pairs = f"{comma} {pair} {remaining_rule}"
            else:
                first_pairs = (
                    f"({pair} {remaining_rule} | {first_pairs})" if self.pairs.comma else ""
                )
                later_pairs = f"({comma} {pair})? {remaining_rule}"
        return first_pairs if self.pairs.comma else later_pairs

    def _in_order(self, arguments: Mapping[str, Argument]) -> list[tuple[str, Argument]]:
        """Return arguments in the order in which the model's chat template writes them."""
        if not self.pairs.is_sorted:
            return [*arguments.items()]
        return sorted(arguments.items(), key=lambda item: item[0].lower())

    def other_key(self, keys: FreeKeys, shape: ObjectShape) -> str:
        """Return the expression of a key that the schema does not list."""
        expressions: list[str] = []
        if keys.pattern is not None and (pattern := full_match_pattern(keys.pattern)) is not None:
            expressions.append(regex(pattern))
        other_patterns = (
            [] if keys.pattern is not None else [free_keys.pattern for free_keys in shape.free]
        )
        patterns = (
            full_match_pattern(other_pattern)
            for other_pattern in other_patterns
            if other_pattern is not None
        )
        expressions += [f"~{regex(pattern)}" for pattern in patterns if pattern is not None]
        if shape.listed:
            names = "|".join(re.escape(name).replace("\\ ", " ") for name in shape.listed)
            expressions.append(f"~{regex(names)}")
        return self.free_key(expressions)

    def free_key(self, expressions: Sequence[str]) -> str:
        """Return the expression of such a key that fits all of these expressions."""
        return self.rules.rule("T", " & ".join([f"/{self.pairs.key}/", *expressions]))

    def key(self, name: str) -> str:
        """Return the expression of a key that the schema lists."""
        return as_json(name)

    def _pair(self, key: str, argument: Argument) -> str:
        """Return the expression of a pair, with its key as an expression."""
        before, _, behind = self.pairs.text.partition("VALUE")
        begin, _, middle = before.partition("KEY")
        value = self.rules.rule("value", self.value(argument, middle, behind))
        return f"{self.marks(begin)} {key} {value}"

    def value(self, argument: Argument, before: str, behind: str) -> str:
        """Return the expression of a value, with the texts before and behind it in a pair."""
        edge = '"\\n"?' if before.endswith("\n") and behind.startswith("\n") else ""
        quote = self.pairs.quote
        begin = self.marks(before.rstrip("\n"))
        texts: list[str] = []
        if quote is not None:
            opening = self.marks(before.rstrip("\n") + quote)
            end = quote + behind.lstrip("\n")
            shapes = argument.texts
            texts = [
                f"{opening} {text}" for shape in shapes for text in self.texts(shape, end, edge)
            ]
            if not quote and any(shape.is_free for shape in shapes):
                return f"{opening} {self.text(TextShape(), end)}"  # the schema says how it is read
        non_text_schema = argument.non_text_schema if texts else argument.schema
        if non_text_schema is not False:
            values = " | ".join([self.json(non_text_schema), *self.literals(argument)])
            texts.append(f"{begin} {edge} ({values}) {edge} {self.marks(behind.lstrip(chr(10)))}")
        return " | ".join(texts)

    def texts(self, shape: TextShape, end: str, edge: str) -> list[str]:
        """Return the expressions of a text that may be on lines of its own, or not."""
        if not edge or shape.is_free:
            return [self.text(shape, end)]
        if shape.values is not None:
            return [f"{edge} {self.text(shape, end, edge)}"]
        return [f'"\\n" {self.text(shape, chr(10) + end)}', self.text(shape, end, is_inline=True)]

    def text(self, shape: TextShape, end: str, edge: str = "", *, is_inline: bool = False) -> str:
        """Return the expression of a text that is no JSON, with the text `end` behind it.

        is_inline: True excludes line breaks at its ends.
        """
        blanks = re.search(r"\n\s*\Z", end)
        gap = "GAP" if blanks else ""
        ending = self.literal(end[: blanks.start()] if blanks else end)
        if shape.values is not None:
            values = [as_json(value) for value in shape.possible_values if value]
            optional = "?" if "" in shape.possible_values else ""
            return f"({' | '.join(values)}){optional} {edge} {ending} {gap}"
        content = content_of(shape)
        if is_inline:
            content += " & /([^\\n]((.|\\n)*[^\\n])?)?/"
        token = ending.find("<[")
        if token < 0:
            if " & " in content:
                content = self.rules.rule("T", content)
            return f"{self.rules.rule('text', content, f'[suffix={ending}]')} {gap}"
        if shape.is_free:  # blanks before the token are text
            return f"{self.rules.rule('text', content)} {ending[token:]} {gap}"
        return f"{self.rules.rule('T', f'({content}) {ending[:token]}')} {ending[token:]} {gap}"

    def literals(self, argument: Argument) -> list[str]:
        """Return the expressions of Python's words for JSON's, which some templates write."""
        words = (("True", True), ("False", False), ("None", None))
        return [f'"{word}"' for word, value in words if argument.fits(value)]

    def json(self, schema: Json) -> str:
        """Return the name of the rule of a value in JSON that fits a schema."""
        if isinstance(schema, dict):
            schema = styled(schema, is_loose=self.is_loose)
        return self.rules.rule("json", lark_json(schema))

    def marks(self, text: str) -> str:
        """Return the expression of marks, with any few blanks where there are line breaks."""
        return marks(text, self.tokens)

    def literal(self, text: str) -> str:
        """Return the expression of a text."""
        return lark_literal(text, self.tokens)


def content_of(shape: TextShape) -> str:
    """Return the expression of a text's characters; bounds and patterns beyond a grammar are
    left out.
    """
    min_length = shape.min_length if shape.min_length < MAX_LENGTH else 0
    max_length = (
        shape.max_length if shape.max_length is not None and shape.max_length < MAX_LENGTH else None
    )
    times = (
        "*"
        if not min_length and max_length is None
        else f"{{{min_length},{'' if max_length is None else max_length}}}"
    )
    patterns = (full_match_pattern(pattern) for pattern in shape.patterns)
    expressions = [regex(pattern) for pattern in patterns if pattern is not None]
    return " & ".join([f"/(.|\\n){times}/", *expressions])
