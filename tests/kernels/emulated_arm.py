"""Tests of the C kernels on emulated 64-bit ARM: `python -m tests.kernels.emulated_arm ROOT TESTS
...`.

Debian's qemu-user and gcc-aarch64-linux-gnu are needed. ROOT has a Python for ARM, unpacked from
Debian's packages (`apt-get download python3.11:arm64 ...`, `dpkg -x`: the interpreter, its library,
libc6, zlib1g, libssl3, libffi8, libstdc++6, libgcc-s1, libgomp1, libexpat1, libbz2-1.0, liblzma5,
libuuid1, libcrypt1), and `ROOT/site` what `pip install --target ROOT/site --platform
manylinux_2_28_aarch64 --only-binary :all:` makes of torch, pytest and what spd depends on. An
import of torch takes a minute, a test some seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from spd.kernels.native import build

COMPILER = """#!/bin/sh
for word; do shift; [ "$word" = -march=native ] && word=-march=armv8-a; set -- "$@" "$word"; done
exec aarch64-linux-gnu-gcc "$@"
"""
"""The emulated program starts this machine's own compiler, which must compile for the other
processor."""

MADVISE = "tests/kernels/test_kernels_native.py::test_large_weights_lie_in_large_pages"
"""Not run: the emulator ignores the request for large pages."""


def pytest_load_initial_conftests() -> None:
    """Name the features of the emulated processor: the system names those of the real one."""
    vars(build)["processor_features"] = lambda: frozenset({"asimd"})


def main(root: Path, arguments: list[str]) -> int:
    """Run pytest under the emulator; returns its status."""
    with tempfile.TemporaryDirectory() as folder:
        compiler = Path(folder, "gcc")
        compiler.write_text(COMPILER)
        compiler.chmod(0o755)
        paths = {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PYTHONPATH": f"{root / 'site'}:{Path(__file__).parents[2]}",
        }
        command = [
            "qemu-aarch64",
            "-L",
            str(root),
            str(root / "usr/bin/python3.11"),
            "-m",
            "pytest",
        ]
        command += [
            "-p",
            "tests.kernels.emulated_arm",
            "-o",
            f"cache_dir={folder}",
            "--deselect",
            MADVISE,
        ]
        return subprocess.run(
            [*command, *arguments], env=os.environ | paths, check=False
        ).returncode


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
