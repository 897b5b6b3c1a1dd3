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


@pytest.mark.parametrize("typed", ["", "k", "8kk", "-1", "1.5k", "1e3", "9" * 13, "٤"])
def test_words_that_are_no_sizes(typed: str) -> None:
    with pytest.raises(typer.BadParameter):
        parse_size(typed)


def test_a_value_of_the_models_file_is_named_as_such(spd_run: Callable, model: Path, script) -> None:
    (model / "generation_config.json").write_text('{"temperature": 200}')
    refused(spd_run("generate", "-m", model, "Hi"), 2, "temperature 200", "generation_config.json")
