"""Golden: every variant and family against `transformers` in float32, logits and whole generations."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from spd.formats.checkpoint import Checkpoint
from spd.formats.model_config import SUPPORTED_ARCHITECTURES, WRAPPERS
from spd.runtime import SamplingParams
from tests.helpers import edit_weights, make_engine, random_prompts, read_model_config, run_one, speaks_as
from tests.recipes.tiny import LLAMA, VARIANTS, write_json
from tests.recipes.tiny_dense import FAMILIES, LONG_ORIGINAL, write_dense
from tests.runtime.test_runtime_wrappers import WRAPPED

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("untried")


def as_known(folder: Path, elsewhere: Path) -> Path:
    """A copy that `transformers` knows: MiMo as Qwen2, Step-3.5 and Muse-Glimmer in what sees images."""
    known = shutil.copytree(folder, elsewhere / "known")
    config = json.loads((known / "config.json").read_text())
    wrapper = SEEING.get(config["model_type"], "Qwen2ForCausalLM")
    if wrapper in WRAPPED:
        vision = WRAPPED[wrapper][0]["vision_config"]
        config = {"text_config": config, "vision_config": vision, "tie_word_embeddings": False}
    if wrapper.startswith("Muse"):
        config |= {"out_hidden_size": 64, "projector_hidden_size": 16}
        edit_weights(known, within)
    names = {"architectures": [wrapper], "model_type": WRAPPERS.get(wrapper, ["qwen2"])[0]}
    write_json(known / "config.json", {**config, **names})
    return known


def within(tensors: dict[str, torch.Tensor]) -> None:
    """Names of a text model's tensors become those inside of what sees images too."""
    for name in [name for name in tensors if name.startswith("model.")]:
        tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)


SEEING = {
    "step3p5": "Step3p7ForConditionalGeneration",
    "muse_glimmer_text": "MuseGlimmerForConditionalGeneration",
}
SEEN = ("step3", "muse_glimmer")
ALONE = ("mimo", *SEEN)
"""Families of which the library has no class of text alone; SEEN are parts of classes that read images."""
FEW = (
    *("llama2", "llama3", "biases", "yarn", "tied", "qwen3", "gqa8", "deepseek_v2", "deepseek_v3"),
    *("glm4_moe", "glm4_moe_lite", "qwen3_moe", "mimo", "ernie4_5", "ernie4_5_moe"),
)
"""Variants of the default lane: the others are of the same classes, with other numbers."""


def every(*without: str) -> list[Any]:
    """Variants and families, the one or other variant slow."""
    names = sorted({*VARIANTS, *FAMILIES} - {*without})
    slow = VARIANTS.keys() - {*FEW}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


@pytest.mark.parametrize("name", every())
def test_logits_and_text_equal_transformers(tiny: Callable[..., Path], tmp_path: Path, name: str) -> None:
    """A prompt several windows long, and for one family so long that whole blocks are left behind."""
    own = name in VARIANTS
    folder = tiny(name) if own else write_dense(tmp_path / "model", name, max_positions=2048)
    known = as_known(folder, tmp_path) if name in ALONE else folder
    kind = transformers.AutoModelForImageTextToText if name in SEEN else transformers.AutoModelForCausalLM
    reference = kind.from_pretrained(known, dtype=torch.float32).eval()
    engine = make_engine(folder, ctx=LONG_ORIGINAL if name == "phi3_long" else 256 if own else 1024)
    prompt = random_prompts(1, 700 if name == "mistral" else 90, 256, seed=len(name))[0]
    run = speaks_as(reference, engine, prompt)
    assert max(run.tokens) < engine.usable_vocab
    if own:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert run.text == tokenizer.decode(run.tokens, skip_special_tokens=True)


@pytest.mark.parametrize("variant", every(*ALONE))
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
    free = run_one(folder, prompt, SamplingParams(max_tokens=24))
    end = next(t for t in free.tokens[4:] if free.tokens.index(t) >= 4)
    stopping = tiny("qwen3", eos=(end,))
    reference = transformers.AutoModelForCausalLM.from_pretrained(stopping, dtype=torch.float32).eval()
    wanted = speaks_as(reference, make_engine(stopping), prompt, 24, ends=True).tokens
    for wishes in ({"spec": "ngram"}, {"spec": "draft", "draft_model": stopping}):
        run = run_one(stopping, prompt, SamplingParams(max_tokens=24), draft_max=4, **wishes)
        assert run.tokens == wanted and run.finish_reason == "stop" and run.tokens[-1] == end
