"""Arguments that are parsed without Typer have the values that Typer gives; it parses all others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from typer.main import get_command

from spd.cli import typer_app
from spd.cli.commands import COMMANDS, CommandBody
from spd.cli.plain_arguments import PlainArguments, parse_plain

SAMPLES = {
    "METHOD": "mtp,ngram",
    "on|off|hide|N": "30",
    "N": "2",
    "TIME": "15m",
    "WHEN": "never",
    "TYPE": "float16",
    "SET": "torch",
    "MODE": "on",
    "F": "0.5",
    "LENGTH": "1.5",
    "T": "0.25",
    "P": "0.5",
    "K": "3",
    "PORT": "80",
}
"""Values by the metavars of options that do not take any text."""
CHOICES = {"quantize": "int4", "activations": "int8", "kv": "int8", "verify": "block", "seed": "7"}
"""Values by the names of options."""


def parse_by_typer(command: str, argv: Sequence[str]) -> PlainArguments:
    """Return what Typer gives to the command: values by option, and the names of typed ones."""
    seen: list[PlainArguments] = []

    def record(
        session: object, body: CommandBody, values: dict[str, Any], typed: frozenset[str]
    ) -> None:
        seen.append(PlainArguments(values, typed))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer_app, "run_command", record)
        app = get_command(typer_app.build_app((command,)))
        app(args=[command, *argv], prog_name="spd", standalone_mode=False)
    (parsed,) = seen
    return parsed


def parse_plainly(command: str, argv: Sequence[str], **environ: str) -> PlainArguments | None:
    """Return the same without Typer; None where that parses."""
    return parse_plain(CommandBody.find(command).options, argv, environ)


def samples(command: str) -> list[list[str]]:
    """Return a line of arguments for each name of each option of a command."""
    lines: list[list[str]] = []
    for field in dataclasses.fields(CommandBody.find(command).options):
        names = field.metadata.get("names")
        if names is None:
            continue
        metavar = field.metadata["option"]["metavar"]
        if str(metavar).startswith("["):
            continue
        if not any(name.startswith("--") for name in names):
            names = (*names, f"--{field.name.replace('_', '-')}")
        for name in "/".join(names).split("/"):
            if metavar is None:
                lines.append([name])
                continue
            value = CHOICES.get(field.name, SAMPLES.get(metavar, "some text"))
            lines.append([name, value])
            if name.startswith("--"):
                lines.append([f"{name}={value}"])
            if "list" in str(field.type):
                lines.append([name, value, name, value])
    return lines


@pytest.mark.parametrize("command", sorted({*COMMANDS} - {"compare", "explain", "completions"}))
def test_every_option_has_the_value_that_typer_gives(command: str) -> None:
    """The commands left out have an argument that is required."""
    lines = samples(command)
    assert len(lines) > 3
    for argv in [[], *lines]:
        assert parse_plainly(command, argv) == parse_by_typer(command, argv), argv
    together = [word for argv in lines for word in argv]
    assert parse_plainly(command, together) == parse_by_typer(command, together)


PLAIN = (
    "generate hello",
    "generate -n 3 - --seed 5",
    "generate -s --temp=3 hi",
    "generate --stop= --stop --json",
    "generate -v hello -v",
    "chat org/name --seed 1 --seed 2",
    "convert-mtp demo folder",
)
NOT_PLAIN = (
    "generate --help",
    "generate -h",
    "generate -qv",
    "generate -n5",
    "generate --nope",
    "generate --temp 1",
    "generate -- --json",
    "generate --json=1",
    "generate --seed x",
    "generate --seed",
    "generate --spec what",
    "generate --color blue",
    "generate --jsonl --concurrency 0",
    "generate two words",
    "chat -c",
    "chat --continue name",
    "rm some models",
    "compare a.json b.json",
    "completions",
)


@pytest.mark.parametrize("line", PLAIN)
def test_a_plain_line_is_parsed_as_typer_does(line: str) -> None:
    command, *argv = line.split()
    assert parse_plainly(command, argv) == parse_by_typer(command, argv)


@pytest.mark.parametrize("line", NOT_PLAIN)
def test_what_is_not_plain_is_left_to_typer(line: str) -> None:
    command, *argv = line.split()
    assert parse_plainly(command, argv) is None


def test_the_environment_counts_where_nothing_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, argv in (("other", []), ("other", ["-m", "typed"]), ("", [])):
        monkeypatch.setenv("SPD_MODEL", value)
        expected = parse_by_typer("generate", argv)
        assert parse_plainly("generate", argv, SPD_MODEL=value) == expected
