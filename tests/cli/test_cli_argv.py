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


def test_continue_may_stand_alone() -> None:
    assert prepare(["chat", "-c"]).args == prepare(["chat", "--continue"]).args == ("chat", "--continue=")
    assert prepare(["chat", "-c", "-q"]).args == ("chat", "--continue=", "-q")
    assert prepare(["chat", "-c", "org/name"]).args == ("chat", "--continue=", "org/name")
    assert prepare(["chat", "-c", "notes"]).args == ("chat", "-c", "notes")


LIMITS = {"generate": 48, "chat": 42, "bench": 34, "verify": 26, "inspect": 10}
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
    assert both == {"--verify"}, "a flag of one command that takes a value in another"
    assert (flags - both) | {"-h", "--help", "-V", "--version"} == FLAGS - both
    assert shorts == VALUE_SHORTS


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "--system", "--temp"],
        ["generate", "--stop", "--json"],
        ["generate", "-qs", "--num-beams"],
        ["generate", "--", "-sys", "--json"],
        ["generate", "-s-md"],
        ["generate", "-n200", "--seed=5", "-"],
    ],
)
def test_values_and_what_follows_a_double_dash_stay(argv: list[str]) -> None:
    done = prepare(argv)
    assert list(done.args) == argv
    assert done.notes == () and not done.json


def test_equals_form_and_values_are_translated() -> None:
    done = prepare(["generate", "--temp=0.5", "-md", "demo", "--dtype=bf16"])
    assert done.args == ("generate", "--temperature=0.5", "--draft-model", "demo", "--dtype=bfloat16")
    assert "--dtype bf16 is --dtype bfloat16 here" in done.notes


def test_a_missing_value_is_left_to_the_parser() -> None:
    assert prepare(["generate", "--temp"]).args == ("generate", "--temperature")


@pytest.mark.parametrize(
    ("argv", "args"),
    [
        (["--json", "generate", "Hi"], ("generate", "--json", "Hi")),
        (["-q", "--color", "never", "inspect"], ("inspect", "-q", "--color", "never")),
        (["--color=always", "generate"], ("generate", "--color=always")),
        (["--json", "--help"], ("--json", "--help")),
        (["generate", "--json"], ("generate", "--json")),
    ],
)
def test_shared_flags_before_the_command_move_behind_it(argv: list[str], args: tuple[str, ...]) -> None:
    assert prepare(argv).args == args


def test_what_the_boundary_must_know() -> None:
    done = prepare(["generate", "--json", "-vqv", "--color", "always"])
    assert (done.json, done.debug, done.quiet, done.color) == (True, True, True, "always")
    assert not prepare(["generate", "-v"]).debug and prepare(["-v", "generate", "--verbose"]).debug


@pytest.mark.parametrize("flag", ["--num-beams", "--beam", "--beam-size=4", "--trust-remote-code"])
def test_refused_by_name(flag: str) -> None:
    with pytest.raises(IncompatibleError) as caught:
        prepare(["generate", flag, "4"])
    assert flag.partition("=")[0] in caught.value.message and caught.value.fix
