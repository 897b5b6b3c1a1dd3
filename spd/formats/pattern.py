"""Regular expressions of a model folder, matched in bounded time.

Python's `re` backtracks: a pattern of a hundred characters can keep it busy for ever. Here a
pattern is applied to all positions of a text at once. A set of positions is a whole number whose
bit i stands for position i, so each part of a pattern maps the positions where it may begin to
those where it may end, and nothing is tried twice. The result is that of `re.match`. Parts that
depend on the order of attempts are refused: references to groups, atomic groups, possessive
repetitions; and so are flags.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from spd.errors import CheckpointError
from spd.formats.json_file import display_text

MAX_NESTING = 40
"""Groups within groups of a pattern."""
MAX_STEPS = 15_000_000
"""Steps of all patterns of a folder together: some seconds.

One pattern for the 70 thousand matrices of the largest mixtures of experts takes about a fifth of
them.
"""
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|0[0-7]{0,2}|[dDsSwWafnrtv]|[^0-9A-Za-z])",
    re.DOTALL,
)
_CLASS = re.compile(r"\[\^?(?:\\.|[^\\\]])(?:\\.|[^\\\]])*\]", re.DOTALL)
_FIRST_BRACKET = re.compile(r"\[\^?\](?:\\.|[^\\\]])*\]", re.DOTALL)
_COUNT = re.compile(r"\{([0-9]*)(,?)([0-9]*)\}")
_GROUP = re.compile(r"\((?:\?(?:(?P<lookaround><?[=!])|:|P<[A-Za-z_][A-Za-z_0-9]*>))?")
_WORDS = re.compile(r"\w")
"""The parts of a pattern: an escape, classes, a repetition, a group's beginning; a letter."""


class PatternError(Exception):
    """A pattern that cannot be matched here; the text is the reason."""


@dataclass
class StepBudget:
    """The steps that the patterns of a folder may take from now on."""

    remaining: int = MAX_STEPS

    def spend(self, steps: int) -> None:
        """Count steps. Raises PatternError where none are left."""
        self.remaining -= steps
        if self.remaining < 0:
            raise PatternError("takes too long to match")


class Subject:
    """A text to match, with the positions of its characters."""

    def __init__(self, text: str, budget: StepBudget) -> None:
        self.text = text
        self.budget = budget
        budget.spend(len(text) * (1 + len(text) // 64))  # a hostile name may have a million letters
        self.all_positions = (1 << (len(text) + 1)) - 1  # the end included
        self._character_positions: dict[str, int] = {}
        for index, character in enumerate(text):
            self._character_positions[character] = (
                self._character_positions.get(character, 0) | 1 << index
            )
        self._class_positions: dict[str, int] = {}
        self.tested: dict[Matcher, int] = {}
        """The positions where the inside of each lookahead was tested."""
        self.passed: dict[Matcher, int] = {}
        """The positions among them from where it matches."""

    def positions_of(self, single: re.Pattern[str]) -> int:
        """Return the positions of the characters that match a pattern of one character."""
        positions = self._class_positions.get(single.pattern)
        if positions is None:
            positions = 0
            for character, positions_of_character in self._character_positions.items():
                if single.match(character):
                    positions |= positions_of_character
            self._class_positions[single.pattern] = positions
        return positions


Matcher = Callable[[Subject, int], int]
"""Maps the positions where a part of a pattern may begin to those where it may end."""


@dataclass(frozen=True)
class Pattern:
    """A pattern of a file; where: the file and the key that messages begin with.

    Raises CheckpointError for a pattern that is not supported.
    """

    text: str
    where: str
    _matcher: Matcher = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            matcher = _Parser(self.text).parse()
        except PatternError as error:
            raise self._error(str(error)) from None
        object.__setattr__(self, "_matcher", matcher)

    def __reduce__(self) -> tuple[type[Pattern], tuple[str, str]]:
        """Pickle the text alone: each rank of a plan parses it again."""
        return Pattern, (self.text, self.where)

    def matches(self, subject: Subject) -> bool:
        """True if `re.match` matches. Raises CheckpointError when the budget is spent."""
        try:
            subject.budget.spend(1)
            return self._matcher(subject, 1) != 0
        except PatternError as error:
            raise self._error(str(error)) from None

    def _error(self, reason: str) -> CheckpointError:
        """Return the error that names the pattern and its place."""
        return CheckpointError(f"{self.where}: {display_text(self.text)} {reason}")


class _Parser:
    """Compiles the text of a pattern to a `Matcher`.

    Each method moves `position` behind its part.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def parse(self) -> Matcher:
        """Return the matcher of the full text. Raises PatternError."""
        matcher = self._parse_alternatives(0)
        if self.position < len(self.text):
            raise PatternError("is no pattern: unbalanced parenthesis")
        return matcher

    def _parse_alternatives(self, depth: int) -> Matcher:
        """Return the matcher of sequences between bars. depth: groups around them."""
        if depth > MAX_NESTING:
            raise PatternError(f"is nested more than {MAX_NESTING} deep")
        branches = [self._parse_sequence(depth)]
        while self.text[self.position : self.position + 1] == "|":
            self.position += 1
            branches.append(self._parse_sequence(depth))
        return branches[0] if len(branches) == 1 else _any_matcher(branches)

    def _parse_sequence(self, depth: int) -> Matcher:
        """Return the matcher of all items up to a bar, a closing parenthesis or the end."""
        matchers: list[Matcher] = []
        while self.position < len(self.text) and self.text[self.position] not in "|)":
            matchers.append(self._parse_repeated(depth))
        return _sequence_matcher(matchers)

    def _parse_repeated(self, depth: int) -> Matcher:
        """Return the matcher of one item with the repetition behind it."""
        begin = self.position
        item = self._parse_item(depth)
        matcher = _character_matcher(item) if isinstance(item, re.Pattern) else item
        count = self._parse_count()
        if count is None:
            return matcher
        low, high = count
        if self.text[begin] in "^$" or self.text[begin : begin + 2] in _ASSERTIONS:
            raise PatternError("is no pattern: nothing to repeat")
        following = self.text[self.position : self.position + 1]
        if following == "?":  # lazy: the order of attempts changes, not whether there is a match
            self.position += 1
        elif following == "+":
            raise PatternError("has a possessive repetition, which is not supported")
        if self._parse_count() is not None:
            raise PatternError("is no pattern: multiple repeat")
        if high is None and isinstance(item, re.Pattern):
            return _run_matcher(item, low)
        return _repetition_matcher(matcher, low, high)

    def _parse_count(self) -> tuple[int, int | None] | None:
        """Return how often an item comes, at least and at most (None: any number of times).

        None without a repetition.
        """
        sign = self.text[self.position : self.position + 1]
        if sign in ("*", "+", "?"):
            self.position += 1
            return (1 if sign == "+" else 0), (1 if sign == "?" else None)
        braces = _COUNT.match(self.text, self.position)
        if braces is None or braces[0] == "{}":  # a brace that stands for itself
            return None
        low, comma, high = braces.groups()
        if len(low) > 9 or len(high) > 9:
            raise PatternError("repeats too often")
        self.position = braces.end()
        minimum = int(low or 0)
        maximum = int(high) if high else None if comma else minimum
        if maximum is not None and maximum < minimum:
            raise PatternError("is no pattern: min repeat greater than max repeat")
        return minimum, maximum

    def _parse_item(self, depth: int) -> Matcher | re.Pattern[str]:
        """Return the matcher of a group or an assertion, or the pattern of a single character."""
        character = self.text[self.position]
        if character == "(":
            return self._parse_group(depth)
        if character == "[":
            return self._compile_match(
                _FIRST_BRACKET.match(self.text, self.position)
                or _CLASS.match(self.text, self.position)
            )
        if character == "\\":
            assertion = _ASSERTIONS.get(self.text[self.position : self.position + 2])
            if assertion is not None:
                self.position += 2
                return assertion
            return self._compile_match(_ESCAPE.match(self.text, self.position))
        if character in "*+?":
            raise PatternError("is no pattern: nothing to repeat")
        self.position += 1
        if character in "^$":
            return _ASSERTIONS[character]
        return re.compile("." if character == "." else re.escape(character))

    def _compile_match(self, match: re.Match[str] | None) -> re.Pattern[str]:
        """Compile the pattern of one character that was matched at this position."""
        if match is None:
            kind = "a class" if self.text[self.position] == "[" else "an escape"
            raise PatternError(f"has {kind} that is not supported, at character {self.position}")
        self.position = match.end()
        try:
            return re.compile(match[0])
        except re.error as error:
            raise PatternError(f"is no pattern: {error}") from None

    def _parse_group(self, depth: int) -> Matcher:
        """Return the matcher of a group or of a look ahead or behind."""
        opened = _GROUP.match(self.text, self.position)
        if opened is None or self.text[opened.end() : opened.end() + 1] == "?":
            raise PatternError(f"has a group that is not supported, at character {self.position}")
        self.position = opened.end()
        matcher = self._parse_alternatives(depth + 1)
        if self.text[self.position : self.position + 1] != ")":
            raise PatternError("is no pattern: unbalanced parenthesis")
        self.position += 1
        lookaround = opened["lookaround"]
        return matcher if lookaround is None else _lookaround_matcher(matcher, lookaround)


def _character_matcher(single: re.Pattern[str]) -> Matcher:
    """Return the matcher of one character."""

    def part(subject: Subject, begins: int) -> int:
        """Return the positions behind those of matching characters."""
        return (begins & subject.positions_of(single)) << 1

    return part


def _run_matcher(single: re.Pattern[str], low: int) -> Matcher:
    """Return the matcher of `low` or more characters of one kind."""

    def part(subject: Subject, begins: int) -> int:
        """Return the ends of runs of all lengths."""
        run = subject.positions_of(single)
        for _ in range(low):
            begins = (begins & run) << 1
            if not begins:
                return 0
            subject.budget.spend(1)
        # A carry runs from each begin through the characters of its kind to the place behind them.
        return begins | ((run + (begins & run)) ^ run)

    return part


def _repetition_matcher(body: Matcher, low: int, high: int | None) -> Matcher:
    """Return the matcher of `low` to `high` repetitions; None is any number of them."""

    def part(subject: Subject, begins: int) -> int:
        """Apply the body repeatedly, each time to new positions only."""
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


def _sequence_matcher(matchers: Sequence[Matcher]) -> Matcher:
    """Return the matcher of parts that follow each other."""

    def sequence(subject: Subject, begins: int) -> int:
        """Apply each part to where the one before ends."""
        subject.budget.spend(1)
        for matcher in matchers:
            begins = matcher(subject, begins)
            if not begins:
                return 0
            subject.budget.spend(1)
        return begins

    return sequence


def _any_matcher(branches: Sequence[Matcher]) -> Matcher:
    """Return the matcher of alternatives."""

    def part(subject: Subject, begins: int) -> int:
        """Apply every branch to the same positions."""
        ends = 0
        for branch in branches:
            ends |= branch(subject, begins)
        return ends

    return part


def _lookaround_matcher(inner: Matcher, lookaround: str) -> Matcher:
    """Return the matcher that looks ahead or behind, and takes no characters."""
    is_positive = lookaround.endswith("=")

    def ahead(subject: Subject, begins: int) -> int:
        """Return the positions where the inner matcher matches; if negative, where it fails.

        Each position is tested once in a text: nested lookaheads would test it again and again.
        """
        untested = begins & ~subject.tested.get(inner, 0)
        while untested:
            begin = untested & -untested
            untested ^= begin
            if inner(subject, begin):
                subject.passed[inner] = subject.passed.get(inner, 0) | begin
        subject.tested[inner] = subject.tested.get(inner, 0) | begins
        passed = subject.passed.get(inner, 0)
        return begins & passed if is_positive else begins & ~passed

    def behind(subject: Subject, begins: int) -> int:
        """Return the positions where the inner matcher ends; if negative, where it does not."""
        ends = inner(subject, subject.all_positions)
        return begins & ends if is_positive else begins & ~ends

    return behind if lookaround.startswith("<") else ahead


def _at_start(subject: Subject, begins: int) -> int:
    """Return the beginning of the text if it is among the positions."""
    return begins & 1


def _at_end(subject: Subject, begins: int) -> int:
    """Return the end of the text if it is among the positions."""
    return begins & (1 << len(subject.text))


def _at_last_line_end(subject: Subject, begins: int) -> int:
    """Return those of the positions that are the end, or before a newline that ends the text."""
    end = 1 << len(subject.text)
    return begins & (end | (end >> 1 if subject.text.endswith("\n") else 0))


def _word_border(subject: Subject, begins: int) -> int:
    """Return those of the positions between a letter of a word and anything else."""
    words = subject.positions_of(_WORDS)
    return begins & (words ^ (words << 1))


def _no_word_border(subject: Subject, begins: int) -> int:
    """Return those of the positions that are no border of a word."""
    if not subject.text:  # as in Python before 3.14
        return 0
    return begins & ~_word_border(subject, begins)


_ASSERTIONS: dict[str, Matcher] = {
    "^": _at_start,
    "$": _at_last_line_end,
    "\\A": _at_start,
    "\\Z": _at_end,
    "\\b": _word_border,
    "\\B": _no_word_border,
}
"""Matchers that take no characters, by their text in a pattern."""
