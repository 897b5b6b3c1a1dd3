"""Compiles the C kernels beside this file for this processor, once, with the machine's compiler. No torch.

The library is kept in a folder of the user's, by the sources, the compiler and the processor it was made for.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import struct
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

SOURCES = ("linear.c", "attention.c", "experts.c", "sample.c", "lookup.c", "init.c")
HEADERS = ("tiles.h", "product.h")
COMPILERS = ("gcc", "cc")
"""Whichever is found first. It has to be GCC: torch brings GCC's OpenMP, and so the one pool of threads."""
LARGEST_HEAD = 576
"""Elements of a head that attention has room for: a latent of 512 with 64 rotated."""
FLAGS = (
    *(
        "-O3",
        "-march=native",
        "-fno-math-errno",
        "-ffp-contract=off",
        "-fopenmp",
        "-fPIC",
        "-shared",
        "-nodefaultlibs",
    ),
    f"-DLARGEST_HEAD={LARGEST_HEAD}",
)
LIBRARIES = ("-lc", "-lm", "-lgcc")
FEATURES = frozenset({"avx512_bf16", "avx512bw", "avx512vl"})
"""What /proc/cpuinfo must say of the processor."""
PATIENCE = 300
"""Seconds that the compiler is given."""
ELF_HEADER = 64


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


def library_path(cache: Callable[[], Path], *definitions: str) -> Path:
    """The compiled library in the folder that `cache` names, made first if it is not there whole.

    definitions: SPD_NO_AMX, for processors that have it. Raises NativeUnavailable.
    """
    if (why := obstacle()) is not None:
        raise NativeUnavailable(why)
    compiler = find_compiler()
    assert compiler is not None
    flags = (*FLAGS, *(f"-D{name}" for name in definitions))
    try:
        folder = cache()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        place = folder / f"native-{_key(compiler, flags)}.so"
        _check_owner(folder)
        if not _is_whole(place):
            _compile(compiler, flags, place)
        _check_owner(place)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: nobody has a home
        raise NativeUnavailable(f"they cannot be compiled: {error}") from error
    return place


def _check_owner(path: Path) -> None:
    """Refuse what others may have put there: it is going to be run."""
    found = path.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NativeUnavailable(f"{path} belongs to others, or they may write to it")


def _is_whole(place: Path) -> bool:
    """Whether a library is there, up to its table of sections, which is its end."""
    try:
        with place.open("rb") as file:
            header = file.read(ELF_HEADER)
    except FileNotFoundError:
        return False
    if len(header) < ELF_HEADER:
        return False
    (offset,), (size, count) = struct.unpack_from("<Q", header, 0x28), struct.unpack_from("<HH", header, 0x3A)
    return bool(place.stat().st_size >= offset + size * count)


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
    with tempfile.TemporaryDirectory(dir=place.parent) as folder:
        made = Path(folder) / place.name
        command = [compiler, *flags, *sources, "-o", str(made), *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
        if done.returncode:
            said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
            raise NativeUnavailable(f"{compiler} does not compile them: {said.strip()}")
        made.chmod(0o700)
        with made.open("rb+") as file:
            os.fsync(file.fileno())
        made.replace(place)
