"""`--schema`, `--grammar`: from text or file, refused before weights, and where thinking ends."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spd.cli.text.prompt import Asked, end_of_thinking

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 22]}}, "required": ["a"]}
SCHEMA["additionalProperties"] = False


@pytest.fixture(scope="module")
def target(tiny: Callable[..., Path]) -> Path:
    return tiny("qwen3", layers=1)


def test_the_reply_follows_what_was_asked_for(spd_run, target, tmp_path) -> None:
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


def test_where_a_grammar_begins() -> None:
    for prompt, template, variables, thinks in (
        *(("Hi", "no thinking", {}, False), ("Hi", "enable_thinking", {}, True)),
        *(
            ("Hi", "enable_thinking", {"enable_thinking": False}, False),
            ("Hi<think>\n", "opens it", {}, True),
        ),
        ("Hi<think>\n\n</think>\n\n", "enable_thinking", {}, False),
        ("<think>a</think>Hi", "enable_thinking", {}, True),
        ("<think>a</think>Hi", "an old turn's", {}, False),
        ("<think>a</think>Hi<think>", "opens it", {}, True),
    ):
        asked = Asked(messages=({"role": "user", "content": "x"},), variables=variables)
        vocabulary: Any = SimpleNamespace(
            need_tokenizer=lambda: SimpleNamespace(token_to_id={"</think>": 6}.get),
            need_template=lambda template=template: SimpleNamespace(default=template),
        )
        assert end_of_thinking(vocabulary, asked, prompt) == (6 if thinks else None), (prompt, template)
