"""How wide a GPU's tiles of tokens may be: that wide ones change no bit was shown, or is asked of the GPU."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from spd.formats.files import write_atomically
from spd.kernels.linear.skinny_config import TILES
from spd.kernels.native.build import read_cached
from spd.version import __version__

TokenTileLimits = dict[
    str, int
]  # by the dtype of weights, the widest tile of bfloat16 tokens; narrow where unsaid
KINDS = ("bfloat16", "int8")
SHOWN: Mapping[str, TokenTileLimits] = {
    "9.0": {"bfloat16": 64}
}  # by compute capability: what long runs have shown


def driver_version() -> str | None:
    """Of NVIDIA's driver."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[1].split()[0]
    except (OSError, IndexError):
        return None


def bound_to(device: torch.device) -> dict[str, str]:
    """What an answer holds for: this GPU and all that compiles and runs its kernels."""
    import triton

    found = torch.cuda.get_device_properties(device)
    versions = {"spd": __version__, "torch": str(torch.__version__), "triton": triton.__version__}
    capability = f"{found.major}.{found.minor}"
    return {
        "gpu": found.name,
        "capability": capability,
        "driver": driver_version() or "unknown",
        **versions,
    }


def widest_tiles(device: str, cache: Callable[[], Path]) -> tuple[TokenTileLimits, str]:
    """Of a device, with where that is known from; cache: the folder where answers are kept."""
    if device == "cpu":
        return {}, "narrow ones suffice"
    bound = bound_to(torch.device(device))
    if (answer := read_answer(cache, bound)) is not None:
        return answer, "as this GPU answered spd doctor"
    shown = SHOWN.get(bound["capability"], {})
    return dict(
        shown
    ), "shown on its architecture" if shown else "spd doctor has not asked this GPU"


def _place(cache: Callable[[], Path], bound: Mapping[str, str]) -> Path:
    name = hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()[:20]
    return cache() / f"tiles-{name}.json"


def read_answer(cache: Callable[[], Path], bound: Mapping[str, str]) -> TokenTileLimits | None:
    """What was kept for a GPU; None unless it can be read, is the user's own and is meant for it."""
    with suppress(OSError, ValueError, TypeError, LookupError, RuntimeError):
        found = json.loads(read_cached(_place(cache, bound)))
        widest: TokenTileLimits = found["widest"]
        if found["for"] == bound and all(
            kind in KINDS and widest[kind] in TILES for kind in widest
        ):
            return dict(widest)
    return None


def keep_answer(
    cache: Callable[[], Path], bound: Mapping[str, str], widest: TokenTileLimits
) -> str | None:
    """Write it whole, as the user's own; the file, or None where that cannot be."""
    try:
        place = _place(cache, bound)
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(place, json.dumps({"for": bound, "widest": widest}), 0o600)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return str(place)
