"""How a model wants to be sampled by default: `generation_config.json`, every value optional.

Ranges are those of the sampling parameters they become; keys that `spd` does not use are ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spd.formats.json_file import Fields, names_in, read_json_object

FILE_NAME = "generation_config.json"


@dataclass(frozen=True)
class GenerationConfig:
    """Sampling defaults of a model; `None` means that the file is silent."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    top_k: int | None = None
    do_sample: bool | None = None


def read_generation_config(folder: Path, *, vocab_size: int = 1 << 24) -> GenerationConfig:
    """Read `generation_config.json`, all defaults when there is none.

    `vocab_size` bounds the end-of-sequence ids. Raises `CheckpointError` naming file and field.
    """
    if FILE_NAME not in names_in(folder):
        return GenerationConfig()
    path = folder / FILE_NAME
    fields = Fields(str(path), read_json_object(path))
    return GenerationConfig(
        eos_token_ids=fields.token_ids("eos_token_id", vocab_size),
        temperature=fields.optional_number("temperature", 0.0, 1e4),
        top_p=fields.optional_number("top_p", 1e-9, 1.0),
        min_p=fields.optional_number("min_p", 0.0, 1.0),
        repetition_penalty=fields.optional_number("repetition_penalty", 1e-6, 1e4),
        top_k=fields.optional_integer("top_k", 0, 1 << 31),
        do_sample=fields.boolean("do_sample", False) if "do_sample" in fields else None,
    )
