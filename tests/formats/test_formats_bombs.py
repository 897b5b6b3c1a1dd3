"""Small files that would take much memory or time end at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spd.errors import CheckpointError
from spd.formats import checkpoint, json_file
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


BOMBS: dict[str, Callable[[Any], object]] = {
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
    "added tokens that grow": lambda c: (
        c["added_tokens"].append({**c["added_tokens"][0], "id": 999, "content": "a" * 20_000}),
        c.update(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "b" * 900}),
    ),
    "tokens around": lambda c: c.update(post_processor=around(100_000)),
    "a long word": lambda c: c["model"]["vocab"].update({"x" * 5_000_000: 1}),
    "a long pattern": lambda c: c.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "x" * 30_000}}),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_bombs_end_at_once(kind: str, tmp_path: Path) -> None:
    write_byte_level(tmp_path)
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    BOMBS[kind](content)
    write_json(tmp_path, "tokenizer.json", content)
    with refused(CheckpointError, "tokenizer.json", seconds=5):
        Tokenizer.open(tmp_path)


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
