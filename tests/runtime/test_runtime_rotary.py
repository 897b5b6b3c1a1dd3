"""Rotation: heads that are reordered at load are rotated by the kernels as their definition has it."""

import pytest
import torch

from spd.formats.rope_config import RopeConfig, RotaryDims
from spd.kernels.attention.rotary_store import apply_rotary
from spd.runtime.layers.rotary import RotaryTable
from spd.runtime.models.builder import reorder_heads


def rotate_by_definition(x: torch.Tensor, position: int, dims: RotaryDims) -> torch.Tensor:
    """Return one head x [D] rotated by the definition, a pair at a time, in float64."""
    y = x.double().clone()
    half = dims.rotary_dim // 2
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if dims.interleaved else (i, i + half)
        angle = torch.tensor(position * 100.0 ** (-2 * i / dims.rotary_dim), dtype=torch.float64)
        a = x[first].double()
        b = x[second].double()
        y[first] = a * angle.cos() - b * angle.sin()
        y[second] = b * angle.cos() + a * angle.sin()
    return y


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("width", "rotated"), [(8, 8), (8, 4), (12, 6), (16, 4), (6, 2)])
def test_reordered_heads_rotate_as_defined(width: int, rotated: int, interleaved: bool) -> None:
    order = (dims := RotaryDims(width, rotated, interleaved)).order
    assert sorted(order or range(width)) == list(range(width))
    assert (order is None) == (width == rotated and not interleaved)
    table = RotaryTable(
        rope=RopeConfig("default", 100.0),
        dims=dims,
        max_positions=50,
        dtype=torch.float32,
        device="cpu",
    )
    heads = torch.randn(3, width, generator=torch.Generator().manual_seed(width))
    reordered = heads.flatten().clone()
    if order is not None:
        reorder_heads(reordered, order)
    for position in (0, 1, 49):
        rotated_heads = apply_rotary(
            reordered.view(3, width), table.cos[position], table.sin[position]
        )
        expected = torch.stack([rotate_by_definition(head, position, dims) for head in heads])
        expected = expected if order is None else expected[:, order]
        assert (rotated_heads.double() - expected).abs().max() < 1e-5


def test_a_scale_on_the_rotation_leaves_unrotated_elements_alone() -> None:
    """YaRN scales cos and sin; elements that are not rotated keep their size."""
    scaled = RopeConfig("yarn", 100.0, 4.0, 32, attention_factor=1.5)
    unrotated = [2, 3, 4, 5, 8, 9, 10, 11]
    table = RotaryTable(
        rope=scaled, dims=RotaryDims(12, 4), max_positions=5, dtype=torch.float32, device="cpu"
    )
    assert (table.cos[:, unrotated] == 1).all() and (table.sin[:, unrotated] == 0).all()
    assert (table.cos[0, [0, 1, 6, 7]] == 1.5).all()
