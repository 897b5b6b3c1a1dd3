"""What an agent asks for, answered as the model likes: tokens a round and tokens a second by method.

    python -m benchmarks.agent_tasks [MODEL] [--draft-model FOLDER] [--pairs 3] [--tokens 160] [--out FILE]

Tasks are edits of source code, lines taken out of logs, summaries of documentation, and records of
logs under a JSON schema. Replies are natural: greedy, and held to nothing but the schema. Each method
answers all tasks in turn, then once more; a method's speed is compared with plain decoding of the same
task in the same turn. "either" is lookup or the model, a slot at a time; "chained" may also let lookup
continue the model's drafts. All texts must be equal.

`--masks` measures instead what it is worth that drafts obey a grammar: tokens a round of records and of tool
calls (those of `agent_replay`) at a fixed number of drafts, with drafts as they are and with drafts that no
mask has chosen, which are cut off at the first that the grammar forbids.
"""

from __future__ import annotations

import argparse
import inspect
import json
import random
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.agent_replay import TOOLS
from benchmarks.environment import describe_commit, describe_machine
from benchmarks.summaries import median_interval
from spd.cli.options import GenerateOptions
from spd.cli.run_settings import plan_settings
from spd.conversation.messages import Message
from spd.conversation.prompt import Prompt
from spd.runtime import Engine, Request, RequestMetrics, SamplingParams
from spd.runtime.engine.request import GrammarSpec
from spd.runtime.engine.sequence import Sequence as EngineSequence

SCHEMA = "spd.benchmarks.agent_tasks/1"
METHODS = ("off", "neural", "lookup", "either", "chained")
EXCERPT = 1600
"""Characters of a file in a task."""
RECORDS = {
    "type": "array",
    "minItems": 6,
    "maxItems": 6,
    "items": {
        "type": "object",
        "properties": {
            "time": {"type": "string", "maxLength": 12},
            "level": {"enum": ["INFO", "WARNING", "ERROR"]},
            "module": {"type": "string", "maxLength": 16},
            "message": {"type": "string", "maxLength": 60},
        },
        "required": ["time", "level", "module", "message"],
        "additionalProperties": False,
    },
}


class Task(NamedTuple):
    """A user's message, and what its reply must be."""

    kind: str
    text: str
    schema: dict[str, Any] | None = None


def log_lines(count: int, seed: int) -> str:
    """Return lines of a log, the same for the same seed."""
    draw = random.Random(seed)
    modules = ("cache", "reader", "worker", "router", "index")
    messages = (
        "opened the file settings.json",
        "the connection to the index was lost",
        "wrote 128 entries in 12 ms",
        "the request took longer than 500 ms",
        "closed the reader",
    )
    lines = []
    for number in range(count):
        level = draw.choice(("INFO", "INFO", "WARNING", "ERROR"))
        clock = f"10:{number // 60:02}:{number % 60:02}"
        lines.append(f"{clock} {level} {draw.choice(modules)}: {draw.choice(messages)}")
    return "\n".join(lines)


def tasks(count: int) -> list[Task]:
    """Return `count` tasks of each kind."""
    all_tasks = []
    sources = ("textwrap", "heapq", "shlex", "csv", "bisect", "fnmatch")
    for number in range(count):
        source = inspect.getsource(import_module(sources[number % len(sources)]))
        code = source[len(source) // 3 :][:EXCERPT]
        names = re.findall(r"\b[a-z_]{4,}\b", code)
        name = max(sorted(set(names)), key=names.count)
        all_tasks.append(
            Task("edits", f"Rename `{name}` to `{name}_new`. Reply with all lines.\n\n{code}")
        )
        log = log_lines(30, number)
        all_tasks.append(Task("logs", f"{log}\n\nRepeat the lines of this log that say ERROR."))
        documentation = inspect.getdoc(import_module(sources[-1 - number % len(sources)])) or code
        text = documentation[:EXCERPT]
        all_tasks.append(Task("summaries", f"{text}\n\nSummarize this text in its own words."))
        all_tasks.append(
            Task("schemas", f"{log_lines(6, number + 99)}\n\nWrite this log as JSON.", RECORDS)
        )
        all_tasks.append(
            Task("calls", f"{code}\n\nCall a tool that renames `{name}` here.", calls_schema())
        )
    return all_tasks


def calls_schema() -> dict[str, Any]:
    """Return the schema of a call of one of the replay's tools."""
    calls = []
    for tool in TOOLS:
        function = tool["function"]
        arguments = function["parameters"]
        arguments |= {"required": [*arguments["properties"]], "additionalProperties": False}
        properties = {"name": {"const": function["name"]}, "arguments": arguments}
        calls.append({"type": "object", "properties": properties, "required": [*properties]})
    return {"anyOf": calls}


class Answers:
    """The engine of one method."""

    def __init__(self, model: str, spec: str, draft_model: str | None, *, chains: bool) -> None:
        has_weights = spec not in ("off", "ngram")
        options = GenerateOptions(
            model=model,
            spec=spec,
            draft_model=draft_model if has_weights else None,
            temperature=0.0,
            no_server=True,
        )
        self.settings = plan_settings(options)
        self.engine = Engine(self.settings.config)
        self.chains = chains

    def ask(self, task: Task, tokens: int) -> tuple[list[int], RequestMetrics]:
        """Return the ids of a reply, and its counters."""
        grammar = None
        if task.schema is not None:
            grammar = GrammarSpec("schema", json.dumps(task.schema))
        message: Message = {"role": "user", "content": task.text}
        prompt = Prompt(messages=(message,), variables={})
        prepared = self.settings.prepare_request("task", prompt, self.params(tokens), grammar)
        request: Request = prepared.request
        ids: list[int] = []
        self.engine.add(request)
        while self.engine.has_work:
            if not self.chains:
                self.engine.draft_length.chained_share = 0.0
            for event in self.engine.step():
                ids += event.token_ids
        return ids, self.engine.metrics(request.id)

    def params(self, tokens: int) -> SamplingParams:
        """Return greedy parameters of a reply."""
        return replace(self.settings.sampling.params, max_tokens=tokens, temperature=0.0)


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of every method and kind of task."""
    neural = arguments.spec
    specs = dict(
        zip(METHODS, ("off", neural, "ngram", f"{neural}+ngram", f"{neural}+ngram"), strict=True)
    )
    engines = {
        name: Answers(arguments.model, spec, arguments.draft_model, chains=name != "either")
        for name, spec in specs.items()
    }
    counts: dict[tuple[str, str], list[int]] = {}
    ratios: dict[tuple[str, str], list[float]] = {}
    speeds: dict[tuple[str, str], list[float]] = {}
    is_equal = True
    for pair in range(arguments.pairs + 1):
        for task in tasks(arguments.tasks):
            plain: list[int] = []
            plain_speed = 0.0
            for name, answers in engines.items():
                ids, metrics = answers.ask(task, arguments.tokens)
                speed = (
                    1000 * (metrics.completion_tokens - metrics.first_tokens) / metrics.predicted_ms
                )
                if name == "off":
                    plain = ids
                    plain_speed = speed
                is_equal = is_equal and ids == plain
                if not pair:  # a warm-up, which fills caches and records rounds
                    continue
                key = (name, task.kind)
                total = counts.setdefault(key, [0, 0])
                total[0] += metrics.completion_tokens
                total[1] += metrics.rounds
                ratios.setdefault(key, []).append(speed / plain_speed)
                speeds.setdefault(key, []).append(speed)
    rows = [row_of(name, kind, counts, ratios, speeds) for name, kind in counts]
    return {"texts_equal": is_equal, "rows": rows}


@contextmanager
def unmasked(engine: Engine) -> Iterator[None]:
    """Let a grammar choose no drafts meanwhile: it only cuts off what it forbids."""
    sampler = engine.round_queue.sampler
    guide = sampler.guide
    force_drafts = EngineSequence.force_drafts
    sampler.guide = None
    EngineSequence.force_drafts = lambda _, drafts, *rest: drafts  # type: ignore[method-assign]
    try:
        yield
    finally:
        sampler.guide = guide
        EngineSequence.force_drafts = force_drafts  # type: ignore[method-assign]


def measure_masks(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return tokens a round with drafts that obey the grammar, and with drafts that do not."""
    rows = []
    is_equal = True
    constrained = [task for task in tasks(arguments.tasks) if task.schema is not None]
    for spec in (arguments.spec, "ngram", f"{arguments.spec}+ngram"):
        obeying, free = (
            Answers(arguments.model, spec, arguments.draft_model, chains=True) for _ in range(2)
        )
        counts: dict[str, dict[str, list[int]]] = {}
        for task in constrained:
            texts = []
            for name, answers in (("masked", obeying), ("unmasked", free)):
                answers.engine.draft_length.adaptive = False
                if name == "unmasked":
                    with unmasked(answers.engine):
                        ids, metrics = answers.ask(task, arguments.tokens)
                else:
                    ids, metrics = answers.ask(task, arguments.tokens)
                texts.append(ids)
                total = counts.setdefault(task.kind, {}).setdefault(name, [0, 0, 0])
                total[0] += metrics.completion_tokens
                total[1] += metrics.rounds
                total[2] += metrics.draft_n_masked
            is_equal = is_equal and texts[0] == texts[1]
        for kind, by_name in counts.items():
            tokens, rounds, masked = by_name["masked"]
            free_tokens, free_rounds, _ = by_name["unmasked"]
            rows.append(
                {
                    "kind": kind,
                    "method": spec,
                    "k": obeying.engine.draft_length.maximum,
                    "masked_drafts": masked,
                    "tokens_per_round": round(tokens / rounds, 3),
                    "unmasked_tokens_per_round": round(free_tokens / free_rounds, 3),
                    "ratio": round(tokens / rounds / (free_tokens / free_rounds), 3),
                }
            )
    return {"texts_equal": is_equal, "rows": rows}


def row_of(
    name: str,
    kind: str,
    counts: dict[tuple[str, str], list[int]],
    ratios: dict[tuple[str, str], list[float]],
    speeds: dict[tuple[str, str], list[float]],
) -> dict[str, Any]:
    """Return the figures of a method and a kind of task."""
    tokens, rounds = counts[name, kind]
    interval = median_interval(ratios[name, kind])
    return {
        "kind": kind,
        "method": name,
        "tokens": tokens,
        "tokens_per_round": round(tokens / rounds, 3),
        "tokens_per_second": round(statistics.median(speeds[name, kind]), 1),
        "ratio": round(statistics.median(ratios[name, kind]), 3),
        "interval": None if interval is None else [round(bound, 3) for bound in interval],
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, and print or write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--spec", default="mtp", help="the model's or head's method")
    parser.add_argument("--draft-model")
    parser.add_argument("--tasks", type=int, default=3, help="of each kind")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--masks", action="store_true", help="with masked drafts and without")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args(argv)
    result = {
        "schema": SCHEMA,
        "machine": describe_machine(),
        **describe_commit("spd", "benchmarks/agent_tasks.py"),
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
        **(measure_masks if arguments.masks else measure)(arguments),
    }
    text = json.dumps(result, indent=1)
    print(text) if arguments.out is None else arguments.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
