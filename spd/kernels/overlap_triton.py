# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Programmatic dependent launch: a kernel begins while the one before it ends.

See `launch.pdl_options`. Every kernel launched so waits in all its programs before its first access
to what another kernel reads or writes. As the kernel before it has waited likewise, everything
earlier has ended too.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until the previous kernel has ended.

    Before, none of its outputs may be read or written.
    """
    if PDL:
        cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel be launched: it waits for this one before it reads its outputs.

    A dense product does so after its loop: earlier, the next kernel's programs would take up the
    processors that this one needs.
    """
    if PDL:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_and_release(PDL: tl.constexpr):
    """Wait, and let the next kernel be launched."""
    wait(PDL)
    release(PDL)


@triton.jit
def prefetch(pointers):
    """Prefetch the cache lines of pointers, which must be readable, into L2; return nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
