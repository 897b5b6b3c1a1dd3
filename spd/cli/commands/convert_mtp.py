"""`spd convert-mtp`: cut an MTP head out of a checkpoint into a small folder, or see whether one fits.

Reads headers, then the head's own bytes a piece at a time. No torch here.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd import __version__
from spd.cli.options import CommonOptions, Session, argument, model_names, printed
from spd.cli.text.output import Sink, check_folder, to_json
from spd.cli.text.progress import Ticker
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.formats.model_config import ModelConfig
    from spd.formats.mtp import HeadPlan

WEIGHTS = "model.safetensors"
MANIFEST = "manifest.json"
SCALES = "_scale_inv"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ConvertOptions(CommonOptions):
    """Everything `spd convert-mtp` takes."""

    source: str = argument(
        "SRC", "A folder or org/name with MTP layers, or a head.", autocompletion=model_names
    )
    destination: Path | None = argument("[DST]", "Folder to write. Default: NAME-mtp here.", None)
    attach: str | None = printed(None, "TARGET", "Check that the head fits it.", autocompletion=model_names)
    revision: str | None = printed(None, "REV", "Branch, tag or commit in the cache.")
    force: bool = printed(False, None, "Replace a head that is already there.")
    dry_run: bool = printed(False, None, "Read headers, write nothing.")
    json: bool = printed(False, None, "One JSON object: every tensor by name.")


@dataclass(frozen=True)
class Report:
    """A conversion, planned or done; `own` names the head's tables that differ from the target's."""

    plan: HeadPlan
    source: str
    destination: Path | None
    attached: dict[str, Any] | None = None
    written: bool = False
    own: tuple[str, ...] = ()

    def shared(self) -> list[str]:
        """Copies of the target's tables: left out, or before writing those that will be compared."""
        return [copy.name for copy, _ in self.plan.copies if copy.name not in self.own]


def convert_mtp(session: Session, options: ConvertOptions) -> None:
    """Cut a checkpoint's MTP head into a small folder, for targets that lost theirs."""
    from spd.formats.folder import ModelFolder
    from spd.formats.mtp import plan_head

    source = ModelFolder.named(options.source, options.revision)
    destination = _destination(options, source.path)
    plan = plan_head(source, options.source, _layer_tensors)
    with plan.checkpoint:
        report = Report(plan, options.source, destination)
        if options.attach is not None:
            report = replace(report, attached=_attach(plan, options.attach))
        if destination is not None and not options.dry_run:
            report = _write(session, plan, options, report, destination)
    sink = Sink.stdout()
    if options.json:
        sink.write(to_json(facts(report)) + "\n")
    else:
        sink.write_lines(convert_lines(report))


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the target's last decoder layer, which a module's layer repeats."""
    from spd.runtime import family_layout

    shapes: dict[str, tuple[int, ...]] = family_layout(config).layers[-1].tensors()
    return shapes


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
        raise UsageError(f"{destination}: exists and is not a folder", fix=["name another folder"])
    if not any(destination.iterdir()):
        return destination
    if not is_head_folder(ModelFolder(destination)) and not (destination / MANIFEST).exists():
        raise UsageError(
            f"{destination}: exists and holds no MTP head, so --force does not replace it either",
            fix=["name another folder"],
        )
    if not options.force:
        raise UsageError(f"{destination}: is there", fix=["--force replaces it, or name another folder"])
    return destination


def _attach(plan: HeadPlan, name: str) -> dict[str, Any]:
    """Whether the head fits a target, and was made for it. Raises IncompatibleError naming what differs."""
    from spd.formats.checkpoint import Checkpoint
    from spd.formats.folder import ModelFolder
    from spd.formats.mtp import FINAL_NORM, check_fits, verifier_hash

    target = ModelFolder.named(name)
    check_fits(plan.head, target.config, target.path)
    with Checkpoint.open(target.path, wanted=lambda shards: (FINAL_NORM,)) as checkpoint:
        digest = verifier_hash(checkpoint)
    return {"target": name, "sha256": digest, "same_verifier": digest == plan.head.verifier_sha256}


def _write(
    session: Session, plan: HeadPlan, options: ConvertOptions, report: Report, destination: Path
) -> Report:
    """Write the folder: weights, config, manifest; then it gets its name."""
    from spd.formats.mtp import differing_copies, head_config, outputs
    from spd.formats.writer import open_stage, write_json, write_tensors

    own = differing_copies(plan)
    tensors = [*plan.tensors, *own]
    with Ticker(session.console) as ticker, open_stage(destination, replaces=options.force) as stage:

        def show(done: int, total: int, tensor: str) -> None:
            ticker.write(f"writing {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB · {tensor}")

        digests = write_tensors(stage / WEIGHTS, outputs(plan.checkpoint, tensors), show)
        plan.checkpoint.check_unchanged()
        told = (plan.head.verifier, plan.head.verifier_sha256, plan.head.layout.modules)
        write_json(stage / "config.json", head_config(plan.raw_config, *told, quantized=plan.quantized))
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


def facts(report: Report) -> dict[str, Any]:
    """The one JSON object: every tensor by name."""
    plan = report.plan
    return {
        "schema": "spd.convert-mtp/1",
        "source": report.source,
        "family": plan.head.layout.family.name,
        "modules": plan.head.layout.modules,
        "declared_modules": plan.declared,
        "layout": "spd",
        "destination": None if report.destination is None else str(report.destination),
        "written": report.written,
        "bytes": size_of(plan),
        "verifier": {"name_or_path": plan.head.verifier, "sha256": plan.head.verifier_sha256},
        "attached": report.attached,
        "mapped": [
            {
                "name": tensor.name,
                "from": tensor.name,
                "shard": tensor.shard.name,
                "shape": list(tensor.shape),
                "stored": tensor.dtype,
                "dtype": tensor.dtype,
            }
            for tensor in plan.tensors
        ],
        "shared": report.shared(),
        "own": list(report.own),
        "dropped": list(plan.ignored),
        "unmapped": [],  # one would have been refused
    }


def convert_lines(report: Report) -> list[str]:
    """The same for people."""
    plan = report.plan
    found = plan.head.layout.words()
    if plan.declared != plan.head.layout.modules:
        found += f" (config.json speaks of {plan.declared or 'none'}; names decide)"
    lines = [f"source    {report.source}", f"found     {found}"]
    lines += [f"{label:<9} {words}" for label, words in _map_lines(report)]
    shared = report.shared()
    compared = "equal to the target's, left out" if report.written else "left out where equal to the target's"
    lines.append(f"shared    {', '.join(shared)}: {compared}" if shared else "shared    no copies of tables")
    if report.own:
        lines.append(f"own       {', '.join(report.own)}: unlike the target's, kept")
    lines.append(f"dropped   {', '.join(plan.ignored) or 'none'}")
    lines.append("unmapped  none")
    lines.append(f"verifier  {plan.head.verifier} · sha256 {plan.head.verifier_sha256[:16]}")
    if report.attached is not None:
        lines.append(f"attach    {_attached_words(report.attached)}")
    size = f"{size_of(plan) / 2**20:,.1f} MiB in {len(plan.tensors)} tensors"
    if report.written:
        lines.append(f"wrote     {size} → {report.destination}")
        lines.append(f"use       spd generate -m TARGET --spec mtp --mtp {report.destination}")
    elif report.destination is not None:
        lines.append(f"would write {size} → {report.destination} (nothing written: --dry-run)")
    return lines


def size_of(plan: HeadPlan) -> int:
    """Bytes of the tensors as they are written."""
    return sum(tensor.nbytes for tensor in plan.tensors)


def _attached_words(attached: dict[str, Any]) -> str:
    if attached["same_verifier"]:
        return f"{attached['target']}: fits, and is what the head was cut from"
    return (
        f"{attached['target']}: fits in shape; its final norm is another (sha256 {attached['sha256'][:16]}), "
        "so acceptance may be lower than with the head's own model"
    )


def _map_lines(report: Report) -> list[tuple[str, str]]:
    """Where the tensors go, then one line for each kind of them."""
    plan = report.plan
    before = plan.head.layout.layer_prefix(0)
    scaled = {t.name.removesuffix(SCALES) for t in plan.tensors if t.name.endswith(SCALES)}
    counts: dict[str, int] = {}
    for tensor in plan.tensors:
        if tensor.name.endswith(SCALES):
            continue
        name = re.sub(r"\.experts\.\d+\.", ".experts.*.", tensor.name.removeprefix(before))
        scales = " with scales" if tensor.name in scaled else ""
        line = f"  {name}  {tensor.dtype} {list(tensor.shape)}{scales}"
        counts[line] = counts.get(line, 0) + 1
    lines = [line + (f" × {count}" if count > 1 else "") for line, count in counts.items()]
    return [("map", f"{before}*"), *(("", line) for line in lines)]
