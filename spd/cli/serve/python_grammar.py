"""The grammar of arguments in Python's form: `a=[{'b': 'x'}], c=True`, or with values in JSON."""

from __future__ import annotations

from dataclasses import dataclass

from spd.cli.serve.call_forms import Pairs
from spd.cli.serve.nested_grammar import NestedGrammar
from spd.cli.serve.pair_grammar import content_of
from spd.cli.serve.schema_arguments import Argument, as_json
from spd.cli.serve.schema_reader import TextShape
from spd.runtime import Json

TEXT = r"""/'([^'\\]|\\['"\\nrt])*'/"""
WITHIN = Pairs("KEY:\nVALUE", "python", None, ",\n")
"""How an object within an argument is written."""


@dataclass(frozen=True)
class PythonGrammar(NestedGrammar):
    """Writes expressions of values that are Python's or JSON."""

    @property
    def item_comma(self) -> str:
        """The expression of what stands between a list's items."""
        return self.marks(WITHIN.comma)

    def written(self, value: Json) -> str:
        """Return a value as the form writes it."""
        return repr(value)

    def texts_of(self, argument: Argument) -> list[str]:
        """Return the expressions of a value that is a text."""
        texts = [text for shape in argument.texts for text in self._quoted(shape)]
        if argument.texts:
            texts.append(self.json(argument.of_kinds(frozenset(["string"]))))
        return texts

    def _quoted(self, shape: TextShape) -> list[str]:
        """Return the expressions of texts between Python's quotes."""
        if shape.values is not None:
            return [as_json(repr(value)) for value in shape.possible_values]
        if shape.is_free:
            return [TEXT]
        content = self.rules.rule("T", f"{content_of(shape)} & /[^'\\\\]*/")
        return [f'"\'" {content} "\'"']

    def objects_of(self, argument: Argument) -> list[str]:
        """Return the expressions of a value that is an object, in JSON where keys are not listed."""
        shapes = argument.objects
        if any(shape.free for shape in shapes):
            return [self.json(argument.of_kinds(frozenset(["object"])))]
        within = _WithinPython(WITHIN, self.tokens, self.options, self.rules)
        return [f'"{{" {within.object(shape)} "}}"' for shape in shapes]


@dataclass(frozen=True)
class _WithinPython(PythonGrammar):
    """Writes expressions of values within others."""

    def key(self, name: str) -> str:
        """Return the expression of a key between quotes of either kind."""
        return f"({as_json(repr(name))} | {as_json(as_json(name))})"
