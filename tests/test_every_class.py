"""What becomes of each causal and image-text class of `transformers`: opened, or refused with what it lacks.

By hand, to write the table that `docs/supported_models.py` links to: `python -m tests.test_every_class`.
A class is opened or refused by the configuration that it has where nothing is asked for, as the library saves
it; that opened ones speak as the library's do is shown by `tests/runtime/test_runtime_golden.py`,
`test_runtime_hybrid.py` and `test_runtime_wrappers.py`.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spd.errors import SpdError
from spd.formats.folder import ModelFolder
from spd.formats.model_config import SUPPORTED_ARCHITECTURES

TABLE = Path(__file__).parents[1] / "docs" / "every-class.md"
DRAFTERS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
ELSEWHERE = {"MiMoForCausalLM", "Step3p5ForCausalLM"}
"""What only code beside published checkpoints defines."""
SAID: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Glm4MoeForCausalLM": {"head_dim": 128},
    "GraniteMoeHybridForCausalLM": {"layer_types": [*["mamba"] * 31, "attention"]},
    "Lfm2ForCausalLM": {"layer_types": [*["conv"] * 31, "full_attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": [*["conv"] * 31, "full_attention"]},
}
"""What every release of a class says, and its defaults do not."""


def classes() -> list[str]:
    """Names of all classes that the library makes text with."""
    from transformers.models.auto import modeling_auto as auto

    maps = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    return sorted(
        {name for each in maps for name in each.values()} | set(SUPPORTED_ARCHITECTURES) - ELSEWHERE
    )


def verdict(name: str, folder: Path) -> tuple[str, str]:
    """Whether a class opens, and why not."""
    import transformers

    made: Any = getattr(transformers, name)
    try:
        config = made.config_class(**SAID.get(name, {}))
        config.architectures = [name]
        config.save_pretrained(folder)
    except Exception as error:  # whatever the library makes of its own defaults
        return "not built", f"the library has no configuration of its own ({type(error).__name__})"
    try:
        read = ModelFolder(folder).config
    except SpdError as error:
        why = re.sub(r"^.*config\.json: ", "", error.message)
        why = "" if why.startswith("architectures: ") else why
        return "refused", "; ".join(filter(None, (why, *error.reason)))
    return ("drafts" if read.head_kind else "opens"), ""


def rows() -> Iterator[tuple[str, str, str]]:
    with tempfile.TemporaryDirectory() as parent:
        for name in classes():
            yield name, *verdict(name, Path(parent, name))


def table() -> str:
    """The table, in Markdown."""
    import transformers

    version = ".".join(transformers.__version__.split(".")[:2])
    lines = [f"Classes of Hugging Face transformers {version}, by their own default configurations.", ""]
    lines += ["| class | spd | why |", "| --- | --- | --- |"]
    return "\n".join([*lines, *(f"| `{name}` | {state} | {why} |" for name, state, why in rows())]) + "\n"


@pytest.mark.slow
def test_every_class_opens_or_is_refused_by_name(say: Any) -> None:
    pytest.importorskip("transformers")
    found = list(rows())
    for row in found:
        say("  ".join(row))
    states = {name: state for name, state, _ in found}
    opened = {name for name, state in states.items() if state in ("opens", "drafts")}
    assert set(SUPPORTED_ARCHITECTURES) - ELSEWHERE <= opened | {
        name for name, state in states.items() if state == "not built"
    }
    drafters = {name for name, state in states.items() if state == "drafts"}
    assert drafters and drafters <= set(DRAFTERS)
    refused = [why for _, state, why in found if state == "refused"]
    assert len(refused) > 100 and all("nearest supported: " in why and "missing: " in why for why in refused)
    assert TABLE.read_text(encoding="utf-8") == table(), "python -m tests.test_every_class"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
