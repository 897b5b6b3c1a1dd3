"""Structured output from the command line: the grammar that is asked for, and where thinking ends."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from spd.cli.batch_options import GrammarOptions
from spd.cli.encode import Vocabulary
from spd.cli.options import as_utf8
from spd.cli.prompt import Asked, read_text
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.formats.tokenizer import Tokenizer
    from spd.runtime.request import GrammarText

THINK, END_OF_THINKING = "<think>", "</think>"


def thinking_marks(tokenizer: Tokenizer) -> tuple[int | None, int | None]:
    """The ids of the tokens that begin and end thinking, where the vocabulary has them."""
    return tokenizer.token_to_id(THINK), tokenizer.token_to_id(END_OF_THINKING)


def read_grammar(options: GrammarOptions) -> GrammarText | None:
    """The schema, expression or grammar of the flags. Raises UsageError and NotFoundError."""
    from spd.runtime.request import GrammarText

    if options.schema is not None:
        text = options.schema if _is_path(options.schema) else as_utf8(options.schema)
        if _is_path(text):
            text = read_text(text.removeprefix("@"))
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"--schema is not JSON: {error}", fix=["""--schema '{"type": "object"}'""", "--schema FILE"]
            ) from None
        return GrammarText("schema", text)
    if options.regex is not None:
        return GrammarText("regex", options.regex)
    if options.grammar is not None:
        inline = re.search(r"^\s*[?!]*start\b[^\n]*:", options.grammar, re.MULTILINE) is not None
        return GrammarText("lark", as_utf8(options.grammar) if inline else read_text(options.grammar))
    return None


def _is_path(schema: str) -> bool:
    """Whether --schema names a file."""
    return schema.lstrip()[:1] not in ("{", "") and schema.strip() not in ("true", "false")


def end_of_thinking(vocabulary: Vocabulary, asked: Asked, ids: Sequence[int]) -> int | None:
    """The token behind which a grammar begins; None where the reply begins with the answer.

    A model thinks if its prompt leaves thinking open, or if its chat template can switch thinking, has
    not been told to, and the prompt does not close it.
    """
    tokenizer, template = vocabulary.tokenizer, vocabulary.template
    if tokenizer is None or template is None or not asked.messages:
        return None
    begin, end = thinking_marks(tokenizer)
    if begin is None or end is None:
        return None
    for token in reversed(ids):
        if token in (begin, end):
            at = len(ids) - 1 - list(reversed(ids)).index(token)
            if token == begin:
                return end
            if at >= len(ids) - 4:  # closed where the reply begins: nothing but line ends follows
                return None
            break
    wanted = (asked.variables or {}).get("enable_thinking", True)
    return end if "enable_thinking" in template.source.default and wanted else None
