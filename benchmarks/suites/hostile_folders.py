"""Hostile model folders: patterns that backtrack, links out of the folder, weights that are no
numbers."""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

SECRET = "a text of the user that no folder may take with it"


class Command(NamedTuple):
    """A run of the command line, and the outcome that is a fault."""

    name: str
    arguments: list[str]
    must_fail: bool = False
    """True if exit status 0 would hide the fault."""


# -- patterns ----------------------------------------------------------------------------------------

REPEATED = (
    "(a+)+$",
    "(a|a)*$",
    "(a|aa)+$",
    "(.*)*x",
    "(.+)+x",
    "([a-z.]+)*x",
    "(([a-z])+.)+[A-Z]",
    "(?:.?){40}",
    "(?:.?){400}x",
    "(?:.|.)*x",
    "(?:\\w|.)+x",
    "(?:.*,){20}x",
    "(.*)\\1x",
    "(?P<a>.*)(?P=a)(?P=a)x",
    "(?=(.*))\\1x",
    "(?=.*x)(?=.*y)(?=.*z).*",
    "(?<=a)(.*)*x",
    "(?!.*x).*.*.*.*y",
    "(?i:(k|K|\\u212a)+)x",
    "(x?){64}(x){64}",
    "((((((.*)*)*)*)*)*)*x",
    ".{0,1000}.{0,1000}.{0,1000}x",
    "(.{1,9}){1,9}{1,9}x",
    "(.{0,99}){0,99}x",
    "[\\s\\S]*[\\s\\S]*[\\s\\S]*[\\s\\S]*x",
    "(\\w*\\.)*\\w*\\.x",
    "(?>a*)*b",
    "(a*)*+b",
)
BROKEN = ("(", "[", "*", "(?P<a", "\\", "a{2,1}", "(?z)", "(?<=a*)b", "x{99999999999}", "\ud800")


def patterns() -> Iterator[str]:
    """Yield patterns that are slow by backtracking, large, or no patterns."""
    yield from REPEATED
    yield from BROKEN
    for size in (2, 5, 9, 15, 25, 60):
        yield ".*" * size + "x"
        yield ".*" * size
        yield "[a-z]*" * size + "[0-9]"
        yield ".+?" * size + "x"
        yield "(?:.*)" * size + "x"
        yield "\\S*" * size + "\\s"
        yield "(?=.*" * size + "x" + ")" * size
    for size in (10, 1000, 20_000):
        yield "|".join(f"a{number}" for number in range(size))
        yield "(" * size + ")" * size
        yield "a?" * size + "a" * size
    yield "." * 100_000


PLACES = ("targets", "ignore", "dynamic", "dynamic minus")


def with_pattern(config: Mapping[str, Any], place: str, pattern: str) -> dict[str, Any]:
    """Return a model's configuration with a pattern in its quantization."""
    if place.startswith("dynamic"):
        sign = "-:" if "minus" in place else "+:"
        how = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
        return {**config, "quantization_config": {**how, "dynamic": {sign + pattern: {"bits": 8}}}}
    weights = {"num_bits": 4, "group_size": 32, "strategy": "group", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    if place == "targets":
        group["targets"] = [f"re:{pattern}"]
    else:
        how["ignore"] = [f"re:{pattern}"]
    how["config_groups"] = {"group_0": group}
    return {**config, "quantization_config": how}


def pattern_commands(model: Path, place: Path) -> Iterator[Command]:
    """Yield an `inspect` for each pattern in each place that takes one."""
    config = json.loads((model / "config.json").read_text())
    for number, pattern in enumerate(patterns()):
        for where in PLACES:
            folder = place / f"pattern-{number}-{where.replace(' ', '-')}"
            shutil.copytree(model, folder)
            text = json.dumps(with_pattern(config, where, pattern))
            (folder / "config.json").write_text(text, encoding="utf-8")
            yield Command(f"{where} {pattern[:60]!r}", ["inspect", str(folder)])


# -- side files --------------------------------------------------------------------------------------

SIDE_FILES = ("extra.json", "README.md", "readme.txt", "merges.txt", "LICENSE", "special.model")
LINKS = ("device", "random", "secret", "folder", "pipe", "socket", "loop", "broken", "huge")


def put_link(path: Path, kind: str, secret: Path) -> None:
    """Put something at `path` that is no plain file of the folder."""
    targets = {"device": "/dev/zero", "random": "/dev/urandom", "secret": str(secret)}
    targets |= {"folder": str(secret.parent), "loop": path.name, "broken": "/nowhere/at/all"}
    if kind in targets:
        path.symlink_to(targets[kind])
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            here = os.getcwd()
            os.chdir(path.parent)
            try:
                listener.bind(path.name)
            finally:
                os.chdir(here)
    else:
        with path.open("wb") as file:
            file.truncate(20 << 30)


def link_commands(model: Path, place: Path) -> Iterator[Command]:
    """Yield a `quantize` for each kind of link and each name of a side file."""
    secret = place / "home" / "secret.txt"
    secret.parent.mkdir()
    secret.write_text(SECRET)
    for kind in LINKS:
        for name in SIDE_FILES:
            folder = place / f"link-{kind}-{name}"
            shutil.copytree(model, folder)
            put_link(folder / name, kind, secret)
            yield Command(
                f"{kind} as {name}", ["quantize", str(folder), str(place / f"out-{kind}-{name}")]
            )


def taken_outside(out: Path) -> str:
    """Return what a written folder holds that is not the model's, or nothing."""
    for path in out.rglob("*") if out.is_dir() else ():
        if path.is_symlink():
            return f"{path.name} is a link to {os.readlink(path)}"
        if path.is_file() and path.stat().st_size > 64 << 20:
            return f"{path.name} has {path.stat().st_size:,} bytes"
        if path.is_file() and SECRET.encode() in path.read_bytes():
            return f"{path.name} is the user's own file"
    return ""


# -- weights -----------------------------------------------------------------------------------------

VALUES = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
WEIGHTS = (
    "model.embed_tokens.weight",
    "model.norm.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.v_proj.weight",
)


def weight_commands(model: Path, place: Path) -> Iterator[Command]:
    """Yield a `generate` for each weight that is no number, as it is stored and quantized."""
    from safetensors.torch import load_file, save_file

    for name in WEIGHTS:
        for value_name, value in VALUES.items():
            folder = place / f"weight-{name}-{value_name}"
            shutil.copytree(model, folder)
            tensors = load_file(folder / "model.safetensors")
            tensors[name].view(-1)[:] = value
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            for how in ([], ["--quantize", "int8"], ["--quantize", "int4"]):
                command = ["generate", "-m", str(folder), "--raw", "Hi", "-n", "4", "--no-server"]
                label = f"{value_name} in {name} {' '.join(how)}"
                yield Command(label, [*command, "--temperature", "0", *how], must_fail=True)
