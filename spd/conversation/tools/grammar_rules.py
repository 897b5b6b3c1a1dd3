"""The rules of a Lark grammar while it is written: equal expressions share one rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from spd.conversation.channels import lark_literal
from spd.runtime import JsonObject
from spd.runtime.engine.request import JSON_STYLE

GAP = "GAP: /[ \\n]{0,9}/"
"""The rule of blanks between marks, of which some templates of one form write more than others."""

STYLE: JsonObject = {**JSON_STYLE, "json_allow_general_unicode_escapes": True}
"""Options of values in JSON: some templates write letters as `\\u00e4`."""
LOOSE_STYLE: JsonObject = {**STYLE, "lenient": True, "coerce_one_of": True}
"""The same options with parts of a schema ignored that no grammar can constrain."""


def styled(schema: JsonObject, *, is_loose: bool) -> JsonObject:
    """Return a schema with the options of its value's notation, unless it has its own."""
    return {"x-guidance": LOOSE_STYLE if is_loose else STYLE, **schema}


class GrammarRules:
    """Rules by their expressions.

    Functions have arguments of the same types, so most rules are shared.
    """

    def __init__(self) -> None:
        self._names: dict[tuple[str, str], str] = {}
        self._pending: list[tuple[str, Callable[[], str]]] = []
        self.lines: list[str] = []
        """Each rule as Lark writes it."""

    def rule(self, kind: str, expression: str, options: str = "") -> str:
        """Return the name of the rule with an expression, which is added if it is new.

        kind: the beginning of its name; a capital letter makes it a terminal. options: what Lark
        has between name and colon.
        """
        return self.recursive_rule(kind, f"{options} {expression}", lambda: expression, options)

    def recursive_rule(
        self, kind: str, key: str, expression: Callable[[], str], options: str = ""
    ) -> str:
        """Return the name of the rule with a key, added if it is new; it may refer to itself."""
        name = self._names.get((kind, key))
        if name is None:
            name = f"{kind}_{len(self._names)}"
            self._names[kind, key] = name
            self.lines.append(f"{name}{options}: {expression()}")
        return name

    def pending_rule(self, kind: str, key: str, expression: Callable[[], str]) -> str:
        """Return the name of the rule with a key, whose expression `finish_pending` writes.

        Chains of such rules may be longer than Python's stack.
        """
        name = self._names.get((kind, key))
        if name is None:
            name = f"{kind}_{len(self._names)}"
            self._names[kind, key] = name
            self._pending.append((name, expression))
        return name

    def finish_pending(self) -> None:
        """Append the rules that are pending to `lines`, and those that they need."""
        while self._pending:
            name, expression = self._pending.pop()
            self.lines.append(f"{name}: {expression()}")


def marks(text: str, tokens: Mapping[str, int]) -> str:
    """Return the expression of marks, with any few blanks where there are line breaks."""
    parts = (lark_literal(part, tokens) for part in re.split(r"\s*\n\s*", text))
    return " GAP ".join(parts)


def regex(expression: str) -> str:
    """Return an expression as Lark writes it, between slashes that are escaped within."""
    escaped = re.sub(r"\\.|/", lambda match: "\\/" if match[0] == "/" else match[0], expression)
    return "/" + escaped.replace("\n", "\\n") + "/"
