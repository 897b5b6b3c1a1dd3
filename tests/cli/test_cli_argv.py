"""Foreign flags and flags before the command; a value is never mistaken for a flag."""

from __future__ import annotations

import re

import pytest
from typer import Context
from typer.main import get_command

from spd.cli.argv import CUT_FLAGS, FLAGS, FOREIGN_FLAGS, FOREIGN_VALUES, VALUE_SHORTS, cut_words, prepare
from spd.cli.chat.slash import Commands
from spd.cli.commands import COMMANDS, build_app
from spd.cli.help import LAST, help_lines
from spd.errors import IncompatibleError, UsageError


def generate_params() -> list:
    return get_command(build_app()).commands["generate"].params


def test_every_foreign_flag_is_translated_with_one_note() -> None:
    for foreign, ours in FOREIGN_FLAGS.items():
        done = prepare(["generate", foreign, "7", foreign, "8"])
        assert done.args == ("generate", ours, "7", ours, "8")
        assert done.notes == (f"{foreign} is {ours} here",)


def test_foreign_flags_lead_to_flags_that_exist_and_hide_none() -> None:
    params = [*generate_params(), *get_command(build_app()).commands["chat"].params]
    ours = {name for param in params for name in (*param.opts, *param.secondary_opts)}
    assert set(FOREIGN_FLAGS.values()) <= ours and not set(FOREIGN_FLAGS) & ours
    assert set(FOREIGN_VALUES) <= ours


@pytest.mark.parametrize(
    ("command", "flag"),
    [(name, flag) for name in COMMANDS for flag in {**CUT_FLAGS[""], **CUT_FLAGS.get(name, {})}],
)
def test_what_is_cut_says_what_does_it_now(command: str, flag: str) -> None:
    params = get_command(build_app((command,))).commands[command].params
    assert flag not in {name for param in params for name in (*param.opts, *param.secondary_opts)}
    for words in ([flag], ["demo", f"{flag}=x"]):
        with pytest.raises(UsageError, match="is no longer an option") as caught:
            prepare([command, *words])
        assert caught.value.exit_code == 2 and caught.value.fix == (cut_words(command, flag),)
    assert prepare(["chat", "-s", flag]).args == ("chat", "-s", flag)


def test_the_words_of_what_is_cut_name_options_that_exist() -> None:
    commands = get_command(build_app()).commands
    every = {name for command in commands.values() for param in command.params for name in param.opts} | {
        "-vv"
    }
    for name, table in CUT_FLAGS.items():
        for words in table.values():
            named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", re.sub("jq .*", "", words)))
            assert named <= every, (name, words)


def test_think_needs_a_value() -> None:
    with pytest.raises(UsageError) as caught:
        prepare(["chat", "--think"])
    assert caught.value.fix == ("--think on|off|hide|N",)


LIMITS = {"generate": 49, "chat": 42, "bench": 34, "verify": 26, "inspect": 10}
ADVANCED = {"--kernels", "--graphs", "--lag", "--memory-fraction", "--threads", "--tp", "--draft-tp"}


def test_there_are_few_options() -> None:
    commands = get_command(build_app()).commands
    flags = {
        name: [p for p in each.params if p.param_type_name == "option"] for name, each in commands.items()
    }
    assert {name: len(flags[name]) for name, most in LIMITS.items() if len(flags[name]) > most} == {}
    assert all(len(flags[name]) <= 30 for name in flags.keys() - LIMITS)
    assert len(FOREIGN_FLAGS) + sum(map(len, FOREIGN_VALUES.values())) <= 12
    assert len(Commands.names()) <= 16
    for param in flags["generate"]:
        assert (param.opts[-1] in ADVANCED | {"--concurrency"}) == (param.rich_help_panel == LAST), param.opts


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_is_short(command: str) -> None:
    group = get_command(build_app())
    shown = group.commands[command] if command else group
    context = Context(shown, info_name=f"spd {command}".strip(), parent=None)
    lines = list(help_lines(shown, context, 100))
    assert len(lines) <= 70


def test_flags_without_a_value_are_known_exactly() -> None:
    """The shim must know what the parser will read as a value."""
    flags, valued, shorts = set(), set(), set()
    commands = get_command(build_app()).commands.values()
    for param in [param for command in commands for param in command.params]:
        names = {name for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}
        if getattr(param, "is_flag", False) or getattr(param, "count", False):
            flags |= names
        else:
            valued |= names
            shorts |= {name[1:] for name in names if len(name) == 2}
    both = flags & valued
    assert both == {"--stop"}, "a flag of one command that takes a value in another"
    assert (flags - both) | {"-h", "--help", "-V", "--version"} == FLAGS - both
    assert shorts == VALUE_SHORTS


PREPARED = [
    ("generate --system --temp", "", False),
    ("generate --stop --json", "", False),
    ("generate -qs --num-beams", "", False),
    ("generate -- -sys --json", "", False),
    ("generate -s-md", "", False),
    ("generate -n200 --seed=5 -", "", False),
    ("generate --temp=0.5 -md x", "generate --temperature=0.5 --draft-model x", False),
    ("generate --dtype=bf16", "generate --dtype=bfloat16", False),
    ("generate --temp", "generate --temperature", False),  # a missing value is left to the parser
    ("chat -c", "chat --continue=", False),
    ("chat --continue", "chat --continue=", False),
    ("chat -c -q", "chat --continue= -q", False),
    ("chat -c org/name", "chat --continue= org/name", False),
    ("chat -c notes", "", False),
    ("--json generate Hi", "generate --json Hi", True),
    ("-q --color never inspect", "inspect -q --color never", False),
    ("--color=always generate", "generate --color=always", False),
    ("--json --help", "", True),
    ("generate --json", "", True),
]
"""What is typed, what the parser gets, nothing where it is the same, and whether JSON is asked for."""


@pytest.mark.parametrize(("typed", "args", "json"), PREPARED)
def test_what_the_parser_gets(typed: str, args: str, json: bool) -> None:
    """Values and what follows a double dash stay; shared flags before the command move behind it."""
    done = prepare(typed.split())
    assert (" ".join(done.args), done.json) == (args or typed, json)
    assert args or done.notes == ()


def test_a_value_that_is_translated_is_noted() -> None:
    assert "--dtype bf16 is --dtype bfloat16 here" in prepare(["generate", "--dtype=bf16"]).notes


def test_what_the_boundary_must_know() -> None:
    done = prepare(["generate", "--json", "-vqv", "--color", "always"])
    assert (done.json, done.debug, done.quiet, done.color) == (True, True, True, "always")
    assert not prepare(["generate", "-v"]).debug and prepare(["-v", "generate", "--verbose"]).debug


@pytest.mark.parametrize("flag", ["--num-beams", "--beam", "--beam-size=4", "--trust-remote-code"])
def test_refused_by_name(flag: str) -> None:
    with pytest.raises(IncompatibleError) as caught:
        prepare(["generate", flag, "4"])
    assert flag.partition("=")[0] in caught.value.message and caught.value.fix
