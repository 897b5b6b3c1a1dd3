"""What `spd convert-mtp` says: as lines, one for all experts and modules, and as JSON, tensor by tensor."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spd.formats.mtp import HeadPlan


SCALES = "_scale_inv"


@dataclass(frozen=True)
class Report:
    """A conversion, planned or done; `own` names the head's tables that differ from the target's."""

    plan: HeadPlan
    source: str
    destination: Path | None
    attached: dict[str, Any] | None = None
    written: bool = False
    own: tuple[str, ...] = ()
    verified: dict[str, Any] | None = None

    def shared(self) -> list[str]:
        """Copies of the target's tables: left out, or before writing those that will be compared."""
        return [copy.name for copy, _ in self.plan.copies if copy.name not in self.own]


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
        "verified": report.verified,
        "mapped": [
            {
                "name": tensor.name,
                "from": tensor.name,
                "shard": tensor.shard.name,
                "shape": list(tensor.shape),
                "stored": tensor.dtype,
                "dtype": plan.dtype_of(tensor),
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
    if report.verified is not None:
        lines.append(f"verify    {_verified_words(report.verified)}")
    return lines


def size_of(plan: HeadPlan) -> int:
    """Bytes of the tensors as they are written."""
    from spd.formats.checkpoint import DTYPE_BITS

    return sum(t.nbytes * DTYPE_BITS[plan.dtype_of(t)] // DTYPE_BITS[t.dtype] for t in plan.tensors)


def _verified_words(found: dict[str, Any]) -> str:
    shares = " ".join(f"{share:.0%}" for share in found["acceptance"])
    return (
        f"{found['tokens']} tokens, accepted by depth {shares} · "
        f"{found['rounds']} rounds, {found['differing']} unlike drafts from an empty cache"
    )


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
        dtype = plan.dtype_of(tensor)
        stored = "" if dtype == tensor.dtype else f"{tensor.dtype} → "
        scales = " with scales" if tensor.name in scaled else ""
        line = f"  {name}  {stored}{dtype} {list(tensor.shape)}{scales}"
        counts[line] = counts.get(line, 0) + 1
    lines = [line + (f" × {count}" if count > 1 else "") for line, count in counts.items()]
    return [("map", f"{before}*"), *(("", line) for line in lines)]
