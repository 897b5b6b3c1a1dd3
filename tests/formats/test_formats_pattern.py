"""Patterns of files: results of `re.match` in bounded time, or a refusal with the pattern."""

from __future__ import annotations

import random
import re
import time

import pytest

from spd.errors import CheckpointError
from spd.formats.pattern import Pattern, StepBudget, Subject

MODULES = (
    "model.layers.0.self_attn.q_proj",
    "model.layers.17.mlp.experts.103.gate_proj",
    "model.layers.3.mlp.shared_expert.down_proj",
    "model.language_model.layers.3.mlp.up_proj",
    "language_model.model.layers.61.self_attn.kv_b_proj",
    "mtp.layers.0.mlp.gate",
    "lm_head",
)
PUBLISHED = (
    r".*self_attn\.[qk]_proj$",
    r".*\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    r".*mlp.*",
    r"^model\.layers\.(?:[0-9]|1[0-9])\..*",
    r"(?!.*(lm_head|mlp\.gate$)).*",
    r".*layers\.\d{1,2}\.(self_attn|mlp)\..+_proj",
    r"model\.layers\.(?!0\.)\d+\.(?:mlp|self_attn)\.",
    r".*(?<!shared_expert)\.down_proj",
    r"^(?=.*experts)(?!.*shared).*$",
    r".*\.(q|k|v|o)_proj\b",
    r"model[.]layers[.][^.]+[.]mlp[.]",
    r"(?P<rest>.*)gate",
    r"lm_head",
    "",
)
HOSTILE = (
    ".*" * 25 + "xyz",
    "(?:.?){40}" + "q" * 40,
    "(a+)+$",
    "(?:[a-z_.0-9]|m)*$1",
    "(?:(?:(?:.{0,99}){0,99}){0,99}){0,99}q",
    "(?:(?:.*)*)*q",
    "(?:|.)*(?:|.)*(?:|.)*q",
    "(?:){4000000}",
    "(?=.*.*.*q)*" * 3,
    "(?:(?!.*.*.*.*q).)*q",
    "(?:a|b|c|.)*" * 200 + "q",
    "(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)(.*)\\.q$",
)


def matches(pattern: str, text: str) -> bool:
    return Pattern(pattern, "config.json: targets").matches(Subject(text, StepBudget()))


@pytest.mark.parametrize("pattern", PUBLISHED)
def test_published_patterns_match_what_re_matches(pattern: str) -> None:
    results = {name: matches(pattern, name) for name in MODULES}
    assert results == {name: re.match(pattern, name) is not None for name in MODULES}


def random_pattern(rng: random.Random, depth: int) -> str:
    """Return a random pattern over a small alphabet."""
    atoms = ["a", "b", ".", r"\.", "[ab]", "[^a]", r"\d", r"\w", "[]a]", "[^]b]", r"[a\d.-]", ""]
    form = rng.randrange(8) if depth else 0
    if form <= 1:
        return rng.choice(atoms)
    inner = random_pattern(rng, depth - 1)
    other = random_pattern(rng, depth - 1)
    count = rng.choice(["*", "+", "?", "{2}", "{1,2}", "{,2}", "{1,}", "{,}", "*?", "+?", "??"])
    lookbehind = rng.choice(["(?<=a)", "(?<!ab)", "(?<=[ab].)"])
    assertion = rng.choice(["^", "$", r"\b", r"\B", r"\Z", r"\A", lookbehind])
    forms = (
        inner + other,
        f"(?:{inner}|{other})",
        f"(?:{inner}){count}",
        rng.choice(atoms[:11]) + count + inner,
        rng.choice(["(?=", "(?!", "("]) + inner + ")" + other,
        inner + assertion + other,
    )
    return forms[form - 2]


def test_random_patterns_match_what_re_matches() -> None:
    rng = random.Random(7)
    compared = 0
    for _ in range(4000):
        text = random_pattern(rng, 5)
        try:
            expected = re.compile(text)
        except re.error:
            continue
        pattern = Pattern(text, "f: k")
        for _ in range(4):
            subject = "".join(rng.choice("abc.1\n ") for _ in range(rng.randrange(9)))
            is_match = pattern.matches(Subject(subject, StepBudget()))
            assert is_match == (expected.match(subject) is not None), (text, subject)
            compared += 1
    assert compared > 10_000


@pytest.mark.parametrize("depth", [5, 15, 30])
def test_nested_lookaheads_do_not_multiply(depth: int) -> None:
    """Each lookahead is tested once at a position, however many are around it."""
    budget = StepBudget(100_000)
    nested = Pattern("(?=.*" * depth + "x" + ")" * depth, "f: k")
    assert not nested.matches(Subject("model.layers.10.mlp.down_proj.weight", budget))
    assert nested.matches(Subject("model.layers.10.mlp.down_proj.weightx", budget))


@pytest.mark.parametrize("pattern", HOSTILE)
def test_hostile_patterns_end_soon(pattern: str) -> None:
    """Each is matched against all names of a large model, or refused by name."""
    budget = StepBudget(2_000_000)
    began = time.thread_time()
    try:
        parsed = Pattern(pattern, "config.json: targets")
        for layer in range(500):
            parsed.matches(Subject(f"model.layers.{layer}.mlp.experts.17.gate_proj", budget))
    except CheckpointError as error:
        assert error.message.startswith("config.json: targets: '")
    assert time.thread_time() - began < 8


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(a)\1", "an escape that is not supported"),
        ("(?i)a", "a group that is not supported"),
        ("(?>a)", "a group that is not supported"),
        ("a*+b", "a possessive repetition"),
        ("a**", "multiple repeat"),
        ("(a", "unbalanced parenthesis"),
        ("a)", "unbalanced parenthesis"),
        ("[a", "a class that is not supported"),
        ("[z-a]", "bad character range"),
        ("*a", "nothing to repeat"),
        ("^*", "nothing to repeat"),
        ("a{3,2}", "min repeat greater"),
        ("a{99999999999}", "repeats too often"),
        ("(" * 50 + ")" * 50, "nested more than 40 deep"),
        ("\\", "an escape that is not supported"),
    ],
)
def test_unsupported_patterns_are_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        Pattern(pattern, "config.json: targets")
    assert refusal.value.message.startswith(f"config.json: targets: {ascii(pattern)[:77]}")
    assert reason in refusal.value.message


def test_a_text_of_a_million_letters_is_refused() -> None:
    with pytest.raises(Exception, match="too long"):
        Subject("x" * 1_000_000, StepBudget())
