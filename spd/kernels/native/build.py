"""Compiles the C kernels beside this file for this processor, once, with the machine's compiler. No torch.

The library is kept in a folder of the user's, by the sources, the compiler and the processor it was made for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = ("linear.c", "attention.c", "experts.c", "init.c")
HEADERS = ("tiles.h", "product.h")
COMPILERS = ("gcc", "cc")
"""Whichever is found first. It has to be GCC: torch brings GCC's OpenMP, and so the one pool of threads."""
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared", "-nodefaultlibs")
LIBRARIES = ("-lc", "-lm", "-lgcc")
FEATURES = frozenset({"avx512_bf16", "avx512bw", "avx512vl"})
"""What /proc/cpuinfo must say of the processor."""
PATIENCE = 300
"""Seconds that the compiler is given."""


class NativeUnavailable(Exception):
    """Why the kernels cannot run here, in words."""


def processor_features(source: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The processor's features by Linux's names; empty where it does not say."""
    try:
        with source.open() as lines:
            line = next((line for line in lines if line.startswith("flags")), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def find_compiler() -> str | None:
    """The path of a C compiler."""
    return next(filter(None, map(shutil.which, COMPILERS)), None)


def obstacle() -> str | None:
    """What keeps this machine from having the kernels, as far as that shows before they are built."""
    if not processor_features() >= FEATURES:
        return "this processor has no AVX512-BF16"
    return None if find_compiler() else "no C compiler (gcc) is installed"


def library_path(cache: Path, *definitions: str) -> Path:
    """The compiled library in `cache`, made first if it is not there. Raises NativeUnavailable.

    definitions: SPD_NO_AMX, for processors that have it.
    """
    if (why := obstacle()) is not None:
        raise NativeUnavailable(why)
    compiler = find_compiler()
    assert compiler is not None
    flags = (*FLAGS, *(f"-D{name}" for name in definitions))
    place = cache / f"native-{_key(compiler, flags)}.so"
    if not place.exists():
        _compile(compiler, flags, place)
    return place


def _key(compiler: str, flags: Sequence[str]) -> str:
    """Names what a library is made of."""
    found = os.stat(compiler)
    made_of = hashlib.sha256(f"{compiler} {found.st_mtime_ns} {found.st_size} {flags} ".encode())
    made_of.update(" ".join(sorted(processor_features())).encode())
    for name in (*SOURCES, *HEADERS):
        made_of.update(Path(__file__).with_name(name).read_bytes())
    return made_of.hexdigest()[:20]


def _compile(compiler: str, flags: Sequence[str], place: Path) -> None:
    """Make the library beside its place and move it there whole: others may be making it too."""
    sources = [str(Path(__file__).with_name(name)) for name in SOURCES]
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=place.parent) as folder:
            made = Path(folder) / place.name
            command = [compiler, *flags, *sources, "-o", str(made), *LIBRARIES]
            done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            if done.returncode:
                said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise NativeUnavailable(f"{compiler} does not compile them: {said.strip()}")
            made.replace(place)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"they cannot be compiled: {error}") from error
