"""Wide token tiles: checked on a GPU, stored for that GPU alone, and used by engines."""

import json
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.kernels.dispatch import load_kernels
from spd.kernels.interface import Kernels
from spd.kernels.linear.skinny_config import token_tile
from spd.kernels.triton_form import TritonKernels
from spd.runtime import SamplingParams
from spd.runtime.lab import diagnostics, tile_checks
from spd.runtime.lab.tile_checks import widest_exact_tiles
from spd.runtime.load import token_tiles
from spd.runtime.load.token_tiles import (
    WEIGHT_DTYPES,
    TokenTileLimits,
    find_tile_limits,
    read_tile_limits,
    store_tile_limits,
)
from tests import helpers
from tests.helpers import (
    INTERPRETER_MARKS,
    Patch,
    Tiny,
    limit_programs,
    make_engine,
    random_prompts,
    run_all,
)

SMALL_SHAPES = ((48, 160), (64, 96), (40, 32))
CPU = torch.device("cpu")
ENVIRONMENT = {"gpu": "one", "driver": "1.2"}
LIMITS: TokenTileLimits = {"bfloat16": 32, "int8": 16}


def test_tiles_follow_the_rows_up_to_their_limit() -> None:
    bf16 = torch.bfloat16
    f16 = torch.float16
    int8 = torch.int8
    assert [token_tile(rows, bf16, bf16, {bf16: 64}) for rows in (1, 16, 17, 33, 500)] == [
        16,
        16,
        32,
        64,
        64,
    ]
    assert [token_tile(rows, bf16, int8, {bf16: 64, int8: 32}) for rows in (1, 17, 500)] == [
        16,
        32,
        32,
    ]
    assert {token_tile(64, f16, int8, {int8: 64}), token_tile(64, bf16, bf16, {})} == {16}


@pytest.mark.parametrize("operation", ["linear", "norm_gate_up", "head_logits"])
def test_a_tile_that_changes_a_bit_is_left_out(operation: str) -> None:
    """Stand-in kernels give other bits for int8 from tiles of 64 on, and for bfloat16 from 32 on."""
    plain = load_kernels("torch")

    def load(widest: TokenTileLimits) -> Kernels:
        def run_inexact(*operands: Any) -> Any:
            """Run the operation; change a bit of the result for tiles that are too wide."""
            result = getattr(plain, operation)(*operands)
            is_inexact = widest.get("int8", 0) >= 64 or widest.get("bfloat16", 0) >= 32
            last = result[-1] if isinstance(result, tuple) else result
            last.view(-1)[-1].add_(is_inexact)
            return result

        return helpers.replace_operations(plain, **{operation: run_inexact})

    assert widest_exact_tiles(load, CPU, shapes=SMALL_SHAPES) == {"bfloat16": 16, "int8": 32}


@INTERPRETER_MARKS[0]
def test_the_kernels_keep_every_bit() -> None:
    assert widest_exact_tiles(
        partial(load_kernels, "triton", None), CPU, ("float16",), SMALL_SHAPES
    ) == {"float16": 64}


def test_stored_limits_are_for_one_gpu_alone(tmp_path: Path) -> None:
    cache = lambda: tmp_path / "new" / "spd"  # noqa: E731
    assert read_tile_limits(cache, ENVIRONMENT) is None
    path = Path(str(store_tile_limits(cache, ENVIRONMENT, LIMITS)))
    assert read_tile_limits(cache, ENVIRONMENT) == LIMITS and path.parent == cache()
    assert read_tile_limits(cache, {**ENVIRONMENT, "driver": "1.3"}) is None
    stored = json.loads(path.read_text())
    widest = [{"int8": 128}, {"int9": 16}, [16], {"int8": [16]}, None]
    bad = [stored | {"for": {**ENVIRONMENT, "gpu": "other"}}, [], {"for": ENVIRONMENT}]
    bad += [{**stored, "widest": value} for value in widest]
    texts = [*map(json.dumps, bad), path.read_text()[:-3], "", "[" * 10**5]
    for text in (*map(str.encode, texts), b"\xff"):
        path.write_bytes(text)
        assert read_tile_limits(cache, ENVIRONMENT) is None, text[:80]
    path.write_text(json.dumps(stored))
    path.chmod(0o666)
    assert read_tile_limits(cache, ENVIRONMENT) is None, "others may have written it"
    path.chmod(0o600)
    path.parent.chmod(0o777)
    assert read_tile_limits(cache, ENVIRONMENT) is None, "others may have put it there"
    path.parent.chmod(0o700)
    assert read_tile_limits(cache, ENVIRONMENT) == LIMITS
    path.unlink()
    os.mkfifo(path, 0o600)
    assert read_tile_limits(cache, ENVIRONMENT) is None, "and is not waited for"
    path.unlink()
    path.write_text("")
    assert store_tile_limits(lambda: path / "below", ENVIRONMENT, LIMITS) is None


def test_a_device_starts_with_stored_or_tested_limits(tmp_path: Path, monkeypatch: Patch) -> None:
    bound = {"capability": "9.0", "gpu": "x", "triton": "3.6.1"}
    monkeypatch.setattr(token_tiles, "describe_kernel_environment", lambda device: bound)
    assert find_tile_limits("cuda", lambda: tmp_path) == (
        {"bfloat16": 64},
        "shown on its architecture",
    )
    store_tile_limits(lambda: tmp_path, bound, LIMITS)
    assert find_tile_limits("cuda", lambda: tmp_path) == (LIMITS, "as this GPU answered spd doctor")
    for other in ({"capability": "8.9"}, {"triton": "3.7.0"}):
        monkeypatch.setattr(
            token_tiles, "describe_kernel_environment", lambda device, o=other: bound | o
        )
        unknown = find_tile_limits("cuda", lambda: tmp_path)
        assert unknown == ({}, "spd doctor has not asked this GPU")
    assert find_tile_limits("cpu", lambda: tmp_path)[0] == {} and set(LIMITS) == set(WEIGHT_DTYPES)


@INTERPRETER_MARKS[0]
def test_an_engine_has_the_tiles_of_its_plan(tiny: Tiny, monkeypatch: Patch) -> None:
    """The text is the same with narrow tiles and with wide ones, in the interpreter."""
    limit_programs(monkeypatch)
    params = [SamplingParams(max_tokens=2, seed=3)]
    runs = []
    for widest in ({}, {"float16": 64}):
        monkeypatch.setattr(
            token_tiles, "find_tile_limits", lambda device, cache, w=widest: (w, "asked")
        )
        engine = make_engine(
            tiny("qwen3"), device="cpu", dtype="float16", kernels="triton", ctx=128
        )
        kernels = engine.round_queue.runner.kernels
        assert widest == engine.plan.as_dict()["token_tiles"]
        assert engine.plan.token_tiles_reason == "asked"
        assert isinstance(kernels, TritonKernels)
        assert kernels.tile_limits == ({torch.float16: 64} if widest else {})
        runs.append(run_all(engine, random_prompts(1, 20, 300), params)[0].output)
    assert runs[0] == runs[1]


def test_the_doctor_checks_each_kind_of_gpu_once(tmp_path: Path, monkeypatch: Patch) -> None:
    capabilities = [(9, 0), (9, 0), (7, 5), (8, 0)]
    capability = lambda device=None: capabilities[device.index if device else 0]  # noqa: E731
    cuda = {"device_count": lambda: len(capabilities), "device": lambda device: nullcontext()}
    cuda |= {"get_device_capability": capability, "is_available": lambda: True}
    for name, stand_in in cuda.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(
        tile_checks,
        "describe_kernel_environment",
        lambda device: {"gpu": str(capabilities[device.index])},
    )
    monkeypatch.setattr(
        tile_checks, "widest_exact_tiles", lambda load, device: dict.fromkeys(WEIGHT_DTYPES, 32)
    )
    monkeypatch.setattr(pytest.importorskip("triton").knobs.runtime, "interpret", False)
    for cache, status in ((tmp_path, "ok"), (tmp_path / "file", "warning")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        (tmp_path / "file").write_text("")
        finding = diagnostics.check_token_tiles()
        assert (
            finding.status == status and "bfloat16 32 int8 32; bfloat16 32 int8 32" in finding.line
        )
        files = [answer["file"] for answer in finding.facts["asked"]]
        assert len(files) == 2 and all(bool(file) == (status == "ok") for file in files)
    assert len(list((tmp_path / "spd").iterdir())) == 2
