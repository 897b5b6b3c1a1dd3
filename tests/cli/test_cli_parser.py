"""Names of other tools, what was cut, few options, and flags before the command."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from spd.cli.chat.slash import Commands
from spd.cli.commands import build_app
from spd.cli.parser import CUT, ELSEWHERE, FOREIGN, LAST, refuse_by_name
from spd.errors import UsageError
from tests.cli.conftest import refused

LIMITS = {"generate": 48, "chat": 42, "bench": 34, "verify": 26, "inspect": 10}
ADVANCED = {"--kernels", "--graphs", "--lag", "--memory-fraction", "--threads", "--tp", "--draft-tp"}


def options() -> dict[str, list[Any]]:
    commands = get_command(build_app()).commands
    return {n: [p for p in c.params if p.param_type_name == "option"] for n, c in commands.items()}


def names(params: list[Any]) -> set[str]:
    return {name for param in params for name in (*param.opts, *param.secondary_opts)}


def parsed(command: str, *argv: str) -> dict[str, Any]:
    """The values that a command would get."""
    app: Any = get_command(build_app((command,)))
    values: dict[str, Any] = app.commands[command].make_context(command, list(argv)).params
    return values


def test_there_are_few_options_and_names_of_other_tools_hide_none() -> None:
    counts = {name: len(params) for name, params in options().items()}
    assert {name: count for name, count in counts.items() if count > LIMITS.get(name, 30)} == {}
    assert len(FOREIGN) <= 12 and len(Commands.names()) <= 16
    for param in options()["generate"]:
        assert (param.opts[-1] in ADVANCED | {"--concurrency"}) == (param.rich_help_panel == LAST), param.opts
    ours = names(options()["generate"])
    assert set(FOREIGN.values()) <= ours and not set(FOREIGN) & ours
    assert parsed("generate", "--temp=0.5", "-md", "x")["temperature"] == 0.5
    assert parsed("generate", "--n-predict", "7", "-md", "x")["draft_model"] == "x"


def test_what_is_cut_or_unknown_says_what_to_type(spd_run) -> None:
    every = set.union(*(names(params) for params in options().values())) | {"-vv"}
    for flag, words in CUT.items():
        with pytest.raises(UsageError, match="is no longer an option") as caught:
            refuse_by_name(flag)
        assert caught.value.fix == (words,)
        named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.sub("jq .*", "", words)))
        assert named <= every, (flag, words)
    refused(spd_run("chat", "--no-think"), 2, "--no-think is no longer an option", "fix: --think off")
    refused(spd_run("generate", "-p", "Hi"), 2, "-p is no longer", 'fix: spd generate "your prompt"')
    for word, words in ELSEWHERE.items():
        refused(spd_run(word), 2, f"no such command '{word}'", words)


def test_a_value_is_never_taken_for_an_option() -> None:
    for typed, name, value in (
        *(("generate -s --temp=3", "system", "--temp=3"), ("generate --stop --json", "stop", ("--json",))),
        *(("generate -s --num-beams", "system", "--num-beams"), ("generate -- --json", "prompt", "--json")),
        *(("generate -s-md", "system", "-md"), ("generate -n200 -", "max_tokens", 200)),
        *(("chat -c", "continue_", ""), ("chat --continue -q", "continue_", "")),
        *(("chat -c org/name", "model_argument", "org/name"), ("chat -c notes", "continue_", "notes")),
        ("serve --stop demo", "model_argument", "demo"),
        ("convert-mtp demo destination", "destination", "destination"),
    ):
        assert parsed(*typed.split())[name] == value, typed


def test_flags_before_the_command_are_its_own(spd_run: Callable, model: Path, script: Any) -> None:
    assert spd_run("--json", "generate", "-m", model, "Hi").json["text"] == "Hello wörld!"
    assert "Traceback" in spd_run("-vv", "generate", "--temperature", "9e9", "-m", model, "Hi").err
    assert spd_run("--json").json["error"]["exit"] == 2
