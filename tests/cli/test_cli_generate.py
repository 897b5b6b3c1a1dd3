"""`spd generate` over a fake engine: requests, settings, errors and streams."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import typer

from spd.cli.options import GenerateOptions
from spd.cli.parser import parse_token_count
from spd.cli.prompt_input import template_variables
from spd.cli.run_settings import parse_logit_bias, requested_sampling, unescape
from spd.conversation.notes import loop_period
from spd.conversation.sampling import resolve_sampling
from spd.errors import EngineError, UsageError
from spd.formats.files import MAX_INPUT_BYTES
from spd.formats.folder import ModelFolder
from spd.formats.model_config import GenerationConfig
from spd.formats.tokenizer import Tokenizer
from spd.runtime.plan.config import EngineConfig
from tests.cli.conftest import assert_refused, edit_json

VERBOSE_TEXTS = (
    "plan              model folder",
    " ctx 128 ",
    "seed 4 (given)",
    "top p 0.5 (given)",
)
STDERR_CASES: list[tuple[str, str | tuple[str, ...]]] = [
    ("", ""),
    ("--stats", "6 tok · 100.0 tok/s · first 0.01 s · 2.00 tok/round · drafts 3/12 (25%)\n"),
    ("--raw -n 500", "note: the context leaves room for 126 tokens, fewer than -n 500\n"),
    ("-v --seed 4 --top-p 0.5", (*VERBOSE_TEXTS, "top k 20 (generation_config.json)")),
]
"""Options, and all of stderr or texts in it."""


@pytest.mark.parametrize(("options", "expected"), STDERR_CASES)
def test_text_and_one_newline_on_stdout_the_rest_on_stderr(
    options, expected, ask, model, script
) -> None:
    ran = ask(options.split())
    assert (ran.code, ran.text) == (0, "Hello wörld!\n") and script.engine.closed
    assert (
        ran.err == expected
        if isinstance(expected, str)
        else all(text in ran.err for text in expected)
    )
    if "note:" in expected:
        assert ask("-q", options.split()).err == ""
    if not options:
        assert script.engine.config == EngineConfig(model=ModelFolder(model))


def test_exactly_one_newline_is_added_where_none_is(ask, script) -> None:
    complete = (["a\n"], ["a\n", "\n"], ["a\r\n"])
    for script.pieces in (*complete, [""], ["a", ""], ["\x1b[31m\x00"]):
        assert ask().text == "".join(script.pieces) + "\n" * (script.pieces not in complete)


def test_drafts_that_do_not_help_are_told_once(ask, script) -> None:
    assert json.loads(ask("--json").text)["metrics"]["speculative_decoding"]["note"] is None
    script.draft_fault = "chance"
    note = "draft: 3 of 3 first drafts were accepted, as by chance"
    assert ask().err.startswith(f"note: {note}") and ask("-q").err == ""
    result = json.loads(ask("--json").text)
    assert result["metrics"]["speculative_decoding"]["note"].startswith(note)


def test_a_reply_that_was_cut_while_it_repeated_itself_says_so(ask, script) -> None:
    script.pieces = ["ab"] * 100
    script.ids = (5, 6)
    script.finish = "length"
    assert "note: the last 200 tokens repeat the same 2 tokens; a smaller -n" in ask().err
    assert ask("-q").err == ""
    script.finish = "stop"
    assert ask().err == ""
    script.finish = "length"
    script.pieces = ["ab"] * 99
    assert ask().err == ""


def test_repetitions_of_up_to_a_hundred_tokens_are_found_at_the_end() -> None:
    for period in (1, 2, 7, 99, 100):
        assert loop_period([999, *list(range(period)) * 300]) == period
    assert loop_period(list(range(101)) * 3) is None
    assert loop_period([1] * 199) is None and loop_period([1] * 200) == 1
    assert loop_period([1] * 300 + [2]) is None


def test_each_event_is_out_before_the_next_step(ask, script, tmp_path) -> None:
    seen = []
    out = tmp_path / "out"
    script.on_step = lambda step: seen.append(out.read_text() if step else "")
    assert ask("-o", out).out == b""
    assert seen == ["", "Hello", "Hello wörld"] and out.read_text() == "Hello wörld!\n"
    assert ask("-o", out, "--top-p", "7").code == 2
    assert out.read_text() == "Hello wörld!\n", "a refused run does not touch the file"


def test_options_reach_the_request_and_the_engine(ask, script, model) -> None:
    argv = ["--stop", r"\n\n", "--set", "stop_token_id=7", "-n", 9, "--seed", 5]
    argv += ["--set", "ignore_eos=on"]
    argv += [
        "--temperature",
        1,
        "--set",
        "logit-bias=3=-1",
        "--set",
        "logit_bias=4=2",
        "--set",
        "min_p=0.1",
    ]
    ask(argv)
    params = script.request.params
    assert (params.stop, params.stop_token_ids, params.max_tokens, params.seed) == (
        ("\n\n",),
        (7,),
        9,
        5,
    )
    assert (
        params.ignore_eos
        and params.temperature == 1.0
        and params.top_k == 20
        and params.min_p == 0.1
    )
    assert params.logit_bias == ((3, -1.0), (4, 2.0))
    flags = "--device cpu --dtype float32 --ctx 64 --spec ngram --draft-max 3 --no-adaptive --lag 2"
    flags += " --graphs off --kernels torch --memory-fraction 0.5 --threads 3"
    ask(flags.split())
    expected_fields: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "ctx": 64,
        "spec": "ngram",
        "draft_max": 3,
        "lag": 2,
    }
    expected_fields |= {
        "adaptive": False,
        "graphs": False,
        "kernels": "torch",
        "memory_fraction": 0.5,
        "threads": 3,
    }
    assert script.engine.config == EngineConfig(model=ModelFolder(model), **expected_fields)
    (model / "generation_config.json").write_text('{"temperature": 200}')
    assert_refused(ask(), 2, "temperature 200", "generation_config.json")


def test_lookup_in_a_folder_asks_for_lookup(ask, script, tmp_path) -> None:
    for flags, spec in (([], "auto+ngram"), (["--spec", "ngram"], "ngram")):
        assert ask(flags, "--lookup", tmp_path / "texts").code == 0
        config = script.engine.config
        assert (config.spec, config.lookup, config.pool_tokens) == (spec, tmp_path / "texts", 0)
    ran = ask("--spec", "mtp", "--lookup", tmp_path)
    assert_refused(ran, 2, "--spec asks for no lookup", "fix: --spec auto+ngram")


def test_json_holds_the_reply_and_its_figures(ask, model, script) -> None:
    ran = ask("--json", "--logprobs", 2, "--seed", 11)
    reply = ran.json
    assert (ran.code, ran.err, ran.text.count("\n")) == (0, "", 1)
    assert reply["schema"] == "spd.generate/1" and reply["model"] == str(model)
    assert reply["text"] == "Hello wörld!" and reply["token_ids"] == [1, 2, 2, 3, 3, 4]
    assert (reply["finish_reason"], reply["seed"], reply["params"]["seed"]) == ("stop", 11, 11)
    counts = {"prompt_tokens": len(script.request.prompt_ids), "completion_tokens": 6}
    assert reply["usage"].items() >= counts.items()
    assert reply["timings"].items() >= {"draft_n": 12, "draft_n_accepted": 3}.items()
    drafting = {"method": "draft", "num_spec_tokens": 4, "num_spec_steps": 3}
    assert reply["metrics"]["speculative_decoding"].items() >= drafting.items()
    assert reply["plan"]["ctx"] == 128 and reply["versions"]["spd"] and reply["versions"]["python"]
    entry, *other_entries = reply["logprobs"]
    assert (entry["token_id"], entry["token"], entry["logprob"], len(other_entries)) == (
        1,
        '"',
        -0.5,
        5,
    )
    assert [likely["logprob"] for likely in entry["top"]] == [-0.5, None]
    other = ask("--json").json
    assert "logprobs" not in other and 0 <= other["seed"] < 2**53
    ask("--seed", other["seed"])
    assert script.request.params.seed == other["seed"], "a printed seed replays"


def test_a_model_that_fails_keeps_the_text_and_exits_with_9(ask, script) -> None:
    script.finish = "error"
    ran = ask()
    assert (ran.code, ran.text) == (9, "Hello wörld!\n")
    assert ran.err.startswith("error: the model failed while generating\n")
    ran = ask("--json")
    assert (ran.code, ran.json["finish_reason"], ran.json["text"]) == (9, "error", "Hello wörld!")
    assert "the model failed" in ran.err, "one object on stdout, the words on stderr"


@pytest.mark.covers(count=3)
@pytest.mark.parametrize(
    ("error", "code", "expected"),
    [
        (EngineError("a worker died"), 9, "error: a worker died"),
        (MemoryError(), 5, "error: out of memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA is full.\nTried"), 5, "CUDA is full."),
        (RuntimeError("epoll_create: Too many open files"), 5, "error: too many open files"),
        (RuntimeError("odd"), 1, "error: unexpected RuntimeError: odd"),
        (OSError(5, "Input/output error"), 1, "error: unexpected OSError"),
    ],
)
def test_errors_while_generating_keep_what_was_printed(error, code, expected, ask, script) -> None:
    script.fail = error
    ran = ask()
    assert (ran.code, ran.text) == (code, "Hello\n")
    assert expected in ran.err and "Traceback" not in ran.err
    ran = ask("--json")
    assert ran.json["error"]["exit"] == code == ran.code and ran.err == ""


def test_a_model_without_tokenizer_takes_and_gives_ids(
    spd_run: Callable, model: Path, script
) -> None:
    (model / "tokenizer.json").unlink()
    script.tokenizer = False
    script.pieces = ["", ""]
    assert spd_run("generate", "-m", model, "--prompt-ids", "1,2 3").text == "1,2,2,3\n"
    assert script.request.prompt_ids == (1, 2, 3)
    assert_refused(spd_run("generate", "-m", model, "Hi"), 4, "no tokenizer.json", "--prompt-ids")


def test_rules_that_keep_only_the_law_say_so(ask, script) -> None:
    ran = ask("--verify", "block")
    assert ran.code == 0 and "--verify block" in ran.err and "4 drafts a round" in ran.err
    config = script.engine.config
    assert (config.verify, config.adaptive) == ("block", None)
    assert ask("--verify", "coupled", "--adaptive").err == ""
    assert script.engine.config.adaptive is True


def test_a_full_disk_ends_with_5_and_a_reader_that_leaves_with_141(ask, script, tmp_path) -> None:
    script.pieces = ["a"] * 50
    for option, left in (("-o", 49), ("--trace", 0)):  # of which nothing has begun
        ran = ask(option, "/dev/full")
        assert ran.code == 5 and "cannot write to /dev/full: No space left" in ran.err
        assert len(script.engine._remaining_pieces) == left, (
            "decoding goes on after the first failed write"
        )
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    script.on_step = lambda step: os.close(reader) if step == 1 else None
    ran = ask("-o", fifo)
    assert (ran.code, ran.err, len(script.engine._remaining_pieces)) == (141, "", 48)


def resolve(model: GenerationConfig | None = None, **flags: Any):
    return resolve_sampling(
        requested_sampling(GenerateOptions(**flags)), model or GenerationConfig(), 264
    )


def test_the_models_defaults_come_before_built_in_and_after_flags() -> None:
    """A model that does not sample is greedy unless a flag says otherwise."""
    resolved = resolve(GenerationConfig(temperature=0.6, top_p=0.95, top_k=20), top_p=0.5)
    params = resolved.params
    sources = resolved.sources
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.5, 20, 0.0)
    source_names = [sources[name] for name in ("temperature", "top_p", "min_p")]
    assert source_names == ["generation_config.json", "given", "default"]
    assert resolve(GenerationConfig(repetition_penalty=1.1)).params.repetition_penalty == 1.1
    for samples, flags, expected in (
        (False, {}, 0.0),
        (False, {"temperature": 0.9}, 0.9),
        (True, {}, 0.6),
    ):
        model = GenerationConfig(temperature=0.6, do_sample=samples)
        assert resolve(model, **flags).params.temperature == expected


def test_values_are_parsed_as_they_are_spelled() -> None:
    assert unescape(r"\n\n a\tb\r\0 \\n \d \q end" + "\n\\") == "\n\n a\tb\r\0 \\n \\d \\q end\n\\"
    assert parse_logit_bias("42=-5.5") == (42, -5.5)
    assert resolve(logit_bias=["1=2", "2=-1"]).params.logit_bias == ((1, 2.0), (2, -1.0))
    for bad in ("42", "x=1", "1=x", "=", "1=2=3"):
        with pytest.raises(UsageError, match="ID=VALUE"):
            parse_logit_bias(bad)
    for bad in ("", "k", "8kk", "-1", "1.5k", "1e3", "9" * 13, "٤"):
        with pytest.raises(typer.BadParameter):
            parse_token_count(bad)


START = "<|im_start|>"
END = "<|im_end|>"


def test_unneeded_stdin_is_ignored_and_invalid_text_is_refused(spd_run, model, script) -> None:
    assert_refused(spd_run("generate", "-m", model, closed=True), 2, "nothing to generate from")
    assert spd_run("generate", "-m", model, "--prompt-ids", "5", stdin=b"junk").code == 0
    assert script.request.prompt_ids == (5,)
    assert_refused(
        spd_run("generate", "-m", model, "caf\udce9"), 2, "the prompt is not Unicode text"
    )
    assert_refused(
        spd_run("generate", "-m", model, "x", "-s", "\udcff"),
        2,
        "the system message is not Unicode",
    )


INPUTS: dict[str, tuple[bytes, list[object]]] = {
    "-f pipe": (b"Hi", []),
    "-s @pipe": (b"Hi", ["Hi"]),
    "--jsonl -f pipe": (b'{"prompt": "Hi"}', []),
    "--messages pipe": (b'[{"role": "user", "content": "Hi"}]', []),
    "--schema pipe": (b'{"type": "object"}', ["Hi"]),
    "--grammar pipe": (b'start: "a"', ["Hi"]),
}


def test_a_pipe_with_a_name_is_a_file(spd_run, model, script, tmp_path, monkeypatch) -> None:
    """A shell's <(command) is such a pipe."""
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    for option, (data, arguments) in INPUTS.items():
        threading.Thread(target=Path("pipe").write_bytes, args=(data,), daemon=True).start()
        ran = spd_run("generate", "-m", model, option.split(), arguments)
        assert ran.code == 0, ran


def test_an_empty_prompt_is_one_token_and_special_tokens_stay_text(spd_run, model, script) -> None:
    """An empty prompt is the begin token if the tokenizer has one, else the end token."""
    for settings, token in (({}, 258), ({"bos_token": START}, 257)):
        edit_json(model / "tokenizer_config.json", **settings)
        spd_run("generate", "-m", model, "--raw", "")
        assert script.request.prompt_ids == (token,)
    spd_run("generate", "-m", model, f"a{END}b")
    assert script.request.prompt_ids.count(258) == 1, "only the template's own"
    spd_run("generate", "-m", model, "--raw", f"a{END}b")
    assert script.request.prompt_ids.count(258) == 1 and len(script.request.prompt_ids) == 3


def test_template_arguments_are_rendered_and_a_missing_template_is_refused(
    spd_run, model, script
) -> None:
    assignments = ["a=1", "b=true", "c=null", "d=text", 'e=[1, "x"]', "f=", "g=a=b"]
    expected = {"a": 1, "b": True, "c": None, "d": "text", "e": [1, "x"], "f": "", "g": "a=b"}
    assert template_variables(GenerateOptions(template_arg=assignments)) == expected
    edit_json(model / "tokenizer_config.json", chat_template="{{ mood }}|{{ messages[0].content }}")
    ran = spd_run("generate", "-m", model, "--dry-run", "Hi", "--template-arg", "mood=calm")
    assert ran.text == "calm|Hi\n"
    (model / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    assert_refused(
        spd_run("generate", "-m", model, "Hi"), 4, "has no chat template", "fix: spd generate --raw"
    )
    assert spd_run("generate", "-m", model, "--raw", "Hi").code == 0


def test_overflow_says_tokens_limit_and_way_out(spd_run: Callable, model: Path, script) -> None:
    """Cover the model's 128 tokens, a smaller --ctx, and a smaller context of the engine."""
    raw = ["generate", "-m", model, "--raw"]
    assert_refused(
        spd_run(raw, "x" * 128),
        4,
        "prompt is 128 tokens but the context is 128",
        "a shorter prompt",
    )
    ran = spd_run(raw, "x" * 5000, "--ctx", "64")
    assert_refused(ran, 4, "prompt is 5,000 tokens but the context is 64", "a shorter prompt")
    assert "--ctx 5k" not in ran.err
    ran = spd_run(raw, "x" * 70, "--ctx", "64", "-n", "10")
    assert ran.code == 4 and "--ctx" in ran.err and not script.engines
    assert spd_run(raw, "x" * 127).code == 0
    script.ctx = 32
    ran = spd_run(raw, "x" * 50)
    assert ran.code == 4 and "50 tokens but the context is 32" in ran.err


def test_a_log_beyond_the_context_is_refused_with_a_command_that_cuts_it(
    spd_run, model, script, tmp_path
) -> None:
    """Each byte is a token here, and three quarters of 128 are 96."""
    log = tmp_path / "build log"
    log.write_text("0123456789" * 3000)
    raw = ("generate", "-m", model, "--raw")
    ran = spd_run(raw, "-f", log, "Why?")
    assert ran.code == 4 and f"fix: tail -c 96 '{log}' | spd generate …\n" in ran.err
    ran = spd_run(raw, "Why?", stdin=log.read_bytes())
    assert ran.code == 4 and "fix: … | tail -c 96 | spd generate …\n" in ran.err
    assert spd_run(raw, "Why?", stdin=log.read_bytes()[-96:]).code == 0
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(MAX_INPUT_BYTES + 1)
    ran = spd_run(raw, "-f", file.name, "Why?")
    assert_refused(ran, 2, "larger than 64 MiB", f"fix: tail -c 190 {file.name} | spd generate …\n")
    assert "tail" not in spd_run(raw, "x" * 500).err
    assert "tail" not in spd_run(raw, "x" * 500, stdin=b"short").err
    assert "tail" not in spd_run(raw, "-f", log, "-f", log).err


LONG_TEXT = "word " * 1_000_000


@pytest.mark.parametrize("how", [["--raw"], ["-s", LONG_TEXT]])
def test_what_is_far_too_long_is_refused_unread(how, spd_run, model, monkeypatch) -> None:
    seen = list[int]()
    encode = Tokenizer._encode_text

    def counted(self: Tokenizer, text: str, parse_special: bool) -> list[int]:
        seen.append(len(text))
        return encode(self, text, parse_special)

    monkeypatch.setattr(Tokenizer, "_encode_text", counted)
    ran = spd_run("generate", "-m", model, how, stdin=LONG_TEXT.encode())
    assert_refused(ran, 4, "characters, far more than 128 tokens", "a shorter prompt")
    assert f"{len(LONG_TEXT) // 1000:,}" in ran.err or "-s" in how
    assert sum(seen) < 700_000


def test_long_tokens_make_a_long_text_legal(spd_run: Callable, model: Path, script) -> None:
    """A hundred tokens of two thousand characters each are a hundred tokens."""
    library = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    library.add_tokens([tokenizers.AddedToken("=" * 2000, normalized=False)])
    library.save(str(model / "tokenizer.json"))
    edit_json(model / "config.json", vocab_size=300)
    assert spd_run("generate", "-m", model, "--raw", stdin=b"=" * 200_000).code == 0
    assert len(script.request.prompt_ids) == 100
