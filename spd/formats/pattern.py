"""Regular expressions that a model folder brings, matched in bounded time.

Python's `re` backtracks: a pattern of a hundred characters can keep it busy for ever. Here a pattern
is applied to all positions of a text at once. A set of positions is a whole number whose bit i stands
for position i, so each part of a pattern maps the positions where it may begin to those where it may
end, and nothing is tried twice. The result is that of `re.match`. What depends on the order of
attempts is refused: references to groups, atomic groups, possessive repetitions; and so are flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spd.errors import CheckpointError
from spd.formats.json_file import display_text

MAX_NESTING = 40
MAX_STEPS = 15_000_000
"""Steps that all patterns of a folder may take together: some seconds. One pattern for the 70 thousand
matrices of the largest mixtures of experts takes about a fifth of them."""
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|0[0-7]{0,2}|[dDsSwWafnrtv]|[^0-9A-Za-z])",
    re.DOTALL,
)
_CLASS = re.compile(r"\[\^?(?:\\.|[^\\\]])(?:\\.|[^\\\]])*\]", re.DOTALL)
_FIRST_BRACKET = re.compile(r"\[\^?\](?:\\.|[^\\\]])*\]", re.DOTALL)
_COUNT = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_GROUP = re.compile(r"\((?:\?(?:(?P<around><?[=!])|:|P<[A-Za-z_][A-Za-z_0-9]*>))?")
_WORDS = re.compile(r"\w")


class PatternError(Exception):
    """Why a pattern cannot be matched here, in words."""


@dataclass
class StepBudget:
    """How many steps the patterns of a folder may still take."""

    left: int = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Count steps. Raises PatternError where none are left."""
        self.left -= steps
        if self.left < 0:
            raise PatternError("takes too long to match")


class Subject:
    """A text to match, with the positions of its characters."""

    def __init__(self, text: str, budget: StepBudget) -> None:
        self.text = text
        self.budget = budget
        budget.spend(len(text) * (1 + len(text) // 64))  # a hostile name may have a million letters
        self.positions = (1 << (len(text) + 1)) - 1  # all of them, the end included
        self._places: dict[str, int] = {}
        for index, character in enumerate(text):
            self._places[character] = self._places.get(character, 0) | 1 << index
        self._found: dict[str, int] = {}
        self.tested: dict[Part, int] = {}
        """The positions where the inside of each lookahead was tried."""
        self.passed: dict[Part, int] = {}
        """Those of them from where it matches."""

    def places(self, single: re.Pattern[str]) -> int:
        """Return the positions of the characters that match a pattern of one character."""
        found = self._found.get(single.pattern)
        if found is None:
            found = 0
            for character, places in self._places.items():
                if single.match(character):
                    found |= places
            self._found[single.pattern] = found
        return found


Part = Callable[[Subject, int], int]
"""Maps the positions where a part of a pattern may begin to those where it may end."""


@dataclass(frozen=True)
class Pattern:
    """A pattern of a file. where: the file and the key that messages begin with."""

    text: str
    where: str
    _part: Part = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            part = _Parser(self.text).parse()
        except PatternError as error:
            raise self._refused(str(error)) from None
        object.__setattr__(self, "_part", part)

    def __reduce__(self) -> tuple[type[Pattern], tuple[str, str]]:
        """Pickle the text alone: each rank of a plan parses it again."""
        return Pattern, (self.text, self.where)

    def matches(self, subject: Subject) -> bool:
        """True if `re.match` would find it at the beginning. Raises CheckpointError without steps left."""
        try:
            subject.budget.spend(1)
            return self._part(subject, 1) != 0
        except PatternError as error:
            raise self._refused(str(error)) from None

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {display_text(self.text)} {why}")


class _Parser:
    """Makes a `Part` of the text of a pattern."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def parse(self) -> Part:
        """Return the part that the whole text stands for. Raises PatternError."""
        part = self._alternatives(0)
        if self.at < len(self.text):
            raise PatternError("is no pattern: unbalanced parenthesis")
        return part

    def _alternatives(self, depth: int) -> Part:
        if depth > MAX_NESTING:
            raise PatternError(f"is nested more than {MAX_NESTING} deep")
        branches = [self._sequence(depth)]
        while self.text[self.at : self.at + 1] == "|":
            self.at += 1
            branches.append(self._sequence(depth))
        return branches[0] if len(branches) == 1 else _any_of(branches)

    def _sequence(self, depth: int) -> Part:
        parts: list[Part] = []
        while self.at < len(self.text) and self.text[self.at] not in "|)":
            parts.append(self._repeated(depth))
        return _one_after_another(parts)

    def _repeated(self, depth: int) -> Part:
        """Read one item and the repetition behind it."""
        begin = self.at
        item = self._item(depth)
        part = _single(item) if isinstance(item, re.Pattern) else item
        count = self._count()
        if count is None:
            return part
        low, high = count
        if self.text[begin] in "^$" or self.text[begin : begin + 2] in _PLACES:
            raise PatternError("is no pattern: nothing to repeat")
        following = self.text[self.at : self.at + 1]
        if following == "?":  # lazy: the order of attempts changes, not whether there is a match
            self.at += 1
        elif following == "+":
            raise PatternError("has a possessive repetition, which is not supported")
        if self._count() is not None:
            raise PatternError("is no pattern: multiple repeat")
        if high is None and isinstance(item, re.Pattern):
            return _run(item, low)
        return _repetition(part, low, high)

    def _count(self) -> tuple[int, int | None] | None:
        """Read what stands behind an item: how often it comes, at least and at most."""
        sign = self.text[self.at : self.at + 1]
        if sign in ("*", "+", "?"):
            self.at += 1
            return (1 if sign == "+" else 0), (1 if sign == "?" else None)
        braces = _COUNT.match(self.text, self.at)
        if braces is None or braces[0] == "{}":  # a brace that stands for itself
            return None
        low, comma, high = braces.groups()
        if len(low) > 9 or len(high) > 9:
            raise PatternError("repeats too often")
        self.at = braces.end()
        least = int(low or 0)
        most = int(high) if high else None if comma else least
        if most is not None and most < least:
            raise PatternError("is no pattern: min repeat greater than max repeat")
        return least, most

    def _item(self, depth: int) -> Part | re.Pattern[str]:
        character = self.text[self.at]
        if character == "(":
            return self._group(depth)
        if character == "[":
            return self._slice(
                _FIRST_BRACKET.match(self.text, self.at) or _CLASS.match(self.text, self.at)
            )
        if character == "\\":
            place = _PLACES.get(self.text[self.at : self.at + 2])
            if place is not None:
                self.at += 2
                return place
            return self._slice(_ESCAPE.match(self.text, self.at))
        if character in "*+?":
            raise PatternError("is no pattern: nothing to repeat")
        self.at += 1
        if character in "^$":
            return _PLACES[character]
        return re.compile("." if character == "." else re.escape(character))

    def _slice(self, found: re.Match[str] | None) -> re.Pattern[str]:
        """Compile the pattern of one character that was found here."""
        if found is None:
            kind = "a class" if self.text[self.at] == "[" else "an escape"
            raise PatternError(f"has {kind} that is not supported, at character {self.at}")
        self.at = found.end()
        try:
            return re.compile(found[0])
        except re.error as error:
            raise PatternError(f"is no pattern: {error}") from None

    def _group(self, depth: int) -> Part:
        opened = _GROUP.match(self.text, self.at)
        if opened is None or self.text[opened.end() : opened.end() + 1] == "?":
            raise PatternError(f"has a group that is not supported, at character {self.at}")
        self.at = opened.end()
        part = self._alternatives(depth + 1)
        if self.text[self.at : self.at + 1] != ")":
            raise PatternError("is no pattern: unbalanced parenthesis")
        self.at += 1
        around = opened["around"]
        return part if around is None else _look(part, around)


def _single(single: re.Pattern[str]) -> Part:
    def part(subject: Subject, begins: int) -> int:
        return (begins & subject.places(single)) << 1

    return part


def _run(single: re.Pattern[str], low: int) -> Part:
    """Return the part that takes at least `low` characters of one kind, and as many more as there are."""

    def part(subject: Subject, begins: int) -> int:
        """Take all lengths of a run."""
        places = subject.places(single)
        for _ in range(low):
            begins = (begins & places) << 1
            if not begins:
                return 0
            subject.budget.spend(1)
        # A carry runs from each begin through the characters of its kind to the place behind them.
        return begins | ((places + (begins & places)) ^ places)

    return part


def _repetition(body: Part, low: int, high: int | None) -> Part:
    def part(subject: Subject, begins: int) -> int:
        """Apply the body again and again, each time to new positions only."""
        for _ in range(low):
            subject.budget.spend(1)
            begins = body(subject, begins)
            if not begins:
                return 0
        reached = begins
        count = low
        while begins and (high is None or count < high):
            subject.budget.spend(1)
            begins = body(subject, begins) & ~reached
            reached |= begins
            count += 1
        return reached

    return part


def _one_after_another(parts: Sequence[Part]) -> Part:
    def sequence(subject: Subject, begins: int) -> int:
        """Apply each part to where the one before ends."""
        subject.budget.spend(1)
        for part in parts:
            begins = part(subject, begins)
            if not begins:
                return 0
            subject.budget.spend(1)
        return begins

    return sequence


def _any_of(branches: Sequence[Part]) -> Part:
    def part(subject: Subject, begins: int) -> int:
        """Apply every branch to the same positions."""
        ends = 0
        for branch in branches:
            ends |= branch(subject, begins)
        return ends

    return part


def _look(inner: Part, around: str) -> Part:
    """Return the part that looks ahead or behind, and takes no characters."""
    wanted = around.endswith("=")

    def ahead(subject: Subject, begins: int) -> int:
        """Keep the positions from where the inner part matches, or does not.

        Each position is tried once for a text, or lookaheads within lookaheads would multiply.
        """
        rest = begins & ~subject.tested.get(inner, 0)
        while rest:
            begin = rest & -rest
            rest ^= begin
            if inner(subject, begin):
                subject.passed[inner] = subject.passed.get(inner, 0) | begin
        subject.tested[inner] = subject.tested.get(inner, 0) | begins
        passed = subject.passed.get(inner, 0)
        return begins & passed if wanted else begins & ~passed

    def behind(subject: Subject, begins: int) -> int:
        ends = inner(subject, subject.positions)
        return begins & ends if wanted else begins & ~ends

    return behind if around.startswith("<") else ahead


def _at_begin(subject: Subject, begins: int) -> int:
    return begins & 1


def _at_end(subject: Subject, begins: int) -> int:
    return begins & (1 << len(subject.text))


def _at_last_line_end(subject: Subject, begins: int) -> int:
    end = 1 << len(subject.text)
    return begins & (end | (end >> 1 if subject.text.endswith("\n") else 0))


def _word_border(subject: Subject, begins: int) -> int:
    words = subject.places(_WORDS)
    return begins & (words ^ (words << 1))


def _no_word_border(subject: Subject, begins: int) -> int:
    if not subject.text:  # as in Python before 3.14
        return 0
    return begins & ~_word_border(subject, begins)


_PLACES: dict[str, Part] = {
    "^": _at_begin,
    "$": _at_last_line_end,
    "\\A": _at_begin,
    "\\Z": _at_end,
    "\\b": _word_border,
    "\\B": _no_word_border,
}
"""Parts that take no characters, by how they are written."""
