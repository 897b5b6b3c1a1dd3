"""Golden: every shape variant against `transformers` in float32, logits and whole generations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.formats.checkpoint import Checkpoint
from spd.formats.model_config import SUPPORTED_ARCHITECTURES
from spd.runtime import SamplingParams
from spd.runtime.round.rows import SlotView
from tests.helpers import make_engine, random_prompts, read_model_config, run_all
from tests.recipes.tiny import LLAMA, VARIANTS
from tests.recipes.tiny_dense import FAMILIES, write_dense
from tests.runtime.test_runtime_wrappers import WRAPPED

transformers = pytest.importorskip("transformers")


def greedy(reference: Any, prompt: tuple[int, ...], count: int) -> list[int]:
    """What `generate` appends; the mask is given, or it would be guessed from padding ids."""
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    whole = reference.generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = whole[0, len(prompt) :].tolist()
    return tokens


def as_known(folder: Path, elsewhere: Path) -> Path:
    """A copy under the architecture whose layers MiMo's are; `transformers` does not know MiMo itself."""
    shutil.copytree(folder, elsewhere / "known")
    path = elsewhere / "known" / "config.json"
    names = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **names}))
    return path.parent


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_logits_and_greedy_text_equal_transformers(
    tiny: Callable[..., Path], tmp_path: Path, variant: str
) -> None:
    folder = tiny(variant)
    known = as_known(folder, tmp_path) if variant == "mimo" else folder
    reference = transformers.AutoModelForCausalLM.from_pretrained(known, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    engine = make_engine(folder)
    vocab = engine.usable_vocab
    prompt = random_prompts(1, 90, 256, seed=len(variant))[0]

    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
        runner = engine._device.runner
        view = SlotView(len(prompt), list(range(2, 10)))
        table = runner.page_row(view.pages, 8)[None]
        ids = torch.tensor([prompt])
        found = []
        for start, stop in ((0, 64), (64, 80), (80, 90)):  # one chunk of prefill, then tiles
            made = runner.forward_prompt(ids, start, stop, table, view.pages, chunked=stop - start == 64)
            found.append(runner.logits(made.hidden)[0])
    assert (torch.cat(found) - expected).abs().max() < 1e-4

    with torch.inference_mode():
        wanted = greedy(reference, prompt, 64)
    assert max(wanted) < vocab
    run = run_all(engine, [prompt], [SamplingParams(max_tokens=64)])[0]
    assert run.tokens == wanted
    assert run.text == tokenizer.decode(wanted, skip_special_tokens=True)
    assert run.finish_reason == ("stop" if wanted[-1] in engine.eos_ids else "length")


@pytest.mark.parametrize("variant", sorted({*VARIANTS, *FAMILIES} - {"mimo"}))
def test_what_transformers_saves_is_read(tiny: Callable[..., Path], tmp_path: Path, variant: str) -> None:
    """Every class in the installed version's own spelling: the same model, tensor by tensor."""
    folder = tiny(variant) if variant in VARIANTS else write_dense(tmp_path / "published", variant)
    saved = tmp_path / "saved"
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder)
    reference.save_pretrained(saved, max_shard_size="100KB")
    assert read_model_config(saved) == read_model_config(folder)
    with Checkpoint.open(saved) as found, Checkpoint.open(folder) as wanted:
        assert found.tensors.keys() == wanted.tensors.keys()
        assert all(torch.equal(found.read(name), wanted.read(name)) for name in wanted.tensors)
    facts = json.loads((saved / "config.json").read_text())
    key = next(name for name in EPSILONS if name in facts)
    facts.pop(key)
    (saved / "config.json").write_text(json.dumps(facts))
    assert read_model_config(saved).rms_norm_eps == getattr(type(reference.config)(), key)


EPSILONS = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
"""What configurations call the same number."""
HYBRIDS = {
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
}
"""Compared in `test_runtime_hybrid`."""


def test_every_class_is_among_them() -> None:
    """`transformers` does not know MiMo."""
    saved = {options.get("architecture", LLAMA) for options in VARIANTS.values()}
    saved |= {name for _, config, _ in FAMILIES.values() for name in config["architectures"]} | HYBRIDS
    saved |= set(WRAPPED)
    assert saved == set(SUPPORTED_ARCHITECTURES)
    assert not hasattr(transformers, "MiMoForCausalLM")


def test_an_end_token_ends_both(tiny: Callable[..., Path]) -> None:
    """The same model with its own fifth greedy token declared as the end: both stop there, end included."""
    folder = tiny("qwen3")
    prompt = random_prompts(1, 20, 256)[0]
    free = run_all(make_engine(folder), [prompt], [SamplingParams(max_tokens=24)])[0]
    end = next(t for t in free.tokens[4:] if free.tokens.index(t) >= 4)
    stopping = tiny("qwen3", eos=(end,))
    reference = transformers.AutoModelForCausalLM.from_pretrained(stopping, dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = greedy(reference, prompt, 24)
    for wishes in (
        {},
        {"spec": "ngram", "draft_max": 4},
        {"spec": "draft", "draft_model": stopping, "draft_max": 4},
    ):
        run = run_all(make_engine(stopping, **wishes), [prompt], [SamplingParams(max_tokens=24)])[0]
        assert run.tokens == wanted
        assert run.finish_reason == "stop" and run.tokens[-1] == end
