"""Model folders that try to hang, fill a disk, take other files along, or fail half in silence."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.formats.test_formats_pattern import HOSTILE
from tests.recipes.packed_twin import LAYOUTS, write_twins
from tests.test_hostile import Bench, Case, bench, put

pytestmark = pytest.mark.slow
__all__ = ["bench"]  # a fixture
Spoil = Callable[[Path], Any]
SECRET = "a key of the user's, which must not be copied"
READ = ("inspect model", "generate -m model -n 2 --no-server hi", "quantize model out/q --dry-run")
TOLD = ("generate -m model -n 2 --no-server hi",)
PATTERNS = (
    *HOSTILE,
    "(" * 5000,
    "[" * 5000,
    ".*" * 2000 + "q",
    "(?:.*|.*)*" * 50 + "q",
    "(a)\\1" * 50,
    "(?P<a>.)(?P=a)",
    "(?i).*",
    "\\",
    "a{1000000000}",
    "(?:.{1,9}){1,9999}q",
    "x" * 300_000,
    "(?<=.*)a",
    "(?=(?=(?=.*).*).*)q",
)


@dataclass(frozen=True)
class Folder:
    """A hostile folder. silent: True where exit code 0 without a message is right."""

    kind: str
    spoil: Spoil
    base: str = "tiny"
    lines: tuple[str, ...] = READ
    silent: bool = True


def weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Spoil:
    """Return a change of a folder's tensors."""

    def spoil(place: Path) -> None:
        path = place / "model" / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})

    return spoil


def patterns() -> Iterator[Folder]:
    """Yield folders with patterns in quantised configurations and in tokenizers."""
    for pattern in PATTERNS:
        place = "quantization_config config_groups group_0 targets"
        yield Folder("targets", put("config.json", place, [f"re:{pattern}"]), "packed")
        number_patterns = [f"re:{pattern[:40]}{number}" for number in range(300)]
        yield Folder("many targets", put("config.json", place, number_patterns), "packed", READ[:1])
        dynamic = {f"+:{pattern}": {"bits": 8}}
        yield Folder("dynamic", put("config.json", "quantization_config dynamic", dynamic), "gptq")
        split = {
            "type": "Split",
            "pattern": {"Regex": pattern[:20_000]},
            "behavior": "Isolated",
            "invert": False,
        }
        text = "letters" * 300
        lines = (f"generate -m model -n 2 --no-server {text}", "inspect model")
        yield Folder("pre_tokenizer", put("tokenizer.json", "pre_tokenizer", split), lines=lines)
    groups = {str(number): {"weights": {}, "targets": ["x"]} for number in range(20_000)}
    place = "quantization_config config_groups"
    yield Folder("20,000 groups", put("config.json", place, groups), "packed", READ[:1])


def links() -> Iterator[Folder]:
    """Yield folders with links beside the weights."""
    targets = ("secret", "/dev/zero", "/etc/hostname", "/proc/self/environ", "..", "nothing", "/")
    for target in targets:
        for name in ("extra.json", "readme.txt", "spiece.model", "other.jinja", "LICENSE.txt"):

            def spoil(place: Path, target: str = target, name: str = name) -> None:
                (place / "secret").write_text(SECRET)
                goal = place / "secret" if target == "secret" else target
                (place / "model" / name).symlink_to(goal)

            yield Folder(f"link {name} to {target}", spoil, lines=("quantize model out/q",))


def numbers() -> Iterator[Folder]:
    """Yield folders whose weights are not finite, in every form that they are stored in."""
    names = ("mlp.down_proj", "self_attn.v_proj", "mlp.gate_proj", "self_attn.q_proj")
    for name in names:
        for value in (math.nan, math.inf, -math.inf):
            for form in ("none", "int8", "int4"):
                fill = weights(
                    lambda t, n=name, v=value: t[f"model.layers.0.{n}.weight"].fill_(v)  # type: ignore[misc]
                )
                line = f"generate -m model -n 2 --no-server --quantize {form} hi"
                yield Folder(f"{value} {name} {form}", fill, lines=(line,), silent=False)
    for way in LAYOUTS:
        for name in names[:2]:
            yield Folder(f"nan scales {way}", weights(_spoil_scales(name)), way, TOLD, silent=False)
        if "fp8" in way:
            codes = lambda t: t["model.layers.0.mlp.down_proj.weight"].view(torch.uint8).fill_(127)  # noqa: E731
            yield Folder(f"nan codes {way}", weights(codes), way, TOLD, silent=False)


def _spoil_scales(name: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if not key.startswith(f"model.layers.0.{name}.") or "scale" not in key:
                continue
            if tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
                tensor.view(torch.uint8).fill_(255)
            else:
                tensor.fill_(math.nan)

    return spoil


def indices() -> Iterator[Folder]:
    """Yield folders whose index and shards contradict each other, and heads beside a tie flag."""
    first_shard = "model-00001-of-00002.safetensors"
    two = "model-00002-of-00002.safetensors"

    def shards(change: Callable[[dict[str, str], dict[str, torch.Tensor]], object]) -> Spoil:
        def spoil(place: Path) -> None:
            tensors = load_file(place / "model" / "model.safetensors")
            (place / "model" / "model.safetensors").unlink()
            places = {name: (first_shard, two)[i % 2] for i, name in enumerate(sorted(tensors))}
            extra: dict[str, torch.Tensor] = {}
            weight_map = dict(places)
            change(weight_map, extra)
            for shard in (first_shard, two):
                shard_tensors = {name: t for name, t in tensors.items() if places[name] == shard}
                save_file(
                    {**(extra if shard == first_shard else {}), **shard_tensors},
                    place / "model" / shard,
                )
            text = json.dumps({"metadata": {}, "weight_map": weight_map})
            (place / "model" / "model.safetensors.index.json").write_text(text)

        return spoil

    stale = torch.zeros(2)
    changes: dict[str, Callable[[dict[str, str], dict[str, torch.Tensor]], object]] = {
        "a stale copy": lambda m, e: e.update({next(n for n in m if m[n] == two): stale}),
        "a name of no shard": lambda m, e: m.update({"lm_head.weight": "gone.safetensors"}),
        "a path": lambda m, e: m.update({"lm_head.weight": "../../x.safetensors"}),
        "a foreign tensor": lambda m, e: e.update({"foreign.weight": stale}),
    }
    for name, change in changes.items():
        yield Folder(f"index: {name}", shards(change), lines=TOLD, silent=False)
    swap = shards(
        lambda m, e: m.update({n: first_shard if s == two else two for n, s in m.items()})
    )
    yield Folder("index: all swapped", swap)
    digits = "9" * 5000
    for tensor in (f"model.layers.{digits}.x", f"mtp.layers.{digits}.x", "model." * 50_000 + "x"):
        add = weights(lambda t, n=tensor: t.update({n: torch.zeros(2)}))  # type: ignore[misc]
        yield Folder(f"tensor {tensor[:20]}", add)
    tied = put("config.json", "tie_word_embeddings", True)
    yield Folder("a head beside a tie flag", tied, lines=TOLD, silent=False)


def tokens() -> Iterator[Folder]:
    """Yield folders with tokens declared outside of tokenizer.json."""
    token = {"content": "<|x|>", "special": True}
    decoders: list[Any] = [
        {"259": token},
        {"9999999": token},
        {"99999999999999": token},
        {"-1": token},
        {"5": token},
        {"1": {"content": "x" * 5_000_000}},
        {str(n): {"content": f"<{n}>", "special": True} for n in range(300, 100_300)},
        {"259": {"content": ""}},
        {"259": "x"},
        {"259": {**token, "lstrip": 3}},
        [],
        "x",
    ]
    name = "tokenizer_config.json"
    for decoder in decoders:
        yield Folder("added_tokens_decoder", put(name, "added_tokens_decoder", decoder))
    for added_tokens in ({"<x>": 259}, {"<x>": -1}, {"<x>": 1 << 40}, {"": 3}, {"x" * 10**6: 300}):
        for text, number in added_tokens.items():
            yield Folder("added_tokens.json", put("added_tokens.json", text, number))
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        for value in (
            {"messages": "<|im_end|>"},
            {"a b": "x"},
            {"x": 3},
            {"x": ""},
            [3],
            {"": "x"},
        ):
            yield Folder(key, put(name, key, value))

    def templates(place: Path) -> None:
        folder = place / "model" / "additional_chat_templates"
        folder.mkdir()
        (folder / "tool_use.jinja").symlink_to("/dev/zero")
        (folder / "default.jinja").write_text("{% for i in range(10**12) %}x{% endfor %}")

    yield Folder("additional_chat_templates", templates)


KINDS: dict[str, Callable[[], Iterator[Folder]]] = {
    "patterns": patterns,
    "links": links,
    "numbers": numbers,
    "indices": indices,
    "tokens": tokens,
}


@pytest.fixture(scope="module")
def folders(bench: Bench) -> Bench:
    """Return the server with a folder for each form of storage."""
    for way in LAYOUTS:
        twin, plain = write_twins(bench.folder / "tiny", bench.folder, way)
        shutil.rmtree(plain)
        twin.rename(bench.folder / way)
    for name, way in (("packed", "w4-32"), ("gptq", "gptq")):
        if name != way:
            shutil.copytree(bench.folder / way, bench.folder / name)
    return bench


def names_beside(folder: Path) -> set[str]:
    """Return the names beside the folder of a case."""
    return {path.name for path in folder.iterdir()} - {"in", "out", "err", "case"}


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_folders_neither_hang_nor_stay_silent(kind: str, folders: Bench) -> None:
    folders.faults = []
    count = 0
    before = names_beside(folders.folder)
    rng = random.Random(kind)
    cases = [
        (folder, line)
        for folder in KINDS[kind]()
        for line in rng.sample(folder.lines, min(2, len(folder.lines)))
    ]
    for folder, line in cases:
        folders.run(Case(folder.kind, line, folder.spoil, folder.base))
        count += 1
        error_text = (folders.folder / "err").read_text(errors="replace").strip()
        if not folder.silent and not error_text:
            folders.faults.append(f"{folder.kind}: spd {line}: nothing was said")
        written = folders.folder / "case" / "out"
        for path in written.rglob("*"):
            if path.suffix == ".safetensors" or not path.is_file():
                continue
            if path.is_symlink() or SECRET.encode() in path.read_bytes():
                folders.faults.append(f"{folder.kind}: {path} was copied")
        if new_names := names_beside(folders.folder) - before:
            folders.faults.append(f"{folder.kind}: wrote {new_names}")
    print(f"{count} folders of {kind}")
    assert not folders.faults, "\n".join(folders.faults)
