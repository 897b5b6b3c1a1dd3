"""From flags to sampling parameters: origin of defaults, escapes, ids, and every refused value of C4.59."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from spd.cli.options import GenerateOptions, parse_size
from spd.cli.text.job import parse_logit_bias, resolve_sampling, unescape
from spd.errors import UsageError
from spd.formats.model_config import GenerationConfig
from tests.cli.conftest import refused


def resolve(model: GenerationConfig | None = None, **flags: object):
    return resolve_sampling(GenerateOptions(**flags), model or GenerationConfig(), 264)


def test_built_in_defaults() -> None:
    resolved = resolve()
    params = resolved.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 1.0, 0, 0.0)
    assert params.repetition_penalty == 1.0 and resolved.sources["temperature"] == "default"


def test_the_models_defaults_come_before_built_in_and_after_flags() -> None:
    model = GenerationConfig(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
    resolved = resolve(model, top_p=0.5)
    params, sources = resolved.params, resolved.sources
    assert (params.temperature, params.top_p, params.top_k) == (0.6, 0.5, 20)
    assert params.repetition_penalty == 1.1 and params.min_p == 0.0
    assert (sources["temperature"], sources["top_p"], sources["min_p"]) == (
        "generation_config.json",
        "given",
        "default",
    )


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


REFUSED = [
    (["--temperature", "nan"], "temperature nan", "valid: 0 to 100"),
    (["--temperature", "-1"], "temperature -1", "valid: 0 to 100"),
    (["--temperature", "1e-9"], "temperature 1e-09", "0 (greedy), or 0.001 to 100"),
    (["--top-p", "0"], "top_p 0", "valid: above 0 to 1"),
    (["--set", "top_k=-5"], "top_k -5", "valid: 0 to"),
    (["--set", "min_p=2"], "min_p 2", "valid: 0 to 1"),
    (["--set", "repetition_penalty=inf"], "repetition_penalty inf", "valid: 0.01 to 100"),
    (["--set", "presence_penalty=inf"], "presence_penalty inf", "valid: -100 to 100"),
    (["-n", "0"], "max_tokens 0", "valid: 1 to"),
    (["-n", "1000000000000"], "max_tokens 1000000000000", "valid: 1 to 16777216\n"),
    (["--set", "min_tokens=-1"], "min_tokens -1", "valid: 0 to"),
    (["--set", "min_tokens=5", "-n", "4"], "min_tokens 5", "max_tokens 4"),
    (["--draft-max", "1000000"], "--draft-max 1000000", "valid: 0 to"),
    (["--seed", str(2**70)], "seed", "valid: 0 to 9223372036854775807\n"),
    (["--json", "--logprobs", "21"], "logprobs 21", "valid: 0 to 20"),
    (["--set", "logit_bias=1=inf"], "logit_bias inf", "valid: -1000 to 1000"),
    (["--set", "logit_bias=259=1"], "token id 259 is not in the vocabulary", "valid: 0 to"),
    (["--set", "stop_token_id=9999"], "token id 9999 is not in the vocabulary", "valid: 0 to"),
    (["--stop", ""], "length of a stop 0 is out of range", "valid: 1 to 256"),
    (["--stop", "x"] * 17, "number of stop 17 is out of range", "valid: 0 to 16"),
    (["--ctx", "0"], "--ctx 0", "valid: 2 to"),
    (["--ctx", "8x"], "--ctx", "8k"),
    (["--threads", "0"], "--threads 0", "valid: 1 to"),
    (["--memory-fraction", "nan"], "--memory-fraction nan", "valid: 0.01 to 1"),
    (["--tp", "0"], "--tp 0", "valid: 1 to"),
    (["--lag", "3"], "--lag", "'0', '1', '2'"),
    (["--temperature", "warm"], "--temperature", "valid float"),
    (["--seed", "1.5"], "--seed", "valid int"),
    (["--device", "mps"], "--device mps", "auto|cpu|cuda"),
    (["--dtype", "int4"], "--dtype", "bfloat16"),
    (["--spec", "mtp,draft"], "'mtp,draft' is not one of", "mtp,ngram"),
    (["--spec", "ngram,ngram"], "'ngram,ngram' is not one of", "mtp,ngram"),
    (["--set", "warmth=1"], "there is no such parameter", ""),
    (["--set", "top_k"], "is not NAME=VALUE", ""),
    (["--set", "top_k=many"], "is not a number", ""),
    (["--set", "ignore_eos=maybe"], "is not on or off", ""),
    (["--template-arg", "messages=1"], "NAME=VALUE", ""),
]


@pytest.mark.parametrize(("argv", "what", "valid"), REFUSED, ids=[" ".join(case[0]) for case in REFUSED])
def test_values_out_of_range_are_refused_with_the_range(
    argv: list[str], what: str, valid: str, spd_run: Callable, model: Path, script
) -> None:
    ran = spd_run("generate", "-m", model, "Hi", *argv)
    if "--json" in argv:
        shown = ran.json["error"]
        assert ran.code == 2 and what in shown["message"] and valid in " ".join(shown["reason"])
    else:
        refused(ran, 2, what, valid)
    assert not script.engines, "refused before anything is loaded"


def test_boundaries_are_accepted(spd_run: Callable, model: Path, script) -> None:
    least = "--temperature 0.001 --top-p 1 --set top_k=1 --set min_p=1 -n 1 --draft-max 0 --seed 0 --ctx 64"
    least += " --set logit_bias=258=-1000"
    assert spd_run("generate", "-m", model, "Hi", *least.split()).code == 0


@pytest.mark.parametrize(
    ("typed", "tokens"), [("4096", 4096), ("8k", 8192), ("32K", 32768), (" 1k ", 1024), ("0", 0)]
)
def test_sizes(typed: str, tokens: int) -> None:
    assert parse_size(typed) == tokens


@pytest.mark.parametrize("typed", ["", "k", "8kk", "-1", "1.5k", "1e3", "9" * 13, "٤"])
def test_words_that_are_no_sizes(typed: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(typed)


def test_a_value_of_the_models_file_is_named_as_such(spd_run: Callable, model: Path, script) -> None:
    (model / "generation_config.json").write_text('{"temperature": 200}')
    refused(spd_run("generate", "-m", model, "Hi"), 2, "temperature 200", "generation_config.json")


@pytest.mark.parametrize("flag", ["--seed", "-n", "--temperature", "--set=top_k=", "--set=min_tokens="])
def test_a_number_of_any_length_is_out_of_range(flag: str, spd_run: Callable, model: Path) -> None:
    words = [flag + "9" * 400] if flag.endswith("=") else [flag, "9" * 400]
    refused(spd_run("generate", "-m", model, "Hi", *words), 2, "is out of range", "valid: ")
