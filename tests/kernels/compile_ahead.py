"""Compile kernels ahead of time for one architecture; started by tests in a process without the interpreter.

Usage: compile_ahead.py ARCH WITHOUT MODULE...  Names that hold WITHOUT are left out. Prints one JSON line
a kernel: name, registers, local and shared bytes, and which instructions its PTX holds. Needs no GPU, for
Triton brings the assembler.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget

FP8_ARCH = 89
"""The first architecture that converts float8_e4m3fn; on others weights are never kept so."""


def compile_for(signature: Any, arch: int) -> Any:
    """Compile one signature; pointers and sizes divisible by 16 but for those it names."""
    names = signature.kernel.arg_names
    constants = {**signature.constants}
    if arch < 90 and "PDL" in constants:
        constants["PDL"] = False
    types = {name: signature.types.get(name, "constexpr") for name in names}
    loose = getattr(signature, "unspecialized", ("rows",))
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if name in signature.types and name not in loose and signature.types[name] not in ("fp32", "i1")
    }
    source = triton.compiler.ASTSource(
        fn=signature.kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs=attributes,
    )
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=signature.options)


def usage(cubin: bytes) -> dict[str, int]:
    """Registers, and bytes of local memory and stack, as the assembler counted them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {"registers": found["REG"], "local": found["STACK"] + found["LOCAL"]}


def main() -> None:
    """Compile every signature of the modules."""
    triton.knobs.language.default_fp_fusion = True  # as `load_kernels` has it
    arch, without = int(sys.argv[1]), sys.argv[2]
    for module in sys.argv[3:]:
        describe = importlib.import_module(module).signatures
        # Tiles and stages follow from the device where a module's do.
        given = {"capability": divmod(arch, 10)} if inspect.signature(describe).parameters else {}
        for name, signature in describe(**given).items():
            if without in name or (arch < FP8_ARCH and "fp8" in repr(signature.types)):
                continue
            compiled = compile_for(signature, arch)
            ptx = compiled.asm["ptx"]
            line = {
                "module": module,
                "name": name,
                "kernel": signature.kernel.fn.__name__,
                "hot": getattr(signature, "hot", True),
                "any_rows": [p.name for p in signature.kernel.params if p.do_not_specialize],
                **usage(compiled.asm["cubin"]),
                "shared": compiled.metadata.shared,
                "target": re.findall(r"\.target (\w+)", ptx),
                "wgmma": "wgmma.mma_async" in ptx,
                "mma": "mma.sync" in ptx,
                "tcgen05": "tcgen05.mma" in ptx,
                "async_copies": "cp.async" in ptx,
                # How many instructions fetch ahead, and where the first one stands: before the wait, or not.
                "prefetches": ptx.count("prefetch.global.L2"),
                "prefetched_first": 0 <= ptx.find("prefetch.global.L2") < ptx.find("griddepcontrol.wait"),
                "released_first": 0
                <= ptx.find("griddepcontrol.launch_dependents")
                < ptx.find("griddepcontrol.wait"),
                "wide_loads": "ld.global.v4" in ptx or ".L1::no_allocate.v4" in ptx,
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
