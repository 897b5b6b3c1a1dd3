"""Hybrids that cannot be run: one line names the file and the key or tensor, and the exit status is 4."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.recipes.mtp_folders import write_hollow
from tests.recipes.published_hybrids import Entry, Release, config_of, mtp_tensors, text_tensors

DENSE = Release(64, 96, 4, 2, 1, 32)
SPARSE = replace(DENSE, experts=(4, 2, 32))
COMMANDS = {
    "generate": ("generate", "-m", "?", "--prompt-ids", "1,2,3"),
    "inspect": ("inspect", "?"),
    "verify": ("verify", "-m", "?"),
}
ROPE = "rope_parameters"
Spoil = Callable[[list[Entry]], list[Entry]]


def write(folder: Path, row: Release, spoil: Spoil = list, **text: Any) -> Path:
    """A small one whose data is a hole; text: other values of its `text_config`."""
    config = config_of(row)
    config["text_config"] |= {"vocab_size": 512, "eos_token_id": 1, **text}
    entries = spoil([*text_tensors(row), *mtp_tensors(row)])
    tables = ("embed_tokens.weight", "lm_head.weight")
    entries = [(n, d, (512, *s[1:]) if n.endswith(tables) else s) for n, d, s in entries]
    write_hollow(folder / "model.safetensors", entries)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(*endings: str) -> Spoil:
    return lambda entries: [entry for entry in entries if not entry[0].endswith(endings)]


def shaped(ending: str, *shape: int) -> Spoil:
    return lambda entries: [(n, d, shape if n.endswith(ending) else s) for n, d, s in entries]


CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "a kind of layer": ({"layer_types": ["rwkv"] * 4}, "layer_types: 'rwkv' is not supported"),
    "too many layers": ({"layer_types": ["full_attention"] * 5}, "layer_types: is not a list of 4 names"),
    "only recurrent": ({"layer_types": ["linear_attention"] * 4}, "layer_types: no layer is full_attention"),
    "no interval": ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: 0 is not"),
    "key heads": ({"linear_num_key_heads": 12}, "linear_num_key_heads: 12 does not divide 32 heads"),
    "no value heads": ({"linear_num_value_heads": 0}, "linear_num_value_heads: 0 is not a whole number"),
    "a wide head": ({"linear_value_head_dim": 100_000}, "linear_value_head_dim: 100000 is not a whole"),
    "another gate": ({"output_gate_type": "sigmoid"}, "output_gate_type: 'sigmoid' is not supported"),
    "no gate": ({"attn_output_gate": False}, "attn_output_gate: false is not supported"),
    "nothing turns": ({ROPE: {"partial_rotary_factor": 0.0}}, "partial_rotary_factor: 0 of 256 is no even"),
    "more than all turns": ({ROPE: {"partial_rotary_factor": 1.5}}, "partial_rotary_factor: 1.5 is not"),
    "another rotation": ({ROPE: {"rope_type": "mrope"}}, "rope_type: 'mrope' is not supported"),
    "no base": ({ROPE: {"rope_theta": 0}}, "rope_theta: 0 is not"),
    "no rotation": ({ROPE: [0.25]}, "rope_parameters: "),
}
"""What of a configuration is wrong, and what is said of it."""


@pytest.mark.parametrize("fault", CONFIGS)
def test_a_wrong_key_is_named(fault: str, tmp_path: Path, spd_run: Callable) -> None:
    changed, words = CONFIGS[fault]
    folder = write(tmp_path, DENSE, **changed)
    for name, argv in COMMANDS.items():
        ran = spd_run(*(folder if word == "?" else word for word in argv))
        line = ran.err.partition("\n")[0]
        assert ran.code == 4 and line.startswith("error: ") and ran.out == b"", (name, ran)
        assert f"{folder / 'config.json'}: " in line and words in line, (name, line)


EXPERT, CONV = "layers.1.mlp.experts.", "linear_attn.conv1d.weight"
GATE_UP, DOWN = f"{EXPERT}gate_up_proj", f"{EXPERT}down_proj"
LACKS_GATE, IN_FILE = f"{EXPERT}0.gate_proj.weight: is missing", " in model.safetensors: "
TENSORS: dict[str, tuple[Release, Spoil, str]] = {
    "no decay": (
        DENSE, without("layers.0.linear_attn.A_log"), "model.layers.0.linear_attn.A_log: is missing",
    ),
    "no taps": (DENSE, without(f"layers.0.{CONV}"), f"{CONV}: is missing"),
    "fewer decays": (DENSE, shaped("A_log", 16), f"A_log{IN_FILE}shape is [16], expected [32]"),
    "projections of the other generation": (
        DENSE,
        lambda entries: [(n.replace("in_proj_qkv.", "in_proj_qkvz."), d, s) for n, d, s in entries],
        "linear_attn.in_proj_qkv.weight: is missing",
    ),
    "queries without gates": (
        DENSE, shaped("self_attn.q_proj.weight", 512, 64),
        f"self_attn.q_proj.weight{IN_FILE}shape is [512, 64], expected [1024, 64]",
    ),
    "half the experts": (SPARSE, without(DOWN), f"{EXPERT}0.down_proj.weight: is missing"),
    "experts that are one matrix": (SPARSE, shaped(GATE_UP, 256, 64), LACKS_GATE),
    "narrow experts": (
        SPARSE, shaped(GATE_UP, 4, 64, 32),
        f"{EXPERT}0.gate_proj.weight{IN_FILE}shape is [32, 32], expected [32, 64]",
    ),
    "an expert twice": (
        SPARSE,
        lambda entries: [*entries, (f"model.language_model.{EXPERT}2.up_proj.weight", "BF16", (32, 64))],
        f"{EXPERT}2.up_proj.weight: is in model.safetensors too",
    ),
    "no gate of the shared expert": (
        SPARSE, without("layers.1.mlp.shared_expert_gate.weight"),
        "layers.1.mlp.shared_expert_gate.weight: is missing",
    ),
}  # fmt: skip
"""What of the tensors is wrong, and what is said of it."""


@pytest.mark.parametrize("fault", TENSORS)
def test_a_wrong_tensor_is_named(fault: str, tmp_path: Path, spd_run: Callable) -> None:
    row, spoil, words = TENSORS[fault]
    folder = write(tmp_path, row, spoil)
    for name, argv in COMMANDS.items():
        if name == "verify":
            continue
        ran = spd_run(*(folder if word == "?" else word for word in argv))
        line = ran.err.partition("\n")[0]
        assert ran.code == 4 and line.startswith("error: ") and ran.out == b"", (name, ran)
        assert str(folder) in line and words in line.replace("'", ""), (name, line)


FC, EXPERTS = "mtp.fc.weight", "mtp.layers.0.mlp.experts."
HEADS: dict[str, tuple[Release, Spoil, str]] = {
    "another width": (DENSE, shaped(FC, 32, 64), f"{FC}{IN_FILE}shape is [32, 64]"),
    "no norm": (DENSE, without("mtp.norm.weight"), "mtp.norm.weight: is missing"),
    "a recurrent layer": (
        DENSE, lambda entries: [*entries, ("mtp.layers.0.linear_attn.A_log", "BF16", (32,))],
        "mtp.layers.0.linear_attn.A_log",
    ),
    "half its experts": (SPARSE, without(f"{EXPERTS}down_proj"), f"{EXPERTS}0.down_proj.weight: is missing"),
    "its own embedding": (
        DENSE, lambda entries: [*entries, ("mtp.embed_tokens.weight", "BF16", (512, 64))],
        "mtp.embed_tokens.weight",
    ),
}  # fmt: skip
"""What of the MTP layer is wrong, and what is said of it."""


@pytest.mark.parametrize("fault", HEADS)
def test_a_wrong_mtp_layer_is_refused_and_told(fault: str, tmp_path: Path, spd_run: Callable) -> None:
    row, spoil, words = HEADS[fault]
    folder = write(tmp_path, row, spoil)
    ran = spd_run("generate", "-m", folder, "--spec", "mtp", "--prompt-ids", "1,2,3")
    line = ran.err.partition("\n")[0]
    assert ran.code == 4 and line.startswith("error: ") and str(folder) in line, ran
    assert words in line.replace("'", ""), line
    told = spd_run("inspect", folder)
    assert told.code == 0 and words in " ".join(told.text.split()).replace("'", ""), told


def test_ranks_that_do_not_divide_the_heads(tmp_path: Path, spd_run: Callable) -> None:
    folder = write(tmp_path, replace(DENSE, value_heads=16, heads=6, inner=96, key_value_heads=3))
    ran = spd_run("generate", "-m", folder, "--tp", "3", "--prompt-ids", "1,2,3")
    assert ran.code == 4 and "--tp 3 does not divide the target" in ran.err
    assert "16 recurrent key heads" in ran.err
