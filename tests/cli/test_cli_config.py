"""Options from a file, nothing asked, nothing fetched: what wins over what, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import refused, saved_chat, write_model

Write = Callable[..., Path]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in; `config/spd/config.toml` in it is the person's file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    (tmp_path / "config" / "spd").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


@pytest.fixture
def own(home: Path) -> Write:
    """`own("temperature = 1")` writes the person's file."""
    file = home / "config" / "spd" / "config.toml"
    return lambda text: file.write_text(text) and file


def test_what_is_typed_wins_then_environment_then_file(own, spd_run, model, script, monkeypatch) -> None:
    rest = 'stop = ["a", "b"]\nadaptive = false\ntop-p = 0.3\n[generate]\ntop-p = 0.7\n'
    own(f'model = "{model}"\ntemperature = 0.25\nctx = "64"\n{rest}')
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


def test_a_named_file_stands_for_the_persons_and_v_says_so(
    own, home, spd_run, model, script, monkeypatch
) -> None:
    own("temperature = 0.25\ntop-p = 0.7\n")
    named = home / "other.toml"
    named.write_text("top-p = 0.9\n")
    monkeypatch.setenv("SPD_CONFIG", str(named))
    for argv in (["generate"], ["generate", "-v"]):
        ran = spd_run(*argv, "-m", model, "Hi")
        params = script.request.params
        assert ran.code == 0 and (params.temperature, params.top_p) == (0.0, 0.9)
    assert f"config  {named} sets top-p\n" in ran.err and "top p 0.9 (given)" in ran.err


def test_keys_of_other_commands_are_left_to_them(own, home, spd_run, model, script) -> None:
    """And a byte order mark is no key."""
    own('\ufeffseed = 5\r\nmarkdown = "off"\r\ncolor = "always"\r\n[chat]\r\nsystem = "be terse"\r\n')
    assert spd_run("generate", "-m", model, "Hi").code == 0 and script.request.params.seed == 5
    assert spd_run("generate").err.startswith("\x1b[1;31merror:")
    assert spd_run("chat", model, "-c", "s", stdin=b"Hi\n").code == 0
    assert saved_chat(home)[0]["system"] == "be terse"
    assert spd_run("completions", "bash").code == 0


def test_a_saved_chat_goes_before_files_and_environment(own, home, spd_run, script, monkeypatch) -> None:
    """What is typed, then what the chat was saved with, then SPD_MODEL, then the file."""
    model, other = (write_model(home / name, max_position_embeddings=4096) for name in ("one", "other"))
    script.ctx = 4096
    ran = spd_run("chat", "-c", "s", model, "--seed", 5, "-s", "be kind", stdin=b"Hi\n")
    own(f'model = "{home / "none"}"\nseed = 6\nsystem = "be terse"\n')
    monkeypatch.setenv("SPD_MODEL", str(home / "nothing"))
    for name in ("s", None):
        assert ran.code == 0
        ran = spd_run("chat", "-c", *filter(None, [name]), stdin=b"Again\n")
        header = saved_chat(home)[0]
        assert (header["model"], header["seed"], header["system"]) == (str(model), 5, "be kind")
    assert ran.code == 0 and header["draws"] == 3
    for seed, how in ((7, [other]), (8, ["-m", other])):
        ran = spd_run("chat", "-c", *how, "--seed", seed, "-s", "be brief", stdin=b"More\n")
        header = saved_chat(home)[0]
        assert ran.code == 0 and (header["model"], header["seed"]) == (str(other), seed)
        assert (header["system"], header["draws"]) == ("be brief", 1)
    assert spd_run("chat", "-c", "new", stdin=b"Hi\n").code == 3, "nothing is saved under this name"


def test_a_saved_chat_without_a_system_message_has_none(own, home, spd_run, model, script) -> None:
    assert spd_run("chat", model, "-c", "s", stdin=b"Hi\n").code == 0
    first = script.request.prompt_ids
    (home / "system.txt").write_text("be terse")
    for value in ("be terse", f"@{home / 'system.txt'}"):
        own(f'system = "{value}"\n')
        assert spd_run("chat", "-c", stdin=b"Again\n").code == 0
        assert script.request.prompt_ids[: len(first)] == first


def test_a_clash_says_which_file_it_is_with(own, spd_run, model, script, monkeypatch) -> None:
    path = own("draft-max = 3\n")
    told = spd_run("generate", "-m", model, "--spec", "off", "Hi")
    refused(told, 2, "are about drafts, and --spec off asks for none", f"  {path} sets draft-max")
    for value in ('"a/b"', "3"):
        own(f"model = {value}\n")
        refused(spd_run("generate", "Hi"), 3, "no such folder", f"  {path} sets model")
    monkeypatch.setenv("SPD_CONFIG", str(path.parent / "none.toml"))
    refused(spd_run("generate", "Hi"), 3, "no file", "none.toml")
