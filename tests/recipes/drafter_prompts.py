"""Prompts to train a drafter on, made of the standard library's documentation.

Five categories, those of `spd bench`, none of whose own prompts is among them: code, edit,
summarise, reasoning and creative. A prompt is a function of its number and of the running
interpreter's standard library, so the same Python gives the same prompts.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.recipes.demo_corpus import Corpus, build_corpus

CATEGORIES = ("code", "edit", "summarise", "reasoning", "creative")
MAX_FUNCTION_LINES = 14
MAX_TEXT = 420
"""Characters of a text that a prompt quotes, unless others are asked for."""
CODE = (
    "Write a Python function `{name}({arguments})` for this description: {sentence}",
    "Write a Python function that does this: {sentence} Raise ValueError for bad arguments.",
    "Write a short Python script that shows how to use `{module}`. {sentence}",
    "Show an example of `{qualified}` with comments.",
    "Write a Python class `{camel}` with a docstring. Its method {name} does this: {sentence}",
    "Write a unittest.TestCase for a function `{name}({arguments})`. {sentence}",
)
EDITS = (
    "Add type hints to this function and print it again.\n\n{code}",
    "Add a docstring to this function and change nothing else.\n\n{code}",
    "Rename `{old}` to `{new}` everywhere in this function and print the whole function.\n\n{code}",
    "Simplify this function and print the whole function.\n\n{code}",
    "Correct the spelling in this text and change nothing else:\n\n{misspelt}",
    "Rewrite this text so that it is easier to read:\n\n{text}",
    'Replace the word "{word}" by "{other}" in this text:\n\n{text}',
)
SUMMARIES = (
    "Summarise this text in two sentences.\n\n{text}",
    "Summarise this text in one sentence.\n\n{text}",
    "List the main points of this text, one line each.\n\n{text}",
    "Here is the documentation of `{qualified}`. Say what it does.\n\n{text}",
    "What should a user of `{qualified}` watch out for?\n\n{text}",
    "Explain this text to a beginner.\n\n{text}",
)
REASONING = (
    "What does {qualified} do in Python, and when would you use it? Explain step by step.",
    "What is the difference between {qualified} and {rival} in Python?",
    "Why does Python have {qualified}? Give an example.",
    "{first} has {a} {thing}s and gives {b} of them to {second}. {second} then buys {c} more. How"
    " many {thing}s does {second} have? Explain each step.",
    "A {place} sells {a} {thing}s a day at {b} coins each. How much does it earn in {c} days?"
    " Explain.",
    "A train travels {a} kilometres in {b} hours. How long does it take for {c} kilometres? Explain"
    " step by step.",
    "{first}, {second} and {third} stand in a line. {first} is not first. {second} stands behind"
    " {third}. Who stands where? Explain.",
    "All {thing}s in the {place} are {quality}. This {thing} is not {quality}. Is it in the"
    " {place}? Explain your answer.",
    "What are the advantages and disadvantages of a {quality} {thing}?",
    "How do you explain a {quality} {thing} to a child?",
)
CREATIVE = (
    "Write a short story about a {person} who finds a {quality} {thing}.",
    "Write a poem about a {quality} {thing} in the {place}.",
    "Write a dialogue between a {person} and a {other_person} about a {thing}.",
    "Describe a {quality} {place} at night.",
    "Write a letter from a {person} to a {other_person}.",
    "Invent a game that is played with a {thing}. Give its name and its rules.",
    "Write a short advertisement for a {quality} {thing}.",
    "Tell a joke about a {person} and a {thing}.",
    "Write the first paragraph of a novel about a {person} in a {place}.",
    "Write a recipe of a {person} for a {quality} soup.",
)
FIRST_NAMES = """
Maria Tom Lena Paul Nina Omar Julia Max Sara Felix Ida Hugo Clara Leo Mia Jonas
"""
THINGS = """
apple book lamp bicycle key map coin kite ladder mirror piano ring robot shoe stone umbrella
violin wagon candle basket bottle bridge button camera carpet chair cup door drum feather garden
hammer hat jacket kettle letter machine needle notebook ocean painting pencil pillow river rope
sail ship spoon table telescope tent tower tree window
"""
PLACES = """
market desert forest library station castle kitchen school museum island village hospital
theatre farm bakery workshop factory garden airport tunnel valley cave beach office square
"""
PERSONS = """
baker farmer teacher sailor painter doctor pilot gardener tailor musician detective nurse
carpenter student shepherd fisherman cook postman scientist soldier king queen thief astronaut
programmer grandmother child stranger merchant blacksmith
"""
QUALITIES = """
red golden broken old tiny huge silent strange bright dark cold warm heavy wooden hidden
forgotten friendly lonely magic noisy clever slow quick empty precious simple modern famous
dusty gentle
"""


@dataclass(frozen=True)
class Documented:
    """A documented name of the standard library, with its documentation's first paragraph."""

    qualified: str
    text: str

    @property
    def name(self) -> str:
        """Return the name without its module."""
        return self.qualified.rpartition(".")[2]


@dataclass(frozen=True)
class Sources:
    """What prompts are made of."""

    names: Sequence[Documented]
    functions: Sequence[str]
    max_text: int = MAX_TEXT
    """Characters of a text that a prompt quotes, at most."""


def read_sources(corpus: Corpus | None = None, max_text: int = MAX_TEXT) -> Sources:
    """Return documented names and short functions of the training side of the demo's corpus.

    max_text: characters of a text that a prompt quotes, at most.
    """
    corpus = corpus or build_corpus()
    names = [Documented(name, text) for name, text in corpus.answers if len(text) >= 40]
    functions: list[str] = []
    for text in corpus.training:
        functions += _short_functions(text)
    return Sources(names, functions, max_text)


def _short_functions(source: str) -> list[str]:
    """Return the functions of a module that are short enough to be quoted."""
    lines = source.splitlines()
    functions = []
    for node in ast.parse(source).body:
        if not isinstance(node, ast.FunctionDef) or node.end_lineno is None:
            continue
        length = node.end_lineno - node.lineno + 1
        code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        if 4 <= length <= MAX_FUNCTION_LINES and len(code) <= MAX_TEXT:
            functions.append(code)
    return functions


def make_prompt(sources: Sources, number: int) -> tuple[str, str]:
    """Return the category and the text of a prompt."""
    draw = random.Random(f"drafter prompt {number}")
    category = CATEGORIES[number % len(CATEGORIES)]
    return category, MAKERS[category](sources, draw)


def _documented_values(sources: Sources, draw: random.Random) -> dict[str, str]:
    """Return what templates say of a documented name."""
    documented = draw.choice(sources.names)
    sentence = re.split(r"(?<=[.!?]) ", documented.text)[0]
    words = re.findall(r"[a-z]{3,}", documented.text.lower())
    arguments = draw.sample(sorted(set(words)), min(2, len(set(words))))
    return {
        "qualified": documented.qualified,
        "rival": draw.choice(sources.names).qualified,
        "module": documented.qualified.partition(".")[0],
        "name": documented.name,
        "camel": documented.name.title().replace("_", ""),
        "arguments": ", ".join(arguments),
        "sentence": sentence,
        "text": _join_texts(sources, documented, draw),
    }


def _join_texts(sources: Sources, documented: Documented, draw: random.Random) -> str:
    """Return documentation of a name, followed by other names' up to a length drawn."""
    length = draw.randrange(120, sources.max_text)
    text = documented.text
    while len(text) < length:
        text += " " + draw.choice(sources.names).text
    return text[: text.rfind(" ", 0, sources.max_text)] if len(text) > sources.max_text else text


def _worldly_values(draw: random.Random) -> dict[str, str]:
    """Return words and numbers for templates that have nothing to do with Python."""
    first, second, third = draw.sample(FIRST_NAMES.split(), 3)
    person, other_person = draw.sample(PERSONS.split(), 2)
    return {
        "first": first,
        "second": second,
        "third": third,
        "person": person,
        "other_person": other_person,
        "thing": draw.choice(THINGS.split()),
        "place": draw.choice(PLACES.split()),
        "quality": draw.choice(QUALITIES.split()),
        "a": str(draw.randrange(12, 90)),
        "b": str(draw.randrange(2, 12)),
        "c": str(draw.randrange(2, 40)),
    }


def _code(sources: Sources, draw: random.Random) -> str:
    return draw.choice(CODE).format(**_documented_values(sources, draw))


def _edit(sources: Sources, draw: random.Random) -> str:
    values = _documented_values(sources, draw)
    code = draw.choice(sources.functions)
    names = sorted(set(re.findall(r"\b[a-z_]{3,}\b", code)))
    words = sorted(set(re.findall(r"\b[a-z]{4,}\b", values["text"]))) or ["text"]
    return draw.choice(EDITS).format(
        text=values["text"],
        code=code,
        old=draw.choice(names),
        new=draw.choice(words),
        word=draw.choice(words),
        other=draw.choice(THINGS.split()),
        misspelt=_misspell(values["text"], draw),
    )


def _misspell(text: str, draw: random.Random) -> str:
    """Swap two letters inside of every sixth word or so."""
    words = text.split(" ")
    for index, word in enumerate(words):
        if len(word) > 4 and word.isalpha() and draw.random() < 1 / 6:
            at = draw.randrange(1, len(word) - 2)
            words[index] = word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    return " ".join(words)


def _summarise(sources: Sources, draw: random.Random) -> str:
    return draw.choice(SUMMARIES).format(**_documented_values(sources, draw))


def _reasoning(sources: Sources, draw: random.Random) -> str:
    values = _documented_values(sources, draw) | _worldly_values(draw)
    return draw.choice(REASONING).format(**values)


def _creative(sources: Sources, draw: random.Random) -> str:
    return draw.choice(CREATIVE).format(**_worldly_values(draw))


MAKERS: dict[str, Callable[[Sources, random.Random], str]] = {
    "code": _code,
    "edit": _edit,
    "summarise": _summarise,
    "reasoning": _reasoning,
    "creative": _creative,
}
"""Makers of prompts by category."""
