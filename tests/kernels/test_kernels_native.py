"""The C kernels' products against plain formulas and each other's rows, and how the library comes
about."""

from __future__ import annotations

import errno
import math
import os
import platform
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spd.formats.hub import spd_cache_folder
from spd.kernels.linear.few_bits import GroupedWeight, grouped_linear
from spd.kernels.linear.norm_gate import rms_norm
from spd.kernels.native import build, library
from spd.kernels.native.build import NativeUnavailable, library_path
from spd.kernels.native.calls import AmxRefused
from spd.kernels.native.library import NativeKernels
from spd.kernels.native.packed import FLOAT32, ROUNDED, epilogue_of
from tests.kernels.forms import (
    ACTS,
    HERE,
    apply_activation,
    assert_rounded,
    needs_compiled,
    noise,
)
from tests.kernels.skinny_cases import CODED, drawn

pytestmark = needs_compiled

SHAPES = [(1, 1), (16, 32), (33, 31), (100, 50), (64, 96), (130, 320), (512, 1040)]
CODES: list[tuple[Any, ...]] = [(*case, wide) for case in CODED for wide in (True, False)]


def weight_of(
    native: NativeKernels, case: tuple[Any, ...], twice: bool = False
) -> Tensor | GroupedWeight:
    """Return a weight (N, K), or in codes (kind, N, K, ...), or one of 2 N rows."""
    if isinstance(case[0], int):
        return noise(case[0] << twice, case[1], seed=twice).to(native.dtype)
    return drawn(case[0], case[1] << twice, *case[2:])


def plain_of(weight: Tensor | GroupedWeight) -> Tensor:
    return (weight.double() if isinstance(weight, Tensor) else weight.plain(torch.float64)).t()


@pytest.mark.covers(1, count=148)
@pytest.mark.parametrize("case", [*SHAPES, *CODES], ids=str)
def test_products_equal_their_definition(native: NativeKernels, case: tuple[Any, ...]) -> None:
    """Every epilogue, with and without what may stand before and after."""
    weight = weight_of(native, case)
    double = weight_of(native, case, twice=True)
    width, depth = weight.shape
    wide = plain_of(weight)
    wide_double = plain_of(double)
    packed = native.pack(weight)
    packed_weights = {g: native.pack(double, gated=g) for g in (False, True)}
    bias = noise(width).float()
    biases = noise(2 * width, seed=1).float()
    scales = noise(depth).float()
    for rows in (1, 3, 16, 17, 32, 47, 70) if isinstance(weight, Tensor) else (47,):
        x, residual = (noise(rows, size).to(native.dtype) for size in (depth, width))
        plain = x.double() @ wide
        near = 1e-5
        least = 1e-4 if isinstance(weight, Tensor) else 1e-5 * float(plain.abs().max())
        scores = native.packed_linear(x, packed, None, FLOAT32)
        torch.testing.assert_close(scores.double(), plain, rtol=near, atol=least)
        assert_rounded(native.packed_linear(x, packed, None), plain)
        assert_rounded(
            native.packed_linear(x, packed, bias, residual=residual),
            plain + bias + residual.double(),
        )
        if isinstance(weight, GroupedWeight):
            assert_rounded(grouped_linear(x, weight, bias), plain + bias)
        near = near if native.dtype == torch.float32 else 0.02
        exact = rms_norm(x, scales, 1e-6).double() @ wide + bias
        scores = native.packed_linear(x, packed, bias, FLOAT32, norm=scales, epsilon=1e-6)
        largest = float(exact.abs().max())
        torch.testing.assert_close(scores.double(), exact, rtol=near, atol=near * largest)
        x = x / 16  # sums of some size, of which activations' limits cut off some
        both = x.double() @ wide_double + biases
        for act in ACTS:
            assert_rounded(
                native.packed_linear(x, packed_weights[act.gated], biases, epilogue_of(act)),
                apply_activation(both, act),
            )
            assert (
                native.packed_linear(
                    x * math.nan, packed_weights[act.gated], biases, epilogue_of(act)
                )
                .isnan()
                .all()
            )


@pytest.mark.parametrize("case", [(100, 50), (96, 1040), *CODED], ids=str)
def test_a_row_of_a_product_has_the_same_bits_in_any_batch(
    native: NativeKernels, case: tuple[Any, ...]
) -> None:
    """The same bits for 1 to 300 rows, wherever a row stands, whatever beside it."""
    weight = weight_of(native, case, twice=True)
    x = noise(300, weight.shape[1]).to(native.dtype)
    norm = noise(weight.shape[1]).float()
    epilogues = (False, FLOAT32, None), (False, ROUNDED, norm), (True, epilogue_of(ACTS[-1]), norm)
    for gated, epilogue, scales in epilogues:
        packed = native.pack(weight, gated=gated)

        def product(rows: Tensor, packed=packed, epilogue=epilogue, scales=scales) -> Tensor:
            return native.packed_linear(rows, packed, None, epilogue, norm=scales, epsilon=1e-6)

        all_rows = product(x)
        for count in (1, 2, 5, 15, 16, 17, 31, 32, 33, 49, 64, 69, 257):
            for first in (0, 5, 300 - count):
                row_slice = slice(first, min(first + count, 300))
                assert torch.equal(product(x[row_slice]), all_rows[row_slice]), (count, first)
        wild = x.clone()
        wild[::2] = float("nan")
        assert torch.equal(product(wild)[1::2], all_rows[1::2])


BUILD = "spd.kernels.native.build"


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails or is missing, no such instructions, nowhere to compile, no library at
    all."""
    broken = tmp_path / "gcc"
    broken.write_text("#!/bin/sh\necho 'x.c:1: error: no such luck' >&2\nexit 1\n")
    broken.chmod(0o755)
    for name, value, words in (
        (f"{BUILD}.find_compiler", lambda: (str(broken),), "no such luck"),
        (f"{BUILD}.find_compiler", tuple, "compiler"),
        (
            f"{BUILD}.processor_features",
            lambda: frozenset({"avx2"}),
            "neither AVX2 with FMA and F16C nor NEON",
        ),
        ("tempfile.tempdir", str(tmp_path / "none"), "cannot be compiled"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(name, value)
            with pytest.raises(NativeUnavailable, match=words):
                library_path(lambda: tmp_path / "cache")
            assert not (tmp_path / "cache").exists()
    with pytest.raises(NativeUnavailable, match="cannot be loaded"):
        NativeKernels(broken)


def test_the_compiler_of_a_package_is_the_last_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ziglang holds one as a file; what it keeps lies beside what is made."""
    (tmp_path / "ziglang").mkdir()
    (tmp_path / "ziglang" / "__init__.py").touch()
    zig = tmp_path / "ziglang" / "zig"
    zig.write_text(
        '#!/bin/sh\n[ "$1" = cc ] && [ -d "$ZIG_LOCAL_CACHE_DIR" ] && echo 1: error: fine >&2; exit 1\n'
    )
    zig.chmod(0o755)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(build, "COMPILERS", ())
    assert build.find_compiler() == (str(zig), "cc")
    with pytest.raises(NativeUnavailable, match=f"{zig} does not compile them: 1: error: fine"):
        library_path(lambda: tmp_path / "cache")


def test_files_are_compiled_together_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits until all have begun. After a fault no compiler goes on."""
    gcc = tmp_path / "gcc"
    words = "[ $# = 5 ] || { echo made > native.so; exit; }; echo $$ >> pids; touch $5.begun; "
    wait = f"while [ $(ls *.begun | wc -l) -lt {len(build.SOURCES)} ]; do sleep 0.01; done; "
    copy = f"cp pids {tmp_path}/pids"
    fail = (
        f"case $3 in */{build.SOURCES[0]}) {copy}; echo error: no; exit 1;; esac >&2; exec sleep 60"
    )
    reports: list[int] = []
    monkeypatch.setattr(build, "_report", reports.append)
    monkeypatch.setattr(build, "LIBRARIES", ())
    gcc.write_text(f"#!/bin/sh\n{words}{wait}\n")
    gcc.chmod(0o755)
    assert build._compile((str(gcc),), ["-O1"]) == b"made\n"
    assert reports == [*range(1, len(build.SOURCES) + 1)]
    gcc.write_text(f"#!/bin/sh\n{words}{wait}\n{fail}\n")
    with pytest.raises(NativeUnavailable, match="gcc does not compile them: error: no"):
        build._compile((str(gcc),), ["-O1"])
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == len(build.SOURCES) and not any(
        Path(f"/proc/{pid}").exists() for pid in pids
    )


@pytest.fixture
def compiled(
    monkeypatch: pytest.MonkeyPatch, native_with: Callable[[str], NativeKernels]
) -> list[Sequence[str]]:
    """Return a list that grows by each compilation's flags; it gives the library that is there."""
    runs: list[Sequence[str]] = []
    monkeypatch.setattr(build, "UNCACHED_LIBRARIES", {})
    native_with(HERE[0])
    library = library_path(spd_cache_folder, HERE[0].split()[0]).read_bytes()

    def compile_counted(compiler: Sequence[str], flags: Sequence[str]) -> bytes:
        runs.append(flags)
        return library

    monkeypatch.setattr(build, "_compile", compile_counted)
    return runs


def overwrite(place: Path) -> None:
    """Overwrite a library as a failing disk would; loaded, it would end the program."""
    with place.open("rb+") as file:
        file.seek(8192)
        file.write(bytes(4096))


def set_aside(place: Path) -> Path:
    return place.rename(place.parent.parent / "aside.so")


def put_pipe(place: Path) -> None:
    set_aside(place)
    os.mkfifo(place, 0o600)


def put_folder(place: Path) -> None:
    set_aside(place)
    place.mkdir()


HARM: dict[str, Callable[[Path], object]] = {
    "overwritten": overwrite,
    "empty": lambda place: os.truncate(place, 0),
    "cut off": lambda place: os.truncate(place, 20_000),
    "longer": lambda place: os.truncate(place, 100_000),
    "far longer": lambda place: os.truncate(place, 1 << 40),
    "a pipe": put_pipe,
    "a link": lambda place: place.symlink_to(set_aside(place)),
    "a folder": put_folder,
    "another's": lambda place: os.chown(place, 1, 1) if os.geteuid() == 0 else place.chmod(0o602),
    "writable": lambda place: place.chmod(0o720),
    "in a writable folder": lambda place: place.parent.chmod(0o777),
    "in another's folder": lambda place: (
        os.chown(place.parent, 1, 1) if os.geteuid() == 0 else place.parent.chmod(0o720)
    ),
}


@pytest.mark.parametrize("harm", HARM)
def test_a_kept_library_that_cannot_be_trusted_is_made_again(
    harm: str, tmp_path: Path, compiled: list[Sequence[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """It runs, the log says so, and where the place can be trusted it is whole again."""
    folder = tmp_path / "a cache, with words"
    NativeKernels(library_path(lambda: folder))
    (place,) = folder.iterdir()
    HARM[harm](place)
    assert NativeKernels(library_path(lambda: folder)).instructions
    assert len(compiled) == 2 and "compiled anew" in caplog.text and str(folder) in caplog.text
    library_path(lambda: folder)
    assert len(compiled) == 2 and caplog.text.count("compiled anew") == 1
    assert ("at every start" in caplog.text) == ("folder" in harm)


def test_a_library_that_cannot_be_cached_is_compiled_once_a_process(
    tmp_path: Path,
    compiled: list[Sequence[str]],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nowhere to keep it: it is compiled once for each run, which one line says."""
    (tmp_path / "file").write_text("")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    def limited(place: Path) -> bytes:
        if place.exists():
            raise OSError(errno.EFBIG, "File too large")
        raise FileNotFoundError

    read = build._read
    for folder, words in (
        (homeless, "home directory"),
        (lambda: tmp_path / "file", "Not a directory"),
        (lambda: tmp_path / "limited", "File too large"),
    ):
        caplog.clear()
        monkeypatch.setattr(build, "UNCACHED_LIBRARIES", {})
        monkeypatch.setattr(build, "_read", limited if "large" in words else read)
        for _ in range(2):
            assert NativeKernels(library_path(folder)).instructions
        (record,) = caplog.records
        assert words in record.message and "compiled anew at every start" in record.message
    assert len(compiled) == 3 and not list((tmp_path / "limited").iterdir())


def test_what_was_checked_is_loaded(tmp_path: Path, compiled: list[Sequence[str]]) -> None:
    """Whatever becomes of the kept file after it was read."""
    library_path(lambda: tmp_path)
    path = library_path(lambda: tmp_path)
    os.truncate(next(tmp_path.iterdir()), 0)
    assert NativeKernels(path).instructions


def test_the_compiler_takes_nothing_from_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative and empty entries of what it searches lead to nothing."""
    monkeypatch.setattr(build, "SOURCES", ("init.c",))
    for name in ("gcc", "cc", "as", "ld", "cc1", "collect2"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/run\nexit 1\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "immintrin.h").write_text("#error taken from the working folder\n")
    monkeypatch.chdir(tmp_path)
    for name in ("PATH", "CPATH", "C_INCLUDE_PATH", "LIBRARY_PATH", "COMPILER_PATH"):
        monkeypatch.setenv(name, f":.:{os.environ.get(name, '')}")
    assert library_path(lambda: tmp_path / "cache").read_bytes().startswith(b"\x7fELF")
    assert not (tmp_path / "run").exists()


def test_where_amx_is_refused_the_other_instructions_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Sequence[str]]
) -> None:
    paths: list[Path] = []

    def refusing(path: Path, dtype: torch.dtype) -> NativeKernels:
        paths.append(path)
        if len(paths) == 1:
            raise AmxRefused("the system does not grant AMX")
        return NativeKernels(path, dtype)

    monkeypatch.setattr(library, "NativeKernels", refusing)
    library.open_library(lambda: tmp_path, "bfloat16")
    assert len(paths) == 2 and "-DSPD_NO_AMX" in compiled[-1]


PAIRS = ("-mavx512bf16", "-mavx512bw", "-mavx512vl")
GIVEN = {
    "AMX": (*PAIRS, "-mamx-tile", "-mamx-bf16"),
    "AVX512-BF16": PAIRS,
    "AVX512-VNNI": (*PAIRS[1:], "-mavx512vnni"),
    "AVX512": PAIRS[1:],
    "AVX2": ("-mavx2", "-mfma"),
    "NEON": ("-march=armv8-a",),
}
CROSS = shutil.which("aarch64-linux-gnu-gcc")
ARM = platform.machine() == "aarch64"


@pytest.mark.covers(count=2)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [(dtype, name) for dtype in build.DTYPE_FLAGS for name in build.usable_instructions(dtype)],
)
def test_every_form_compiles(dtype: str, name: str) -> None:
    """Also those whose instructions this processor lacks, without a warning."""
    is_local = (name == "NEON") == ARM
    if not is_local and (ARM or CROSS is None):
        pytest.skip(f"{name} needs a compiler for another processor, such as aarch64-linux-gnu-gcc")
    compiler = build.find_compiler() if is_local else [CROSS]
    sources = [str(Path(build.__file__).with_name(source)) for source in build.SOURCES]
    checks = ("-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    flags = [flag for flag in build.FLAGS if is_local or flag != "-march=native"]
    command = [
        *compiler,
        *flags,
        *GIVEN[name],
        *build.INSTRUCTION_FLAGS[name],
        *build.DTYPE_FLAGS[dtype],
    ]
    command += [*checks, *sources]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


WIDTH = 2080
DEPTH = 512
"""Enough work for several threads, in blocks that no number of them divides."""


@pytest.mark.covers(count=4)
def test_any_number_of_threads_gives_the_same_bits(
    native: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of calls in a row, by 1 to 9 threads: every item once, in any order."""
    x = noise(33, DEPTH).to(native.dtype)
    packed = native.pack(noise(WIDTH, DEPTH))
    monkeypatch.setattr(native, "threads", 1)
    alone = {rows: native.packed_linear(x[:rows], packed, None, FLOAT32) for rows in (1, 4, 33)}
    for call in range(300):
        monkeypatch.setattr(native, "threads", 1 + call % 9)
        rows = (1, 4, 33)[call // 9 % 3]
        assert torch.equal(native.packed_linear(x[:rows], packed, None, FLOAT32), alone[rows])
        assert call >= 9 or torch.equal(native.pack(noise(WIDTH, DEPTH)).tiles, packed.tiles)


@pytest.mark.covers(count=4)
def test_two_callers_at_once_get_the_same_bits(
    native: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has the pool, the other works alone."""
    x = noise(64, 4096).to(native.dtype)
    weight = torch.randn(64, 4096)
    alone = native.router_logits(x, weight)
    monkeypatch.setattr(native, "threads", 3)
    with ThreadPoolExecutor(2) as callers:
        results = callers.map(lambda _: native.router_logits(x, weight), range(200))
        assert all(torch.equal(result, alone) for result in results)


@pytest.mark.covers(count=1)
def test_a_forked_child_computes(native: NativeKernels, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has none of its parent's threads, even where they were at work."""
    x = noise(4, DEPTH).to(native.dtype)
    packed = native.pack(noise(WIDTH, DEPTH))
    monkeypatch.setattr(native, "threads", 3)
    result = native.packed_linear(x, packed, None)
    with ThreadPoolExecutor(1) as caller:
        many_rows = noise(2000, DEPTH).to(native.dtype)
        busy = caller.submit(
            lambda: [native.packed_linear(many_rows, packed, None) for _ in range(30)]
        )
        for _ in range(5):
            child = os.fork()
            if child == 0:
                signal.alarm(30)
                os._exit(0 if torch.equal(native.packed_linear(x, packed, None), result) else 1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        busy.result()
