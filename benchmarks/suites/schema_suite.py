"""JSON-Schema-Test-Suite against spd's grammars: which instances a schema's grammar accepts.

A valid instance is accepted where the grammar takes one of its texts: keys in any order, numbers
with or without a fraction of zero. An invalid one has to be refused in all of its texts.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.suites.folders import END, VOCABULARY, write_tokenizer
from benchmarks.suites.report import WRONG, Report
from spd.conversation import tool_choice
from spd.conversation.fields import FieldError
from spd.errors import SpdError
from spd.formats.tokenizer import Tokenizer
from spd.runtime.engine.grammar import GrammarCompiler, GrammarError
from spd.runtime.engine.request import GrammarSpec
from spd.server import chat_completions

DRAFTS = ("draft4", "draft6", "draft7", "draft2019-09", "draft2020-12")
MOST_TEXTS = 720
"""Texts of one instance that are tried: the orders of its keys."""
HELD = "held"
CLOSED = "closed by design"
REFUSED = "refused by name"
BOOLEAN = "a boolean schema"
SIBLINGS = "$ref with siblings, as in 2020-12"
FORMAT = "format asserted"
OLDER = ("draft4", "draft6", "draft7")
"""Drafts in which what stands beside a `$ref` says nothing; spd reads all schemas as 2020-12
does."""


def suite_files(jsonschema: Path) -> Iterator[tuple[str, Path]]:
    """Yield each draft and file of the suite in an unpacked `jsonschema`."""
    for draft in DRAFTS:
        for path in sorted((jsonschema / "json" / "tests" / draft).glob("*.json")):
            yield draft, path


def texts_of(value: Any) -> Iterator[str]:
    """Yield texts of a value: each order of an object's keys, a whole number with and without a
    fraction.
    """
    if isinstance(value, dict):
        for order in itertools.permutations(value):
            parts = (_pairs(name, value[name]) for name in order)
            for chosen in itertools.product(*parts):
                yield f"{{{', '.join(chosen)}}}"
    elif isinstance(value, list):
        for chosen in itertools.product(*([*texts_of(item)] for item in value)):
            yield f"[{', '.join(chosen)}]"
    else:
        yield json.dumps(value, ensure_ascii=False)
        if isinstance(value, float) and value.is_integer():
            yield str(int(value))
        elif isinstance(value, str) and not value.isascii():
            yield json.dumps(value)


def _pairs(name: str, value: Any) -> list[str]:
    key = json.dumps(name, ensure_ascii=False)
    return [f"{key}: {text}" for text in itertools.islice(texts_of(value), MOST_TEXTS)]


class Acceptor:
    """Checks texts with grammars, over a tokenizer of bytes."""

    def __init__(self, folder: Path) -> None:
        write_tokenizer(folder)
        self._tokenizer = Tokenizer.open(folder)
        self._compiler = GrammarCompiler(self._tokenizer, VOCABULARY)

    def grammar_of(self, schema: Mapping[str, Any]) -> GrammarSpec:
        """Return what a chat completion's format makes of a schema. Raises SpdError, FieldError."""
        form: dict[str, Any] = {
            "type": "json_schema",
            "json_schema": {"name": "s", "schema": schema},
        }
        body = chat_completions.CHAT_FIELDS["response_format"](form, "response_format")
        grammar = tool_choice.response_format_grammar(body)
        assert grammar is not None
        self._compiler.compile(grammar, (END,))
        return grammar

    def takes(self, grammar: GrammarSpec, value: Any) -> bool:
        """True if the grammar takes a text of the value."""
        tried = itertools.islice(texts_of(value), MOST_TEXTS)
        return any(self._takes_text(grammar, text) for text in tried)

    def _takes_text(self, grammar: GrammarSpec, text: str) -> bool:
        matcher = self._compiler.compile(grammar, (END,))
        assert matcher is not None
        try:
            for token in self._tokenizer.encode(text):
                matcher.accept_token(token)
        except GrammarError:
            return False
        return matcher.is_complete


def named_properties(schema: Any) -> set[str]:
    """Return every name that `properties` give anywhere in a schema."""
    if isinstance(schema, list):
        return {name for value in schema for name in named_properties(value)}
    if not isinstance(schema, dict):
        return set()
    properties = schema.get("properties")
    names = set(properties) if isinstance(properties, dict) else set[str]()
    return names | {name for value in schema.values() for name in named_properties(value)}


def is_closed_by_design(schema: Any, value: Any) -> bool:
    """True if the value has a key that no `properties` of the schema name, where some are given.

    spd closes objects over the properties that they name, so that small models end.
    """
    names = named_properties(schema)
    return bool(names) and any(key not in names for key in _keys(value))


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from value
        value = [*value.values()]
    for item in value if isinstance(value, list) else ():
        yield from _keys(item)


def run(jsonschema: Path) -> Report:
    """Try every instance of every schema."""
    report = Report("schemas", "JSON-Schema-Test-Suite in jsonschema's sdist")
    with tempfile.TemporaryDirectory() as place:
        acceptor = Acceptor(Path(place))
        for draft, path in suite_files(jsonschema):
            for group in json.loads(path.read_text(encoding="utf-8")):
                _try(report, acceptor, f"{draft}/{path.stem}", group)
    return report


def _try(report: Report, acceptor: Acceptor, where: str, group: Mapping[str, Any]) -> None:
    """Count the instances of one schema."""
    row = where.partition("/")[2]
    schema = group["schema"]
    if not isinstance(schema, dict):  # no field of the APIs takes one
        report.rows.setdefault(row, Counter())[BOOLEAN] += len(group["tests"])
        return
    try:
        grammar = acceptor.grammar_of(schema)
    except (SpdError, FieldError) as error:
        report.rows.setdefault(row, Counter())[REFUSED] += len(group["tests"])
        report.reasons.setdefault(row, error.message)
        return
    for test in group["tests"]:
        value = test["data"]
        valid = test["valid"]
        accepted = acceptor.takes(grammar, value)
        outcome = HELD if accepted == valid else _difference(where, schema, value, accepted)
        detail = f"{where}: {json.dumps(schema)}: {json.dumps(value)} is {_word(valid)}"
        report.add(row, outcome, detail)


def _difference(where: str, schema: Mapping[str, Any], value: Any, accepted: bool) -> str:
    """Return the outcome of an instance for which the grammar and the suite differ."""
    draft, _, row = where.partition("/")
    if draft in OLDER and has_siblings(schema):
        return SIBLINGS
    if accepted:
        return WRONG
    if is_closed_by_design(schema, value):
        return CLOSED
    return FORMAT if row == "format" else WRONG


def has_siblings(schema: Any) -> bool:
    """True if a schema has a `$ref` with something beside it that could say more."""
    if isinstance(schema, list):
        return any(map(has_siblings, schema))
    if not isinstance(schema, dict):
        return False
    siblings = schema.keys() - {"$ref", "$defs", "definitions", "$comment", "$schema"}
    has_sibling = isinstance(schema.get("$ref"), str) and bool(siblings)
    return has_sibling or any(map(has_siblings, schema.values()))


def _word(valid: bool) -> str:
    return "valid" if valid else "invalid"
