"""Kernels run in Triton's interpreter where there is no GPU, and on the GPU where there is one."""

from __future__ import annotations

import fcntl
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from spd.formats.hub import spd_cache_folder
from spd.kernels.dispatch import load_kernels
from spd.kernels.native.build import library_path
from spd.kernels.native.library import NativeKernels
from tests.kernels.forms import EVERY, HERE, Form, form_of, needs_compiled


@pytest.fixture(
    params=[pytest.param("cuda", marks=pytest.mark.gpu) if torch.cuda.is_available() else "cpu"]
)
def device(request: pytest.FixtureRequest) -> str:
    """Return the device that runs Triton kernels here."""
    return str(request.param)


@pytest.fixture(params=["torch", "triton", pytest.param("native", marks=needs_compiled)])
def op(request: pytest.FixtureRequest) -> Any:
    """Return a form of the operations that a file's STEM names."""
    return form_of(request, request.param, request.module.STEM)


@pytest.fixture
def dtypes(device: str) -> tuple[torch.dtype, ...]:
    """Return the types whose products are right there; the interpreter gets bfloat16 ones wrong."""
    both = (torch.float32, torch.float16)
    return both if device == "cpu" else (*both, torch.bfloat16)


@pytest.fixture(scope="session")
def native_with(pytestconfig: pytest.Config) -> Callable[[str], NativeKernels]:
    """Return a loader of the C kernels by instructions and dtype, as `HERE` names them, cached
    where `spd` caches its own."""

    @functools.cache
    def load(name: str) -> NativeKernels:
        instructions, dtype = name.split()
        with open(pytestconfig.cache.mkdir("native") / f"{name}.lock", "w") as lock:
            fcntl.flock(
                lock, fcntl.LOCK_EX
            )  # one process compiles, the others wait for what it made
            path = library_path(spd_cache_folder, instructions, dtype=dtype)
        library = NativeKernels(path, getattr(torch, dtype))
        assert library.instructions == instructions
        return library

    return load


@pytest.fixture(scope="session", params=HERE)
def native(
    request: pytest.FixtureRequest, native_with: Callable[[str], NativeKernels]
) -> NativeKernels:
    """Return the kernels with each of the instructions that this processor has."""
    return native_with(request.param)


@pytest.fixture(params=EVERY)
def form(request: pytest.FixtureRequest, device: str, dtypes: tuple[torch.dtype, ...]) -> Form:
    """Return one form of the operations; torch's and C's run on the CPU."""
    if request.param == "torch":
        return Form("torch", load_kernels("torch"), "cpu", (torch.float32, torch.bfloat16))
    if request.param == "triton":
        pytest.importorskip("triton")
        return Form("triton", load_kernels("triton"), device, dtypes)
    library = request.getfixturevalue("native_with")(request.param)
    return Form(request.param, library, "cpu", (library.dtype,))


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set sampling blocks and chunks so small that a few hundred ids fill several."""
    from spd.kernels.sampling import sampling_triton, truncation_triton

    monkeypatch.setattr(sampling_triton, "BLOCK", 64)
    monkeypatch.setattr(truncation_triton, "BLOCK", 64)
    monkeypatch.setattr(truncation_triton, "CHUNK", 16)


def _poison(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned_empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = make(*args, **kwargs)
        return (
            tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-(2**7 - 3))
        )

    return poisoned_empty


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new memory with NaN (or a nonsense integer), so that an unwritten element shows."""
    monkeypatch.setattr(torch, "empty", _poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poison(torch.Tensor.new_empty))
