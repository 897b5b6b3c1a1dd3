"""The divergence that weights in few bits cause, at small scale."""

from __future__ import annotations

import pytest
import torch

from benchmarks import weight_quality
from spd.formats.demo import demo_folder


@pytest.mark.usefixtures("keep_threads")
@pytest.mark.slow
def test_fewer_bits_diverge_more_and_the_same_weights_do_not() -> None:
    folder = demo_folder()
    same, int8, int4 = weight_quality.measure(folder, [str(folder), "int8", "int4"], 128, 400)
    assert same["bits"] == 16.0 and same["divergence"] == same["likeliest_changed"] == 0
    assert 16.0 > int8["bits"] > int4["bits"] > 4.0
    assert 0 < int8["divergence"] < int4["divergence"] < 1
    assert {result["tokens"] for result in (same, int8, int4)} == {384}


def test_logits_are_those_of_a_prompt_in_one_piece() -> None:
    engine = weight_quality.open_engine(demo_folder(), 300)
    prompt = [*range(5, 300)]
    logits = torch.cat([*weight_quality.iterate_logits(engine, prompt)])
    assert logits.shape[0] == len(prompt) > weight_quality.ROWS
    first = torch.cat([*weight_quality.iterate_logits(engine, prompt[:40])])
    assert torch.equal(first, logits[:40])


def test_noise_stays_within_half_a_step_of_each_block() -> None:
    generator = torch.Generator().manual_seed(1)
    steps = torch.tensor([0.25, 2.0]).repeat_interleave(weight_quality.BLOCK)
    codes = torch.arange(2 * weight_quality.BLOCK) % 16 - 8
    values = (codes * steps).view(2, -1)
    noisy = weight_quality.add_noise(values, generator).float()
    distance = (noisy - values).abs() / steps.view(2, -1)
    assert distance.max() < 0.51 and distance.mean() > 0.2
    generator.manual_seed(1)
    assert torch.equal(noisy, weight_quality.add_noise(values, generator).float())
