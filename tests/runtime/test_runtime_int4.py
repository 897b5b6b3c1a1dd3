"""`--quantize int4`: groups rounded at load, kept packed, and what that does to a model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from spd.errors import IncompatibleError
from spd.formats.demo import demo_folder
from spd.kernels.linear.few_bits import INT4_GROUP, int4_groups
from spd.runtime import SamplingParams
from spd.runtime.plan.memory import tensor_bytes
from tests.helpers import PROPOSERS, accepted, assert_same, make_engine, random_prompts, run_all
from tests.kernels.forms import needs_compiled
from tests.recipes.packed_twin import write_twins
from tests.runtime.demo_logits import demo_logits, relative_error

KERNELS = ["torch", pytest.param("native", marks=needs_compiled)]


def test_groups_err_less_than_the_largest_value_would_have_it() -> None:
    weight = torch.randn(70, 256, generator=torch.Generator().manual_seed(1))
    found = int4_groups(weight)
    assert found.scales.shape == (70, 256 // INT4_GROUP) and found.codes.shape == (70, 128)
    grouped = weight.view(70, -1, INT4_GROUP)
    step = grouped.abs().amax(-1, keepdim=True) / 7
    usual = ((grouped / step).round().clamp(-8, 7) * step - grouped).square().sum(-1)
    own = (found.plain(torch.float32) - weight).view(grouped.shape).square().sum(-1)
    assert (own <= usual * 1.02).all() and own.sum() < 0.9 * usual.sum()


def test_groups_do_not_depend_on_their_neighbours() -> None:
    weight = torch.randn(2, 33, 192, generator=torch.Generator().manual_seed(2)).bfloat16()
    weight[0, 3, :64] = 0
    whole = int4_groups(weight)
    for one, part in ((weight[1, 5:9, 64:128], (1, slice(5, 9))), (weight[0, 3:4, :128], (0, slice(3, 4)))):
        found = int4_groups(one)
        columns = slice(64, 128) if one.shape[0] == 4 else slice(0, 128)
        assert torch.equal(found.plain(torch.float32), whole.plain(torch.float32)[part][:, columns])


def test_a_value_that_is_not_finite_is_not_rounded_away() -> None:
    weight = torch.randn(3, 128, generator=torch.Generator().manual_seed(3))
    weight[0, 3], weight[1, 70], weight[2, 1] = float("nan"), float("inf"), float("-inf")
    found = int4_groups(weight).plain(torch.float32).view(3, 2, INT4_GROUP).isnan()
    assert found.all(-1).tolist() == found.any(-1).tolist() == [[True, False], [False, True], [True, False]]


@pytest.mark.parametrize(
    ("spec", "kernels"),
    [
        ("ngram", "torch"),
        *(pytest.param(spec, "native", marks=needs_compiled) for spec in ("ngram", "mtp", "draft")),
        *(pytest.param(spec, "torch", marks=pytest.mark.slow) for spec in ("mtp", "draft")),
    ],
)
def test_speculation_is_invisible(spec: str, kernels: str) -> None:
    """On the demo, whose drafts are accepted naturally."""
    demo = demo_folder()
    wishes = {"quantize": "int4", "kernels": kernels, "dtype": "bfloat16"}
    temperatures = (0.7,) if kernels == "torch" else (0.0, 0.7, 1.0)
    params = [SamplingParams(max_tokens=16, temperature=t, seed=5) for t in temperatures]
    work = [tuple(range(40 + i, 70 + i)) for i in range(len(params))], params
    plain = run_all(make_engine(demo, spec="off", **wishes), *work)
    more = dict(PROPOSERS[spec]) | ({"draft_model": demo} if spec == "draft" else {})
    runs = run_all(make_engine(demo, **wishes, **more), *work)
    assert_same(runs, plain)
    assert spec == "ngram" or accepted(runs) > 0


def test_bytes_and_logits_of_the_demo() -> None:
    demo = demo_folder()
    engine = make_engine(demo, quantize="int4", dtype="bfloat16")
    config, form = engine.plan.model.config, engine.plan.shape.form
    assert engine.plan.weights == "int4" and "a scale for 64 columns" in engine.plan.weights_reason
    assert tensor_bytes(config, "bfloat16", form) < tensor_bytes(config, "bfloat16")
    exact = demo_logits(demo)
    error = relative_error(demo_logits(demo, quantize="int4"), exact)
    assert 0.02 < error < 0.25


def test_weights_that_are_quantized_already(tiny: Callable[..., Path], tmp_path: Path) -> None:
    twin, _ = write_twins(tiny("qwen3", hidden=64, intermediate=128, dtype="bfloat16"), tmp_path, "gptq")
    with pytest.raises(IncompatibleError, match="--quantize int4, but the weights"):
        make_engine(twin, quantize="int4")


@pytest.mark.covers(1)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "biases"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_families(family: str, kernels: str, tiny: Callable[..., Path]) -> None:
    """Experts, latent attention, biases; a width that groups do not divide stays wide."""
    folder = tiny(family, dtype="bfloat16")
    wishes = {"quantize": "int4", "kernels": kernels, "dtype": "bfloat16"}
    work = random_prompts(2, 30, 256), [SamplingParams(max_tokens=24)] * 2
    plain = run_all(make_engine(folder, spec="off", **wishes), *work)
    assert_same(run_all(make_engine(folder, **wishes, **PROPOSERS["ngram"]), *work), plain)
