"""generation_config.json: defaults when absent, ranges, names in refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from spd.errors import CheckpointError
from spd.formats.model_config import GenerationConfig, read_generation_config
from tests.formats.formats_helpers import refused, write_json


def test_values_are_read(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == GenerationConfig()
    values = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0, "repetition_penalty": 1.05}
    write_json(
        tmp_path, "generation_config.json", {**values, "do_sample": True, "eos_token_id": [5, 3], "x": 1}
    )
    assert read_generation_config(tmp_path) == GenerationConfig((5, 3), 0.6, 0.95, 0.0, 1.05, 20, True)
    write_json(tmp_path, "generation_config.json", {"eos_token_id": 7, "temperature": None})
    assert read_generation_config(tmp_path) == GenerationConfig((7,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-1, "0.5", True, 1e9)),
        *(("top_p", value) for value in (0, 1.5, -0.1)),
        *(("top_k", value) for value in (-5, 2.0, 2**40)),
        ("min_p", 2),
        *(("repetition_penalty", value) for value in (0, -1)),
        ("do_sample", 1),
        *(("eos_token_id", value) for value in (-1, 2**31, [1.0], "3")),
    ],
)
def test_values_that_are_refused(tmp_path: Path, field: str, value: object) -> None:
    write_json(tmp_path, "generation_config.json", {field: value})
    with refused(CheckpointError, "generation_config.json: ", field):
        read_generation_config(tmp_path)


def test_end_of_sequence_beyond_the_vocabulary(tmp_path: Path) -> None:
    write_json(tmp_path, "generation_config.json", {"eos_token_id": [3, 300]})
    with refused(CheckpointError, "eos_token_id", "300"):
        read_generation_config(tmp_path, vocab_size=300)
    assert read_generation_config(tmp_path, vocab_size=301).eos_token_ids == (3, 300)
