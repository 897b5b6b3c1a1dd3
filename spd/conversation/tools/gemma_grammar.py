"""The grammar of arguments in Gemma's form: `{a:[{b:<|"|>x<|"|>}],c:1}`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from spd.conversation.tools.call_forms import BARE_KEY, QUOTE
from spd.conversation.tools.nested_grammar import NestedGrammar
from spd.conversation.tools.schema_arguments import Argument, as_json
from spd.runtime import Json


@dataclass(frozen=True)
class GemmaGrammar(NestedGrammar):
    """Writes expressions of values in which keys are bare and texts are between marks."""

    def key(self, name: str) -> str:
        """Return the expression of a key; one that would be ambiguous is between marks."""
        is_bare = re.fullmatch(BARE_KEY, name) is not None
        return super().key(name) if is_bare else self.literal(QUOTE + name + QUOTE)

    def value_text(self, value: Json) -> str:
        """Return a value as the form writes it."""
        if isinstance(value, str):
            return f"{QUOTE}{value}{QUOTE}"
        if isinstance(value, list):
            return f"[{','.join(map(self.value_text, value))}]"
        if isinstance(value, dict):
            items = sorted(value.items(), key=lambda item: item[0].lower())
            pairs = [f"{key}:{self.value_text(item)}" for key, item in items]
            return f"{{{','.join(pairs)}}}"
        return as_json(value)

    def texts_of(self, argument: Argument) -> list[str]:
        """Return the expressions of a value that is a text."""
        quote = self.literal(QUOTE)
        return [f"{quote} {self.text(shape, QUOTE)}" for shape in argument.texts]
