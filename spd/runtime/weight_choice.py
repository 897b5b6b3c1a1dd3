"""Which form each model's weights are kept in: what was asked, what is stored, and what the kernels know."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from spd.errors import IncompatibleError
from spd.formats.checkpoint import Checkpoint
from spd.formats.model_config import ModelConfig
from spd.runtime.models.weight_form import BLOCK, WIDE, WeightForm, int8_form
from spd.runtime.models.weights import FP8_DTYPE

AS_STORED = "as the dtype says"
"""Why weights are wide that nobody quantized."""
FP8_CAPABILITY = (8, 9)
"""The first devices whose compilers convert float8_e4m3fn."""


class Circumstances(Protocol):
    """What the choice follows from, beside the model: an engine's plan has it."""

    @property
    def quantize(self) -> str:
        """none or int8."""
        ...

    @property
    def kernels(self) -> str:
        """torch or triton."""
        ...

    @property
    def device(self) -> str:
        """Where the weights lie."""
        ...

    @property
    def dtype(self) -> str:
        """Of everything else."""
        ...

    @property
    def load(self) -> str:
        """dummy: nothing is read."""
        ...

    @property
    def tp(self) -> int:
        """Ranks among which a model is divided."""
        ...


@dataclass(frozen=True)
class Wishes:
    """Circumstances by themselves, before there is a plan."""

    quantize: str
    kernels: str
    device: str
    dtype: str
    load: str
    tp: int = 1


def choose_forms(
    target: tuple[ModelConfig, Path],
    drafter: tuple[ModelConfig, Path] | None,
    given: Circumstances,
    capability: tuple[int, int] | None = None,
) -> tuple[WeightForm, WeightForm, str]:
    """Forms of the target and of what drafts for it, a model or an MTP head; and why the target's."""
    form, why = choose_form(*target, given, capability)
    return form, choose_form(*drafter, given, capability)[0] if drafter else WIDE, why


def choose_form(
    model: ModelConfig, folder: Path, given: Circumstances, capability: tuple[int, int] | None = None
) -> tuple[WeightForm, str]:
    """The form of a folder's weights, and why. Raises IncompatibleError, CheckpointError.

    Reads the headers of a checkpoint whose configuration speaks of FP8 blocks, and of no other.
    capability: of the CUDA device, which is asked otherwise.
    """
    if given.quantize == "int8":
        return _int8(model, folder, given)
    if model.fp8_block is None:
        return WIDE, AS_STORED
    obstacle = _obstacle(model.fp8_block, given, capability)
    if obstacle is not None:
        return WIDE, f"FP8 blocks are multiplied out: {obstacle}"
    why = "FP8 blocks are multiplied as stored"
    if given.load == "dummy":
        return WeightForm("fp8"), why
    with Checkpoint.open(folder) as checkpoint:
        names = (name for name, meta in checkpoint.tensors.items() if meta.dtype == FP8_DTYPE)
        return WeightForm("fp8", stored=frozenset(names)), why


def _int8(model: ModelConfig, folder: Path, given: Circumstances) -> tuple[WeightForm, str]:
    if model.fp8_block is not None:
        raise IncompatibleError(
            f"--quantize int8, but the weights of {folder.name} are quantized already",
            reason=["quantization_config in config.json speaks of FP8 blocks."],
            fix=["leave --quantize out"],
        )
    asked = "--quantize int8: a scale a row, made at load"
    form = int8_form(given.kernels, given.device == "cpu", given.dtype)
    if form is not None:
        return form, asked
    why = f"kept as {given.dtype}, for torch's products here want wide weights"
    return WeightForm("int8", widened=True), f"{asked}, {why}"


def _obstacle(block: tuple[int, int], given: Circumstances, capability: tuple[int, int] | None) -> str | None:
    """What keeps FP8 blocks from being multiplied as they are stored."""
    if given.kernels != "triton":
        return "torch's products know none"
    if given.tp > 1:
        return "a rank's part may begin inside a block"
    if block != (BLOCK, BLOCK):
        return f"kernels know blocks of {BLOCK} x {BLOCK}, these are {block[0]} x {block[1]}"
    if given.dtype == "float16":
        return "float16 could overflow before the norm's scales"
    if given.device != "cpu":
        if capability is None:
            import torch

            capability = torch.cuda.get_device_capability(given.device)
        if capability < FP8_CAPABILITY:
            return f"this GPU (sm_{capability[0]}{capability[1]}) has no FP8"
    return None
