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


def nvidia_driver_version() -> str | None:
    """Read the version of NVIDIA's driver from /proc; None without one."""
    try:
        return Path("/proc/driver/nvidia/version").read_text().split("Kernel Module")[1].split()[0]
    except (OSError, IndexError):
        return None


def describe_kernel_environment(device: torch.device) -> dict[str, str]:
    """Return the kernel environment of a GPU, by name: the GPU, its capability, and the versions of
    its driver, torch, Triton and spd. A check of tiles is valid for these alone.
    """
    import triton

    properties = torch.cuda.get_device_properties(device)
    versions = {"spd": __version__, "torch": str(torch.__version__), "triton": triton.__version__}
    capability = f"{properties.major}.{properties.minor}"
    return {
        "gpu": properties.name,
        "capability": capability,
        "driver": nvidia_driver_version() or "unknown",
        **versions,
    }


def find_tile_limits(device: str, cache_folder: Callable[[], Path]) -> tuple[TokenTileLimits, str]:
    """Return a device's limits, from the file of an earlier check or from the table, and their
    origin in words.

    cache_folder: returns the folder with the files of checks.
    """
    if device == "cpu":
        return {}, "narrow ones suffice"
    kernel_environment = describe_kernel_environment(torch.device(device))
    stored_limits = read_tile_limits(cache_folder, kernel_environment)
    if stored_limits is not None:
        return stored_limits, "as this GPU answered spd doctor"
    compiler = ".".join(kernel_environment["triton"].split(".")[:2])
    tested_limits = TESTED_LIMITS.get((kernel_environment["capability"], compiler))
    if tested_limits:
        return dict(tested_limits), "shown on its architecture"
    return {}, "spd doctor has not asked this GPU"


def _limits_path(cache_folder: Callable[[], Path], kernel_environment: Mapping[str, str]) -> Path:
    """Return the path of the file with the limits checked in a kernel environment.

    The file's name is a hash of `kernel_environment`; see `describe_kernel_environment`.
    """
    name = hashlib.sha256(json.dumps(kernel_environment, sort_keys=True).encode()).hexdigest()[:20]
    return cache_folder() / f"tiles-{name}.json"


def read_tile_limits(
    cache_folder: Callable[[], Path], kernel_environment: Mapping[str, str]
) -> TokenTileLimits | None:
    """Read the limits that were checked in a kernel environment from their file.

    Return None unless the file can be read, belongs to the user and is for this environment.
    """
    with suppress(OSError, ValueError, TypeError, LookupError, RuntimeError):
        data = json.loads(read_cached(_limits_path(cache_folder, kernel_environment)))
        limits: TokenTileLimits = data["widest"]
        if data["for"] == kernel_environment and all(
            dtype in WEIGHT_DTYPES and limits[dtype] in TOKEN_TILES for dtype in limits
        ):
            return dict(limits)
    return None


def store_tile_limits(
    cache_folder: Callable[[], Path], kernel_environment: Mapping[str, str], limits: TokenTileLimits
) -> str | None:
    """Write the limits checked in a kernel environment to a file that only the user can read.

    Creates its folder. Returns the file's path, or None where it cannot be written.
    """
    try:
        path = _limits_path(cache_folder, kernel_environment)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, json.dumps({"for": kernel_environment, "widest": limits}), 0o600)
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    return str(path)
