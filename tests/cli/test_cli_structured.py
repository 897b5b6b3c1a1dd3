"""`--schema`, `--grammar`: from text or file, refused before weights, and where thinking ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spd.cli.text.job import Vocabulary
from spd.cli.text.prompt import Asked, end_of_thinking

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen3", layers=1)


def test_the_reply_follows_what_was_asked_for(
    spd_run: Callable[..., Any], target: Path, tmp_path: Path
) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text(json.dumps(SCHEMA))
    lark.write_text('start: "on" | "off"\n')
    base = ["generate", "-m", target, "--threads", 1, "--ctx", 256, "-n", 60, "--temperature", 0, "Hi"]
    pattern = r'\s*\{\s*"a"\s*:\s*(1|22)\s*\}\s*'
    ways = ([], ["--spec", "off"], ["--spec", "ngram", "--lag", 2])
    for flags, wanted, among in (
        (["--grammar", "/[x-z]{3,5}/"], "[x-z]{3,5}", ways),
        (["--schema", json.dumps(SCHEMA)], pattern, ways),
        (["--schema", schema], pattern, ways[:1]),
        (["--grammar", lark], "on|off", ways[:1]),
        (["--grammar", '?start: "on" | "off"'], "on|off", ways[:1]),
    ):
        replies = [spd_run(*base, *flags, *more) for more in among]
        assert replies[0].code == 0 and len({reply.out for reply in replies}) == 1
        assert re.fullmatch(wanted, replies[0].text.removesuffix("\n")), replies[0]


THINK, END, OTHER = 5, 6, 1


@pytest.mark.parametrize(
    ("ids", "template", "variables", "expected"),
    [
        ([OTHER] * 9, "no thinking", {}, None),
        ([OTHER] * 9, "enable_thinking", {}, END),
        ([OTHER] * 9, "enable_thinking", {"enable_thinking": False}, None),
        ([OTHER] * 9 + [THINK, OTHER], "opens it", {}, END),
        ([OTHER] * 9 + [THINK, OTHER, END, OTHER], "enable_thinking", {}, None),
        ([THINK, OTHER, END] + [OTHER] * 9, "enable_thinking", {}, END),
        ([THINK, OTHER, END] + [OTHER] * 9, "an old turn's", {}, None),
        ([OTHER, THINK, OTHER, END, OTHER, THINK], "opens it", {}, END),
    ],
)
def test_where_a_grammar_begins(ids: list[int], template: str, variables: Any, expected: int | None) -> None:
    names = {"<think>": THINK, "</think>": END}
    vocabulary: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(token_to_id=names.get), template=SimpleNamespace(default=template)
    )
    asked = Asked(messages=({"role": "user", "content": "x"},), variables=variables)
    assert end_of_thinking(vocabulary, asked, ids) == expected
    assert end_of_thinking(vocabulary, Asked(ids=tuple(ids)), ids) is None
    none: Any = SimpleNamespace(
        tokenizer=SimpleNamespace(token_to_id=lambda _: None), template=vocabulary.template
    )
    assert end_of_thinking(none, asked, ids) is None


def test_a_model_without_a_tokenizer_says_so() -> None:
    vocabulary = Vocabulary(config=SimpleNamespace(), tokenizer=None, template=None, name="x")  # type: ignore[arg-type]
    assert end_of_thinking(vocabulary, Asked(ids=(1,)), [1]) is None
