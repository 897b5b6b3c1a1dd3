"""Small files that would take much memory or time: each bound holds exactly, known bombs end at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError
from spd.formats import checkpoint, json_file
from spd.formats import tokenizer as tokenizer_file
from spd.formats.checkpoint import Checkpoint
from spd.formats.tokenizer import Tokenizer
from tests.formats.formats_helpers import refused, write_json, write_sharded
from tests.formats.formats_tokenizers import write_byte_level

GROWS = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
"""By two bytes for one, beside the one that may stay: three times."""


def around(count: int) -> dict[str, Any]:
    """A post-processor that puts `count` tokens before a text."""
    token = {"id": "s", "ids": [1] * count, "tokens": ["s"] * count}
    pieces = [{"SpecialToken": {"id": "s", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    return {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {"s": token}}


Change, Quantity = Callable[[Any], object], Callable[[Any], int]
BOUNDS: dict[str, tuple[str, Change, Quantity, str]] = {
    "decoder": (
        "MAX_GROWTH",
        lambda c: c.update(decoder={"type": "Sequence", "decoders": [GROWS] * 3}),
        lambda c: 27,
        "decoder: may make",
    ),
    "normalizer": ("MAX_GROWTH", lambda c: c.update(normalizer=GROWS), lambda c: 3, "normalizer: may make"),
    "vocabulary": (
        "MAX_CHARACTERS",
        lambda c: None,
        lambda c: sum(map(len, c["model"]["vocab"])),
        "vocab: has",
    ),
    "part": ("MAX_PART", lambda c: None, lambda c: len(json.dumps(c["pre_tokenizer"])), "pre_tokenizer: has"),
    "around": ("MAX_AROUND", lambda c: c.update(post_processor=around(7)), lambda c: 7, "adds 7 tokens"),
}


@pytest.mark.parametrize("kind", BOUNDS)
def test_a_tokenizers_bound_holds_exactly(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bound, change, quantity, words = BOUNDS[kind]
    write_byte_level(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    change(content)
    write_json(tmp_path, "tokenizer.json", content)
    monkeypatch.setattr(tokenizer_file, bound, quantity(content))
    Tokenizer.open(tmp_path)
    monkeypatch.setattr(tokenizer_file, bound, quantity(content) - 1)
    with refused(CheckpointError, "tokenizer.json", words):
        Tokenizer.open(tmp_path)


BOMBS: dict[str, Change] = {
    "a decoder that doubles": lambda c: c.update(decoder={"type": "Sequence", "decoders": [GROWS] * 40}),
    "a normalizer that doubles": lambda c: c.update(
        normalizer={"type": "Sequence", "normalizers": [GROWS] * 40}
    ),
    "a text put before": lambda c: c.update(normalizer={"type": "Prepend", "prepend": "a" * 15_000}),
    "groups that call groups": lambda c: c.update(
        pre_tokenizer={
            "type": "Split",
            "pattern": {"Regex": "(?<a>a)" + r"(?<b>\g<a>\g<a>)" * 8},
            "behavior": "Isolated",
            "invert": False,
        }
    ),
    "tokens around": lambda c: c.update(post_processor=around(100_000)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_end_at_once(kind: str, tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    BOMBS[kind](content)
    write_json(tmp_path, "tokenizer.json", content)
    with refused(CheckpointError, "tokenizer.json", seconds=5):
        Tokenizer.open(tmp_path)


def test_bounds_of_a_checkpoint_hold_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{i}.safetensors" for i in range(3)]
    write_sharded(tmp_path, {name: {f"tensor{i}": [2]} for i, name in enumerate(names)})
    index = tmp_path / "model.safetensors.index.json"
    header = int.from_bytes((tmp_path / names[0]).read_bytes()[:8], "little")
    for module, bound, value, words in (
        (checkpoint, "INDEX_LIMIT", index.stat().st_size, "index.json"),
        (checkpoint, "HEADER_LIMIT", header, "header too large"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, bound, value)
            Checkpoint.open(tmp_path).close()
            patch.setattr(module, bound, value - 1)
            with refused(CheckpointError, words):
                Checkpoint.open(tmp_path)


def test_links_to_one_header_end_at_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"{i}.safetensors" for i in range(50)]
    write_sharded(tmp_path, {name: {"same": [2]} for name in names})
    write_json(
        tmp_path, checkpoint.INDEX_NAME, {"weight_map": {f"tensor{i}": name for i, name in enumerate(names)}}
    )
    read, honest = [], checkpoint.read_shard_header
    monkeypatch.setattr(checkpoint, "read_shard_header", lambda path: read.append(path) or honest(path))
    with refused(CheckpointError, "tensor 'same': is in 0.safetensors too"):
        Checkpoint.open(tmp_path)
    assert len(read) == 2


def test_containers_bound_holds_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_file, "MAX_CONTAINERS", 3)
    assert json_file.parse_json('[{}, {"a": 1}]', "x") == [{}, {"a": 1}]
    with pytest.raises(CheckpointError, match="more than 3 lists and objects"):
        json_file.parse_json("[{}, {}, []]", "x")
