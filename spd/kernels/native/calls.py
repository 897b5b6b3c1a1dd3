# mypy: disable-error-code="no-untyped-call"
"""Calls of the functions of a compiled C library, with tensors, numbers and structures as
arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spd.kernels.native.build import NativeUnavailable
from spd.kernels.native.packed import (
    SUM_BYTES,
    TILE_BYTES,
    WEIGHT_FORMAT,
    Operand,
    pack_structure,
)
from spd.kernels.round.window import Paging, RoundTensors, Rows
from spd.kernels.torch_form import TorchKernels

Step = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function and its arguments."""
ROUND_FIELDS = (
    "tokens",
    "length",
    "length_limit",
    "draft",
    "num_drafts",
    "match",
    "draft_limit",
    "draft_cap",
    "page_table",
    "stop_ids",
    "active",
    "ring",
    "times",
    "counter",
)
"""The tensors of `RoundTensors`, in the order of round.c's structure."""
INSTRUCTIONS = ("AVX2", "AVX512", "AVX512-VNNI", "AVX512-BF16", "AMX", "NEON")
"""Sets of instructions, in the order of init.c."""
STRUCTURES = {
    "pack": "2P2li",
    "pack_codes": "2P2l2i",
    "linear": f"3P{WEIGHT_FORMAT}3P2li2f6lf",
    "rows": f"{WEIGHT_FORMAT}2P2l",
    "norm": "4P2lf",
    "rotary_store": "11P5lf",
    "attend": "11P11l2f",
    "latent_store": "10P7lf",
    "router": "3P3l",
    "route": "5P6l2i2f",
    "experts": f"6P{WEIGHT_FORMAT}{WEIGHT_FORMAT}i2f9P7l",
    "sample": "11P7l2i",
    "short_conv": "2P2l5P4li",
    "delta_rule": "2P2l10P6li",
    "gated_norm": "4P5lfi",
}
"""The structures of the C functions that run on several threads, in the notation of the module
struct."""


def round_structure(state: RoundTensors) -> bytes:
    """Return the structure of a round's tensors."""
    return pack_structure(
        "14P11l",
        *[getattr(state, name) for name in ROUND_FIELDS],
        state.length.shape[0],
        state.tokens.stride(0),
        state.draft.stride(0),
        state.page_table.stride(0),
        state.page_table.shape[1],
        state.stop_ids.stride(0),
        state.stop_ids.shape[1],
        *state.ring.shape,
        state.times.shape[1],
    )


def allocate_rows(slots: int, width: int, paging: Paging) -> tuple[Rows, bytes]:
    """Return uninitialized rows [slots, width], and the structure of their tensors."""
    rows = Rows(
        token_ids=torch.empty(slots, width, dtype=torch.int64),
        positions=torch.empty(slots, width, dtype=torch.int64),
        valid=torch.empty(slots, width, dtype=torch.bool),
        kv_slots=torch.empty(slots, width, dtype=torch.int64),
    )
    structure = pack_structure(
        "4P4l", rows.token_ids, rows.positions, rows.valid, rows.kv_slots, width, *paging
    )
    return rows, structure


class AmxRefused(NativeUnavailable):
    """The processor has AMX, but the system does not let programs use it."""


class NativeCalls(TorchKernels):
    """A compiled library, its threads and its scratch memory; see `spd.kernels.native.library`."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        """dtype: the library's elements'. Raises NativeUnavailable."""
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise NativeUnavailable(f"the compiled library cannot be loaded: {error}") from error
        number = library.spd_init()
        if number < 0:
            raise AmxRefused("the system does not grant AMX")
        self.instructions = INSTRUCTIONS[number]
        self.dtype = dtype
        self.library = library
        self.calls: list[Step] | None = None
        self.scratch_storages = [torch.UntypedStorage(0)]
        """Memory for a product's rows: the last one is used; recordings use those they began
        with."""
        self.threads = torch.get_num_threads()

    @contextmanager
    def record_calls(self, calls: list[Step]) -> Iterator[None]:
        """Append calls of C functions, with arguments that need no conversion, instead of making
        them."""
        self.calls = calls
        try:
            yield
        finally:
            self.calls = None

    def call(self, name: str, *operands: Tensor | bytes | int | None) -> None:
        """Call a C function with tensors, integers and structures, or record the call."""
        function = getattr(self.library, f"spd_{name}")
        arguments = tuple(
            operand
            if isinstance(operand, bytes)
            else ctypes.c_long(operand.data_ptr() if isinstance(operand, Tensor) else operand or 0)
            for operand in operands
        )
        if self.calls is None:
            function(*arguments)
        else:
            self.calls.append((function, arguments))

    def call_host(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a Python function between C functions, or record the call."""
        if self.calls is None:
            function(*arguments)
        else:
            self.calls.append((function, arguments))

    def call_threads(self, name: str, *operands: Operand) -> None:
        """Call a C function that runs on several threads, with its structure."""
        self.call(name, pack_structure(STRUCTURES[name], *operands), self.threads)

    def scratch_address(self, tiles: int) -> int:
        """Return the address of memory for left-side tiles, float32 in float32 products, and row
        sums."""
        size = tiles * (2 * TILE_BYTES + SUM_BYTES)
        if self.scratch_storages[-1].nbytes() < size:
            size = max(size, 2 * self.scratch_storages[-1].nbytes())
            self.scratch_storages.append(torch.UntypedStorage(size))
        address: int = self.scratch_storages[-1].data_ptr()
        return address
