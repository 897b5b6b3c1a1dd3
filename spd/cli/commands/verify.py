"""`spd verify`: compares replies with and without speculation token by token.

Writes a certificate. A server is compared by `verify_server.py`.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spd.cli.commands.bench import parse_temperature_list, requested_prompts, split_comma_list
from spd.cli.commands.verify_options import VerifyOptions
from spd.cli.options import is_url
from spd.cli.parser import parse_value
from spd.cli.terminal.console import Session
from spd.cli.terminal.progress import ticking
from spd.cli.terminal.sink import Sink
from spd.cli.terminal.tables import fact_lines
from spd.errors import CheckFailedError, UsageError
from spd.formats.gguf.file_kind import model_files
from spd.runtime.plan.config import DRAFTER_OPTIONS, METHODS, EngineConfig

if TYPE_CHECKING:
    from spd.runtime.lab import Replay

VERIFY_SCHEMA = "spd.verify/1"
SETTING_NAMES = (
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
ROUNDING_SETTINGS = ("device", "dtype", "kernels", "threads", "tp")
"""Settings whose change may change bits of the arithmetic."""
SUMMARY_FIELDS = (
    "model",
    "against",
    "temperatures",
    "untested",
    "texts",
    "tokens",
    "drafts_accepted",
    "passed",
)
"""Fields of a certificate that are printed."""
MAX_DIFFERENCES = 10
"""How many differences are printed."""


def verify(session: Session, options: VerifyOptions) -> None:
    """Run prompts with and without speculation, compare every token; the exit code is 6 if one differs.

    Examples:
      spd verify FOLDER --lag 2 --json > certificate.json
      spd verify --against lag=0 --lag 2 --tokens 50000 --concurrency 8
      spd verify http://127.0.0.1:8080 --against http://127.0.0.1:8081
    """
    if is_url(options.model):
        from spd.cli.commands.verify_server import verify_server

        verify_server(session, options)
    else:
        _verify_model(session, options)


def _verify_model(session: Session, options: VerifyOptions) -> None:
    """Compare engines of a model, print a certificate; raise CheckFailedError if texts differ."""
    from spd.cli.reply_view import package_versions
    from spd.cli.run_settings import engine_config
    from spd.formats.folder import ModelFolder
    from spd.runtime import lab

    _refuse_server_options(options)
    temperatures = parse_temperature_list(options.temperature)
    candidate = replace(
        engine_config(options, ModelFolder.resolve(options.model)), slots=options.concurrency
    )
    reference = with_settings(candidate, options.against)
    sink = Sink.stdout()
    prompts = requested_prompts(options.prompts)
    questions = lab.encode_prompts(candidate.model, prompts, [None], options.max_tokens)
    ctx = max(len(question.ids) for question in questions) + options.max_tokens
    reference = replace(reference, ctx=ctx)
    candidate = replace(candidate, ctx=ctx)
    is_coupled = candidate.verify == "coupled" and reference.verify == "coupled"
    # Other rules promise equal texts at temperature 0 only.
    compared_temperatures = [t for t in temperatures if is_coupled or not t] or [0.0]
    requests = lab.make_requests(
        questions, compared_temperatures, max_tokens=options.max_tokens, min_tokens=options.tokens
    )
    with ticking(session.console) as ticker:

        def watch(run_name: str, num_ended: int) -> None:
            """Show the progress of a run. Raises Interrupted after a signal."""
            session.guard.raise_if_received()
            ticker.write(f"{run_name}: {num_ended} of {len(requests)} replies")

        result = lab.replay_requests(reference, candidate, requests, watch)
    certificate = {
        "schema": VERIFY_SCHEMA,
        "model": options.model,
        "files": file_hashes(candidate.model, result.plans[1]["draft_model"]),
        "versions": package_versions(),
        "machine": lab.describe_machine(),
        "against": options.against,
        "plans": dict(zip(("reference", "candidate"), result.plans, strict=True)),
        "prompts": {question.prompt.name: question.prompt.digest for question in questions},
        "temperatures": compared_temperatures,
        "untested": [t for t in temperatures if t not in compared_temperatures],
        "texts": len(requests),
        "tokens": result.tokens,
        "drafts_accepted": result.speculated,
        "differences": result.differences,
        "draft_note": result.draft_note,
        "passed": not result.differences,
    }
    facts = _replay_facts(result) | {name: certificate[name] for name in SUMMARY_FIELDS}
    if not result.speculated and result.plans[1]["spec"] != "off":
        facts["note"] = "no draft was accepted, so this tested little"
    if result.draft_note is not None:
        facts["drafts"] = result.draft_note
    sink.write_result(options.json, certificate, fact_lines(facts))
    if result.differences:
        raise _difference_error(result, len(requests))


def _refuse_server_options(options: VerifyOptions) -> None:
    """Raise UsageError for options about servers."""
    if server_options := sorted(options.typed & {"toggle", "api_key"}):
        message = f"--{server_options[0].replace('_', '-')} is about a server"
        reason = [f"{options.model} runs here"]
        raise UsageError(message, reason=reason, fix=["spd verify http://HOST:PORT"])


def _replay_facts(result: Replay) -> dict[str, object]:
    """Return printed facts of a comparison: first differences, parts of the candidate's plan."""
    plan = result.plans[1]
    return {
        "differences": [
            {**difference, "seed": str(difference["seed"])}
            for difference in result.differences[:MAX_DIFFERENCES]
        ],
        "candidate": {name: plan[name] for name in ("spec", "draft_max", "verify", "lag", "dtype")},
    }


def _difference_error(result: Replay, num_texts: int) -> CheckFailedError:
    """Return the error for texts that differ.

    Its reason names settings that may round otherwise.
    """
    reference_plan, candidate_plan = result.plans
    differing_settings = [
        name for name in ROUNDING_SETTINGS if reference_plan[name] != candidate_plan[name]
    ]
    reason = "spd promises equal texts"
    if differing_settings:
        reason = f"other {' and '.join(differing_settings)} may round otherwise"
    fix = "--against with one setting at a time shows which one is at fault; please report it"
    message = f"{len(result.differences)} of {num_texts} texts differ"
    return CheckFailedError(message, reason=[reason], fix=[fix])


def with_settings(config: EngineConfig, text: str) -> EngineConfig:
    """Return the configuration changed by `name=value,…`, the text of --against.

    What belongs to another drafter or rank is left out. Raises UsageError for an invalid setting.
    """
    changes: dict[str, Any] = {}
    annotations = {field.name: str(field.type) for field in fields(config)}
    for member in split_comma_list(
        re.sub(r"(spec\s*=[^,]*),\s*ngram\b", r"\1+ngram", text), "--against"
    ):
        name, equals, value = member.partition("=")
        name = name.strip().lstrip("-").replace("-", "_")
        if not equals or name not in SETTING_NAMES:
            choices = f"there are: {', '.join(SETTING_NAMES).replace('_', '-')}"
            fix = ["--against spec=off", "--against lag=0"]
            raise UsageError(f"--against {member} is not a setting", reason=[choices], fix=fix)
        changes[name] = parse_value(f"--against {name}", annotations[name], value)
    method = METHODS.get(changes.get("spec", ""))
    if method is not None and not method.has_weights:
        changes = {**dict.fromkeys(DRAFTER_OPTIONS), **changes}
    if changes.get("spec") == "off":
        changes = {"draft_max": None, "adaptive": None, "verify": "coupled", **changes}
    if changes.get("tp") == 1:  # no other rank
        changes["rendezvous"] = None
    return replace(config, **changes)


def file_hashes(model: os.PathLike[str], draft: str | None) -> dict[str, str]:
    """Read every file that decides the text, and return its SHA-256 by name.

    These are configuration, weights and tokenizer; the draft model's names begin with `draft/`.
    """
    hashes = {}
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
                hashes[label + path.name] = digest.hexdigest()
    return hashes
