"""Compiles the C kernels beside this file for this processor, once, with the machine's compiler. No torch.

The library is kept in a folder of the user's, by the sources, the compiler and the processor it was made for,
with its hash at its end. What is loaded is a copy in memory of the bytes that were checked.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = (
    "linear.c",
    "attention.c",
    "experts.c",
    "sample.c",
    "round.c",
    "recurrent.c",
    "pool.c",
    "init.c",
)
COMPILERS = ("gcc", "cc")  # the first that is found; else the one that the package ziglang holds
LARGEST_HEAD = (
    576  # elements of a head that attention has room for: a latent of 512 with 64 rotated
)
FLAGS = (
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-pthread",
    "-fPIC",
    "-shared",
    "-nodefaultlibs",
    f"-DLARGEST_HEAD={LARGEST_HEAD}",
)
LIBRARIES = ("-lc", "-lm", "-lgcc")
BF16_FEATURES = frozenset({"avx512_bf16", "avx512bw", "avx512vl"})
FEATURES = {
    "AMX": BF16_FEATURES | {"amx_tile", "amx_bf16"},
    "AVX512-BF16": BF16_FEATURES,
    "AVX512": frozenset({"avx512f", "avx512bw", "avx512vl"}),
    "AVX2": frozenset({"avx2", "fma"}),
    "NEON": frozenset({"asimd"}),
}
"""What /proc/cpuinfo says of a processor that has the instructions: those are taken that come first."""
INSTRUCTION_FLAGS: dict[str, tuple[str, ...]] = {
    "AMX": (),
    "AVX512-BF16": ("-DSPD_NO_AMX",),
    "AVX512": ("-DSPD_NO_PAIRS",),
    "AVX2": ("-DSPD_AVX2", "-mno-avx512f"),
    "NEON": (),
}
"""They leave the better instructions alone."""
DTYPE_FLAGS: dict[str, tuple[str, ...]] = {"bfloat16": (), "float32": ("-DSPD_FLOAT32",)}
"""By what a library's elements are: weights, the cache, and what goes from layer to layer."""
COMPILE_TIMEOUT = 300  # seconds that the compiler is given
HASH_BYTES = hashlib.sha256().digest_size
MAX_FILE_BYTES = (
    16 << 20
)  # bytes that are read of a kept file; a library has below a hundred thousand


UNCACHED_LIBRARIES: dict[str, bytes] = {}
"""Libraries that this process compiled and could not keep, by file name: they are not made twice."""


class NativeUnavailable(Exception):
    """Why the kernels cannot run here, in words."""


def processor_features(source: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """The processor's features by Linux's names; empty where it does not say."""
    try:
        with source.open() as lines:
            line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def find_compiler() -> tuple[str, ...]:
    """The command of a C compiler; empty without one."""
    if found := next(filter(None, map(shutil.which, COMPILERS)), None):
        return (found,)
    package = find_spec("ziglang")
    return (str(Path(package.origin).parent / "zig"), "cc") if package and package.origin else ()


def instructions(dtype: str = "bfloat16") -> str | None:
    """The instructions that the kernels are made of on this processor."""
    having = processor_features()
    return next((name for name in usable_instructions(dtype) if having >= FEATURES[name]), None)


def usable_instructions(dtype: str) -> list[str]:
    """The instructions that there are libraries of a dtype for, the best first."""
    return [
        name
        for name, needed in FEATURES.items()
        if dtype == "bfloat16" or "avx512_bf16" not in needed
    ]


def unavailable_reason() -> str | None:
    """What keeps this machine from having the kernels, as far as that shows before they are built."""
    if instructions() is None:
        return "this processor has neither AVX2 with FMA nor NEON"
    return (
        None
        if find_compiler()
        else "no C compiler is installed (gcc, or pip install 'spd[compiler]')"
    )


def library_path(
    folder: Callable[[], Path], chosen: str | None = None, *, dtype: str = "bfloat16"
) -> Path:
    """The compiled library as a file to load: kept in the folder that `folder` names, or made now.

    It is made now too where the kept one is broken or others could have written it. A warning says
    so, and also where it cannot be kept.
    chosen: the instructions, where they are not the best that there are; dtype: one of `DTYPE_FLAGS`.
    Raises NativeUnavailable.
    """
    if (why := unavailable_reason()) is not None:
        raise NativeUnavailable(why)
    compiler = find_compiler()
    flags = (*FLAGS, *INSTRUCTION_FLAGS[chosen or instructions(dtype) or ""], *DTYPE_FLAGS[dtype])
    try:
        name = f"native-{_key(compiler, flags)}.so"
        if name in UNCACHED_LIBRARIES:
            return _in_memory(UNCACHED_LIBRARIES[name])
        fault: Exception | None = None
        try:
            return _in_memory(_read(folder() / name))
        except FileNotFoundError:
            logger.getChild("compiling").info("compiling C kernels, at the first run")
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # RuntimeError: no home folder is known
            fault = error
        made = _compile(compiler, flags)
        try:
            _keep(folder() / name, made)
        except (OSError, RuntimeError, ValueError) as error:
            UNCACHED_LIBRARIES[name] = made
            cause = fault or error
            logger.warning("the C kernels are compiled anew at every start: %s", cause)
        else:
            if fault is not None:
                logger.warning("the C kernels were compiled anew: %s", fault)
        return _in_memory(made)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"they cannot be compiled: {error}") from error


def read_cached(place: Path) -> bytes:
    """Read a kept file; empty if there is none. Raises OSError, and ValueError if others may write it."""
    with open(
        place, "rb", opener=lambda path, _: os.open(path, os.O_NOFOLLOW | os.O_NONBLOCK)
    ) as file:
        found = os.fstat(file.fileno())
        for path, status in ((place, found), (place.parent, place.parent.stat())):
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError(f"{path} belongs to others, or they may write to it")
        return file.read(MAX_FILE_BYTES) if stat.S_ISREG(found.st_mode) else b""


def _read(place: Path) -> bytes:
    """A kept library. Raises as `read_cached` does; ValueError where it is not whole."""
    made = read_cached(place)
    if hashlib.sha256(made[:-HASH_BYTES]).digest() != made[-HASH_BYTES:]:
        raise ValueError(f"{place} is broken")
    return made[:-HASH_BYTES]


def _keep(place: Path, made: bytes) -> None:
    """Write a library and its hash, and read it back as the next process will.

    A process that reads meanwhile finds it broken and makes its own. Raises as `_read` does; nothing
    incomplete is left then.
    """
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    place.unlink(missing_ok=True)
    descriptor = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(made + hashlib.sha256(made).digest())
        _read(place)
    except BaseException:
        with suppress(OSError):
            place.unlink()
        raise


@cache
def _warn_once(words: str) -> None:
    """Warn of something that several libraries meet, once in a process."""
    logger.warning(words)


@cache
def _in_memory(made: bytes) -> Path:
    """A file to load that nothing else can change. It stays open: a loader knows a library by its path."""
    descriptor = os.memfd_create("spd-kernels")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(made)
    return Path(f"/proc/self/fd/{descriptor}")


def _key(compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Names what a library is made of."""
    found = os.stat(compiler[0])
    made_of = hashlib.sha256(f"{compiler} {found.st_mtime_ns} {found.st_size} {flags} ".encode())
    made_of.update(" ".join(sorted(processor_features())).encode())
    for path in sorted(Path(__file__).parent.glob("*.[ch]")):
        made_of.update(path.read_bytes())
    return made_of.hexdigest()[:20]


def _compile(compiler: Sequence[str], flags: Sequence[str]) -> bytes:
    """Make the library in a folder of its own, where relative paths in the environment lead to nothing."""
    from tempfile import TemporaryDirectory

    sources = [str(Path(__file__).with_name(name)) for name in SOURCES]
    with TemporaryDirectory(prefix="spd-kernels-") as folder:
        made = Path(folder, "native.so")
        places = (
            f"{name}={folder}" for name in ("TMPDIR", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
        )
        command = ["env", *places, *compiler, *flags, *sources, "-o", str(made), *LIBRARIES]
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=COMPILE_TIMEOUT
        )
        if done.returncode:
            said = next(
                (line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200]
            )
            why = f"{compiler[0]} does not compile them: {said.strip()}"
            _warn_once(f"no C kernels, so this is slower: {why}")
            raise NativeUnavailable(why)
        return made.read_bytes()
