"""The marks of models around their thinking, and the variable that switches it in a chat template.

Marks are recognised by their form: a word for thinking between brackets, as tokens of the
vocabulary or in the text of the template. Only the few that have no such form are listed by name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

_WORD = r"(?:\w+:)?(?:think|thinking|thoughts?|reasoning)(?::\w+)?"
_MARK_FORMS = (
    ("<{}>", "</{}>"),
    ("[{}]", "[/{}]"),
    ("<|START_{}|>", "<|END_{}|>"),
    ("<|begin_of_{}|>", "<|end_of_{}|>"),
    ("<|{}_start|>", "<|{}_end|>"),
)
"""Forms of a word for thinking: the opening and the closing mark."""


@dataclass(frozen=True)
class MarkPair:
    """An opening and a closing mark; `label` is a word that follows the opening mark.

    Where the marks `are_tokens`, special ones, they count anywhere in a reply. Otherwise ordinary
    text could contain them, so they count at its beginning only.
    """

    opening: str
    closing: str
    label: str = ""
    are_tokens: bool = False


@dataclass(frozen=True)
class ThinkingMarks:
    """A model's marks: around thinking, its template's pair first, and around the answer."""

    thinking: tuple[MarkPair, ...]
    answer: tuple[MarkPair, ...] = ()


DEFAULT_MARKS = MarkPair("<think>", "</think>")
"""So common that it counts even where neither template nor vocabulary mentions it."""
GEMMA_MARKS = MarkPair("<|channel>", "<channel|>", label="thought", are_tokens=True)
_FORMLESS_MARKS = (
    GEMMA_MARKS,
    MarkPair("Here is my thought process:", "Here is my response:"),  # Granite 3.2
    MarkPair("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),  # Apriel
)
_ANSWER_MARKS = (
    MarkPair("<|START_RESPONSE|>", "<|END_RESPONSE|>", are_tokens=True),  # Command
    MarkPair("<response>", "</response>"),  # Granite 3.3, ERNIE 4.5
    MarkPair("<answer>", "</answer>"),  # Hunyuan
    MarkPair("[BEGIN FINAL RESPONSE]", "[END FINAL RESPONSE]"),
)
KNOWN_MARKS = ThinkingMarks(
    (
        DEFAULT_MARKS,
        GEMMA_MARKS,
        MarkPair("[THINK]", "[/THINK]", are_tokens=True),  # Magistral, Ministral 3 Reasoning
        MarkPair("<seed:think>", "</seed:think>", are_tokens=True),  # Seed-OSS
        MarkPair("<|START_THINKING|>", "<|END_THINKING|>", are_tokens=True),  # Command A
    ),
    _ANSWER_MARKS[:1],
)
"""Marks that are searched for in a reply of an unknown template and vocabulary."""


def _find_pairs(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the position of every mark in a text, with the opening and closing mark of its pair."""
    for forms in _MARK_FORMS:
        for form in forms:
            before, behind = map(re.escape, form.split("{}"))
            for match in re.finditer(f"{before}({_WORD}){behind}", text, re.IGNORECASE):
                opening, closing = (member.format(match[1]) for member in forms)
                yield match.start(), opening, closing


def find_mark_tokens(names: Collection[str]) -> frozenset[str]:
    """Return the tokens among a vocabulary's names that mark thinking."""
    pairs = [(opening, closing) for _, opening, closing in _find_pairs(" ".join(names))]
    pairs.append((GEMMA_MARKS.opening, GEMMA_MARKS.closing))
    complete_pairs = (pair for pair in pairs if pair[0] in names and pair[1] in names)
    return frozenset(mark for pair in complete_pairs for mark in pair)


def find_thinking_marks(
    template: str, names: Collection[str], special: Collection[str]
) -> ThinkingMarks:
    """Return the marks of a model by its chat template and the names of its added tokens.

    special: the names that are special tokens. One mark of a pair in the template is enough; in the
    vocabulary both are required.
    """

    def pair_of(opening: str, closing: str, label: str = "") -> MarkPair:
        """Return a pair, which is one of tokens if both marks are special."""
        return MarkPair(opening, closing, label, {opening, closing} <= {*special})

    def with_special(pair: MarkPair) -> MarkPair:
        """Return a pair with `are_tokens` as this vocabulary has it."""
        return pair_of(pair.opening, pair.closing, pair.label)

    by_form = {
        (opening, closing): pair_of(opening, closing)
        for _, opening, closing in sorted(_find_pairs(template))
    }
    for _, opening, closing in sorted(_find_pairs("\n".join(names))):
        if opening in names and closing in names:
            by_form.setdefault((opening, closing), pair_of(opening, closing))
    formless = (
        pair for pair in _FORMLESS_MARKS if pair.opening in template or pair.opening in names
    )
    pairs = [*map(with_special, formless), *by_form.values()]
    openings = {pair.opening for pair in pairs}
    defaults = (pair for pair in (DEFAULT_MARKS, GEMMA_MARKS) if pair.opening not in openings)
    pairs += map(with_special, defaults)
    pairs.sort(key=lambda pair: pair.opening not in template and pair.closing not in template)
    answers = (
        pair
        for pair in _ANSWER_MARKS
        if (pair.opening in template and pair.closing in template) or pair.opening in names
    )
    return ThinkingMarks(tuple(pairs), tuple(answers))


_TEMPLATE_CODE = re.compile(r"\{#.*?#\}|\{[{%](.*?)[%}]\}", re.DOTALL)
"""A comment of a template, or its code as the group."""
_REASONING_FIELD = re.compile(
    r"""['"]reasoning(_content)?['"]|get\(\s*['"]thinking|\.(reasoning(_content)?|thinking)\b"""
)
"""Code that reads the thinking of a turn from a field of its message."""
_CHUNK_TEST = re.compile(r"""type['"]?\s*\]?\s*==\s*['"]thinking['"]""")
"""Code that finds the thinking of a turn among the parts of its content."""


def separates_thinking(template: str) -> bool:
    """True if a chat template reads the thinking of a past turn separately from its text."""
    code = (match[1] for match in _TEMPLATE_CODE.finditer(template) if match[1])
    return _CHUNK_TEST.search(template) is not None or any(map(_REASONING_FIELD.search, code))


def make_past_turn(thought: str, text: str, template: str) -> dict[str, object]:
    """Return the fields of a past turn of the model, with its thinking as the template reads it."""
    if _CHUNK_TEST.search(template) and not _REASONING_FIELD.search(template):
        thoughts = [{"type": "thinking", "thinking": thought}] if thought else []
        contents = [{"type": "text", "text": text}] if text or not thought else []
        return {"content": [*thoughts, *contents]}
    return {"content": text, "reasoning_content": thought, "thinking": thought}


THINKING_SWITCHES = ("enable_thinking", "thinking", "thinking_budget", "reasoning", "thinking_mode")
"""Variables of chat templates that switch thinking, the most common name first."""
_SWITCH_VALUES: dict[str, tuple[object, object]] = {
    "thinking_budget": (0, -1),
    "thinking_mode": ("disabled", "enabled"),
}
"""Values of a switch that turn thinking off and on, where they are not false and true."""
_STRING = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
"""A string in a template's code."""


def find_thinking_switch(template: str) -> str | None:
    """Return the variable that switches thinking in a chat template; None where it reads none."""
    code = [_STRING.sub("''", match[1]) for match in _TEMPLATE_CODE.finditer(template) if match[1]]
    return next((name for name in THINKING_SWITCHES if _is_read_first(name, code)), None)


def _is_read_first(name: str, statements: Sequence[str]) -> bool:
    """True if a template's statements read a variable before they set it.

    They come in order, and their strings are emptied. Any use of the name counts as reading it.
    """
    read = re.compile(rf"(?<![.\w]){name}\b(?!\s*=(?!=))")
    assigned = re.compile(rf"-?\s*set\s+{name}\s*=(?!=)")
    for statement in statements:
        target = assigned.match(statement)
        if read.search(statement, target.end() if target else 0):
            return True
        if target:
            return False
    return False


def switch_value(switch: str, thinks: bool) -> object:
    """Return the value of a template's switch with which the model thinks, or does not."""
    return _SWITCH_VALUES.get(switch, (False, True))[thinks]


def opens_thinking(prompt: str, marks: ThinkingMarks) -> bool:
    """True if a rendered prompt, or its end, ends inside thinking that has no text yet."""
    end = prompt.rstrip()
    return any(end.endswith((pair.opening, pair.opening + pair.label)) for pair in marks.thinking)


def closes_thinking(prompt: str, marks: ThinkingMarks) -> bool:
    """True if a rendered prompt, or its end, has closed thinking: the reply is an answer."""
    return prompt.rstrip().endswith(tuple(pair.closing for pair in marks.thinking))


def continues_thinking(prompt: str, marks: ThinkingMarks) -> bool:
    """True if a prompt, or its end, has begun thinking and not closed it, whatever text follows."""
    last_opening = max(prompt.rfind(pair.opening) for pair in marks.thinking)
    last_closing = max(prompt.rfind(pair.closing) for pair in marks.thinking)
    return last_opening > last_closing
