"""`spd verify`: the same prompts with and without speculation, token by token, and a certificate of it."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from spd.cli.commands.bench import chosen_prompts, numbers, split
from spd.cli.options import MODEL, EngineOptions, ModelArgument, first, option
from spd.cli.parser import parse_as
from spd.cli.terminal.console import Session
from spd.cli.terminal.progress import Ticker
from spd.cli.terminal.sink import Sink
from spd.cli.terminal.tables import fact_lines
from spd.errors import CheckFailedError, UsageError
from spd.formats.gguf.file_kind import model_files
from spd.runtime.plan.config import DRAFTER_OPTIONS, METHODS, EngineConfig

SCHEMA = "spd.verify/1"
SETTINGS = (
    "spec",
    "draft_max",
    "adaptive",
    "verify",
    "lag",
    "graphs",
    "kernels",
    "device",
    "dtype",
    "threads",
    "slots",
    "tp",
    "draft_tp",
    "prefix_sharing",
    "draft_ctx",
    "ngram_min",
    "ngram_max",
)
ARITHMETIC = ("device", "dtype", "kernels", "threads", "tp")
"""Settings between which equal bits are not promised."""
SHOWN = (
    "model",
    "against",
    "temperatures",
    "untested",
    "texts",
    "tokens",
    "drafts_accepted",
    "passed",
)
DIFFERENCES = 10
"""What is shown of a certificate, and how many differences."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerifyOptions(ModelArgument, EngineOptions):
    """Everything `spd verify` takes."""

    adaptive: bool = option(
        MODEL, False, None, "Adapt K. Default: it is fixed.", "--adaptive/--no-adaptive"
    )
    against: str = first(
        "spec=off", "SETTING=…", "Compare with spec=off, lag=0, kernels=torch, slots=1 …"
    )
    temperature: str = first("0,0.8", "T,…", "Sampling temperatures. Default: 0,0.8.")
    max_tokens: int = first(64, "N", "Most tokens in a reply. Default: 64.", "-n", min=2)
    tokens: int = first(0, "N", "Repeat with new seeds until replies could hold N tokens.", min=0)
    concurrency: int = first(1, "N", "Requests at a time. Default: 1.", min=1)
    json: bool = first(False, None, "Print the certificate as JSON.")
    prompts: Path | None = option(MODEL, None, "FILE", "Your own, as for spd bench.")


def verify(session: Session, options: VerifyOptions) -> None:
    """Run prompts with and without speculation, compare every token; the exit code is 6 if one differs.

    Examples:
      spd verify FOLDER --lag 2 --json > certificate.json
      spd verify --against lag=0 --lag 2 --tokens 50000 --concurrency 8
    """
    from spd.cli.reply_view import versions
    from spd.cli.run_settings import engine_config
    from spd.formats.folder import ModelFolder
    from spd.runtime import lab

    temperatures = numbers(options.temperature, "--temperature", "float", 0, 100)
    candidate = replace(
        engine_config(options, ModelFolder.resolve(options.model)), slots=options.concurrency
    )
    reference = apply_settings(candidate, options.against)
    sink = Sink.stdout()
    most = options.max_tokens
    questions = lab.encode_prompts(candidate.model, chosen_prompts(options.prompts), [None], most)
    ctx = max(len(question.ids) for question in questions) + most
    reference, candidate = (replace(config, ctx=ctx) for config in (reference, candidate))
    coupled = candidate.verify == "coupled" and reference.verify == "coupled"
    compared = [t for t in temperatures if coupled or not t] or [
        0.0
    ]  # others promise texts at T 0 only
    requests = lab.make_requests(questions, compared, max_tokens=most, min_tokens=options.tokens)
    with Ticker(session.console) as ticker:

        def watch(what: str, ended: int) -> None:
            session.guard.check()
            ticker.write(f"{what}: {ended} of {len(requests)} replies")

        result = lab.replay_requests(reference, candidate, requests, watch)
    certificate = {
        "schema": SCHEMA,
        "model": options.model,
        "files": file_hashes(candidate.model, result.plans[1]["draft_model"]),
        "versions": versions(),
        "machine": lab.describe_machine(),
        "against": options.against,
        "plans": dict(zip(("reference", "candidate"), result.plans, strict=True)),
        "prompts": {question.prompt.name: question.prompt.digest for question in questions},
        "temperatures": compared,
        "untested": [t for t in temperatures if t not in compared],
        "texts": len(requests),
        "tokens": result.tokens,
        "drafts_accepted": result.speculated,
        "differences": result.differences,
        "passed": not result.differences,
    }
    plain, plan = result.plans
    shown = {
        "differences": [
            {**each, "seed": str(each["seed"])} for each in result.differences[:DIFFERENCES]
        ],
        "candidate": {name: plan[name] for name in ("spec", "draft_max", "verify", "lag", "dtype")},
        **{name: certificate[name] for name in SHOWN},
    }
    if not result.speculated and plan["spec"] != "off":
        shown["note"] = "no draft was accepted, so this tested little"
    sink.answer(options.json, certificate, fact_lines(shown))
    if result.differences:
        other = [name for name in ARITHMETIC if plain[name] != plan[name]]
        why = (
            f"other {' and '.join(other)} may round otherwise"
            if other
            else "spd promises equal texts"
        )
        fix = "--against with one setting at a time shows which one is at fault; please report it"
        words = f"{len(result.differences)} of {len(requests)} texts differ"
        raise CheckFailedError(words, reason=[why], fix=[fix])


def apply_settings(config: EngineConfig, text: str) -> EngineConfig:
    """The configuration with `name=value,…` in its place. Raises UsageError naming what is wrong."""
    changes: dict[str, Any] = {}
    kinds = {field.name: str(field.type) for field in fields(config)}
    for member in split(re.sub(r"(spec\s*=[^,]*),\s*ngram\b", r"\1+ngram", text), "--against"):
        name, equals, value = member.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or name not in SETTINGS:
            there = f"there are: {', '.join(SETTINGS).replace('_', '-')}"
            fix = ["--against spec=off", "--against lag=0"]
            raise UsageError(f"--against {member} is not a setting", reason=[there], fix=fix)
        changes[name] = parse_as(f"--against {name}", kinds[name], value)
    method = METHODS.get(changes.get("spec", ""))
    if method is not None and not method.weights:
        changes = {**dict.fromkeys(DRAFTER_OPTIONS), **changes}
    if changes.get("spec") == "off":
        changes = {"draft_max": None, "adaptive": None, "verify": "coupled", **changes}
    if changes.get("tp") == 1:  # no other rank
        changes["rendezvous"] = None
    return replace(config, **changes)


def file_hashes(model: os.PathLike[str], draft: str | None) -> dict[str, str]:
    """SHA-256 of every file that decides the text: configuration, weights, tokenizer."""
    found = {}
    for label, folder in (("", model), ("draft/", draft)):
        if folder is None:
            continue
        is_file = Path(folder).is_file()
        for path in model_files(Path(folder)):
            if is_file or path.suffix in (".json", ".safetensors"):
                digest = hashlib.sha256()
                with path.open("rb") as file:
                    while block := file.read(2**24):
                        digest.update(block)
                found[label + path.name] = digest.hexdigest()
    return found
