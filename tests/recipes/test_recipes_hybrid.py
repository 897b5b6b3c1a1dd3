"""The hybrid demo's recipe: transformers opens what it writes, its chunks and its MTP layer are the rules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from spd.formats.demo import demo_folder
from tests.recipes.demo_checkpoint import load_decoder, save_checkpoint
from tests.recipes.demo_model import HybridDecoder, HybridShape, delta_rule

SMALL = HybridShape(
    **{"hidden": 32, "intermediate": 48, "layers": 4, "heads": 4, "kv_heads": 2, "head_dim": 16, "rope": 8},
    **{"key_heads": 2, "value_heads": 4, "key_dim": 8, "value_dim": 12, "max_positions": 512, "vocab": 96},
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A random model written by the recipe, every norm and decay off its starting value."""
    torch.manual_seed(0)
    model = HybridDecoder(SMALL)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(len(parameter)) * 0.3)
    save_checkpoint(model, tmp_path, Tokenizer.from_file(str(demo_folder() / "tokenizer.json")))
    return tmp_path


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule token by token, as `delta_rule` takes and gives it."""
    groups = v.shape[1] // k.shape[1]
    q, k = q.repeat_interleave(groups, 1), k.repeat_interleave(groups, 1)
    state, out = torch.zeros(*v.shape[:2], k.shape[-1], v.shape[-1]), []
    for t in range(v.shape[2]):
        state = state * g[:, :, t, None, None].exp()
        delta = (v[:, :, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, :, t])) * beta[:, :, t, None]
        state = state + k[:, :, t, :, None] * delta[:, :, None]
        out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
    return torch.stack(out, dim=2)


@pytest.mark.parametrize("length", [1, 63, 64, 200])
def test_chunks_are_the_recurrence_and_so_are_their_gradients(length: int) -> None:
    torch.manual_seed(length)
    # One key said again and again, and decays from none to a wall, are what chunks get wrong first.
    k = torch.randn(2, 2, length, 8)
    k[:, :, length // 3 : length // 2] = k[:, :, :1]
    given = [torch.randn(2, 2, length, 8) * 8**-0.5, F.normalize(k, dim=-1), torch.randn(2, 4, length, 12)]
    given += [-(torch.rand(2, 4, length) ** 8) * 30, torch.rand(2, 4, length)]
    results = []
    for rule in (recurrence, delta_rule):
        inputs = [x.clone().requires_grad_() for x in given]
        out = rule(*inputs)
        weight = torch.linspace(-1, 1, out.numel()).view_as(out)
        results.append([out, *torch.autograd.grad((out * weight).sum(), inputs)])
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_transformers_opens_it_and_computes_the_same(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, faults = transformers.Qwen3_5ForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not faults["missing_keys"] and not faults["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in faults["unexpected_keys"])
    ours = load_decoder(folder, SMALL).eval()
    ids = torch.randint(SMALL.vocab, (2, 150), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(ids)), model(ids).logits, rtol=0, atol=1e-4)
        # And where transformers decodes token by token.
        cache = transformers.DynamicCache(config=model.config)
        rows = [model(ids[:1, i : i + 1], past_key_values=cache).logits for i in range(20)]
        torch.testing.assert_close(ours.logits(ours(ids[:1, :20])), torch.cat(rows, 1), rtol=0, atol=1e-4)
