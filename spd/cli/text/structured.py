"""What a reply is made of: the grammar that is asked for, thinking and its budget, and the answer.

Owns the split of a reply into thinking and answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from spd.cli.options import GenerateOptions
from spd.cli.text.output import Console
from spd.cli.text.prompt import Asked, read_text
from spd.errors import IncompatibleError, UsageError

if TYPE_CHECKING:
    from spd.cli.text.job import Vocabulary
    from spd.runtime.engine.request import GrammarText, ThinkingBudget

OPENING, CLOSING = "<think>", "</think>"
SWITCH = "enable_thinking"
TAIL = 16
"""Tokens at the end of a prompt that can hold an open thinking block's beginning."""


def read_grammar(options: GenerateOptions) -> GrammarText | None:
    """The schema, expression or grammar of the flags. Raises UsageError and NotFoundError."""
    from spd.runtime.engine.request import GrammarText

    if (schema := options.schema) is not None:
        is_file = schema.lstrip()[:1] not in ("{", "") and schema.strip() not in ("true", "false")
        text = read_text(schema.removeprefix("@")) if is_file else schema
        try:
            json.loads(text)
        except (ValueError, RecursionError) as error:
            fix = ["""--schema '{"type": "object"}'""", "--schema FILE"]
            raise UsageError(f"--schema is not JSON: {error}", fix=fix) from None
        return GrammarText("schema", text)
    if (grammar := options.grammar) is not None:
        if len(grammar) > 1 and grammar[0] == grammar[-1] == "/":  # a file's name does not end so
            return GrammarText("regex", grammar[1:-1])
        inline = re.search(r"^\s*[?!]*start\b[^\n]*:", grammar, re.MULTILINE) is not None
        return GrammarText("lark", grammar if inline else read_text(grammar))
    return None


def end_of_thinking(vocabulary: Vocabulary, asked: Asked, ids: Sequence[int]) -> int | None:
    """The token behind which a grammar begins; None where the reply begins with the answer.

    A model thinks if its prompt leaves thinking open, or if its chat template can switch thinking, has
    not been told to, and the prompt does not close it.
    """
    tokenizer, template = vocabulary.tokenizer, vocabulary.template
    if tokenizer is None or template is None or not asked.messages:
        return None
    begin, end = tokenizer.token_to_id(OPENING), tokenizer.token_to_id(CLOSING)
    if begin is None or end is None:
        return None
    last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] in (begin, end)), None)
    if last is not None and ids[last] == begin:
        return end
    if last is not None and last >= len(ids) - 4:  # closed where the reply begins: line ends follow
        return None
    wanted = (asked.variables or {}).get(SWITCH, True)
    return end if SWITCH in template.default and wanted else None


def opens_thinking(prompt: str) -> bool:
    """Whether a rendered prompt, or its end, leaves a thinking block open."""
    return prompt.rstrip().endswith(OPENING)


def thinking_budget(
    think: str, vocabulary: Vocabulary, inside: bool, spent: Sequence[int] = ()
) -> ThinkingBudget | None:
    """What --think N leaves for a reply of which `spent` has come; None where there is no limit.

    Raises IncompatibleError for a model whose thinking no single token ends.
    """
    from spd.runtime.engine.request import ThinkingBudget

    if not think.isdigit() or (spent and not inside):
        return None
    begin, end = map(vocabulary.need_tokenizer().token_to_id, (OPENING, CLOSING))
    if end is None:
        raise IncompatibleError(
            f"at most {think} tokens of thinking: for models that end it with a token {CLOSING}",
            reason=["This vocabulary has none."],
            fix=["on, off or hide in place of the number"],
            code="no_thinking",
        )
    left = int(think) - sum(token != begin for token in spent)
    return ThinkingBudget(max(0, left), end, begin, inside)


def note_thinking(console: Console, think: str, vocabulary: Vocabulary) -> None:
    """Say that a chat template cannot be asked for thinking or for none, where it is asked."""
    template = vocabulary.template
    if think in ("on", "off") and template is not None and SWITCH not in template.default:
        console.note(f"this chat template has no {SWITCH}: thinking cannot be switched on or off")


class ThinkingSplitter:
    """Cuts a growing reply into thinking and answer; a <think> counts only at the very beginning.

    `inside` says that the prompt left thinking open; None that nothing is thinking. `tags` are the model's.
    """

    def __init__(self, inside: bool | None, tags: tuple[str, str] = (OPENING, CLOSING)) -> None:
        self._tags = tags
        self.part: Literal["beginning", "thinking", "answer"] = "answer" if inside is None else "beginning"
        self._inside, self._held, self._fresh = bool(inside), "", False

    @property
    def thinking(self) -> bool:
        """Whether what comes next is thinking."""
        return self._inside if self.part == "beginning" else self.part == "thinking"

    def feed(self, text: str, *, final: bool = False) -> list[tuple[bool, str]]:
        """(is thinking, text) in order; what may be a part of a tag is held back until it is known."""
        opening, closing = self._tags
        self._held += text
        parts: list[tuple[bool, str]] = []
        if self.part == "beginning":
            begun = self._held.lstrip()
            if not final and opening.startswith(begun):
                return parts
            if begun.startswith(opening):
                self._inside, self._held = True, begun[len(opening) :]
            self.part, self._fresh = "thinking" if self._inside else "answer", self._inside
        if self.part == "thinking":
            thought, tag, rest = self._held.partition(closing)
            keep = 0 if tag or final else tail_of(closing, thought)
            self._held = rest if tag else thought[len(thought) - keep :]
            parts.append((True, self._without_first_newlines(thought[: len(thought) - keep])))
            if tag:
                self.part, self._fresh = "answer", True
        if self.part == "answer":
            parts.append((False, self._without_first_newlines(self._held)))
            self._held = ""
        return parts

    def _without_first_newlines(self, text: str) -> str:
        if self._fresh:
            text = text.lstrip("\n")
            self._fresh = not text
        return text


def tail_of(tag: str, text: str) -> int:
    """Length of the longest end of `text` that begins `tag`."""
    return next((size for size in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:size])), 0)


def parted(text: str, inside: bool | None = False) -> tuple[str | None, str]:
    """The thinking of a whole reply, None where it has none, and its answer; `inside` as above."""
    parts = ThinkingSplitter(inside).feed(text, final=True)
    thoughts = [part for thinking, part in parts if thinking]
    answer = "".join(part for thinking, part in parts if not thinking)
    return "".join(thoughts).strip("\n") if thoughts else None, answer
