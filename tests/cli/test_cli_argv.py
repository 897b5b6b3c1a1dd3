"""Foreign flags and flags before the command; a value is never mistaken for a flag."""

from __future__ import annotations

import pytest
from typer.main import get_command

from spd.cli.argv import CUT_FLAGS, FLAGS, FOREIGN_FLAGS, FOREIGN_VALUES, VALUE_SHORTS, prepare
from spd.cli.commands import build_app
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
    assert set(FOREIGN_FLAGS.values()) | {words.split()[0] for words in CUT_FLAGS.values()} <= ours
    assert not (set(FOREIGN_FLAGS) | set(CUT_FLAGS)) & ours
    assert set(FOREIGN_VALUES) <= ours


@pytest.mark.parametrize("flag", [*CUT_FLAGS, "--think"])
def test_what_is_cut_says_what_does_it_now(flag: str) -> None:
    for words in ([flag], ["demo", flag]):
        with pytest.raises(UsageError) as caught:
            prepare(["chat", *words])
        assert caught.value.fix == (CUT_FLAGS.get(flag, "--think on|off|hide|N"),)
    assert prepare(["chat", "-s", flag]).args == ("chat", "-s", flag)


def test_flags_without_a_value_are_known_exactly() -> None:
    """The shim must know what the parser will read as a value."""
    flags, valued, shorts = set(), set(), set()
    commands = get_command(build_app()).commands.values()
    for param in [param for command in commands for param in command.params]:
        names = {name for name in (*param.opts, *param.secondary_opts) if name.startswith("-")}
        if getattr(param, "is_flag", False):
            flags |= names
        else:
            valued |= names
            shorts |= {name[1:] for name in names if len(name) == 2}
    both = flags & valued
    assert both == {"--verify", "--markdown"}, "a flag of one command that takes a value in another"
    assert (flags - both) | {"-h", "--help", "-V", "--version"} == FLAGS - both
    assert shorts == VALUE_SHORTS


@pytest.mark.parametrize(
    "argv",
    [
        ["generate", "-p", "-md"],
        ["generate", "--system", "--temp"],
        ["generate", "--stop", "--json"],
        ["generate", "-qp", "--num-beams"],
        ["generate", "--", "-sys", "--json"],
        ["generate", "-p-md"],
        ["generate", "-n200", "--seed=5", "-"],
    ],
)
def test_values_and_what_follows_a_double_dash_stay(argv: list[str]) -> None:
    done = prepare(argv)
    assert list(done.args) == argv
    assert done.notes == () and not done.json


def test_equals_form_and_values_are_translated() -> None:
    done = prepare(["generate", "--temp=0.5", "--spec-type", "draft-simple", "--dtype=bf16"])
    assert done.args == ("generate", "--temperature=0.5", "--spec", "draft", "--dtype=bfloat16")
    assert "--spec draft-simple is --spec draft here" in done.notes


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
    done = prepare(["generate", "--json", "--debug", "-vq", "--color", "always"])
    assert (done.json, done.debug, done.quiet, done.color) == (True, True, True, "always")
    assert prepare(["generate", "--no-color", "--color=always"]).color == "never"


@pytest.mark.parametrize("flag", ["--num-beams", "--beam", "--beam-size=4", "--trust-remote-code"])
def test_refused_by_name(flag: str) -> None:
    with pytest.raises(IncompatibleError) as caught:
        prepare(["generate", flag, "4"])
    assert flag.partition("=")[0] in caught.value.message and caught.value.fix
