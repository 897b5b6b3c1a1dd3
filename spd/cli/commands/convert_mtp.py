"""`spd convert-mtp`: cut an MTP head out of a checkpoint into a small folder, or see whether one fits.

Reads headers, then the head's own bytes a piece at a time; torch is imported for --dtype only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from spd import __version__
from spd.cli.commands.convert_report import Report, convert_lines, facts
from spd.cli.options import CommonOptions, Session, _output, model_names
from spd.cli.text.output import Sink, check_folder, to_json, write_error
from spd.cli.text.progress import Ticker
from spd.errors import CheckFailedError, UsageError

if TYPE_CHECKING:
    from spd.formats.folder import ModelFolder
    from spd.formats.model_config import ModelConfig
    from spd.formats.mtp import Cast, HeadPlan

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
CODES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
PROMPT, TOKENS, DEPTHS, SLOTS = 32, 64, 4, 8
"""What --verify runs: tokens of its prompt, of the reply that are drafted for, drafts, requests at once."""
USELESS, POOR = 0.05, 0.4


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConvertOptions(CommonOptions):
    """Everything `spd convert-mtp` takes."""

    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", autocompletion=model_names, help="A folder or org/name with MTP layers, or a head."
        ),
    ]
    destination: Annotated[
        Path | None, typer.Argument(metavar="[DST]", help="Folder to write. Default: NAME-mtp here.")
    ] = None
    attach: Annotated[
        str | None,
        typer.Option(
            "--attach", autocompletion=model_names, metavar="TARGET", help="Check that the head fits it."
        ),
    ] = None
    revision: Annotated[
        str | None, typer.Option(metavar="REV", help="Branch, tag or commit in the cache.")
    ] = None
    dtype: Annotated[
        Literal["stored", "bfloat16", "float16", "float32"],
        typer.Option(help="Of what is written; FP8 blocks are multiplied out."),
    ] = "stored"
    verify: Annotated[
        bool, typer.Option("--verify", help="Try the head on its target: drafts, acceptance by depth.")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace a head that is already there.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read headers, write nothing.")] = False
    json: Annotated[bool, _output("--json", help="One JSON object: every tensor by name.")] = False


def convert_mtp(session: Session, options: ConvertOptions) -> int:
    """Cut a checkpoint's MTP head into a small folder, for targets that lost theirs."""
    from spd.formats.folder import ModelFolder
    from spd.formats.mtp import plan_head

    source = ModelFolder.named(options.source, options.revision)
    destination = _destination(options, source.path)
    if options.verify:
        _require_target(options, source)
    plan = plan_head(source, options.source, _layer_tensors)
    with plan.checkpoint:
        report = Report(plan, options.source, destination)
        target = source if options.attach is None else ModelFolder.named(options.attach)
        if options.attach is not None:
            report = replace(report, attached=_attach(plan, options.attach, target))
        if options.dtype != "stored":
            plan = plan.cast(CODES[options.dtype])
        report = replace(report, plan=plan)
        if destination is not None and not options.dry_run:
            report = _write(session, plan, options, report, destination)
    if options.verify:
        report = replace(report, verified=_verify(session, target, destination or source.path))
    sink = Sink.stdout()
    if options.json:
        sink.write(to_json(facts(report)) + "\n")
    else:
        sink.write_lines(convert_lines(report))
    failure = None if report.verified is None else _fault(session, report.verified)
    if failure is None:
        return 0
    write_error(failure, session.console, as_json=False)  # the answer is on stdout already
    return failure.exit_code


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the target's last decoder layer, which a module's layer repeats."""
    from spd.runtime.models import family_layout

    return family_layout(config).layers[-1].tensors()


def _destination(options: ConvertOptions, source: Path) -> Path | None:
    """Where to write, seen to be free; None where a head's fit is all that is asked. Raises UsageError."""
    from spd.formats.folder import ModelFolder
    from spd.formats.mtp import is_head_folder

    if options.destination is None and options.attach is not None:
        return None
    name = source.name if Path(options.source).exists() else options.source.rsplit("/", 1)[-1]
    destination = Path(os.path.abspath((options.destination or Path(f"{name}-mtp")).expanduser()))
    real, origin = destination.resolve(), source.resolve()
    if real == origin or origin in real.parents or real in origin.parents:
        raise UsageError(
            f"{destination}: is or holds the source, or lies inside it", fix=["name a folder elsewhere"]
        )
    if not options.dry_run:
        check_folder(destination)
    if options.dry_run or not (destination.exists() or destination.is_symlink()):
        return destination
    if not destination.is_dir() or destination.is_symlink():
        raise UsageError(f"{destination}: is there and no folder", fix=["name another folder"])
    if not any(destination.iterdir()):
        return destination
    if not is_head_folder(ModelFolder(destination)) and not (destination / MANIFEST).exists():
        raise UsageError(
            f"{destination}: is there and holds no MTP head, so --force does not replace it either",
            fix=["name another folder"],
        )
    if not options.force:
        raise UsageError(f"{destination}: is there", fix=["--force replaces it, or name another folder"])
    return destination


def _attach(plan: HeadPlan, name: str, target: ModelFolder) -> dict[str, Any]:
    """Whether the head fits a target, and was made for it. Raises IncompatibleError naming what differs."""
    from spd.formats.checkpoint import Checkpoint
    from spd.formats.mtp import FINAL_NORM, check_fits, verifier_hash

    check_fits(plan.head, target.config, target.path)
    with Checkpoint.open(target.path, wanted=lambda shards: (FINAL_NORM,)) as checkpoint:
        digest = verifier_hash(checkpoint)
    return {"target": name, "sha256": digest, "same_verifier": digest == plan.head.verifier_sha256}


def _write(
    session: Session, plan: HeadPlan, options: ConvertOptions, report: Report, destination: Path
) -> Report:
    """Write the folder: weights, config, manifest; then it gets its name."""
    from spd.formats.model_config import FILE_NAME
    from spd.formats.mtp import config_to_write, differing_copies, outputs
    from spd.formats.writer import open_stage, write_json, write_tensors

    own = differing_copies(plan)
    tensors = [*plan.tensors, *own]
    cast = _cast(plan, options.dtype) if options.dtype != "stored" else None
    with Ticker(session.console) as ticker, open_stage(destination, replaces=options.force) as stage:

        def show(done: int, total: int, tensor: str) -> None:
            ticker.write(f"writing {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB · {tensor}")

        digests = write_tensors(stage / WEIGHTS, outputs(plan, tensors, cast), show)
        plan.checkpoint.check_unchanged()
        write_json(stage / FILE_NAME, config_to_write(plan))
        manifest = {
            "schema": "spd.manifest/1",
            "spd": __version__,
            "source": report.source,
            "verifier_sha256": plan.head.verifier_sha256,
            "layout": "spd",
            "tensors": {meta.name: {"from": meta.name, "sha256": digests[meta.name]} for meta in tensors},
        }
        write_json(stage / MANIFEST, manifest)
    return replace(report, written=True, own=tuple(tensor.name for tensor in own))


def _cast(plan: HeadPlan, dtype: str) -> Cast:
    import torch

    from spd.runtime.load.fp8_blocks import cast_pieces

    wanted, block = getattr(torch, dtype), plan.head.config.fp8_block
    return lambda checkpoint, meta: cast_pieces(checkpoint, meta, wanted, block)


def _require_target(options: ConvertOptions, source: ModelFolder) -> None:
    """Raise UsageError where --verify has no target to try a head on, or no head that spd can read."""
    from spd.formats.mtp import is_head_folder

    if options.dry_run:
        raise UsageError("--verify tries the folder that is written, as spd reads it", fix=["leave it out"])
    if options.attach is None and is_head_folder(source):
        raise UsageError("--verify needs a target: SRC is a head", fix=["--attach TARGET"])
    if options.attach is not None and options.destination is None and not is_head_folder(source):
        raise UsageError("--verify needs a head folder to try", fix=["name a folder to write"])


def _verify(session: Session, target: ModelFolder, head: Path) -> dict[str, Any]:
    """Run the target with the head on spd's own prompts, else on token ids where it has no tokenizer."""
    from spd.runtime import EngineConfig
    from spd.runtime.lab.head_check import check_head
    from spd.runtime.lab.prompt_set import read_prompts

    prompt = tuple(range(PROMPT))
    if target.tokenizer is not None:
        prompt = tuple(target.tokenizer.encode(read_prompts()[0].text))[:PROMPT]
    ctx = PROMPT + TOKENS + 3 * DEPTHS
    config = EngineConfig(model=target, spec="mtp", mtp=head, draft_max=DEPTHS, ctx=ctx, slots=SLOTS)
    with Ticker(session.console) as ticker:
        ticker.write("trying the head on its target")
        return check_head(config, [prompt], TOKENS + DEPTHS, session.guard.check).as_dict()


def _fault(session: Session, found: dict[str, Any]) -> CheckFailedError | None:
    """What is wrong with drafts that depend on the cache, or that are next to never accepted."""
    first = found["acceptance"][0]
    if found["differing"]:
        return CheckFailedError(
            f"{found['differing']} of {found['rounds']} rounds drafted otherwise than from an empty cache",
            fix=["please report it"],
        )
    if first < USELESS:
        return CheckFailedError(
            f"{first:.0%} of first drafts are accepted: the head is broken, or another target's",
            fix=["make the head from the checkpoint that the target was made of"],
        )
    if first < POOR:
        session.console.note(f"{first:.0%} of first drafts are accepted: less than heads are known for")
    return None
