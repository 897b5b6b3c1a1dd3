"""The recipes' checkpoints: as Hugging Face names them, the same every time, and worth decoding."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load_file

from tests.recipes.medium import DAMPING, write_medium, write_medium_draft
from tests.recipes.tiny import SPECIAL_TOKENS, VARIANTS, write_tiny

SMALL: dict[str, Any] = {
    "hidden": 64,
    "layers": 4,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "intermediate": 96,
    "vocab": 320,
}

DENSE = {
    name: shape
    for name, shape in VARIANTS.items()
    if shape["architecture"] in ("LlamaForCausalLM", "Qwen3ForCausalLM")
}
"""Of the others the golden tests see that transformers reads them."""


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for path in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first = digest(write_tiny(tmp_path / "a", shards=2))
    assert first == digest(write_tiny(tmp_path / "b", shards=2))
    assert first != digest(write_tiny(tmp_path / "c", shards=2, seed=1))


def test_every_id_is_a_token_and_every_text_comes_back(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, vocab=600)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 600
    assert all(tokenizer.id_to_token(index) is not None for index in range(600))
    every_byte = "".join(map(chr, range(0x500))) + "\ud7ff\uffff\U0010ffff"
    for text in (every_byte, "Hello, world", "wörld — 日本 🙂\n\t\x00", "<|im_end|> said <|im_start|>"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [256, 257, 258]
    assert len(tokenizer.encode("a test of it").ids) < len("a test of it")


def test_transformers_loads_every_variant_and_the_text_is_not_a_loop(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, shape in DENSE.items():
        folder = write_tiny(tmp_path / name, **shape)
        model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), (name, info)
        newer = write_tiny(tmp_path / f"{name}-newer", rope_style="parameters", **shape)
        rope = transformers.AutoConfig.from_pretrained(newer).rope_parameters
        assert rope == model.config.rope_parameters
        assert rope["rope_type"] == shape.get("rope", {}).get("rope_type", "default")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("Hello, wörld!", return_tensors="pt").input_ids
        with torch.inference_mode():
            out = model.generate(ids, max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0)
        text = out[0, ids.shape[1] :].tolist()
        fourgrams = [tuple(text[i : i + 4]) for i in range(len(text) - 3)]
        assert len(set(fourgrams)) >= 0.7 * len(fourgrams), name
        assert len(set(text)) >= 20, name
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_the_draft_is_the_targets_first_layers(tmp_path: Path) -> None:
    target = write_medium(tmp_path / "target", **SMALL)
    draft = write_medium_draft(tmp_path / "draft", target)
    whole, part = tensors_of(target), tensors_of(draft)
    layers = {int(name.split(".")[2]) for name in part if name.startswith("model.layers.")}
    assert layers == {0, 1}
    assert json.loads((draft / "config.json").read_text())["num_hidden_layers"] == 2
    assert all(torch.equal(tensor, whole[name]) for name, tensor in part.items())
    assert {"model.embed_tokens.weight", "model.norm.weight"} <= part.keys()
    assert (draft / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    for projection in ("self_attn.o_proj", "mlp.down_proj"):
        loud, soft = (whole[f"model.layers.{layer}.{projection}.weight"].float().std() for layer in (1, 2))
        assert soft / loud == pytest.approx(DAMPING, rel=0.1)
    assert whole["model.norm.weight"].dtype == torch.bfloat16
