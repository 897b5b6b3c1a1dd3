"""The GPU suite's kernels without a GPU: compiled ahead of time for Hopper, and run by the interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from benchmarks.gpu_suite.kernels import Signature, signatures  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]


def compile_for_hopper(signature: Signature) -> Any:
    """Compile one signature for compute capability 9.0; pointers and sizes but the rows divisible by 16."""
    names = signature.kernel.arg_names
    types = {name: signature.types.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): value for name, value in signature.constants.items()}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if (index,) not in constants and name != "rows"
    }
    source = triton.compiler.ASTSource(
        fn=signature.kernel, signature=types, constexprs=constants, attrs=attributes
    )
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options=signature.options)


def local_bytes(cubin: bytes, folder: Path) -> int:
    """Bytes of local memory and stack a kernel uses: what registers could not hold."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = triton.knobs.nvidia.cuobjdump.path
    text = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"(?:STACK|LOCAL):(\d+)", text)
    assert len(found) == 2, text
    return sum(map(int, found))


@pytest.mark.parametrize("name", list(signatures()))
def test_compiles_for_hopper_without_spills(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    compiled = compile_for_hopper(signatures()[name])
    assert re.search(r"\.target sm_90a?\b", compiled.asm["ptx"])
    assert local_bytes(compiled.asm["cubin"], tmp_path) == 0
    if name.startswith("skinny_gemm"):
        assert re.search(r"wgmma\.mma_async|mma\.sync", compiled.asm["ptx"]), "no matrix units are used"
    else:
        assert ".global.b32" in compiled.asm["ptx"] or ".global.v4.b32" in compiled.asm["ptx"]


def test_wide_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bandwidth kernel whose loads are narrow would measure itself and not the memory."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("read_sum", "copy"):
        assert "ld.global.v4.b32" in compile_for_hopper(signatures()[name]).asm["ptx"], name


def test_the_number_of_rows_does_not_choose_the_program() -> None:
    """Triton would compile a product for one row apart from that for five, with other bits perhaps."""
    kernel = signatures()["skinny_gemm_bf16_16"].kernel
    assert [p.name for p in kernel.params if p.do_not_specialize] == ["rows"]


def test_interpreted_kernels_are_right() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = Path(__file__).with_name("interpreted_kernels.py")
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=300
    )
    if run.returncode == 77:
        pytest.skip(f"the interpreter of Triton {triton.__version__} cannot loop with this NumPy")
    assert run.returncode == 0, run.stderr[-4000:]
    assert run.stdout.split() == ["read_sum", "copy", "add_one", "float32", "float16", "invariant"]
