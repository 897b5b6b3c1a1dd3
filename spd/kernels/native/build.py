"""Compile this folder's C kernels for this processor, once, with the machine's compiler. No torch.

The library is cached in a folder of the user, keyed by the sources, the compiler and the processor,
with its hash at its end. A copy in memory of the verified bytes is loaded.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import subprocess
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCES = (
    "pool.c",
    "init.c",
    "round.c",
    "recurrent.c",
    "sample.c",
    "rotary.c",
    "attention.c",
    "experts.c",
    "linear.c",
    "product.c",
    "int8.c",
)
"""Files that are compiled at the same time, those that take longest last."""
COMPILERS = ("gcc", "cc")
"""Commands of C compilers, the first of which is used; without any, zig of the package ziglang."""
LARGEST_HEAD = 576
"""The largest head of attention in elements: a latent of 512 with 64 rotated."""
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
AVX512_FEATURES = frozenset({"avx512f", "avx512bw", "avx512vl"})
BF16_FEATURES = AVX512_FEATURES | {"avx512_bf16"}
FEATURES = {
    "AMX": BF16_FEATURES | {"amx_tile", "amx_bf16"},
    "AVX512-BF16": BF16_FEATURES,
    "AVX512-VNNI": AVX512_FEATURES | {"avx512_vnni"},
    "AVX512": AVX512_FEATURES,
    "AVX2": frozenset({"avx2", "fma", "f16c"}),
    "NEON": frozenset({"asimd"}),
}
"""The features in /proc/cpuinfo that each set of instructions needs, the best set first."""
INSTRUCTION_FLAGS: dict[str, tuple[str, ...]] = {
    "AMX": (),
    "AVX512-BF16": ("-DSPD_NO_AMX",),
    "AVX512-VNNI": ("-DSPD_NO_PAIRS",),
    "AVX512": ("-DSPD_NO_PAIRS", "-DSPD_NO_VNNI"),
    "AVX2": ("-DSPD_AVX2", "-mno-avx512f"),
    "NEON": (),
}
"""Flags that keep the compiler from using better instructions."""
DTYPE_FLAGS: dict[str, tuple[str, ...]] = {"bfloat16": (), "float32": ("-DSPD_FLOAT32",)}
"""Flags by the dtype of a library's elements: weights, the cache, and the residual stream."""
COMPILE_TIMEOUT = 300
"""Seconds until the compiler is ended."""
HASH_BYTES = hashlib.sha256().digest_size
MAX_FILE_BYTES = (
    16 << 20
)  # bytes that are read of a kept file; a library has below a hundred thousand


UNCACHED_LIBRARIES: dict[str, bytes] = {}
"""Libraries that this process compiled and could not cache, by file name.

They are not compiled again.
"""


class NativeUnavailable(Exception):
    """The kernels cannot run here; the message says why."""


def processor_features(source: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Return the processor's features by Linux's names; empty where Linux does not list them."""
    try:
        with source.open() as lines:
            line = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        return frozenset()
    return frozenset(line.partition(":")[2].split())


def find_compiler() -> tuple[str, ...]:
    """Return the command of a C compiler; empty without one."""
    if compiler := next(filter(None, map(shutil.which, COMPILERS)), None):
        return (compiler,)
    package = find_spec("ziglang")
    return (str(Path(package.origin).parent / "zig"), "cc") if package and package.origin else ()


def instructions(dtype: str = "bfloat16") -> str | None:
    """Return the best instructions of this processor that there are kernels for, or None."""
    features = processor_features()
    return next((name for name in usable_instructions(dtype) if features >= FEATURES[name]), None)


def usable_instructions(dtype: str) -> list[str]:
    """Return the instructions that there are libraries of a dtype for, the best first."""
    return [
        name
        for name, needed in FEATURES.items()
        if dtype == "bfloat16" or "avx512_bf16" not in needed
    ]


def unavailable_reason() -> str | None:
    """Return the reason why this machine cannot compile the kernels, or None.

    Nothing is compiled.
    """
    if instructions() is None:
        return "this processor has neither AVX2 with FMA and F16C nor NEON"
    return (
        None
        if find_compiler()
        else "no C compiler is installed (gcc, or pip install 'spd[compiler]')"
    )


def library_path(
    folder: Callable[[], Path], chosen_instructions: str | None = None, *, dtype: str = "bfloat16"
) -> Path:
    """Return the path of the compiled library: cached in the folder that `folder` returns, or
    compiled now.

    It is compiled now, too, with a warning, where the cached one is broken or other users could
    have written it. Another warning is logged where it cannot be cached. chosen_instructions: None
    for the best; dtype: one of `DTYPE_FLAGS`. Raises NativeUnavailable.
    """
    if (reason := unavailable_reason()) is not None:
        raise NativeUnavailable(reason)
    compiler = find_compiler()
    flags = (
        *FLAGS,
        *INSTRUCTION_FLAGS[chosen_instructions or instructions(dtype) or ""],
        *DTYPE_FLAGS[dtype],
    )
    try:
        name = f"native-{_key(compiler, flags)}.so"
        if name in UNCACHED_LIBRARIES:
            return _in_memory(UNCACHED_LIBRARIES[name])
        fault: Exception | None = None
        try:
            return _in_memory(_read(folder() / name))
        except FileNotFoundError:
            _report(0)
        except (
            OSError,
            RuntimeError,
            ValueError,
        ) as error:  # RuntimeError: no home folder is known
            fault = error
        library = _compile(compiler, flags)
        try:
            _store(folder() / name, library)
        except (OSError, RuntimeError, ValueError) as error:
            UNCACHED_LIBRARIES[name] = library
            cause = fault or error
            logger.warning("the C kernels are compiled anew at every start: %s", cause)
        else:
            if fault is not None:
                logger.warning("the C kernels were compiled anew: %s", fault)
        return _in_memory(library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NativeUnavailable(f"they cannot be compiled: {error}") from error


def read_cached(place: Path) -> bytes:
    """Read a cached file; empty if it is no file. Raises OSError, and ValueError if others may
    write it."""
    with open(
        place, "rb", opener=lambda path, _: os.open(path, os.O_NOFOLLOW | os.O_NONBLOCK)
    ) as file:
        file_status = os.fstat(file.fileno())
        for path, status in ((place, file_status), (place.parent, place.parent.stat())):
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                raise ValueError(f"{path} belongs to others, or they may write to it")
        return file.read(MAX_FILE_BYTES) if stat.S_ISREG(file_status.st_mode) else b""


def _read(path: Path) -> bytes:
    """Read a cached library. Raises as `read_cached` does, and ValueError if its hash is wrong."""
    content = read_cached(path)
    if hashlib.sha256(content[:-HASH_BYTES]).digest() != content[-HASH_BYTES:]:
        raise ValueError(f"{path} is broken")
    return content[:-HASH_BYTES]


def _store(path: Path, library: bytes) -> None:
    """Write a library and its hash, and read it back as the next process will.

    A process that reads an incomplete file finds it broken and compiles the library itself. Raises
    as `_read` does, after removing the file.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "wb") as file:
            file.write(library + hashlib.sha256(library).digest())
        _read(path)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


@cache
def _warn_once(message: str) -> None:
    """Log a warning once in a process, though several libraries may cause it."""
    logger.warning(message)


@cache
def _in_memory(library: bytes) -> Path:
    """Return a path to load that nothing else can write. It stays open: loaders key libraries by
    path."""
    descriptor = os.memfd_create("spd-kernels")
    with open(descriptor, "wb", closefd=False) as file:
        file.write(library)
    return Path(f"/proc/self/fd/{descriptor}")


def _key(compiler: Sequence[str], flags: Sequence[str]) -> str:
    """Return a key of all that a library is compiled from."""
    status = os.stat(compiler[0])
    digest = hashlib.sha256(f"{compiler} {status.st_mtime_ns} {status.st_size} {flags} ".encode())
    digest.update(" ".join(sorted(processor_features())).encode())
    for path in sorted(Path(__file__).parent.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(compiler: Sequence[str], flags: Sequence[str]) -> bytes:
    """Compile the library in a new folder, where relative paths in the environment resolve to
    nothing. Raises OSError, TimeoutExpired and NativeUnavailable."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="spd-kernels-") as folder:
        directories = (
            f"{name}={folder}" for name in ("TMPDIR", "ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR")
        )
        begin = ["env", *directories, *compiler, *flags]
        sources = [Path(__file__).with_name(name) for name in SOURCES]
        objects = [f"{source.stem}.o" for source in sources]
        files = zip(sources, objects, strict=True)
        compilations = [[*begin, "-c", str(file), "-o", output] for file, output in files]
        for done in _run_compilers(compiler[0], compilations, folder):
            _report(done)
        linking = [*begin, *objects, "-o", "native.so", *LIBRARIES]
        deque(_run_compilers(compiler[0], [linking], folder))
        return Path(folder, "native.so").read_bytes()


def _run_compilers(
    name: str, commands: Sequence[Sequence[str]], folder: str
) -> Generator[int, None, None]:
    """Run commands of a compiler in a folder at the same time; yield how many have ended.

    Raises OSError, TimeoutExpired, and NativeUnavailable with the first error of the compiler.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            processes.append(
                subprocess.Popen(
                    command,
                    cwd=folder,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        for number, process in enumerate(processes, 1):
            _, output = process.communicate(timeout=COMPILE_TIMEOUT)
            if process.returncode:
                lines = output.splitlines()
                error = next((line for line in lines if "error" in line), output[:200]).strip()
                reason = f"{name} does not compile them: {error}"
                _warn_once(f"no C kernels, so this is slower: {reason}")
                raise NativeUnavailable(reason)
            yield number
    finally:
        for process in processes:
            process.terminate()
            with process:  # closes its pipe and waits
                pass


def _report(done: int) -> None:
    """Log how many files are compiled."""
    fields = {"done": done, "total": len(SOURCES)}
    logger.getChild("compiling").info("compiling C kernels once", extra=fields)
