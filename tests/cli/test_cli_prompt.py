"""What is asked: arguments, files, stdin, chats, ids; odd text; and prompts that are too long."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers

from spd.cli.options import GenerateOptions
from spd.cli.text.prompt import template_variables
from spd.formats.tokenizer import Tokenizer
from tests.cli.conftest import edit, refused

START, END = "<|im_start|>", "<|im_end|>"


def test_stdin_that_is_not_needed_and_arguments_that_are_no_text(spd_run, model, script) -> None:
    refused(spd_run("generate", "-m", model, closed=True), 2, "nothing to generate from")
    assert spd_run("generate", "-m", model, "--prompt-ids", "5", stdin=b"junk").code == 0
    assert script.request.prompt_ids == (5,)
    refused(spd_run("generate", "-m", model, "caf\udce9"), 2, "the prompt is not Unicode text")
    refused(spd_run("generate", "-m", model, "x", "-s", "\udcff"), 2, "the system message is not Unicode")


INPUTS: dict[str, tuple[bytes, list[object]]] = {
    "-f pipe": (b"Hi", []),
    "-s @pipe": (b"Hi", ["Hi"]),
    "--jsonl -f pipe": (b'{"prompt": "Hi"}', []),
    "--messages pipe": (b'[{"role": "user", "content": "Hi"}]', []),
    "--schema pipe": (b'{"type": "object"}', ["Hi"]),
    "--grammar pipe": (b'start: "a"', ["Hi"]),
}


def test_a_pipe_with_a_name_is_a_file(spd_run, model, script, tmp_path, monkeypatch) -> None:
    """As a shell's <(command) is."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for option, (data, more) in INPUTS.items():
        threading.Thread(target=Path("pipe").write_bytes, args=(data,), daemon=True).start()
        ran = spd_run("generate", "-m", model, *option.split(), *more)
        assert ran.code == 0, ran


def test_empty_prompts_and_special_tokens_in_text(spd_run, model, script) -> None:
    """The first token stands for nothing where there is one, else what ends a text."""
    for settings, token in (({}, 258), ({"bos_token": START}, 257)):
        edit(model / "tokenizer_config.json", **settings)
        spd_run("generate", "-m", model, "--raw", "")
        assert script.request.prompt_ids == (token,)
    spd_run("generate", "-m", model, f"a{END}b")
    assert script.request.prompt_ids.count(258) == 1, "only the template's own"
    spd_run("generate", "-m", model, "--raw", END)
    assert len(script.request.prompt_ids) == len(END)


def test_template_arguments_and_a_model_without_a_template(spd_run, model, script) -> None:
    words = ["a=1", "b=true", "c=null", "d=text", 'e=[1, "x"]', "f=", "g=a=b"]
    meant = {"a": 1, "b": True, "c": None, "d": "text", "e": [1, "x"], "f": "", "g": "a=b"}
    assert template_variables(GenerateOptions(template_arg=words)) == meant
    edit(model / "tokenizer_config.json", chat_template="{{ mood }}|{{ messages[0].content }}")
    ran = spd_run("generate", "-m", model, "--dry-run", "Hi", "--template-arg", "mood=calm")
    assert ran.text == "calm|Hi\n"
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    refused(spd_run("generate", "-m", model, "Hi"), 4, "has no chat template", "fix: spd generate --raw")
    assert spd_run("generate", "-m", model, "--raw", "Hi").code == 0


def test_overflow_says_tokens_limit_and_way_out(spd_run: Callable, model: Path, script) -> None:
    """Of 128 tokens that the model has, fewer that are asked for, and fewer that the engine has."""
    raw = ["generate", "-m", model, "--raw"]
    refused(spd_run(*raw, "x" * 128), 4, "prompt is 128 tokens but the context is 128", "a shorter prompt")
    ran = spd_run(*raw, "x" * 5000, "--ctx", "64")
    refused(ran, 4, "prompt is 5,000 tokens but the context is 64", "a shorter prompt")
    assert "--ctx 5k" not in ran.err
    ran = spd_run(*raw, "x" * 70, "--ctx", "64", "-n", "10")
    assert ran.code == 4 and "--ctx" in ran.err and not script.engines
    assert spd_run(*raw, "x" * 127).code == 0
    script.ctx = 32
    ran = spd_run(*raw, "x" * 50)
    assert ran.code == 4 and "50 tokens but the context is 32" in ran.err


FAR = "word " * 1_000_000


@pytest.mark.parametrize("how", [["--raw"], ["-s", FAR]])
def test_what_is_far_too_long_is_refused_unread(how, spd_run, model, monkeypatch) -> None:
    seen, encode = list[int](), Tokenizer._encode

    def counted(self: Tokenizer, text: str, parse_special: bool) -> list[int]:
        seen.append(len(text))
        return encode(self, text, parse_special)

    monkeypatch.setattr(Tokenizer, "_encode", counted)
    ran = spd_run("generate", "-m", model, *how, stdin=FAR.encode())
    refused(ran, 4, "characters, far more than 128 tokens", "a shorter prompt")
    assert f"{len(FAR) // 1000:,}" in ran.err or "-s" in how
    assert sum(seen) < 700_000


def test_long_tokens_make_a_long_text_legal(spd_run: Callable, model: Path, script) -> None:
    """A hundred tokens of two thousand characters each are a hundred tokens."""
    library = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    library.add_tokens([tokenizers.AddedToken("=" * 2000, normalized=False)])
    library.save(str(model / "tokenizer.json"))
    edit(model / "config.json", vocab_size=300)
    assert spd_run("generate", "-m", model, "--raw", stdin=b"=" * 200_000).code == 0
    assert len(script.request.prompt_ids) == 100
