"""Which form each model's weights are kept in: what was asked, what is stored, and what the kernels know."""

from __future__ import annotations

from spd.errors import IncompatibleError
from spd.formats.folder import ModelFolder
from spd.formats.model_config import ModelConfig
from spd.runtime.models.weight_form import BLOCK, WIDE, WeightForm, int8_form
from spd.runtime.models.weights import FP8_DTYPE
from spd.runtime.plan.config import EngineConfig
from spd.runtime.plan.machine import Machine

AS_STORED = "as the dtype says"
"""Why weights are wide that were not quantized."""
FP8_CAPABILITY = (8, 9)
"""The first devices whose compilers convert float8_e4m3fn."""


def choose_form(
    model: ModelConfig, folder: ModelFolder, wishes: EngineConfig, machine: Machine, kernels: str, dtype: str
) -> tuple[WeightForm, str]:
    """The form of a folder's weights, and why. Raises IncompatibleError, CheckpointError.

    Reads the headers of a checkpoint whose configuration speaks of FP8 blocks, and of no other.
    """
    if wishes.quantize == "int8":
        return _int8(model, folder, machine, kernels, dtype)
    if model.fp8_block is None:
        return WIDE, AS_STORED
    obstacle = _obstacle(model.fp8_block, wishes.tp, machine, kernels, dtype)
    if obstacle is not None:
        return WIDE, f"FP8 blocks are multiplied out: {obstacle}"
    why = "FP8 blocks are multiplied as stored"
    if wishes.load == "dummy":
        return WeightForm("fp8"), why
    names = (name for name, meta in folder.checkpoint.tensors.items() if meta.dtype == FP8_DTYPE)
    return WeightForm("fp8", stored=frozenset(names)), why


def _int8(
    model: ModelConfig, folder: ModelFolder, machine: Machine, kernels: str, dtype: str
) -> tuple[WeightForm, str]:
    if model.fp8_block is not None:
        raise IncompatibleError(
            f"--quantize int8, but the weights of {folder.path.name} are quantized already",
            reason=["quantization_config in config.json speaks of FP8 blocks."],
            fix=["leave --quantize out"],
        )
    asked = "--quantize int8: a scale a row, made at load"
    form = int8_form(kernels, machine.on_cpu, dtype)
    if form is not None:
        return form, asked
    why = f"kept as {dtype}, for torch's products here want wide weights"
    return WeightForm("int8", widened=True), f"{asked}, {why}"


def _obstacle(block: tuple[int, int], tp: int, machine: Machine, kernels: str, dtype: str) -> str | None:
    """What keeps FP8 blocks from being multiplied as they are stored."""
    if kernels != "triton":
        return "torch's products know none"
    if tp > 1:
        return "a rank's part may begin inside a block"
    if block != (BLOCK, BLOCK):
        return f"kernels know blocks of {BLOCK} x {BLOCK}, these are {block[0]} x {block[1]}"
    if dtype == "float16":
        return "float16 could overflow before the norm's scales"
    if not machine.on_cpu and machine.capability < FP8_CAPABILITY:
        return "this GPU (sm_{}{}) has no FP8".format(*machine.capability)
    return None
