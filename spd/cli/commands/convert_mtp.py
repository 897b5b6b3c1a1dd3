"""`spd convert-mtp`: cut an MTP head out of a checkpoint into a small folder, or see whether one fits.

Reads headers, then the head's own bytes a piece at a time, without torch.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd import __version__
from spd.cli.options import CommonOptions, Session, argument, model_names, printed
from spd.cli.text.output import Sink, check_folder, to_json
from spd.cli.text.progress import Ticker
from spd.errors import UsageError

if TYPE_CHECKING:
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


def convert_mtp(session: Session, options: ConvertOptions) -> None:
    """Cut a checkpoint's MTP head into a small folder, for targets that lost theirs."""
    from spd.formats.folder import ModelFolder
    from spd.formats.mtp import plan_head
    from spd.runtime import check_source

    source = ModelFolder.named(options.source, options.revision)
    destination = _destination(options, source.path)
    plan = plan_head(source, options.source, check_source)
    with plan.checkpoint:
        attached = None if options.attach is None else _attach(plan, options.attach)
        own: list[str] | None = None
        if destination is not None and not options.dry_run:
            own = _write(session, plan, options, destination)
    shown = _facts(plan, options, destination, attached, own)
    sink = Sink.stdout()
    if options.json:
        sink.write(to_json(shown) + "\n")
    else:
        sink.write_lines(f"{label:<10}{words}" for label, words in convert_lines(shown))


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


def _write(session: Session, plan: HeadPlan, options: ConvertOptions, destination: Path) -> list[str]:
    """Write the folder: weights, config, manifest; then it gets its name. Returns the head's own tables."""
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
            "source": options.source,
            "verifier_sha256": plan.head.verifier_sha256,
            "layout": "spd",
            "tensors": {meta.name: {"from": meta.name, "sha256": digests[meta.name]} for meta in tensors},
        }
        write_json(stage / MANIFEST, manifest)
    return [tensor.name for tensor in own]


def _facts(
    plan: HeadPlan,
    options: ConvertOptions,
    destination: Path | None,
    attached: dict[str, Any] | None,
    own: list[str] | None,
) -> dict[str, Any]:
    """The one JSON object: every tensor by name. `own`: tables unlike the target's; None: not written."""
    return {
        "schema": "spd.convert-mtp/1",
        "source": options.source,
        "family": plan.head.layout.family.name,
        "modules": plan.head.layout.modules,
        "declared_modules": plan.declared,
        "found": plan.head.layout.words(),
        "destination": None if destination is None else str(destination),
        "written": own is not None,
        "bytes": sum(tensor.nbytes for tensor in plan.tensors),
        "verifier": {"name_or_path": plan.head.verifier, "sha256": plan.head.verifier_sha256},
        "attached": attached,
        "mapped": [
            {
                "name": tensor.name,
                "shard": tensor.shard.name,
                "shape": list(tensor.shape),
                "dtype": tensor.dtype,
            }
            for tensor in plan.tensors
        ],
        "shared": [copy.name for copy, _ in plan.copies if copy.name not in (own or ())],
        "own": own or [],
        "dropped": list(plan.ignored),
    }


def convert_lines(shown: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The same for people: labels, empty on lines that go on, and words."""
    yield "source", shown["source"]
    declared = shown["declared_modules"]
    differs = f" (config.json speaks of {declared or 'none'}; names decide)"
    yield "found", shown["found"] + (differs if declared != shown["modules"] else "")
    yield from zip_longest(["map"], _kinds(shown["mapped"]), fillvalue="")
    kept = "equal to the target's, left out" if shown["written"] else "left out where equal to the target's"
    yield "shared", f"{', '.join(shown['shared'])}: {kept}" if shown["shared"] else "no copies of tables"
    if shown["own"]:
        yield "own", f"{', '.join(shown['own'])}: unlike the target's, kept"
    yield "dropped", ", ".join(shown["dropped"]) or "none"
    yield "verifier", f"{shown['verifier']['name_or_path']} · sha256 {shown['verifier']['sha256'][:16]}"
    if (attached := shown["attached"]) is not None:
        words = "fits, and is what the head was cut from"
        if not attached["same_verifier"]:
            words = (
                f"fits in shape; its final norm is another (sha256 {attached['sha256'][:16]}), so acceptance "
                "may be lower than with the head's own model"
            )
        yield "attach", f"{attached['target']}: {words}"
    size = f"{shown['bytes'] / 2**20:,.1f} MiB in {len(shown['mapped'])} tensors → {shown['destination']}"
    if shown["written"]:
        yield "wrote", size
        yield "use", f"spd generate -m TARGET --spec mtp --mtp {shown['destination']}"
    elif shown["destination"] is not None:
        yield "dry run", f"{size} would be written; nothing written"


def _kinds(mapped: list[dict[str, Any]]) -> Iterator[str]:
    """Tensors of one name, apart from layers and experts, and of one form."""
    scaled = {tensor["name"].removesuffix(SCALES) for tensor in mapped if tensor["name"].endswith(SCALES)}
    counts = Counter[str]()
    for tensor in mapped:
        name = tensor["name"]
        if not name.endswith(SCALES):
            kind = re.sub(r"\.(layers|experts)\.\d+\.", r".\1.*.", name)
            scales = " with scales" if name in scaled else ""
            counts[f"{kind}  {tensor['dtype']} {tensor['shape']}{scales}"] += 1
    return (line + (f" × {count}" if count > 1 else "") for line, count in counts.items())
