"""`spd convert-mtp` copies an MTP head out of a checkpoint without torch; `spd quantize`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from spd.cli.options import JsonOptions, ModelArgument, argument, output_option, same_as_argument
from spd.cli.terminal.console import Session
from spd.cli.terminal.progress import Ticker
from spd.cli.terminal.sink import Sink, check_new_folder
from spd.cli.terminal.tables import Size, fact_lines
from spd.errors import UsageError
from spd.formats.names import CONFIG_FILE, WEIGHTS_FILE
from spd.formats.writer import open_stage, output_tensors, write_json, write_tensors
from spd.runtime.plan.config import format_size

if TYPE_CHECKING:
    from spd.formats.mtp import HeadPlan


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConvertOptions(ModelArgument, JsonOptions):
    """The options of `spd convert-mtp`."""

    model_argument: str | None = argument(
        "MODEL", "A folder or org/name with MTP layers, or a head.", None
    )
    destination: Path | None = argument("DIR", "Folder to write. Default: NAME-mtp here.", None)
    model: str = same_as_argument()
    dry_run: bool = output_option(False, None, "Read headers, write nothing.")


def convert_mtp(session: Session, options: ConvertOptions) -> None:
    """Copy a checkpoint's MTP head into a small folder, for models that lost theirs.

    Examples:
      spd convert-mtp deepseek-ai/DeepSeek-V3.1 v31-mtp
      spd generate -m my/DeepSeek-V3.1-AWQ --draft-model v31-mtp "Hello"
    """
    from spd.formats.folder import ModelFolder
    from spd.formats.mtp import plan_head
    from spd.runtime import check_mtp_source

    source = ModelFolder.resolve(options.model)
    source.require_folder("spd convert-mtp")
    destination = options.destination or Path(f"{Path(options.model).resolve().name}-mtp")
    destination = destination.expanduser().absolute()
    check_new_folder(destination)
    plan = plan_head(source, options.model, check_mtp_source)
    with plan.checkpoint:
        own_tables = None if options.dry_run else _write_head(session, plan, destination)
    facts = _head_facts(plan, options.model, destination, own_tables)
    Sink.stdout().write_result(
        options.json, facts, fact_lines(facts | {"mapped": len(plan.tensors)})
    )


def _write_head(session: Session, plan: HeadPlan, destination: Path) -> list[str]:
    """Write the head's folder; return the names of its tables that differ from the target's.

    The folder gets its name once it is complete. Shows progress. Raises CheckpointError if the
    source changed meanwhile, and what writing raises.
    """
    from spd.formats.mtp import find_differing_copies, make_head_config

    own_tables = find_differing_copies(plan)
    head = plan.head
    with Ticker(session.console) as ticker, open_stage(destination) as stage:
        tensors = output_tensors(plan.checkpoint, [*plan.tensors, *own_tables])
        write_tensors(
            stage / WEIGHTS_FILE,
            tensors,
            partial(ticker.show_progress, "writing", amount=format_size),
        )
        plan.checkpoint.check_unchanged()
        config = make_head_config(
            head.folder.fields.values,
            head.verifier,
            head.verifier_sha256,
            head.layout.modules,
            quantized=plan.is_quantized,
        )
        write_json(stage / CONFIG_FILE, config)
    return [tensor.name for tensor in own_tables]


def _head_facts(
    plan: HeadPlan, source: str, destination: Path, own_tables: list[str] | None
) -> dict[str, object]:
    """Return the JSON object of `spd convert-mtp`, with every tensor by name.

    own_tables: names of tables that differ from the target's; None if nothing was written.
    """
    return {
        "schema": "spd.convert-mtp/1",
        "source": source,
        "family": plan.head.layout.family.name,
        "modules": plan.head.layout.modules,
        "declared_modules": plan.declared_modules,
        "found": plan.head.layout.description,
        "destination": str(destination),
        "written": own_tables is not None,
        "bytes": Size(sum(tensor.nbytes for tensor in plan.tensors)),
        "verifier": {"name_or_path": plan.head.verifier, "sha256": plan.head.verifier_sha256},
        "mapped": [
            {
                "name": tensor.name,
                "shard": tensor.shard.name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
            }
            for tensor in plan.tensors
        ],
        "shared": [
            copy.name for copy, _ in plan.table_copies if copy.name not in (own_tables or ())
        ],
        "own": own_tables or [],
        "dropped": list(plan.unused_tensors),
    }


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class QuantizeOptions(ModelArgument, JsonOptions):
    """The options of `spd quantize`."""

    model_argument: str | None = argument("MODEL", "A folder, or org/name in the cache.", None)
    destination: Path | None = argument("DIR", "Folder to write.", None)
    model: str = same_as_argument()
    mtp_too: bool = output_option(
        False, None, "Round MTP layers too. Default: they stay as they are."
    )
    dry_run: bool = output_option(False, None, "Read headers, write nothing.")


def quantize(session: Session, options: QuantizeOptions) -> None:
    """Write a model in four to eight bits, as --quantize int4 rounds it; the text changes.

    Examples:
      spd quantize Qwen/Qwen3-8B qwen3-8b-int4
    """
    from spd.formats.folder import ModelFolder
    from spd.formats.side_files import copy_side_files, find_side_files
    from spd.runtime import find_rounded_specs, quantization_config, rounded_checkpoint_tensors

    if options.destination is None:
        raise UsageError("missing argument 'DIR'")
    source = ModelFolder.resolve(options.model)
    source.require_folder("spd quantize")
    destination = options.destination.expanduser()
    check_new_folder(destination)
    extra_files, notes = find_side_files(source.path, excluded=(CONFIG_FILE,))
    for note in notes:
        session.console.note(note)
    with source.checkpoint as checkpoint:
        rounded = find_rounded_specs(source, options.mtp_too)
        if not rounded:
            raise UsageError(f"{options.model}: no matrix has rows that groups of 32 divide")
        output_tensors = rounded_checkpoint_tensors(checkpoint, rounded, source.config)
        config = {
            **source.fields.values,
            "quantization_config": quantization_config(rounded),
        }
        if not options.dry_run:
            with Ticker(session.console) as ticker, open_stage(destination) as stage:
                report = partial(ticker.show_progress, "writing", amount=format_size)
                write_tensors(stage / WEIGHTS_FILE, output_tensors, report)
                checkpoint.check_unchanged()
                write_json(stage / CONFIG_FILE, config)
                copy_side_files(extra_files, stage)
        num_unrounded = len(checkpoint.tensors) - len(rounded)
        bytes_before = checkpoint.total_bytes
    bytes_after = sum(output.nbytes for output in output_tensors)
    result = {
        "schema": "spd.quantize/1",
        "model": options.model,
        "destination": str(destination),
        "written": not options.dry_run,
        "rounded": len(rounded),
        "kept": num_unrounded,
        "bytes": {"before": Size(bytes_before), "after": Size(bytes_after)},
    }
    Sink.stdout().write_result(options.json, result)
