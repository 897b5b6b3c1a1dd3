"""The C kernels in whole models: every family, every company that a row can be in, the same
text."""

from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from spd.errors import IncompatibleError
from spd.formats.demo import demo_folder
from spd.kernels.native import build
from spd.kernels.native.build import instructions, unavailable_reason
from spd.runtime import EngineConfig, Request, SamplingParams
from spd.runtime.layers.base import ForwardBatch, ModelOutput
from spd.runtime.plan.machine import Machine
from spd.runtime.plan.plan import make_plan
from spd.runtime.proposers.draft_model import DraftModelProposer
from tests import helpers
from tests.helpers import (
    Patch,
    Tiny,
    TinyShelf,
    collect_outputs,
    compute_logits,
    get_local_queue,
    make_engine,
    random_prompts,
    run_all,
)
from tests.kernels.forms import needs_compiled as needs_native
from tests.page_checks import check_pages
from tests.recipes.tiny import VARIANTS
from tests.recipes.tiny_dense import FAMILIES, write_dense

FEW = (
    "biases",
    "qwen3",
    "deepseek_v3",
    "deepseek_v2_lite",
    "glm4_moe",
    "qwen3_moe",
    "ernie4_5_moe",
)
SHAPES = [
    *(
        pytest.param(f"tiny-{name}", marks=() if name in FEW else pytest.mark.slow)
        for name in VARIANTS
    ),
    *sorted(FAMILIES),
]
BFLOAT16 = {"dtype": "bfloat16"}
NATIVE = {dtype: {"dtype": dtype, "kernels": "native"} for dtype in ("bfloat16", "float32")}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    shelf = TinyShelf(tmp_path_factory.mktemp("native"))

    @cache
    def get(shape: str, **options: Any) -> Path:
        if shape.startswith("tiny-"):
            return shelf.get(shape[5:], **options)
        return write_dense(tmp_path_factory.mktemp(shape), shape, **options)

    return get


@needs_native
@pytest.mark.usefixtures("untried")
@pytest.mark.covers(1, count=20)
@pytest.mark.parametrize("dtype", NATIVE)
@pytest.mark.parametrize("shape", SHAPES)
def test_logits_of_every_family_are_near_float32(model: Tiny, shape: str, dtype: str) -> None:
    """Bfloat16: no farther from float32 than twice torch's is."""
    folder = model(shape)
    prompt = random_prompts(1, 90, 250, seed=len(shape))[0]
    exact, native_logits = (
        compute_logits(make_engine(folder, **options), prompt, 0) for options in ({}, NATIVE[dtype])
    )
    if dtype == "float32":
        assert 0 < (native_logits - exact).norm() / exact.norm() < 5e-6
        return
    torch_logits = compute_logits(make_engine(folder, **BFLOAT16, kernels="torch"), prompt, 0)
    # Of most rows: an expert that is nearly another's equal may be chosen in its place.
    off, allowed = (
        ((logits - exact).norm(dim=1) / exact.norm(dim=1)).median()
        for logits in (native_logits, torch_logits)
    )
    assert 0 < off <= 2 * allowed, (off, allowed)


@needs_native
def test_prompts_go_through_one_pass_together(model: Tiny) -> None:
    """As many as a chunk holds, one of them on pages that another writes in the same pass."""
    folder = model("tiny-qwen3")
    engine = make_engine(folder, **BFLOAT16, slots=6, ctx=512)
    passes = []
    honest = engine.round_queue.runner.write_prompt_parts
    runner = engine.round_queue.runner
    ends = lambda parts: [(part.begin, part.end) for part in parts]  # noqa: E731
    runner.write_prompt_parts = lambda parts: passes.append(ends(parts)) or honest(parts)  # type: ignore
    first = random_prompts(1, 70, 250, seed=1)[0]
    prompts = [
        first,
        (*first[:66], 9),
        *random_prompts(3, 30, 250, seed=2),
        random_prompts(1, 300, 250)[0],
    ]
    params = [SamplingParams(max_tokens=4, ignore_eos=True)] * 6
    together = run_all(engine, prompts, params)
    assert passes == [[(0, 69), (64, 66), (0, 29), (0, 29), (0, 29)], [(0, 256)], [(256, 299)]]
    assert [run.metrics.cached_tokens for run in together] == [0, 64, 0, 0, 0, 0]
    assert all(run.metrics.prompt_ms > 0 for run in together)
    alone = make_engine(folder, **BFLOAT16, slots=1, ctx=512, prefix_sharing=False)
    assert collect_outputs(run_all(alone, prompts, params)) == collect_outputs(together)


@needs_native
def test_the_target_alone_decides(model: Tiny) -> None:
    """A draft model that C kernels cannot run is run by torch's, and the text stays."""
    target = model("tiny-qwen3")
    draft = model("tiny-qwen3", head_dim=640, heads=1, kv_heads=1)
    prompts = random_prompts(2, 20, 250)
    params = [SamplingParams(max_tokens=8, ignore_eos=True)] * 2
    plain = make_engine(target, **BFLOAT16)
    speculated = make_engine(target, **BFLOAT16, spec="draft", draft_model=draft, draft_max=2)
    assert (speculated.plan.shape.kernels, speculated.plan.draft_kernels) == ("native", "torch")
    proposer = get_local_queue(speculated).proposer
    assert isinstance(proposer, DraftModelProposer)
    assert proposer.runners[0].kernels.name == "torch"
    outputs = collect_outputs(run_all(speculated, prompts, params))
    assert outputs == collect_outputs(run_all(plain, prompts, params))


def test_the_reason_against_c_kernels_is_reported(model: Tiny, monkeypatch: Patch) -> None:
    """Kernels that were asked for and cannot run are an error; else the plan says why not."""
    dense = model("tiny-qwen3")
    for folder, options, reason in (
        (dense, {"dtype": "float16"}, "they multiply bfloat16 and float32, not float16"),
        (
            model("tiny-qwen3", head_dim=640, heads=1, kv_heads=1),
            BFLOAT16,
            "heads of 640 are too large",
        ),
    ):
        assert reason in make_engine(folder, **options).plan.kernels_reason
        with pytest.raises(IncompatibleError, match="--kernels native") as refused:
            make_engine(folder, **options, kernels="native")
        assert reason in refused.value.reason[0]
    monkeypatch.setattr(build, "find_compiler", tuple)
    plan = make_engine(dense, **BFLOAT16).plan
    assert plan.shape.kernels == "torch" and plan.kernels_reason.startswith("not the C kernels: ")


def test_the_dtype_follows_the_kernels(monkeypatch: Patch) -> None:
    """`auto` is bfloat16 where C kernels run; else it is torch's choice, and the plan still says
    why."""
    of_torch = "bfloat16" if Machine("cpu", 0).has_fast_bfloat16 else "float32"

    def planned(**options: Any) -> tuple[str, str, str]:
        plan = make_plan(EngineConfig(model=demo_folder(), device="cpu", **options))
        return plan.shape.dtype, plan.shape.kernels, plan.kernels_reason

    if unavailable_reason() is None:
        reason = f"compiled for this processor's {instructions()}"
        assert planned() == planned(kernels="native") == ("bfloat16", "native", reason)
        reason = f"compiled for this processor's {instructions('float32')}"
        assert planned(dtype="float32") == ("float32", "native", reason)
    assert planned(kernels="torch") == (of_torch, "torch", "asked for")
    monkeypatch.setattr(build, "find_compiler", tuple)
    assert planned() == (of_torch, "torch", f"not the C kernels: {unavailable_reason()}")


@needs_native
@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("once"), KeyboardInterrupt(), RuntimeError("once")]
)
def test_a_pass_that_broke_off_leaves_no_pages_behind(model: Tiny, error: BaseException) -> None:
    """Later requests find no page that the broken pass was to write, and give the same text."""
    folder = model("tiny-qwen3")
    prompt = random_prompts(1, 200, 250, seed=3)[0]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = run_all(make_engine(folder, **BFLOAT16, ctx=320), [prompt], [params])[0].tokens
    engine = make_engine(folder, **BFLOAT16, ctx=320, slots=2)
    honest = engine.round_queue.runner._run_model
    runner = engine.round_queue.runner

    def failing(batch: ForwardBatch) -> ModelOutput:
        runner._run_model = honest  # type: ignore[method-assign]
        raise error

    runner._run_model = failing  # type: ignore[method-assign]
    engine.add(Request("first", prompt, params))
    with pytest.raises(BaseException):  # noqa: B017
        engine.step()
    engine.abort("first")
    engine.step()
    requests = [Request(name, prompt, params) for name in ("second", "third")]
    again = helpers.run_requests(engine, requests)
    assert [run.tokens for run in again] == [expected, expected]
    check_pages(engine.scheduler)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=needs_native)])
def test_a_pass_that_always_breaks_off_is_said_once(model: Tiny, dtype: str) -> None:
    """Requests end with an error; aborting them and closing does not raise it again."""
    engine = make_engine(model("tiny-qwen3"), dtype=dtype, slots=2)
    runner = engine.round_queue.runner
    runner.write_prompt_parts = Mock(side_effect=RuntimeError("always"))  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=4)
    for name, prompt in zip("ab", random_prompts(2, 30, 250), strict=True):
        engine.add(Request(name, prompt, params))
    with pytest.raises(RuntimeError, match="always"):
        engine.step()
    ended = {event.request_id: event for event in engine.step()}
    assert {event.finish_reason for event in ended.values()} == {"error"} and set(ended) == {
        "a",
        "b",
    }
    check_pages(engine.scheduler)
    engine.close()
