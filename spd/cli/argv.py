"""The argument list before the parser sees it: foreign flags, and shared flags before the command.

Owns what other tools call our options. A word that is another option's value is never touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from spd.cli.options import parse_think
from spd.errors import IncompatibleError, UsageError

FOREIGN_FLAGS: Mapping[str, str] = MappingProxyType(
    {
        "--system-prompt": "--system",
        "--n-predict": "--max-tokens",
        "--max-new-tokens": "--max-tokens",
        "--ctx-size": "--ctx",
        "--max-model-len": "--ctx",
        "--temp": "--temperature",
        "-md": "--draft-model",
        "--num-speculative-tokens": "--draft-max",
        "--json-schema": "--schema",
    }
)

FOREIGN_VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {"--dtype": {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}}
)

_ENGINE = {
    "--revision": "spd pull NAME --revision REV prints a folder for -m",
    "--ngram-min": "--spec ngram finds the longest match by itself",
    "--ngram-max": "--spec ngram finds the longest match by itself",
    "--load": "spd bench --load dummy",
    "--synthetic-acceptance": "spd bench --synthetic-acceptance LENGTH",
    "--rendezvous": "torchrun says where ranks meet",
    "--profile": "--trace FILE, then spd explain FILE",
    "--explain": "spd generate --trace FILE …, then spd explain FILE",
}
_REPLY = {
    "--system-file": "-s @FILE",
    "--top-k": "--set top_k=K",
    "--min-p": "--set min_p=P",
    "--repetition-penalty": "--set repetition_penalty=X",
    "--presence-penalty": "--set presence_penalty=X",
    "--frequency-penalty": "--set frequency_penalty=X",
    "--logit-bias": "--set logit_bias=ID=VALUE",
    "--min-tokens": "--set min_tokens=N",
    "--stop-token-id": "--set stop_token_id=ID",
    "--no-think": "--think off",
    "--hide-thinking": "--think hide",
    "--think-budget": "--think N",
}
CUT_FLAGS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "": {
            "--no-color": "--color never",
            "--debug": "-vv",
            "--config": "SPD_CONFIG=FILE spd …",
            "--offline": "HF_HUB_OFFLINE=1 spd …",
            "--no-input": "spd … < /dev/null",
        },
        "generate": {
            **_ENGINE,
            **_REPLY,
            "-p": 'spd generate "your prompt"',
            "--prompt": 'spd generate "your prompt"',
            "--parse-special": "--prompt-ids 1,2,3",
            "--overflow": "a shorter prompt, or a larger --ctx",
            "--stream": "leave it out: text comes as it is made",
            "--no-stream": "--json | jq -r .text",
            "--regex": "--grammar /REGEX/",
        },
        "chat": {
            **_ENGINE,
            **_REPLY,
            "--session": "-c NAME",
            "--no-history": "XDG_STATE_HOME=FOLDER spd chat keeps its files elsewhere",
            "--vi": "Ctrl-G opens $EDITOR",
        },
        "bench": {
            **{name: _ENGINE[name] for name in ("--revision", "--rendezvous")},
            "--ctx": "leave it out: the context is what the prompts need",
            "--each": "--prompts FILE",
            "--time": "-r N",
            "--warmup": "leave it out: one reply is not measured",
            "--seed": "leave it out: seeds are the same in every run",
            "--goodput": "jq .samples of --json, which hold every time",
            "--jsonl": "--json | jq -c '.rows[]'",
            "--csv": "--json | jq -r '.rows[] | [.method, .tokens_per_second.median] | @csv'",
            "--markdown": "--json | jq -r '.rows[] | \"| \\(.method) | \\(.tokens_per_second.median) |\"'",
            "--plot": "-o FILE, and any plotting tool",
            "--profile": "--trace FILE of spd generate, then spd explain FILE",
            "--baseline": "-o NEW.json, then spd compare OLD.json NEW.json",
        },
        "verify": {
            **_ENGINE,
            "--each": "--prompts FILE",
            "--category": "--prompts FILE",
            "--draws": "leave it out: 300 where a rule's law is tested",
            "--redraft": "leave it out: 64 rounds are drafted again",
            "--seed": "leave it out: --tokens N asks with new seeds",
            "--ctx": "leave it out: the context is what the prompts need",
            "--draft-ctx": "leave it out: the context is what the prompts need",
            "--ignore-eos": "--tokens N",
            "--memory-fraction": "leave it out: 0.9 of the memory",
            "-o": "--json > FILE",
            "--output": "--json > FILE",
        },
        "convert-mtp": {
            "--verify": "spd bench -m TARGET --spec mtp --mtp HEAD tells what it gains",
            "--dtype": "leave it out: tensors are written as they are stored, and cast when they are loaded",
            "--repeat": "leave it out: spd uses the last module again by itself",
            "--layout": "scripts/export_deepseek_nextn.py of SGLang, for its one-layer model",
        },
    }
)
"""Options of earlier versions, by the command that had them ("": all), and what to type now."""

BEAM_FLAGS = frozenset({"--num-beams", "--beam", "--beams", "--beam-size", "--beam-width", "--beam-search"})

SHARED_FLAGS = frozenset({"--json", "-q", "--quiet", "-v", "-vv", "--verbose"})
SHARED_VALUES = ("--color",)
"""Options that may also stand before the command, the latter with a value."""

FLAGS = (SHARED_FLAGS - {"-vv"}) | {"-h", "--help", "-V", "--version", "--adaptive", "--no-adaptive", "--raw"}
FLAGS |= {"--no-save", "-y", "--yes", "--pull", "--show-drafts", "--stats", "--no-stats", "--dry-run"}
FLAGS |= {"--ignore-eos", "--quick", "--force", "--jsonl", "--resume", "--detach", "--status", "--no-server"}
"""Options that take no value."""

VALUE_SHORTS = frozenset("mfnsorc")


@dataclass(frozen=True)
class Invocation:
    """The argument list for the parser, what was translated, and what the error boundary must know."""

    args: tuple[str, ...]
    notes: tuple[str, ...]
    json: bool
    debug: bool
    quiet: bool
    color: str | None


def prepare(argv: Sequence[str]) -> Invocation:
    """Translate an argument list. Raises IncompatibleError and UsageError for what is refused by name."""
    words = _shared_after_command(list(argv))
    args: list[str] = []
    notes: dict[str, None] = {}
    seen: dict[str, str] = {}
    command, verbosity, position = words[0] if words else "", 0, 0
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
        refuse_by_name(command, name)
        canonical = FOREIGN_FLAGS.get(name, name)
        if canonical != name:
            notes[f"{name} is {canonical} here"] = None
        if words[position - 1 :] == ["--think"]:
            parse_think("")
        if command == "chat" and word in ("-c", "--continue"):
            named = words[position : position + 1]
            if not named or named[0].startswith("-") or "/" in named[0]:  # a model, never a chat's name
                args.append("--continue=")  # the latest
                continue
        alone = equals or (command, canonical) == ("serve", "--stop")  # which takes a text elsewhere
        follows = not alone and _takes_value(canonical) and position < len(words)
        if follows:
            value = words[position]
            position += 1
        known = FOREIGN_VALUES.get(canonical, {}).get(value, value)
        if known != value:
            notes[f"{canonical} {value} is {canonical} {known} here"] = None
        args += [canonical, known] if follows else [canonical + equals + known]
        letters = _letters(canonical)
        seen |= dict.fromkeys(letters, known)
        verbosity += letters.count("-v") + letters.count("--verbose")
    return Invocation(
        args=tuple(args),
        notes=tuple(notes),
        json="--json" in seen,
        debug=verbosity > 1,
        quiet="-q" in seen or "--quiet" in seen,
        color=seen.get("--color"),
    )


def cut_words(command: str, name: str) -> str | None:
    """What to type in the place of an option that an earlier version of a command had."""
    return CUT_FLAGS.get(command, {}).get(name) or CUT_FLAGS[""].get(name)


def refuse_by_name(command: str, name: str) -> None:
    """Say why an option that people look for does not exist. Raises IncompatibleError and UsageError."""
    if words := cut_words(command, name):
        raise UsageError(f"{name} is no longer an option", fix=[words], code="cut_option")
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
        raise UsageError(f"no command follows {words[0]}", fix=["spd --help lists them"])
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
