"""`spd quantize`: write a model with its matrices in four bits, for spd and for other engines."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from spd.cli.options import JsonOptions, argument, printed
from spd.cli.text.output import Session, Sink, Size, check_new_folder
from spd.cli.text.progress import writing
from spd.errors import UsageError

WEIGHTS, CONFIG = "model.safetensors", "config.json"
COPIED = (".json", ".jinja", ".txt", ".model")
"""Endings of the files beside the weights that go along."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuantizeOptions(JsonOptions):
    """Everything `spd quantize` takes."""

    model: str = argument("MODEL", "A folder, or org/name in the cache.")
    destination: Path = argument("DIR", "Folder to write.")
    mtp_too: bool = printed(False, None, "Round MTP layers too. Default: they stay as they are.")
    dry_run: bool = printed(False, None, "Read headers, write nothing.")


def quantize(session: Session, options: QuantizeOptions) -> None:
    """Write a model in four bits (compressed-tensors) as --quantize int4 rounds it; the text changes."""
    from spd.formats.folder import ModelFolder
    from spd.formats.writer import open_stage, write_json, write_tensors
    from spd.runtime import quantization_config, rounded_names, rounded_outputs

    source, destination = ModelFolder.named(options.model), options.destination.expanduser()
    check_new_folder(destination)
    with source.checkpoint as checkpoint:
        rounded = set(rounded_names(source, options.mtp_too))
        if not rounded:
            raise UsageError(f"{options.model}: no matrix has rows that groups of 64 divide")
        outputs = rounded_outputs(checkpoint, rounded)
        if not options.dry_run:
            with writing(session.console) as report, open_stage(destination, replaces=False) as stage:
                write_tensors(stage / WEIGHTS, outputs, report)
                checkpoint.check_unchanged()
                config = json.loads((source.path / CONFIG).read_text(encoding="utf-8"))
                config["quantization_config"] = quantization_config(checkpoint, rounded)
                write_json(stage / CONFIG, config)
                for file in source.path.iterdir():
                    if file.name.endswith(COPIED) and ".safetensors" not in file.name and file.name != CONFIG:
                        shutil.copyfile(file, stage / file.name)
        kept, before = len(checkpoint.tensors) - len(rounded), checkpoint.total_bytes
    after = sum(each.nbytes for each in outputs)
    shown = {
        "schema": "spd.quantize/1",
        "model": options.model,
        "destination": str(destination),
        "written": not options.dry_run,
        "rounded": len(rounded),
        "kept": kept,
        "bytes": {"before": Size(before), "after": Size(after)},
    }
    Sink.stdout().answer(options.json, shown)
