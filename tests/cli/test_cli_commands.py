"""Typed lines of `commands.txt`, conflicting options, the number of options, and files of options."""

from __future__ import annotations

import codecs
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command, get_group

from spd.cli.chat.slash import Commands
from spd.cli.commands import jsonl
from spd.cli.options import merge_model_argument, parse_sampling_settings
from spd.cli.parser import (
    ADVANCED_PANEL,
    COMMAND_FIXES,
    FOREIGN_OPTIONS,
    OPTION_FIXES,
    SET_NAMES,
    refuse_foreign_option,
)
from spd.cli.run_settings import CONFLICTS, REQUIREMENTS
from spd.cli.typer_app import build_app
from spd.errors import UsageError
from tests.cli.conftest import (
    SPECIALS,
    assert_refused,
    read_saved_chat,
    write_model,
    write_tokenizer,
)

LINES = Path(__file__).with_name("commands.txt").read_text(encoding="utf-8").splitlines()
ROWS = [line for line in LINES if line and line[0] != "#"]


REPLACEMENTS = {"LONGNAME": "x" * 300, "NINES": "9" * 400, "DEEP": "[" * 100_000, "NEWLINE": "\n"}
REPLACEMENTS |= {name.upper(): f"<|im_start|>{name}\n" for name in ("system", "user")}
REPLACEMENTS |= {"END": "<|im_end|>\n", "REPLY": "<|im_end|>\n<|im_start|>assistant\n"}
FILES = {"a": b"first\n", "b": b"second\n\n", "latin": b"caf\xe9", "empty": b""}
FILES |= {"chat": '[{"role": "system", "content": "S"}, {"role": "user", "content": "é"}]'.encode()}


def list_files(model: Path) -> list[Path]:
    """Return the files next to the model, without those of saved chats."""
    return sorted(path for path in model.parent.rglob("*") if "state" not in path.parts)


def unescape_bytes(text: str) -> bytes:
    """Return the bytes of a text with Python's escapes."""
    return codecs.decode(text, "unicode_escape").encode("latin-1")


@pytest.mark.parametrize("row", ROWS)
def test_a_typed_line_gives_its_output(row, spd_run, model, script, monkeypatch) -> None:
    write_tokenizer(model, (*SPECIALS, "<think>", "</think>"))
    monkeypatch.chdir(model.parent)
    monkeypatch.setattr(jsonl, "MAX_LINES_BYTES", 2**20)
    for name, data in FILES.items():
        Path(name).write_bytes(data)
    for name, replacement in {"MODEL": model.name, **REPLACEMENTS}.items():
        row = row.replace(name, replacement)
    status, typed, expected_output = row.split(" | ")
    typed, has_stdin, stdin = typed.partition(" <")
    typed, _, options = typed.partition(" ~ ")
    argv = shlex.split(typed)
    expected_texts = expected_output.split(" ; ")
    if options:
        monkeypatch.setenv("XDG_CONFIG_HOME", str(model.parent))
        file = model.parent / "spd" / "config.toml"
        file.parent.mkdir()
        file.write_text(options + "\n")
        expected_texts.append(str(file))
        assert spd_run("generate", "--help").code == 0, "whatever the file says"
    before = list_files(model)
    if expected_output.startswith("> "):
        argv.insert(1, "--json")
    ran = spd_run(argv, stdin=unescape_bytes(stdin.strip()) if has_stdin else None)
    if expected_output.startswith("> "):
        assert (ran.code, ran.json["prompt"].encode()) == (
            int(status),
            unescape_bytes(expected_output[2:]),
        )
    elif status == "0":
        assert ran.code == 0 and all(expected in ran.text + ran.err for expected in expected_texts)
    elif "--json" in argv:
        error = ran.json["error"]
        assert error["exit"] == ran.code == int(status) and expected_texts[0] in error["message"]
        assert error["fix"] and ran.err == ""
        assert all(expected in " ".join(error["reason"]) for expected in expected_texts[1:])
    else:
        assert_refused(ran, int(status), *expected_texts)
    loads = (status == "0" and "--dry-run" not in argv) or argv[
        0
    ] == "chat"  # while it waits for lines
    assert loads or not script.engines
    assert list_files(model) == before


OPTION_ARGUMENTS = {
    "prompt": ["Hi"],
    "template_arg": ["--template-arg", "a=1"],
    "think": ["--think", "off"],
}
OPTION_ARGUMENTS |= {
    "schema": ["--schema", "{}"],
    "prompt_ids": ["--prompt-ids", "1"],
    "logprobs": ["--logprobs", "0"],
}
OPTION_ARGUMENTS |= {
    n: [f"--{n}", "x"] for n in ("system", "messages", "file", "grammar", "trace", "output")
}
OPTION_ARGUMENTS |= {"concurrency": ["--concurrency", "4"]}


def arguments_of(name: str) -> list[str]:
    return OPTION_ARGUMENTS.get(name, [f"--{name.replace('_', '-')}"])


PAIRS = [(name, other, reason) for name, excluded, reason in CONFLICTS for other in excluded]


@pytest.mark.parametrize(("name", "other", "reason"), PAIRS, ids=[f"{n}-{o}" for n, o, _ in PAIRS])
def test_conflicting_options_are_refused(
    name: str, other: str, reason: str, spd_run: Callable, model: Path
) -> None:
    ran = spd_run("generate", "-m", model, arguments_of(name), arguments_of(other))
    if "json" in (name, other):
        error = ran.json["error"]
        assert ran.code == 2 and reason in error["message"]
    else:
        flags = (f"--{n.replace('_', '-')}" for n in (name, other) if n != "prompt")
        assert_refused(ran, 2, reason, "leave one of them out", *flags)


@pytest.mark.parametrize(("name", "needed", "reason", "fix"), REQUIREMENTS)
def test_an_option_without_the_one_it_needs_is_refused(
    name, needed, reason, fix, spd_run, model
) -> None:
    extra_arguments = [] if needed != ["output"] else ["--jsonl"]
    assert_refused(
        spd_run("generate", "-m", model, arguments_of(name), extra_arguments), 2, reason, fix
    )


LIMITS = {"generate": 48, "chat": 42, "bench": 34, "verify": 28, "inspect": 10, "serve": 30}
ADVANCED = {
    "--kernels",
    "--graphs",
    "--lag",
    "--memory-fraction",
    "--threads",
    "--tp",
    "--draft-tp",
}


def options() -> dict[str, list[Any]]:
    commands = get_group(build_app()).commands
    return {n: [p for p in c.params if p.param_type_name == "option"] for n, c in commands.items()}


def names(params: list[Any]) -> set[str]:
    return {name for param in params for name in (*param.opts, *param.secondary_opts)}


def parse_arguments(command_line: Sequence[str]) -> dict[str, Any]:
    """Return the values that a command would get."""
    command, *argv = command_line
    app: Any = get_command(build_app((command,)))
    values: dict[str, Any] = app.commands[command].make_context(command, argv).params
    return values


def test_there_are_few_options_and_names_of_other_tools_hide_none() -> None:
    counts = {name: len(params) for name, params in options().items()}
    assert {name: count for name, count in counts.items() if count > LIMITS.get(name, 30)} == {}
    assert len(FOREIGN_OPTIONS) <= 12 and len(Commands.names()) <= 16
    for param in options()["generate"]:
        assert (param.opts[-1] in ADVANCED | {"--concurrency"}) == (
            param.rich_help_panel == ADVANCED_PANEL
        ), param.opts
    ours = names(options()["generate"])
    assert set(FOREIGN_OPTIONS.values()) <= ours and not set(FOREIGN_OPTIONS) & ours
    assert parse_arguments(["generate", "--temp=0.5", "-md", "x"])["temperature"] == 0.5
    assert parse_arguments(["generate", "--n-predict", "7", "-md", "x"])["draft_model"] == "x"


def test_an_option_of_another_tool_has_a_fix_that_works(spd_run) -> None:
    for flag, fix in OPTION_FIXES.items():
        with pytest.raises(UsageError, match=f"no such option: {flag}") as caught:
            refuse_foreign_option(flag)
        assert caught.value.fix == (fix,)
    assert not set(OPTION_FIXES) & {name for params in options().values() for name in names(params)}
    for name in SET_NAMES:
        value = "1=2" if name == "logit_bias" else "1"
        assert set(parse_sampling_settings([f"{name}={value}"])) == {name}
    assert_refused(
        spd_run("generate", "-p", "Hi"), 2, "no such option: -p", 'fix: spd generate "your prompt"'
    )
    assert_refused(
        spd_run("generate", "--top-k=4"), 2, "no such option: --top-k", "--set top_k=VALUE"
    )


def test_what_is_unknown_says_what_is_near(spd_run) -> None:
    assert_refused(spd_run("chat", "--no-stat"), 2, "no such option: --no-stat", "--no-stats")
    assert_refused(spd_run("chat", "--zzz"), 2, "no such option: --zzz", "fix: spd chat --help")
    for command, fix in COMMAND_FIXES.items():
        assert_refused(spd_run(command), 2, f"no such command '{command}'", fix)


def test_only_what_is_near_is_suggested(spd_run) -> None:
    for typed, word in (("--bogus", "--verbose"), ("--stop", "--tp")):
        ran = spd_run("inspect", typed)
        assert_refused(ran, 2, f"no such option: {typed}", "fix: spd inspect --help")
        assert "ossible" not in ran.err and word not in ran.err
    assert_refused(spd_run("chat", "--draft", "x"), 2, "(Possible options: --draft-max")
    assert_refused(spd_run("chat", "--temprature=1"), 2, "(Possible options: --temperature)")


MODEL_COMMANDS = ("chat", "serve", "bench", "verify", "inspect", "pull", "quantize", "convert-mtp")


@pytest.mark.parametrize("command", MODEL_COMMANDS)
def test_a_model_is_an_argument_or_an_option(command: str) -> None:
    """So in every command but `generate`, whose argument is the prompt.

    Also with a folder to write.
    """
    folder = ["out"] if command in ("quantize", "convert-mtp") else []
    argument_lists = (
        ["M", *folder],
        ["-m", "M", *folder],
        [*folder, "--model", "M"],
        ["M", *folder, "-m", "M"],
    )
    for arguments in argument_lists:
        values = parse_arguments([command, *arguments])
        merge_model_argument(values, {"model"} if {"-m", "--model"} & {*arguments} else set())
        assert values["model"] == "M", arguments
        assert str(values.get("destination")) == "".join(folder or ["None"]), arguments


def test_a_model_in_a_file_of_options_is_never_removed(write_config, spd_run) -> None:
    write_config('model = "org/precious"\n')
    assert_refused(spd_run("rm", "-y"), 2, "missing argument 'MODEL…'")
    ran = spd_run("rm", "-y", "org/other")
    assert_refused(ran, 3, "org/other is not in the local cache")
    assert "precious" not in ran.err.replace("sets model", "")
    assert_refused(spd_run("rm", "-y", "-m", "org/third"), 3, "org/third is not in the local cache")


def test_a_value_is_never_taken_for_an_option() -> None:
    for typed, name, value in (
        ("generate -s --temp=3", "system", "--temp=3"),
        ("generate --stop --json", "stop", ("--json",)),
        ("generate -s --num-beams", "system", "--num-beams"),
        ("generate -- --json", "prompt", "--json"),
        ("generate -s-md", "system", "-md"),
        ("generate -n200 -", "max_tokens", 200),
        ("chat -c", "continue_", ""),
        ("chat --continue -q", "continue_", ""),
        ("chat -c org/name", "model_argument", "org/name"),
        ("chat -c notes", "continue_", "notes"),
        ("serve --stop demo", "model_argument", "demo"),
        ("convert-mtp demo destination", "destination", "destination"),
    ):
        assert parse_arguments(typed.split())[name] == value, typed


def test_flags_before_the_command_are_its_own(spd_run: Callable, model: Path, script: Any) -> None:
    assert spd_run("--json", "generate", "-m", model, "Hi").json["text"] == "Hello wörld!"
    assert "Traceback" in spd_run("-vv", "generate", "--temperature", "9e9", "-m", model, "Hi").err
    assert spd_run("--json").json["error"]["exit"] == 2


Write = Callable[..., Path]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder to work in; `config/spd/config.toml` in it is the user's file of options."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "config" / "spd").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def write_config(home: Path) -> Write:
    """Return a function that writes the user's file: `write_config("temperature = 1")`."""
    file = home / "config" / "spd" / "config.toml"

    def write(text: str) -> Path:
        file.write_text(text)
        return file

    return write


def test_what_is_typed_wins_then_environment_then_file(
    write_config, spd_run, model, script, monkeypatch
) -> None:
    more_options = 'stop = ["a", "b"]\nadaptive = false\ntop-p = 0.3\n[generate]\ntop-p = 0.7\n'
    write_config(f'model = "{model}"\ntemperature = 0.25\nctx = "64"\n{more_options}')
    assert spd_run("generate", "Hi").code == 0
    params = script.request.params
    assert (params.temperature, params.top_p, params.stop) == (0.25, 0.7, ("a", "b"))
    assert (script.engine.config.ctx, script.engine.config.adaptive) == (64, False)
    spd_run("generate", "Hi", "--temperature", "1", "--adaptive", "--stop", "c")
    params = script.request.params
    assert (params.temperature, params.stop) == (1.0, ("c",)) and script.engine.config.adaptive
    monkeypatch.setenv("SPD_MODEL", str(model.parent / "none"))
    assert spd_run("generate", "Hi").code == 3
    assert spd_run("inspect", "demo", "--json").json["target"]["model"] == "demo"


def test_a_named_file_stands_for_the_persons(
    write_config, home, spd_run, model, script, monkeypatch
) -> None:
    write_config("temperature = 0.25\ntop-p = 0.7\n")
    named_file = home / "other.toml"
    named_file.write_text("top-p = 0.9\n")
    monkeypatch.setenv("SPD_CONFIG", str(named_file))
    for argv in (["generate"], ["generate", "-v"]):
        ran = spd_run(argv, "-m", model, "Hi")
        params = script.request.params
        assert ran.code == 0 and (params.temperature, params.top_p) == (0.0, 0.9)
    assert f"config  {named_file} sets top-p\n" in ran.err and "top p 0.9 (given)" in ran.err


def test_keys_of_other_commands_are_left_to_them(
    write_config, home, spd_run, model, script
) -> None:
    """A byte order mark is no key either."""
    write_config(
        '\ufeffseed = 5\r\nmarkdown = "off"\r\ncolor = "always"\r\n[chat]\r\nsystem = "be terse"\r\n'
    )
    assert spd_run("generate", "-m", model, "Hi").code == 0 and script.request.params.seed == 5
    assert spd_run("generate").err.startswith("\x1b[1;31merror:")
    assert spd_run("chat", model, "-c", "s", stdin=b"Hi\n").code == 0
    assert read_saved_chat(home)[0]["system"] == "be terse"
    assert spd_run("completions", "bash").code == 0


def test_a_saved_chat_goes_before_files_and_environment(
    write_config, home, spd_run, script, monkeypatch
) -> None:
    """The order is: typed, saved with the chat, SPD_MODEL, the file."""
    model, other = (
        write_model(home / name, max_position_embeddings=4096) for name in ("one", "other")
    )
    script.ctx = 4096
    ran = spd_run("chat", "-c", "s", model, "--seed", 5, "-s", "be kind", stdin=b"Hi\n")
    write_config(f'model = "{home / "none"}"\nseed = 6\nsystem = "be terse"\n')
    monkeypatch.setenv("SPD_MODEL", str(home / "nothing"))
    for name in ("s", None):
        assert ran.code == 0
        ran = spd_run("chat", "-c", [name] if name else [], stdin=b"Again\n")
        header = read_saved_chat(home)[0]
        assert (header["model"], header["seed"], header["system"]) == (str(model), 5, "be kind")
    assert ran.code == 0 and header["draws"] == 3
    for seed, how in ((7, [other]), (8, ["-m", other])):
        ran = spd_run("chat", "-c", how, "--seed", seed, "-s", "be brief", stdin=b"More\n")
        header = read_saved_chat(home)[0]
        assert ran.code == 0 and (header["model"], header["seed"]) == (str(other), seed)
        assert (header["system"], header["draws"]) == ("be brief", 1)
    assert spd_run("chat", "-c", "new", stdin=b"Hi\n").code == 3, "nothing is saved under this name"


def test_a_saved_chat_without_a_system_message_has_none(
    write_config, home, spd_run, model, script
) -> None:
    assert spd_run("chat", model, "-c", "s", stdin=b"Hi\n").code == 0
    first = script.request.prompt_ids
    (home / "system.txt").write_text("be terse")
    for value in ("be terse", f"@{home / 'system.txt'}"):
        write_config(f'system = "{value}"\n')
        assert spd_run("chat", "-c", stdin=b"Again\n").code == 0
        assert script.request.prompt_ids[: len(first)] == first


def test_a_clash_says_which_file_it_is_with(
    write_config, spd_run, model, script, monkeypatch
) -> None:
    path = write_config("draft-max = 3\n")
    result = spd_run("generate", "-m", model, "--spec", "off", "Hi")
    assert_refused(
        result, 2, "are about drafts, and --spec off asks for none", f"  {path} sets draft-max"
    )
    for value in ('"a/b"', "3"):
        write_config(f"model = {value}\n")
        assert_refused(spd_run("generate", "Hi"), 3, "no such folder", f"  {path} sets model")
    monkeypatch.setenv("SPD_CONFIG", str(path.parent / "none.toml"))
    assert_refused(spd_run("generate", "Hi"), 3, "no file", "none.toml")


def test_a_persons_file_that_cannot_be_read_is_said(write_config, spd_run, model, script) -> None:
    """A dangling link and a folder would silently set nothing."""
    path = write_config("ctx = 64\n")
    target = path.rename(path.with_name("moved.toml"))
    path.symlink_to(target)
    assert spd_run("generate", "-m", model, "Hi").code == 0 and script.engine.config.ctx == 64
    target.unlink()
    assert_refused(spd_run("generate", "-m", model, "Hi"), 3, f"no file {path}")
    path.unlink()
    path.mkdir()
    assert_refused(spd_run("generate", "-m", model, "Hi"), 2, f"cannot read {path}: Is a directory")
    path.rmdir()
    assert spd_run("generate", "-m", model, "Hi").code == 0
