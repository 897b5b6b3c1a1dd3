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
from spd.errors import EngineError, ResourceError, UsageError
from spd.formats.folder import ModelFolder
from spd.formats.model_config import GenerationConfig
from spd.runtime.plan.config import EngineConfig
from tests.cli.conftest import refused

SAID: list[tuple[str, str | tuple[str, ...]]] = [
    ("", ""),
    ("--stats", "6 tok · 100.0 tok/s · first 0.01 s · 2.00 tok/round · drafts 3/12 (25%)\n"),
    ("--raw -n 500", "note: the context leaves room for 126 tokens, fewer than -n 500\n"),
    (
        "-v --seed 4 --top-p 0.5",
        (
            *("plan              model folder", " ctx 128 ", "seed 4 (given)", "top p 0.5 (given)"),
            "top k 20 (generation_config.json)",
        ),
    ),
]
"""Options, and all that stderr says or words of it."""


@pytest.mark.parametrize(("options", "said"), SAID)
def test_text_and_one_newline_on_stdout_the_rest_on_stderr(options, said, spd_run, model, script) -> None:
    ran = spd_run("generate", "-m", model, "Hi", *options.split())
    assert (ran.code, ran.text) == (0, "Hello wörld!\n") and script.engine.closed
    assert ran.err == said if isinstance(said, str) else all(words in ran.err for words in said)
    if said and isinstance(said, str) and said.startswith("note:"):
        assert spd_run("-q", "generate", "-m", model, "Hi", *options.split()).err == ""
    if not options:
        assert script.engine.config == EngineConfig(model=ModelFolder(model))


@pytest.mark.parametrize(
    ("pieces", "out"),
    [
        (["a\n"], "a\n"),
        (["a\n", "\n"], "a\n\n"),
        ([""], "\n"),
        (["a", ""], "a\n"),
        (["a\r\n"], "a\r\n"),
        (["\x1b[31m\x00"], "\x1b[31m\x00\n"),
    ],
)
def test_exactly_one_newline_is_added_where_none_is(pieces, out, spd_run, model, script) -> None:
    script.pieces = pieces
    assert spd_run("generate", "-m", model, "Hi").text == out


def test_each_event_is_out_before_the_next_step(spd_run, model, script, tmp_path) -> None:
    seen = []
    script.on_step = lambda step: seen.append((tmp_path / "out").read_text() if step else "")
    assert spd_run("generate", "-m", model, "Hi", "-o", tmp_path / "out").out == b""
    assert seen == ["", "Hello", "Hello wörld"]
    assert (tmp_path / "out").read_text() == "Hello wörld!\n"


def test_a_refused_run_does_not_touch_the_output_file(spd_run: Callable, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("precious")
    assert spd_run("generate", "-m", model, "Hi", "-o", tmp_path / "out", "--top-p", "7").code == 2
    assert (tmp_path / "out").read_text() == "precious"


def test_the_request(spd_run: Callable, model: Path, script) -> None:
    argv = ["--stop", r"\n\n", "--set", "stop_token_id=7", "-n", 9, "--seed", 5, "--ignore-eos"]
    argv += ["--temperature", 1, "--set", "logit-bias=3=-1", "--set", "logit_bias=4=2", "--set", "min_p=0.1"]
    spd_run("generate", "-m", model, "Hi", *argv)
    params = script.request.params
    assert (params.stop, params.stop_token_ids, params.max_tokens, params.seed) == (("\n\n",), (7,), 9, 5)
    assert params.ignore_eos and params.temperature == 1.0 and params.top_k == 20 and params.min_p == 0.1
    assert params.logit_bias == ((3, -1.0), (4, 2.0))


def test_the_engine_configuration(spd_run: Callable, model: Path, script) -> None:
    argv = "--device cpu --dtype float32 --ctx 64 --spec ngram --draft-max 3 --no-adaptive --lag 2"
    argv += " --graphs off --kernels torch --memory-fraction 0.5 --threads 3"
    spd_run("generate", "-m", model, "Hi", *argv.split())
    config = script.engine.config
    assert config.model == ModelFolder(model) and config.draft_model is None
    assert (config.device, config.dtype, config.ctx, config.spec) == ("cpu", "float32", 64, "ngram")
    assert (config.draft_max, config.adaptive, config.ngram_min, config.ngram_max) == (3, False, None, 8)
    assert (config.lag, config.graphs, config.kernels, config.threads) == (2, False, "torch", 3)
    assert (config.memory_fraction, config.load, config.tp, config.draft_tp) == (0.5, "auto", 1, None)


def test_json_object(spd_run: Callable, model: Path, script) -> None:
    ran = spd_run("generate", "-m", model, "--json", "Hi", "--logprobs", 2, "--seed", 11)
    shown = ran.json
    assert (ran.code, ran.err, ran.text.count("\n")) == (0, "", 1)
    assert shown["schema"] == "spd.generate/1" and shown["model"] == str(model)
    assert shown["text"] == "Hello wörld!" and shown["token_ids"] == [1, 2, 2, 3, 3, 4]
    assert (shown["finish_reason"], shown["seed"], shown["params"]["seed"]) == ("stop", 11, 11)
    assert shown["usage"]["completion_tokens"] == 6
    assert shown["usage"]["prompt_tokens"] == len(script.request.prompt_ids)
    assert shown["timings"]["draft_n"] == 12 and shown["timings"]["draft_n_accepted"] == 3
    speculation = shown["metrics"]["speculative_decoding"]
    names = ("method", "num_spec_tokens", "num_spec_steps")
    assert [speculation[name] for name in names] == ["draft", 4, 3]
    assert shown["plan"]["ctx"] == 128 and shown["versions"]["spd"] and shown["versions"]["python"]
    assert len(shown["logprobs"]) == 6
    entry = shown["logprobs"][0]
    assert (entry["token_id"], entry["token"], entry["logprob"]) == (1, '"', -0.5)
    assert [likely["logprob"] for likely in entry["top"]] == [-0.5, None]
    other = spd_run("generate", "-m", model, "--json", "Hi").json
    assert "logprobs" not in other and 0 <= other["seed"] < 2**53
    spd_run("generate", "-m", model, "Hi", "--seed", other["seed"])
    assert script.request.params.seed == other["seed"], "a printed seed replays"


def test_dry_run_builds_no_engine(spd_run: Callable, model: Path, script) -> None:
    ran = spd_run("generate", "-m", model, "--dry-run", "-s", "Be terse", "Hi")
    want = "<|im_start|>system\nBe terse<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert ran.text == want and ran.code == 0
    assert ran.err == "39 tokens of 128\n"
    shown = spd_run("generate", "-m", model, "--dry-run", "--json", "--raw", "Hi").json
    assert (shown["prompt"], shown["prompt_tokens"], shown["context"]) == ("Hi", 2, 128)
    assert len(shown["prompt_ids"]) == 2 and not script.engines


def test_a_model_that_fails_while_generating(spd_run: Callable, model: Path, script) -> None:
    script.finish = "error"
    ran = spd_run("generate", "-m", model, "Hi")
    assert (ran.code, ran.text) == (9, "Hello wörld!\n")
    assert ran.err.startswith("error: the model failed while generating\n")
    ran = spd_run("generate", "-m", model, "Hi", "--json")
    assert (ran.code, ran.json["finish_reason"], ran.json["text"]) == (9, "error", "Hello wörld!")
    assert "the model failed" in ran.err, "one object on stdout, the words on stderr"


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (EngineError("a worker died"), 9, "error: a worker died"),
        (ResourceError("no memory"), 5, "error: no memory"),
        (MemoryError(), 5, "error: out of memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA is full.\nTried"), 5, "CUDA is full."),
        (RuntimeError("epoll_create: Too many open files"), 5, "error: too many open files"),
        (RuntimeError("odd"), 1, "error: unexpected RuntimeError: odd"),
        (OSError(5, "Input/output error"), 1, "error: unexpected OSError"),
    ],
)
def test_errors_while_generating_keep_what_was_printed(error, code, words, spd_run, model, script) -> None:
    script.fail = error
    ran = spd_run("generate", "-m", model, "Hi")
    assert (ran.code, ran.text) == (code, "Hello\n")
    assert words in ran.err and "Traceback" not in ran.err
    ran = spd_run("generate", "-m", model, "Hi", "--json")
    assert ran.json["error"]["exit"] == code == ran.code and ran.err == ""


def test_a_model_without_tokenizer_takes_and_gives_ids(spd_run: Callable, model: Path, script) -> None:
    (model / "tokenizer.json").unlink()
    script.tokenizer, script.pieces = False, ["", ""]
    assert spd_run("generate", "-m", model, "--prompt-ids", "1,2 3").text == "1,2,2,3\n"
    assert script.request.prompt_ids == (1, 2, 3)
    refused(spd_run("generate", "-m", model, "Hi"), 4, "no tokenizer.json", "--prompt-ids")


def test_rules_that_keep_only_the_law_say_so(spd_run: Callable, model: Path, script) -> None:
    ran = spd_run("generate", "-m", model, "Hi", "--verify", "block")
    assert ran.code == 0 and "--verify block" in ran.err and "4 drafts a round" in ran.err
    config = script.engine.config
    assert (config.verify, config.adaptive) == ("block", None)
    assert spd_run("generate", "-m", model, "Hi", "--verify", "coupled", "--adaptive").err == ""
    assert script.engine.config.adaptive is True


def test_no_escape_bytes_off_terminal(spd_run, model, script, monkeypatch) -> None:
    ran = spd_run("generate", "-m", model, "Hi", "--stats", "-v", "-n", "500")
    assert b"\x1b" not in ran.out and "\x1b" not in ran.err
    coloured = spd_run("generate", "-m", model, "Hi", "--color", "always", "-n", "500")
    assert b"\x1b" not in coloured.out and "\x1b" in coloured.err
    assert spd_run("generate").err.startswith("error:")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert spd_run("generate").err.startswith("\x1b[1;31merror:\x1b[0m")


@pytest.mark.parametrize(("option", "left"), [("-o", 49), ("--trace", 0)])  # of which nothing has begun
def test_a_full_disk_ends_with_5_and_no_loop(option, left, spd_run, model, script) -> None:
    script.pieces = ["a"] * 50
    ran = spd_run("generate", "-m", model, "Hi", option, "/dev/full")
    assert ran.code == 5 and "cannot write to /dev/full: No space left" in ran.err
    assert len(script.engine._left) == left, "decoding goes on after the first failed write"


def test_a_reader_that_leaves_ends_with_141_quietly(spd_run, model, script, tmp_path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script.pieces = ["a"] * 50
    script.on_step = lambda step: os.close(reader) if step == 1 else None
    ran = spd_run("generate", "-m", model, "Hi", "-o", fifo)
    assert (ran.code, ran.err) == (141, "")
    assert len(script.engine._left) == 48


def resolve(model: GenerationConfig | None = None, **flags: object):
    return resolve_sampling(GenerateOptions(**flags), model or GenerationConfig(), 264)


def test_the_models_defaults_come_before_built_in_and_after_flags() -> None:
    model = GenerationConfig(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    resolved = resolve(model, top_p=0.5)
    params, sources = resolved.params, resolved.sources
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 20)
    assert params.repetition_penalty == 1.1 and params.min_p == 0.0
    told = [sources[name] for name in ("temperature", "top_p", "min_p")]
    assert told == ["generation_config.json", "given", "default"]


def test_a_model_that_does_not_sample_is_greedy_unless_told() -> None:
    model = GenerationConfig(temperature=0.6, do_sample=False)
    assert resolve(model).params.temperature == 0.0
    assert resolve(model, temperature=0.9).params.temperature == 0.9
    assert resolve(GenerationConfig(temperature=0.6, do_sample=True)).params.temperature == 0.6


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (r"\n\n", "\n\n"),
        (r"a\tb\r\0", "a\tb\r\0"),
        (r"\\n", "\\n"),
        (r"\d \q", r"\d \q"),
        ("end\\", "end\\"),
        ("\n", "\n"),
    ],
)
def test_escapes(typed: str, meant: str) -> None:
    assert unescape(typed) == meant


def test_logit_bias() -> None:
    assert parse_logit_bias("42=-5.5") == (42, -5.5)
    assert resolve(logit_bias=["1=2", "2=-1"]).params.logit_bias == ((1, 2.0), (2, -1.0))
    for bad in ("42", "x=1", "1=x", "=", "1=2=3"):
        with pytest.raises(UsageError, match="ID=VALUE"):
            parse_logit_bias(bad)


@pytest.mark.parametrize("typed", ["", "k", "8kk", "-1", "1.5k", "1e3", "9" * 13, "٤"])
def test_words_that_are_no_sizes(typed: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(typed)


def test_a_value_of_the_models_file_is_named_as_such(spd_run: Callable, model: Path, script) -> None:
    (model / "generation_config.json").write_text('{"temperature": 200}')
    refused(spd_run("generate", "-m", model, "Hi"), 2, "temperature 200", "generation_config.json")
