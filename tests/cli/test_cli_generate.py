"""`spd generate` around a fake engine: what goes to which stream, and what engine and sampler are asked."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from spd.cli.options import GenerateOptions
from spd.cli.parser import parse_size
from spd.cli.text.job import parse_logit_bias, resolve_sampling, unescape
from spd.errors import EngineError, UsageError
from spd.formats.folder import ModelFolder
from spd.formats.model_config import GenerationConfig
from spd.runtime.plan.config import EngineConfig
from tests.cli.conftest import refused

GIVEN = ("plan              model folder", " ctx 128 ", "seed 4 (given)", "top p 0.5 (given)")
SAID: list[tuple[str, str | tuple[str, ...]]] = [
    ("", ""),
    ("--stats", "6 tok · 100.0 tok/s · first 0.01 s · 2.00 tok/round · drafts 3/12 (25%)\n"),
    ("--raw -n 500", "note: the context leaves room for 126 tokens, fewer than -n 500\n"),
    ("-v --seed 4 --top-p 0.5", (*GIVEN, "top k 20 (generation_config.json)")),
]
"""Options, and all that stderr says or words of it."""


@pytest.mark.parametrize(("options", "said"), SAID)
def test_text_and_one_newline_on_stdout_the_rest_on_stderr(options, said, ask, model, script) -> None:
    ran = ask(*options.split())
    assert (ran.code, ran.text) == (0, "Hello wörld!\n") and script.engine.closed
    assert ran.err == said if isinstance(said, str) else all(words in ran.err for words in said)
    if "note:" in said:
        assert ask("-q", *options.split()).err == ""
    if not options:
        assert script.engine.config == EngineConfig(model=ModelFolder(model))


def test_exactly_one_newline_is_added_where_none_is(ask, script) -> None:
    whole = (["a\n"], ["a\n", "\n"], ["a\r\n"])
    for script.pieces in (*whole, [""], ["a", ""], ["\x1b[31m\x00"]):
        assert ask().text == "".join(script.pieces) + "\n" * (script.pieces not in whole)


def test_each_event_is_out_before_the_next_step(ask, script, tmp_path) -> None:
    seen, out = [], tmp_path / "out"
    script.on_step = lambda step: seen.append(out.read_text() if step else "")
    assert ask("-o", out).out == b""
    assert seen == ["", "Hello", "Hello wörld"] and out.read_text() == "Hello wörld!\n"
    assert ask("-o", out, "--top-p", "7").code == 2
    assert out.read_text() == "Hello wörld!\n", "a refused run does not touch the file"


def test_the_request_and_the_engine(ask, script, model) -> None:
    argv = ["--stop", r"\n\n", "--set", "stop_token_id=7", "-n", 9, "--seed", 5, "--ignore-eos"]
    argv += ["--temperature", 1, "--set", "logit-bias=3=-1", "--set", "logit_bias=4=2", "--set", "min_p=0.1"]
    ask(*argv)
    params = script.request.params
    assert (params.stop, params.stop_token_ids, params.max_tokens, params.seed) == (("\n\n",), (7,), 9, 5)
    assert params.ignore_eos and params.temperature == 1.0 and params.top_k == 20 and params.min_p == 0.1
    assert params.logit_bias == ((3, -1.0), (4, 2.0))
    argv = "--device cpu --dtype float32 --ctx 64 --spec ngram --draft-max 3 --no-adaptive --lag 2"
    argv += " --graphs off --kernels torch --memory-fraction 0.5 --threads 3"
    ask(*argv.split())
    given = {"device": "cpu", "dtype": "float32", "ctx": 64, "spec": "ngram", "draft_max": 3, "lag": 2}
    given |= {"adaptive": False, "graphs": False, "kernels": "torch", "memory_fraction": 0.5, "threads": 3}
    assert script.engine.config == EngineConfig(model=ModelFolder(model), **given)


def test_json_object(ask, model, script) -> None:
    ran = ask("--json", "--logprobs", 2, "--seed", 11)
    shown = ran.json
    assert (ran.code, ran.err, ran.text.count("\n")) == (0, "", 1)
    assert shown["schema"] == "spd.generate/1" and shown["model"] == str(model)
    assert shown["text"] == "Hello wörld!" and shown["token_ids"] == [1, 2, 2, 3, 3, 4]
    assert (shown["finish_reason"], shown["seed"], shown["params"]["seed"]) == ("stop", 11, 11)
    counts = {"prompt_tokens": len(script.request.prompt_ids), "completion_tokens": 6}
    assert shown["usage"].items() >= counts.items()
    assert shown["timings"].items() >= {"draft_n": 12, "draft_n_accepted": 3}.items()
    counts = {"method": "draft", "num_spec_tokens": 4, "num_spec_steps": 3}
    assert shown["metrics"]["speculative_decoding"].items() >= counts.items()
    assert shown["plan"]["ctx"] == 128 and shown["versions"]["spd"] and shown["versions"]["python"]
    entry, *others = shown["logprobs"]
    assert (entry["token_id"], entry["token"], entry["logprob"], len(others)) == (1, '"', -0.5, 5)
    assert [likely["logprob"] for likely in entry["top"]] == [-0.5, None]
    other = ask("--json").json
    assert "logprobs" not in other and 0 <= other["seed"] < 2**53
    ask("--seed", other["seed"])
    assert script.request.params.seed == other["seed"], "a printed seed replays"


def test_a_model_that_fails_while_generating(ask, script) -> None:
    script.finish = "error"
    ran = ask()
    assert (ran.code, ran.text) == (9, "Hello wörld!\n")
    assert ran.err.startswith("error: the model failed while generating\n")
    ran = ask("--json")
    assert (ran.code, ran.json["finish_reason"], ran.json["text"]) == (9, "error", "Hello wörld!")
    assert "the model failed" in ran.err, "one object on stdout, the words on stderr"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (EngineError("a worker died"), 9, "error: a worker died"),
        (MemoryError(), 5, "error: out of memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA is full.\nTried"), 5, "CUDA is full."),
        (RuntimeError("epoll_create: Too many open files"), 5, "error: too many open files"),
        (RuntimeError("odd"), 1, "error: unexpected RuntimeError: odd"),
        (OSError(5, "Input/output error"), 1, "error: unexpected OSError"),
    ],
)
def test_errors_while_generating_keep_what_was_printed(error, code, words, ask, script) -> None:
    script.fail = error
    ran = ask()
    assert (ran.code, ran.text) == (code, "Hello\n")
    assert words in ran.err and "Traceback" not in ran.err
    ran = ask("--json")
    assert ran.json["error"]["exit"] == code == ran.code and ran.err == ""


def test_a_model_without_tokenizer_takes_and_gives_ids(spd_run: Callable, model: Path, script) -> None:
    (model / "tokenizer.json").unlink()
    script.tokenizer, script.pieces = False, ["", ""]
    assert spd_run("generate", "-m", model, "--prompt-ids", "1,2 3").text == "1,2,2,3\n"
    assert script.request.prompt_ids == (1, 2, 3)
    refused(spd_run("generate", "-m", model, "Hi"), 4, "no tokenizer.json", "--prompt-ids")


def test_rules_that_keep_only_the_law_say_so(ask, script) -> None:
    ran = ask("--verify", "block")
    assert ran.code == 0 and "--verify block" in ran.err and "4 drafts a round" in ran.err
    config = script.engine.config
    assert (config.verify, config.adaptive) == ("block", None)
    assert ask("--verify", "coupled", "--adaptive").err == ""
    assert script.engine.config.adaptive is True


def test_no_escape_bytes_off_terminal(ask, spd_run, monkeypatch) -> None:
    ran = ask("--stats", "-v", "-n", "500")
    assert b"\x1b" not in ran.out and "\x1b" not in ran.err
    coloured = ask("--color", "always", "-n", "500")
    assert b"\x1b" not in coloured.out and "\x1b" in coloured.err
    assert spd_run("generate").err.startswith("error:")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert spd_run("generate").err.startswith("\x1b[1;31merror:\x1b[0m")


def test_a_full_disk_ends_with_5_and_a_reader_that_leaves_with_141(ask, script, tmp_path) -> None:
    script.pieces = ["a"] * 50
    for option, left in (("-o", 49), ("--trace", 0)):  # of which nothing has begun
        ran = ask(option, "/dev/full")
        assert ran.code == 5 and "cannot write to /dev/full: No space left" in ran.err
        assert len(script.engine._left) == left, "decoding goes on after the first failed write"
    os.mkfifo(fifo := tmp_path / "fifo")
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script.on_step = lambda step: os.close(reader) if step == 1 else None
    ran = ask("-o", fifo)
    assert (ran.code, ran.err, len(script.engine._left)) == (141, "", 48)


def resolve(model: GenerationConfig | None = None, **flags: object):
    return resolve_sampling(GenerateOptions(**flags), model or GenerationConfig(), 264)


def test_the_models_defaults_come_before_built_in_and_after_flags() -> None:
    """A model that does not sample is greedy unless it is told."""
    resolved = resolve(GenerationConfig(temperature=0.6, top_p=0.95, top_k=20), top_p=0.5)
    params, sources = resolved.params, resolved.sources
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.5, 20, 0.0)
    told = [sources[name] for name in ("temperature", "top_p", "min_p")]
    assert told == ["generation_config.json", "given", "default"]
    assert resolve(GenerationConfig(repetition_penalty=1.1)).params.repetition_penalty == 1.1
    for samples, given, meant in ((False, {}, 0.0), (False, {"temperature": 0.9}, 0.9), (True, {}, 0.6)):
        model = GenerationConfig(temperature=0.6, do_sample=samples)
        assert resolve(model, **given).params.temperature == meant


def test_how_values_are_spelled() -> None:
    assert unescape(r"\n\n a\tb\r\0 \\n \d \q end" + "\n\\") == "\n\n a\tb\r\0 \\n \\d \\q end\n\\"
    assert parse_logit_bias("42=-5.5") == (42, -5.5)
    assert resolve(logit_bias=["1=2", "2=-1"]).params.logit_bias == ((1, 2.0), (2, -1.0))
    for bad in ("42", "x=1", "1=x", "=", "1=2=3"):
        with pytest.raises(UsageError, match="ID=VALUE"):
            parse_logit_bias(bad)
    for bad in ("", "k", "8kk", "-1", "1.5k", "1e3", "9" * 13, "٤"):
        with pytest.raises(typer.BadParameter):
            parse_size(bad)


def test_a_value_of_the_models_file_is_named_as_such(ask, model) -> None:
    (model / "generation_config.json").write_text('{"temperature": 200}')
    refused(ask(), 2, "temperature 200", "generation_config.json")
