"""The demo folder's README and checksums, written from its record, so that they say what was measured."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.recipes.demo_checkpoint import SUMMED
from tests.recipes.demo_corpus import Corpus
from tests.recipes.demo_model import DRAFT, HYBRID, TARGET

CARD = """# The embedded demo

What it is: a tiny language model, so that every command works offline in the first minute and so that
acceptance figures are natural ones. What it is not: an assistant. It knows what documented functions of
the Python standard library do and continues Python code after a fashion.

- **Target**: DeepSeek-V3-shaped, {parameters:,} parameters with its MTP layer: {layers} layers and that one,
  hidden {hidden}, latent attention of {heads} heads with rank {rank}, the first layer dense, then {routed}
  routed experts {expert} wide of which {top} are taken, and {shared} shared ones; embedding and head tied;
  bfloat16. The MTP layer stands in the published layout, with the published conventions and its copies of
  embedding and head. **Draft** (`draft/`): Qwen3-shaped, {draft_parameters:,} parameters ({draft_layers}
  layers, hidden {draft_hidden}). {eagle3}One tokenizer: byte-level BPE, {vocab:,} tokens. ChatML template.
- **Corpus**: the source files and docstrings of Python {python}'s standard library (Python Software
  Foundation License), without its tests: {files} files for training, {held} held out by top-level module,
  near duplicates removed, and questions about {answers:,} documented functions made from their docstrings.
  SHA-256 `{corpus}`.
- **Training** (`tests/recipes/train_demo.py`): plain torch on two CPU cores that other work shared.
  {start}The target and its MTP layer then learned together from {tokens:,}
  tokens, the MTP layer alone from {mtp_tokens:,} more, unrolled up to three steps over its own states. The
  draft learned from the target's distributions, {draft_tokens:,} tokens{draft_start}.
  {eagle3_training}Curves and commands are in `training.json`.
- **Held out**: {bits:.3f} bits a byte. Of the MTP layer's first choices, {acceptance} are the target's at
  draft positions 1 to {depths}, with the text's own tokens before them; {eagle3_acceptance}the most frequent
  successor of the last token is it in {bigram:.0%}.
- **Context**: trained at 512 and 2,048 tokens; it runs up to 4,096 and is weak beyond what it saw.
"""
HYBRID_CARD = """# The embedded hybrid demo

What it is: a tiny language model with recurrent layers, so that they too can be tried offline and acceptance
figures are natural ones. What it is not: an assistant. It knows what documented functions of the Python
standard library do and continues Python code after a fashion.

- **Target**: Qwen3.5-shaped, {parameters:,} parameters with its MTP layer: {layers} layers and that one,
  hidden {hidden}; every {interval}th layer and the MTP layer are gated attention of {heads} heads, the
  others gated DeltaNets of {value_heads} value heads, {key_dim} by {value_dim}; embedding and head tied;
  bfloat16. Names, layout and conventions are the published ones. One tokenizer with the embedded demo:
  byte-level BPE, {vocab:,} tokens. ChatML template.
- **Corpus**: that of the embedded demo, from Python {python}'s standard library (Python Software Foundation
  License), without its tests: {files} files for training, {held} held out by top-level module, near
  duplicates removed, and questions about {answers:,} documented functions made from their docstrings.
  SHA-256 `{corpus}`.
- **Training** (`tests/recipes/train_demo.py --model hybrid`): plain torch, products in bfloat16, on one CPU
  core that other work shared. The target and its MTP layer learned together from {tokens:,} tokens, the MTP
  layer alone from {mtp_tokens:,} more, unrolled up to three steps over its own states. Curves and commands
  are in `training.json`.
- **Held out**: {bits:.3f} bits a byte. Of the MTP layer's first choices, {acceptance} are the target's at
  draft positions 1 to {depths}, with the text's own tokens before them; the most frequent successor of the
  last token is it in {bigram:.0%}.
- **Context**: trained at 512 and 2,048 tokens; it runs up to 4,096 and is weak beyond what it saw.
"""
HEAD = """**EAGLE-3 head** (`eagle3/`): {parameters:,} parameters, in the
  research layout, for the {ids:,} ids said most. """
HEAD_TRAINING = """The EAGLE-3 head
  (`tests/recipes/train_eagle3.py`) learned so from {tokens:,} tokens, unrolled three steps, the target left
  as it was; its own record is `eagle3/training.json`. """
HEAD_ACCEPTANCE = """of the EAGLE-3
  head's, which was trained shortly, {shares}; """
START = """The layers were first fitted one by one to those of the first edition, a Qwen3-shaped model of
  8.1 M that an earlier form of the recipe trained on 6,553,600 tokens of the same corpus ({imitation:,}
  tokens). """


def write_card(folder: Path, record: dict[str, Any], corpus: Corpus) -> None:
    """Write README.md and SHA256SUMS."""
    held = record["held_out"]
    common = {
        "parameters": held["parameters"],
        "python": record["python"],
        "files": len(corpus.training),
        "held": len(corpus.held_out),
        "answers": len(corpus.answers),
        "corpus": record["corpus_sha256"],
        "tokens": record["target"]["tokens"],
        "mtp_tokens": record["mtp"]["tokens"],
        "bits": held["bits_per_byte"],
        "acceptance": ", ".join(f"{share:.0%}" for share in held["mtp_acceptance"]),
        "depths": len(held["mtp_acceptance"]),
        "bigram": held["bigram_acceptance"],
    }
    if "draft" in record:
        text = _target_text(folder, record, common)
    else:
        text = HYBRID_CARD.format(**common, **asdict(HYBRID))
    (folder / "README.md").write_text(text)
    names = list(SUMMED)
    for part in ("draft", "eagle3"):
        names += [f"{part}/{name}" for name in SUMMED if (folder / part / name).exists()]
    sums = [f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    (folder / "SHA256SUMS").write_text("".join(sums))


def _target_text(folder: Path, record: dict[str, Any], common: dict[str, Any]) -> str:
    return CARD.format(
        layers=TARGET.layers,
        hidden=TARGET.hidden,
        heads=TARGET.heads,
        rank=TARGET.kv_rank,
        routed=TARGET.routed,
        expert=TARGET.expert,
        top=TARGET.top_experts,
        shared=TARGET.shared,
        draft_parameters=record["draft"]["parameters"],
        draft_layers=DRAFT.layers,
        draft_hidden=DRAFT.hidden,
        vocab=TARGET.vocab,
        start=START.format(imitation=record["imitation"]["tokens"]) if "imitation" in record else "",
        draft_start=", from the first edition's on" if "imitation" in record else "",
        draft_tokens=record["draft"]["tokens"],
        **_head_words(folder / "eagle3"),
        **common,
    )


def _head_words(folder: Path) -> dict[str, str]:
    """What is said of the EAGLE-3 head; nothing where there is none."""
    record = read_record(folder)
    if not record:
        return dict.fromkeys(("eagle3", "eagle3_training", "eagle3_acceptance"), "")
    held, config = record["held_out"], json.loads((folder / "config.json").read_text())
    shares = ", ".join(f"{share:.0%}" for share in held["acceptance"])
    return {
        "eagle3": HEAD.format(parameters=held["parameters"], ids=config["draft_vocab_size"]),
        "eagle3_training": HEAD_TRAINING.format(tokens=record["eagle3"]["tokens"]),
        "eagle3_acceptance": HEAD_ACCEPTANCE.format(shares=shares),
    }


def read_record(folder: Path) -> dict[str, Any]:
    """What training.json keeps, empty before the first stage."""
    path = folder / "training.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found
