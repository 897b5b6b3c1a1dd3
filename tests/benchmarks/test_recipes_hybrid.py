"""The hybrid demo's recipe: transformers opens what it writes, its chunks and its MTP layer are the rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from spd.formats.demo import demo_folder
from tests.recipes import train_demo
from tests.recipes.demo_checkpoint import load_decoder, save_checkpoint
from tests.recipes.demo_corpus import Corpus
from tests.recipes.demo_hybrid import HybridDecoder, delta_rule
from tests.recipes.demo_model import HybridShape
from tests.recipes.demo_optimizers import FullMuon, make_optimizers

SMALL = HybridShape(
    hidden=32,
    intermediate=48,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    rope=8,
    key_heads=2,
    value_heads=4,
    key_dim=8,
    value_dim=12,
    max_positions=512,
    vocab=96,
)
MTP = {
    "mtp.fc.weight": (32, 64),
    "mtp.pre_fc_norm_embedding.weight": (32,),
    "mtp.pre_fc_norm_hidden.weight": (32,),
    "mtp.norm.weight": (32,),
    "mtp.layers.0.input_layernorm.weight": (32,),
    "mtp.layers.0.post_attention_layernorm.weight": (32,),
    "mtp.layers.0.self_attn.q_proj.weight": (128, 32),
    "mtp.layers.0.self_attn.k_proj.weight": (32, 32),
    "mtp.layers.0.self_attn.v_proj.weight": (32, 32),
    "mtp.layers.0.self_attn.o_proj.weight": (32, 64),
    "mtp.layers.0.self_attn.q_norm.weight": (16,),
    "mtp.layers.0.self_attn.k_norm.weight": (16,),
    "mtp.layers.0.mlp.gate_proj.weight": (48, 32),
    "mtp.layers.0.mlp.up_proj.weight": (48, 32),
    "mtp.layers.0.mlp.down_proj.weight": (32, 48),
}


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
    given = [
        torch.randn(2, 2, length, 8) * 8**-0.5,
        F.normalize(k, dim=-1),
        torch.randn(2, 4, length, 12),
        -(torch.rand(2, 4, length) ** 8) * 30,
        torch.rand(2, 4, length),
    ]
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


def test_the_mtp_block_has_the_published_names_and_computes_as_published(folder: Path) -> None:
    """Its layer is the target's attending layer, so that transformers' own is the reference for it."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

    tensors = load_file(folder / "model.safetensors")
    block = {name: tensor.float() for name, tensor in tensors.items() if name.startswith("mtp.")}
    assert {name: tuple(tensor.shape) for name, tensor in block.items()} == MTP
    config = transformers.AutoConfig.from_pretrained(folder)
    config._attn_implementation = "eager"
    layer, turns = Qwen3_5DecoderLayer(config, SMALL.interval - 1).eval(), Qwen3_5TextRotaryEmbedding(config)
    layer.load_state_dict(
        {name.removeprefix("mtp.layers.0."): x for name, x in block.items() if ".layers.0." in name}
    )

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (SMALL.hidden,), eps=1e-6) * (1 + block[f"mtp.{name}.weight"])

    ours = load_decoder(folder, SMALL).eval()
    ids = torch.randint(SMALL.vocab, (2, 41), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        hidden = ours(ids[:, :-1])
        embedded = ours.embed_tokens(ids[:, 1:])
        both = [norm(embedded, "pre_fc_norm_embedding"), norm(hidden, "pre_fc_norm_hidden")]
        x = torch.cat(both, dim=-1) @ block["mtp.fc.weight"].T
        causal = torch.full((40, 40), float("-inf")).triu(1)[None, None]
        wanted = norm(layer(x, turns(x, torch.arange(40)[None]), attention_mask=causal), "norm")
        (found,) = ours.mtp_hidden(hidden, ids[:, 1:], 1)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


def test_the_optimizer_takes_the_steps_of_torchs_own() -> None:
    torch.manual_seed(0)
    start, gradients = torch.randn(24, 40), torch.randn(3, 24, 40)
    ends = []
    for kind in (FullMuon, torch.optim.Muon):
        matrix = torch.nn.Parameter(start.clone())
        extra = {} if kind is FullMuon else {"adjust_lr_fn": "match_rms_adamw"}
        optimizer = kind([matrix], lr=0.01, weight_decay=0.05, **extra)
        for gradient in gradients:
            matrix.grad = gradient.clone()
            optimizer.step()
        ends.append(matrix.detach() - start)
    torch.testing.assert_close(ends[0], ends[1], rtol=0.05, atol=2e-4)


def test_matrices_and_the_rest_are_dealt_to_their_optimizers() -> None:
    model = HybridDecoder(SMALL)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    full, rest = (
        {names[id(p)] for group in optimizer.param_groups for p in group["params"]}
        for optimizer in make_optimizers(model, 1.0, model.mixed)
    )
    assert full | rest == set(names.values()) and not full & rest
    assert "layers.0.self_attn.in_proj_qkv.weight" in full and "mtp.eh_proj.weight" in full
    assert {"layers.0.self_attn.A_log", "layers.0.self_attn.in_proj_b.weight"} < rest
    assert {"embed_tokens.weight", "layers.0.self_attn.conv1d.weight"} < rest


class Stopped(Exception):
    """A stop in the middle of a stage."""


def test_a_stopped_stage_goes_on_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tuple(f"def f{i}(x):\n    return x + {i}\n" * 60 for i in range(8))
    corpus = Corpus(training=texts, held_out=texts[:1], answers=(("f", "Adds."), ("g", "Takes away.")))
    tokenizer = train_demo.train_tokenizer(corpus)
    shape = replace(SMALL, layers=2, interval=2, vocab=tokenizer.get_vocab_size())
    monkeypatch.setitem(train_demo.TARGETS, "hybrid", shape)
    monkeypatch.setattr(train_demo, "KEPT_SECONDS", 0.0)
    arguments = train_demo.parsed(["--model", "hybrid", "--steps", "2", "--mtp-steps", "2"])
    keep, stages = train_demo.Keeper.keep, (train_demo.train_target, train_demo.train_mtp)

    def stop(keeper: train_demo.Keeper, step: int) -> None:
        keep(keeper, step)
        if step == 0:
            raise Stopped

    ends = []
    for name, stops in (("whole", False), ("stopped", True)):
        torch.manual_seed(0)
        arguments.out = tmp_path / name
        for stage in stages:
            if stops:
                with monkeypatch.context() as patch, pytest.raises(Stopped):
                    patch.setattr(train_demo.Keeper, "keep", stop)
                    stage(arguments, corpus, tokenizer)
            assert stage(arguments, corpus, tokenizer)["tokens"] == 2 * 4096
        assert not list(arguments.out.glob("*state*"))
        ends.append(load_file(arguments.out / "model.safetensors"))
    assert all(torch.equal(tensor, ends[1][name]) for name, tensor in ends[0].items())
