"""The widest token tiles that change no bit on a GPU: known for its architecture, or checked on it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from spd.formats.files import write_atomically
from spd.kernels.linear.skinny_config import TOKEN_TILES
from spd.kernels.native.build import read_cached
from spd.version import __version__

TokenTileLimits = dict[str, int]
"""The widest tile of bfloat16 tokens by the dtype of weights.

A dtype without an entry has narrow tiles.
"""
WEIGHT_DTYPES = ("bfloat16", "int8")
"""The dtypes of weights that a limit may have."""
TESTED_LIMITS: Mapping[tuple[str, str], TokenTileLimits] = {("9.0", "3.6"): {"bfloat16": 64}}
"""The limits that long runs have shown to be exact, by compute capability and Triton's version.

Another Triton may add up a tile in another order.
"""


def driver_version() -> str | None:
    """Return the version of NVIDIA's driver, None without one."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[1].split()[0]
    except (OSError, IndexError):
        return None


def kernel_environment(device: torch.device) -> dict[str, str]:
    """Return the GPU, and the versions of all that compiles and runs its kernels: a check is valid
    for these.
    """
    import triton

    properties = torch.cuda.get_device_properties(device)
    versions = {"spd": __version__, "torch": str(torch.__version__), "triton": triton.__version__}
    capability = f"{properties.major}.{properties.minor}"
    return {
        "gpu": properties.name,
        "capability": capability,
        "driver": driver_version() or "unknown",
        **versions,
    }


def find_tile_limits(device: str, cache: Callable[[], Path]) -> tuple[TokenTileLimits, str]:
    """Return a device's limits, and their origin in words.

    cache: returns the folder of stored checks.
    """
    if device == "cpu":
        return {}, "narrow ones suffice"
    environment = kernel_environment(torch.device(device))
    stored_limits = read_tile_limits(cache, environment)
    if stored_limits is not None:
        return stored_limits, "as this GPU answered spd doctor"
    compiler = ".".join(environment["triton"].split(".")[:2])
    tested_limits = TESTED_LIMITS.get((environment["capability"], compiler))
    if tested_limits:
        return dict(tested_limits), "shown on its architecture"
    return {}, "spd doctor has not asked this GPU"


def _limits_path(cache: Callable[[], Path], environment: Mapping[str, str]) -> Path:
    """Return the file of the limits measured with a GPU, driver and libraries, the environment."""
    name = hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:20]
    return cache() / f"tiles-{name}.json"


def read_tile_limits(
    cache: Callable[[], Path], environment: Mapping[str, str]
) -> TokenTileLimits | None:
    """Return the stored limits of an environment.

    Return None unless the file can be read, belongs to the user and is for this environment.
    """
    with suppress(OSError, ValueError, TypeError, LookupError, RuntimeError):
        data = json.loads(read_cached(_limits_path(cache, environment)))
        limits: TokenTileLimits = data["widest"]
        if data["for"] == environment and all(
            dtype in WEIGHT_DTYPES and limits[dtype] in TOKEN_TILES for dtype in limits
        ):
            return dict(limits)
    return None


def store_tile_limits(
    cache: Callable[[], Path], environment: Mapping[str, str], limits: TokenTileLimits
) -> str | None:
    """Write an environment's limits to a file that only the user can read.

    Return its path, or None where it cannot be written.
    """
    try:
        path = _limits_path(cache, environment)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"for": environment, "widest": limits}), 0o600)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return str(path)
