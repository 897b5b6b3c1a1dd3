"""The grammar of arguments in Python's form: `a=[{'b': 'x'}], c=True`, or with values in JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spd.conversation.tools.call_forms import Pairs
from spd.conversation.tools.nested_grammar import NestedGrammar
from spd.conversation.tools.pair_grammar import PairGrammar, content_of
from spd.conversation.tools.schema_arguments import Argument, as_json
from spd.conversation.tools.schema_reader import TextShape
from spd.runtime import Json

_HEX = "[0-9a-fA-F]"
_LETTER = rf"u(?:[0-9a-ce-fA-CE-F]{_HEX}{{3}}|[dD][0-7]{_HEX}{{2}})|U00(?:0{_HEX}|10){_HEX}{{4}}"
_ESCAPE = rf"""\\(?:['"\\nrt]|x{_HEX}{{2}}|{_LETTER})"""
"""An escape as Python's `repr` writes it; a half of a UTF-16 pair is none."""
SINGLE = rf"([^'\\]|{_ESCAPE})*"
DOUBLE = rf'([^"\\]|{_ESCAPE})*'
"""Patterns of the text between quotes of either kind."""
WITHIN = Pairs("KEY:\nVALUE", "python", None, ",\n")
"""The form of an object within an argument."""


@dataclass(frozen=True)
class PythonGrammar(NestedGrammar):
    """Writes expressions of values in Python or JSON."""

    @classmethod
    def within(cls, outer: PairGrammar) -> PythonGrammar:
        """Return the writer of values within arguments that another grammar writes."""
        return cls(WITHIN, outer.tokens, outer.is_loose, outer.rules)

    @property
    def item_comma(self) -> str:
        """Return the expression of the text between a list's items."""
        return self.marks(WITHIN.comma)

    def value_text(self, value: Json) -> str:
        """Return a value as the form writes it."""
        return repr(value)

    def key(self, name: str) -> str:
        """Return the expression of a key between quotes of either kind."""
        return f"({as_json(repr(name))} | {as_json(as_json(name))})"

    def free_key(self, expressions: Sequence[str]) -> str:
        """Return the expression of such a key that the schema does not list."""
        single = self.rules.rule("T", " & ".join([f"/{SINGLE}/", *expressions]))
        double = self.rules.rule("T", " & ".join([f"/{DOUBLE}/", *expressions]))
        return self.rules.rule("T", f'"\'" {single} "\'" | "\\"" {double} "\\""')

    def texts_of(self, argument: Argument) -> list[str]:
        """Return the expressions of a value that is a text."""
        texts = [text for shape in argument.texts for text in self.quoted(shape)]
        if argument.texts:
            texts.append(self.json(argument.of_kinds(frozenset(["string"]))))
        return texts

    def quoted(self, shape: TextShape) -> list[str]:
        """Return the expressions of texts between Python's quotes."""
        if shape.values is not None:
            return [as_json(repr(value)) for value in shape.possible_values]
        if shape.is_free:
            return [f"/'{SINGLE}'/", f'/"{DOUBLE}"/']
        content = self.rules.rule("T", f"{content_of(shape)} & /[^'\\\\]*/")
        return [f'"\'" {content} "\'"']

    def objects_of(self, argument: Argument) -> list[str]:
        """Return the expressions of a value that is an object."""
        objects = super().objects_of(argument)
        if any(shape.free for shape in argument.objects):
            objects.append(self.json(argument.of_kinds(frozenset(["object"]))))
        return objects


@dataclass(frozen=True)
class PythonInTagsGrammar(PairGrammar):
    """Writes expressions of arguments between tags, whose objects and lists may be Python's."""

    def literals(self, argument: Argument) -> list[str]:
        """Return the expressions of Python's words, lists and objects, beside JSON."""
        return [*super().literals(argument), *PythonGrammar.within(self).containers_of(argument)]
