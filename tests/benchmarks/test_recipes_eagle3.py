"""The EAGLE-3 head's recipe: its folder as such heads are published, its training as a drafter runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.recipes.demo_model import Decoder, DeepseekShape, angles
from tests.recipes.eagle3_model import (
    HEAD,
    Eagle3Head,
    Eagle3Shape,
    read_target,
    save_head,
    soft_losses,
)
from tests.recipes.train_eagle3 import losses_of, make_optimizers

SMALL_TARGET = DeepseekShape(
    hidden=32, kv_rank=16, nope=8, rope=8, value=8, dense=48, expert=8, max_positions=64, vocab=96
)
SMALL = Eagle3Shape(hidden=32, intermediate=24, heads=4, kv_heads=2, head_dim=8, draft_vocab=48, vocab=96)
LARGEST_FILE = 2_000_000


@pytest.fixture
def target() -> Decoder:
    torch.manual_seed(0)
    return Decoder(SMALL_TARGET).eval().requires_grad_(False)


@pytest.fixture
def head(target: Decoder) -> Eagle3Head:
    kept = torch.randperm(SMALL.vocab)[: SMALL.draft_vocab].sort().values
    head = Eagle3Head(SMALL, kept)
    head.start_from(target)
    return head


def one_after_another(head: Eagle3Head, streams: Tensor, embedded: Tensor, depth: int) -> Tensor:
    """The states after `depth` drafts from the last row on, computed row by row with a cache [depth, H].

    streams [T, 3 * hidden]; embedded [T + depth - 1, hidden], embeddings of the tokens at positions 1 on.
    """
    attention, layer, cache, drafted = head.midlayer.self_attn, head.midlayer, [], []
    truth = head.fc(streams)
    for row in range(len(streams) + depth - 1):
        state = truth[row] if row < len(truth) else drafted[-1]
        wide = torch.cat([layer.input_layernorm(embedded[row]), layer.hidden_norm(state)])
        turns = angles(1, head.shape.head_dim, head.shape.rope_theta, row)
        q, k, v = (part[0, :, 0] for part in attention.project(wide[None, None], *turns))
        cache.append((k, v))
        keys, values = (torch.stack(parts, dim=1) for parts in zip(*cache, strict=True))
        weights = (torch.einsum("hd,htd->ht", q, keys) * head.shape.head_dim**-0.5).softmax(-1)
        x = state + attention.o_proj(torch.einsum("ht,htd->hd", weights, values).flatten())
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        if row >= len(truth) - 1:
            drafted.append(x)
    return torch.stack(drafted)


def test_the_folder_has_the_published_names_and_shapes(tmp_path: Path) -> None:
    kept = torch.arange(0, HEAD.vocab)[-HEAD.draft_vocab :]
    save_head(Eagle3Head(HEAD, kept), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_size <= LARGEST_FILE
    tensors, hidden = load_file(tmp_path / "model.safetensors"), HEAD.hidden
    wide, narrow = HEAD.heads * HEAD.head_dim, HEAD.kv_heads * HEAD.head_dim
    shapes = {
        "fc.weight": (hidden, 3 * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (wide, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (narrow, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (narrow, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, wide),
        "midlayer.mlp.gate_proj.weight": (HEAD.intermediate, hidden),
        "midlayer.mlp.up_proj.weight": (HEAD.intermediate, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, HEAD.intermediate),
        "norm.weight": (hidden,),
        "lm_head.weight": (HEAD.draft_vocab, hidden),
    }
    maps = {"d2t": tensors.pop("d2t"), "t2d": tensors.pop("t2d")}
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert torch.equal(torch.arange(HEAD.draft_vocab) + maps["d2t"], kept)
    assert maps["t2d"].dtype == torch.bool and torch.equal(maps["t2d"].nonzero()[:, 0], kept)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["vocab_size"], config["draft_vocab_size"]) == (HEAD.vocab, HEAD.draft_vocab)
    outputs = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    assert outputs == [index - 1 for index in HEAD.read]


def test_unrolled_rows_are_a_drafters_with_a_cache(target: Decoder, head: Eagle3Head) -> None:
    ids, depth = torch.randint(0, SMALL.vocab, (1, 16)), 3
    streams, _ = read_target(target, ids[:, :12], SMALL.read)
    embedded = target.embed(ids[:, 1:])
    steps = head.states(streams, embedded[:, : 12 + depth - 1], depth)
    for row in (0, 5, 11):
        alone = one_after_another(head, streams[0, : row + 1], embedded[0, : row + depth], depth)
        together = torch.stack([state[0, row] for state in steps])
        torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_the_loss_leaves_out_positions_whose_choice_is_not_kept(head: Eagle3Head) -> None:
    left_out = next(index for index in range(SMALL.vocab) if index not in head.kept)
    logits, states = torch.zeros(1, 4, SMALL.vocab), [torch.randn(1, 4, SMALL.hidden)]
    logits[0, 1:3, head.kept[7]] = 30.0
    logits[0, 3, left_out] = 30.0
    losses, _ = soft_losses(head, states, logits)
    chances = head.logits(states[0][0, :2]).log_softmax(-1)
    torch.testing.assert_close(losses[0], -chances[:, 7].mean())


def test_agreement_counts_every_position_and_target_ids(head: Eagle3Head) -> None:
    states = [torch.randn(1, 4, SMALL.hidden)]
    guess = head.kept[head.logits(states[0])[0].argmax(-1)]
    left_out = next(index for index in range(SMALL.vocab) if index not in head.kept)
    logits = torch.zeros(1, 4, SMALL.vocab)
    for position, choice in ((1, guess[0]), (2, guess[1]), (3, left_out)):
        logits[0, position, choice] = 30.0
    assert soft_losses(head, states, logits)[1].item() == pytest.approx(2 / 3)


def test_a_few_steps_lower_the_loss_at_every_depth(target: Decoder, head: Eagle3Head) -> None:
    ids = torch.randint(0, SMALL.vocab, (2, 27))
    optimizers = make_optimizers(head, 1.0)
    frozen = {name: value.clone() for name, value in target.state_dict().items()}
    curve = []
    for _ in range(4):
        missed, _ = losses_of(head, target, ids, 3)
        curve.append(missed.detach())
        missed.sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert bool((curve[-1] < curve[0]).all()), curve
    assert all(torch.equal(value, frozen[name]) for name, value in target.state_dict().items())
