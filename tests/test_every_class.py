"""The result for each causal and image-text class of `transformers`: opened, or refused with
reasons.

`python -m tests.test_every_class` writes the table that `docs/supported_models.py` links to.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spd.errors import SpdError
from spd.formats.folder import ModelFolder
from spd.formats.model_config import SUPPORTED_ARCHITECTURES
from tests.helpers import compute_logits, make_engine, random_prompts
from tests.recipes.tiny import write_tokenizer

TABLE = Path(__file__).parents[1] / "docs" / "every-class.md"
DRAFTERS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
NOT_IN_TRANSFORMERS = {"MiMoForCausalLM", "Step3p5ForCausalLM", "MuseGlimmerForCausalLM"}
"""Classes that only the code in published checkpoints defines."""
RELEASE_VALUES: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": [*["mamba"] * 31, "attention"]},
    "Lfm2ForCausalLM": {"layer_types": [*["conv"] * 31, "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": [*["conv"] * 31, "full_attention"]},
}
"""Values of every release of a class that are not its defaults."""
SMALL_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "vocab_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "moe_num_experts": 8,
    "moe_k": 2,
    "moe_topk": 2,
    "sliding_window": 24,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "n_groups": 4,
    "mamba_n_groups": 4,
    "mamba_d_state": 16,
    "ssm_state_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "global_head_dim": 16,
    "vocab_size_per_layer_input": 320,
    "hidden_size_per_layer_input": 8,
    "shared_intermediate_size": 48,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "time_step_min": 1e-9,
}
"""Small sizes; the library has a lower bound of Mamba-2's steps in prompts, and no other bound."""


def list_classes() -> list[str]:
    """Return the causal and image-text classes of `transformers`, and those that spd supports."""
    from transformers.models.auto import modeling_auto as auto

    maps = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return sorted(
        {*maps[0].values(), *maps[1].values(), *SUPPORTED_ARCHITECTURES} - NOT_IN_TRANSFORMERS
    )


def classify(name: str, folder: Path) -> tuple[str, str]:
    """Return the state of a class by its default configuration, and the reasons of a refusal."""
    import transformers

    model_class: Any = getattr(transformers, name)
    try:
        config = model_class.config_class(**RELEASE_VALUES.get(name, {}))
        config.architectures = [name]
        config.save_pretrained(folder)
    except Exception as error:  # whatever the library makes of its own defaults
        return "not built", f"the library has no configuration of its own ({type(error).__name__})"
    try:
        read = ModelFolder(folder).config
    except SpdError as error:
        reason = re.sub(r"^.*config\.json: ", "", error.message)
        reason = "" if reason.startswith("architectures: ") else reason
        return "refused", "; ".join(filter(None, (reason, *error.reason)))
    return ("drafts" if read.head_kind else "opens"), ""


def compare_logits(name: str, folder: Path) -> str:
    """Compare logits of a small model of a class with the library's; return the result in words.

    Empty where the class reads images, whose sizes differ.
    """
    import torch
    import transformers

    model_class: Any = getattr(transformers, name)
    try:
        default_config = model_class.config_class(**RELEASE_VALUES.get(name, {}))
        text = default_config.get_text_config()
        keys = {key for key in SMALL_SIZES if getattr(text, key, None) is not None}
        latent = "kv_lora_rank" in keys
        keys = (
            keys - {"head_dim"} if latent or not hasattr(text, "head_dim") else keys | {"head_dim"}
        )
        small = {key: SMALL_SIZES[key] for key in keys}
        kinds = {
            key: value[-4:] for key, value in RELEASE_VALUES.get(name, {}).items() if "layer" in key
        }
        if text is not default_config:
            return ""  # what sees images has sizes of its own besides
        if latent:
            small["num_key_value_heads"] = small["num_attention_heads"]
        torch.manual_seed(0)
        model = (
            model_class(
                model_class.config_class(**{**RELEASE_VALUES.get(name, {}), **small, **kinds})
            )
            .float()
            .eval()
        )
        prompt = random_prompts(1, 40, 300)[0]
        with torch.no_grad():
            for weight in model.parameters():
                std = 0.1 if weight.dim() < 2 else weight.shape[-1] ** -0.5
                weight.add_(torch.randn_like(weight) * std)
            expected = model(torch.tensor([prompt])).logits[0]
        model.save_pretrained(folder)
        write_tokenizer(folder, 320, 512)
    except (
        Exception
    ) as error:  # sizes that do not fit together, or whatever else the library refuses
        return f"not built small ({type(error).__name__})"
    try:
        distance = float((compute_logits(make_engine(folder), prompt) - expected).abs().max())
    except SpdError as error:  # such as a part of a head that is too small to turn
        return f"not opened small ({type(error).__name__})"
    return "logits equal" if distance < 1e-3 else f"logits differ by {distance:.2g}"


def iterate_rows() -> Iterator[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as parent:
        for name in list_classes():
            state, reason = classify(name, Path(parent, name))
            yield (
                name,
                state,
                compare_logits(name, Path(parent, f"{name}-small")) if state == "opens" else reason,
            )


def format_table(rows: list[tuple[str, str, str]]) -> str:
    """Return the rows as a Markdown table."""
    import transformers

    version = ".".join(transformers.__version__.split(".")[:2])
    lines = [
        f"Classes of Hugging Face transformers {version}, by their own default configurations.",
        "",
    ]
    lines += ["| class | spd | why |", "| --- | --- | --- |"]
    return (
        "\n".join([*lines, *(f"| `{name}` | {state} | {reason} |" for name, state, reason in rows)])
        + "\n"
    )


@pytest.mark.slow
def test_every_class_opens_or_is_refused_by_name(say: Any) -> None:
    pytest.importorskip("transformers")
    all_rows = list(iterate_rows())
    for row in all_rows:
        say("  ".join(row))
    by_state = defaultdict[str, dict[str, str]](dict)
    for name, state, reason in all_rows:
        by_state[state][name] = reason
    recognized = {*by_state["opens"], *by_state["drafts"], *by_state["not built"]}
    assert set(SUPPORTED_ARCHITECTURES) - NOT_IN_TRANSFORMERS <= recognized
    comparisons = [reason for reason in by_state["opens"].values() if reason]
    assert (
        not any("differ" in reason for reason in comparisons)
        and comparisons.count("logits equal") > 20
    ), comparisons
    assert by_state["drafts"] and by_state["drafts"].keys() <= set(DRAFTERS)
    refused = by_state["refused"].values()
    assert len(refused) > 100 and all(
        "nearest supported: " in reason and "missing: " in reason for reason in refused
    )
    assert TABLE.read_text(encoding="utf-8") == format_table(all_rows), (
        "python -m tests.test_every_class"
    )


if __name__ == "__main__":
    TABLE.write_text(format_table(list(iterate_rows())), encoding="utf-8")
