"""The argument list before the parser sees it: foreign flags, and shared flags before the command.

Owns what other tools call our options. A word that is another option's value is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from spd.cli.batch_options import parse_think
from spd.errors import IncompatibleError, UsageError

FOREIGN_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--model-path": "--model",
        "--system-prompt": "--system",
        "-sys": "--system",
        "-sysf": "--system-file",
        "--n-predict": "--max-tokens",
        "--predict": "--max-tokens",
        "--max-new-tokens": "--max-tokens",
        "--ctx-size": "--ctx",
        "--max-model-len": "--ctx",
        "--context-length": "--ctx",
        "--temp": "--temperature",
        "--repeat-penalty": "--repetition-penalty",
        "--reverse-prompt": "--stop",
        "-md": "--draft-model",
        "--model-draft": "--draft-model",
        "--spec-draft-model": "--draft-model",
        "--speculative-draft-model": "--draft-model",
        "--speculative-draft-model-path": "--draft-model",
        "-ndt": "--draft-max",
        "--spec-draft-n-max": "--draft-max",
        "--num-draft-tokens": "--draft-max",
        "--num-speculative-tokens": "--draft-max",
        "--speculative-num-draft-tokens": "--draft-max",
        "--draft-num-predict": "--draft-max",
        "--json-schema": "--schema",
        "-j": "--schema",
        "--json-schema-file": "--schema",
        "-jf": "--schema",
        "--spec-type": "--spec",
        "--prompt-lookup-min": "--ngram-min",
        "--prompt-lookup-max": "--ngram-max",
        "--reasoning": "--think",
        "--reasoning-budget": "--think",
    }
)

FOREIGN_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "--spec": {
            "none": "off",
            "draft-mtp": "mtp",
            "draft-simple": "draft",
            "draft-eagle3": "eagle3",
            "EAGLE3": "eagle3",
            "NEXTN": "mtp",
            "NGRAM": "ngram",
            "STANDALONE": "draft",
            "ngram-simple": "ngram",
        },
        "--dtype": {
            "bf16": "bfloat16",
            "fp16": "float16",
            "half": "float16",
            "fp32": "float32",
            "float": "float32",
        },
    }
)

CUT_FLAGS: Mapping[str, str] = MappingProxyType(
    {"--no-think": "--think off", "--hide-thinking": "--think hide", "--think-budget": "--think N"}
)
"""Our own options of earlier versions, and what says the same now."""

GONE_FLAGS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "--repeat": ("spd uses the last module again by itself", "leave it out"),
        "--layout": ("SGLang makes its one-layer model itself", "scripts/export_deepseek_nextn.py of SGLang"),
    }
)
"""Our own options that were dropped: why they are not needed, and what to do."""

BEAM_FLAGS = frozenset({"--num-beams", "--beam", "--beams", "--beam-size", "--beam-width", "--beam-search"})

SHARED_FLAGS = frozenset({"--json", "-q", "--quiet", "-v", "--verbose", "--no-color", "--debug"})
SHARED_FLAGS |= {"--offline", "--no-input"}
SHARED_VALUES = ("--color", "--config")
"""Options that may also stand before the command, the latter with a value."""

FLAGS = SHARED_FLAGS | {
    "-h",
    "--help",
    "-V",
    "--version",
    "--adaptive",
    "--no-adaptive",
    "--raw",
    "--parse-special",
}
FLAGS |= {"-c", "--continue", "--no-save", "--no-history"}
FLAGS |= {"-y", "--yes", "--pull"}
FLAGS |= {"--show-drafts", "--no-stats", "--vi"}
FLAGS |= {"--stats", "--stream", "--no-stream", "--dry-run", "--ignore-eos", "--quick"}
FLAGS |= {"--force", "--jsonl", "--resume", "--csv", "--markdown", "--explain"}
"""Options that take no value."""

VALUE_SHORTS = frozenset("mpfnsorw")


@dataclass(frozen=True)
class Invocation:
    """The argument list for the parser, what was translated, and what the error boundary must know."""

    args: tuple[str, ...]
    notes: tuple[str, ...]
    json: bool
    debug: bool
    quiet: bool
    color: str | None
    offline: bool = False
    no_input: bool = False
    config: str | None = None


def prepare(argv: Sequence[str]) -> Invocation:
    """Translate an argument list. Raises IncompatibleError and UsageError for what is refused by name."""
    words = _shared_after_command(list(argv))
    args: list[str] = []
    notes: dict[str, None] = {}
    seen: dict[str, str] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word == "--":
            args += words[position - 1 :]
            break
        if not word.startswith("-") or word == "-":
            args.append(word)
            continue
        name, equals, value = word.partition("=")
        refuse_by_name(name)
        canonical = FOREIGN_FLAGS.get(name, name)
        if canonical != name:
            notes[f"{name} is {canonical} here"] = None
        if words[position - 1 :] == ["--think"]:
            parse_think("")
        follows = not equals and _takes_value(canonical) and position < len(words)
        if follows:
            value = words[position]
            position += 1
        known = FOREIGN_VALUES.get(canonical, {}).get(value, value)
        if known != value:
            notes[f"{canonical} {value} is {canonical} {known} here"] = None
        args += [canonical, known] if follows else [canonical + equals + known]
        seen |= dict.fromkeys(_letters(canonical), known)
    return Invocation(
        args=tuple(args),
        notes=tuple(notes),
        json="--json" in seen,
        debug="--debug" in seen,
        quiet="-q" in seen or "--quiet" in seen,
        color="never" if "--no-color" in seen else seen.get("--color"),
        offline="--offline" in seen,
        no_input="--no-input" in seen,
        config=seen.get("--config"),
    )


def refuse_by_name(name: str) -> None:
    """Say why an option that people look for does not exist. Raises IncompatibleError and UsageError."""
    if name in CUT_FLAGS:
        raise UsageError(f"{name} is now {CUT_FLAGS[name]}", fix=[CUT_FLAGS[name]], code="cut_option")
    if name in GONE_FLAGS:
        why, instead = GONE_FLAGS[name]
        raise UsageError(f"{name} is no longer an option: {why}", fix=[instead], code="cut_option")
    if name in BEAM_FLAGS:
        raise IncompatibleError(
            f"{name}: spd has no beam search",
            reason=["Speculation keeps the model's own sampling law; a beam search follows another one."],
            fix=["leave it out; for the likeliest continuation token by token: --temperature 0"],
            code="beam_search",
        )
    if name == "--trust-remote-code":
        raise IncompatibleError(
            f"{name}: spd never runs code from a model folder",
            fix=["leave it out; `spd inspect MODEL` says whether the architecture is built in"],
            code="remote_code",
        )


def _shared_after_command(words: list[str]) -> list[str]:
    """Move flags such as --json or --color WHEN from before the command to just after it, if there is one."""
    end = 0
    while end < len(words):
        if words[end] in SHARED_VALUES:
            end += 2
        elif words[end] in SHARED_FLAGS or words[end].partition("=")[0] in SHARED_VALUES:
            end += 1
        else:
            break
    if words and end >= len(words):
        raise UsageError(f"there is no command behind {words[0]}", fix=["spd --help lists them"])
    if not end or words[end].startswith("-"):
        return words
    return [words[end], *words[:end], *words[end + 1 :]]


def _letters(name: str) -> list[str]:
    """A cluster of short flags such as -qv as its members; any other option as itself."""
    if name.startswith("--"):
        return [name]
    return [f"-{letter}" for letter in name[1:]] if _is_cluster(name) else [name]


def _is_cluster(name: str) -> bool:
    return all(f"-{letter}" in FLAGS for letter in name[1:])


def _takes_value(name: str) -> bool:
    """Whether the parser will read the next word as this option's value."""
    if name.startswith("--"):
        return name not in FLAGS
    rest = name[1:]
    while rest and f"-{rest[0]}" in FLAGS:
        rest = rest[1:]
    return len(rest) == 1 and rest in VALUE_SHORTS
