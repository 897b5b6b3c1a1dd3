"""Compile kernels ahead of time for one architecture; started by tests in a process without the
interpreter.

Usage: compile_ahead.py ARCH WITHOUT MODULE...  A module's `launches` says what to launch; cases in
whose name the pattern WITHOUT is found are left out. Prints one JSON line a program: name,
registers, local and shared bytes, and which instructions its PTX holds. Needs no GPU, for Triton
brings the assembler.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from spd.kernels.launch import Device

DEVICES = {
    arch: Device(divmod(arch, 10), kib * 1024, 132)
    for arch, kib in ((80, 163), (86, 99), (89, 99), (90, 227), (100, 227), (120, 99))
}
"""By architecture: every one that is compiled for, with what a program may use of shared memory."""


def pretend(arch: int) -> None:
    """Answer Triton, and what asks torch, as a GPU of an architecture would."""
    device = DEVICES[arch]
    properties = SimpleNamespace(
        major=arch // 10, minor=arch % 10, multi_processor_count=device.processors
    )
    properties.shared_memory_per_block_optin = device.shared
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", arch, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    vars(torch.cuda)["get_device_properties"] = lambda device: properties


def compiled(
    launches: dict[str, Callable[[], Any]], without: str
) -> Iterator[tuple[str, Any, Any]]:
    """Yield every program that the cases launch, once, with its kernel and a name after kernel and
    case."""
    programs: list[tuple[Any, Any]] = []
    run = triton.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        programs.append((kernel, run(kernel, *args, grid=grid, warmup=True, **options)))

    triton.JITFunction.run = compile_only
    seen: dict[int, str] = {}
    for case, launch in launches.items():
        programs.clear()
        if not re.search(without, case):
            launch()
        for kernel, program in programs:
            if id(program) not in seen:
                stem = kernel.fn.__name__.removesuffix("_kernel")
                name = case if stem in case else f"{stem}_{case}"
                seen[id(program)] = name = name + "_again" * (name in seen.values())
                yield name, kernel, program


def usage(cubin: bytes) -> dict[str, int]:
    """Return registers, and bytes of local memory and stack, as the assembler counted them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    counts = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": counts["REG"], "local": counts["STACK"] + counts["LOCAL"]}


ACCESS = r"\b((?:ld\.global|st\.global|atom|red|cp\.async)\S*)"
WAIT = "griddepcontrol.wait"


def access_order(ptx: str) -> dict[str, Any]:
    """Return whether a program waits for the one before it, and the order of its accesses.

    `early`: kinds of accesses to memory before the wait. `hand_over`: stores, barriers, atomics and
    loads past the first-level cache, in order, where the program has an atomic with acquire and
    release. `read_back`: stores, barriers and loads between the first two atomics, where attention
    rotates rows and reads them.
    """
    body = ptx[ptx.find("{") :]
    before, wait, _ = body.partition(WAIT)
    steps = re.findall(r"\b(st\.global|bar\.sync|atom\.\S+|ld\.global\.cg)", body)
    after_first = body.partition("atom.")[2].partition("atom.")[0]
    return {
        "waits": bool(wait),
        "early": sorted(set(re.findall(ACCESS, before))) if wait else [],
        "hand_over": " ".join(steps) if any("acq_rel" in step for step in steps) else "",
        "read_back": " ".join(re.findall(r"\b(st\.global|bar\.sync|ld\.global)", after_first)),
    }


WORDS = (
    r'elementwise_inline_asm "[^"]*(?:lop3|0x3120)[^"]*" .*?packed_element = 4 .*? '
    r": tensor<[\dx]+i8, (#[^>]+>*)"
)
"""The conversion of a word of four codes, or its bytes put in order: their layout over threads."""


def packed_columns(ttgir: str) -> int | None:
    """Return how many neighbouring columns a thread holds where bytes of a word have an order.

    The fewest of all such conversions; None where there are none.
    """
    names = dict(re.findall(r"^(#\w+) = (#ttg\..*)$", ttgir, re.M))
    widths = []
    for layout in re.findall(WORDS, ttgir):
        text = names.get(layout.strip(">, "), layout)
        run = re.search(r"kWidth = (\d+)|sizePerThread = \[\d+, (\d+)\].*order = \[1, 0\]", text)
        widths.append(int(run[1] or run[2]) if run else 1)
    return min(widths, default=None)


def main() -> None:
    """Compile all that the modules launch."""
    triton.knobs.language.default_fp_fusion = True  # as `load_kernels` has it
    arch = int(sys.argv[1])
    without = sys.argv[2]
    pretend(arch)
    for module in map(importlib.import_module, sys.argv[3:]):
        for name, kernel, program in compiled(module.launches(divmod(arch, 10)), without):
            ptx = program.asm["ptx"]
            line = {
                "name": name,
                "kernel": kernel.fn.__name__,
                "file": kernel.fn.__module__,
                "any_rows": [p.name for p in kernel.params if p.do_not_specialize],
                **usage(program.asm["cubin"]),
                "shared": program.metadata.shared,
                "target": re.findall(r"\.target (\w+)", ptx),
                "wgmma": "wgmma.mma_async" in ptx,
                "mma": "mma.sync" in ptx,
                "tcgen05": "tcgen05.mma" in ptx,
                "async_copies": "cp.async" in ptx,
                # How many instructions fetch ahead, and where the first one stands: before the
                # wait, or not.
                "prefetches": ptx.count("prefetch.global.L2"),
                "prefetched_first": 0 <= ptx.find("prefetch.global.L2") < ptx.find(WAIT),
                "released_first": 0
                <= ptx.find("griddepcontrol.launch_dependents")
                < ptx.find(WAIT),
                "launched_early": bool(getattr(program.metadata, "launch_pdl", False)),
                **access_order(ptx),
                "packed_columns": packed_columns(program.asm["ttgir"]),
                "wide_loads": "ld.global.v4" in ptx or ".L1::no_allocate.v4" in ptx,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
