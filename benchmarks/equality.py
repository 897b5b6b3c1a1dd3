"""Count tokens that speculation changed: every drafter, k, lag and temperature, alone and 16 together.

    python -m benchmarks.equality [-m MODEL...] [--draft-model FOLDER] [--dtype bfloat16,float32] [--tp N]
                                  [--kv int8] [--requests 48] [--tokens 64] [--rotate] [--agents]
                                  [--only PATTERN] [--minutes M] [--out FILE]

What is right is plain decoding of each request alone, without cached prefixes and recorded rounds. A cell
runs the same requests speculated with one drafter and k: at each lag 16 together in a cache that is too
small for them, so that some are interrupted, and every sixth alone. Of three requests the second begins as
the first, and the third is the next turn of its chat: prefixes are found. Where nothing interrupted a
request, drafts and accepted counts are the same at every lag. With --rotate each drafter of each model runs
at one k, in turn: for the files of many types that a model comes in. With --agents every other request
follows a schema, lookup drafts from texts of ended requests too, and the number of drafts changes from round
to round, those of a model that lookup continues included; drafts then depend on the lag.

FILE keeps finished cells, by commit, processor and model; a later call goes on with what is missing. Exits 0
where nothing differs, 6 where something does, 7 where --minutes left cells.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from benchmarks.drafters import EngineOptions, engine_config
from benchmarks.environment import describe_commit, describe_machine
from spd import Engine, Request, SamplingParams, SpdError
from spd.formats.folder import ModelFolder
from spd.formats.hub import resolve_model
from spd.formats.tokenizer import Tokenizer
from spd.runtime.engine.request import GrammarSpec
from spd.runtime.plan.config import KV_FORMS
from spd.runtime.plan.drafter_choice import choose_drafter
from spd.runtime.round.limits import PAGE_SIZE

SCHEMA = "spd.benchmarks.equality/1"
TEMPERATURES = (0.0, 0.8, 1.3)
KS = (1, 2, 4, 8)
LAGS = (0, 1, 2)
SLOTS = 16
CTX = 512
ALONE = 6
CALLS = (
    "os.path.join",
    "re.sub",
    "json.dumps",
    "heapq.heappush",
    "functools.reduce",
    "str.join",
    "csv.reader",
)
OPENINGS = (
    "import {0}\n\n\ndef {1}(self, *args):\n    ",
    "What does {0} do?",
    "# {0}\n# {1}\n# {0}\n# {1}\n",
)


CALL = {
    "type": "object",
    "properties": {
        "path": {"type": "string", "maxLength": 24},
        "lines": {"type": "array", "items": {"type": "integer", "maximum": 9999}, "maxItems": 3},
        "mode": {"enum": ["read", "replace", "append"]},
    },
    "required": ["path", "lines", "mode"],
    "additionalProperties": False,
}
POOL_TOKENS = 16_384


@dataclass
class Text:
    """The output of one request."""

    tokens: list[int] = field(default_factory=list)
    drafts: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    finish: str | None = None
    interrupted: int = 0
    cached: int = 0


def vary_drafts(engine: Engine) -> None:
    """Let rounds draft every number of tokens in turn, by a model, by lookup, and by both."""
    chooser = engine.draft_length
    longest = chooser.lookup_k or chooser.maximum
    lengths = itertools.cycle(
        (chooser.maximum, longest, longest, 1, longest, 0, longest, longest, longest, 0, 0)
    )
    chained = itertools.cycle((0, 2, 1, 0, 3))

    def choose() -> int:
        """Return the next number of drafts, and set how many a model makes before lookup."""
        length = next(lengths)
        chains = chooser.lookup_k and length > chooser.maximum
        chooser.chained = min(next(chained), chooser.maximum) if chains else 0
        return length

    chooser.choose_k = choose  # type: ignore[method-assign]


def run(engine: Engine, requests: Sequence[Request]) -> list[Text]:
    """Run all requests to their ends, together as far as there are slots; return their texts."""
    texts = {request.id: Text() for request in requests}
    engine.trace = lambda record: texts[record.request].drafts.append(
        (tuple(record.draft), record.accepted)
    )
    for event in engine.stream(requests):
        texts[event.request_id].tokens += event.token_ids
        texts[event.request_id].finish = event.finish_reason
    for name, text in texts.items():
        metrics = engine.metrics(name)
        text.interrupted = metrics.preemptions
        text.cached = metrics.cached_tokens
    return list(texts.values())


def make_requests(
    engine: Engine, count: int, tokens: int, *, with_schemas: bool = False
) -> list[Request]:
    """Return requests at every temperature; `engine` generates what a next turn continues.

    with_schemas: True for a schema that every other one follows.
    """
    tokenizer = engine.tokenizer
    requests = list[Request]()
    assert isinstance(tokenizer, Tokenizer)
    for i in range(count):
        name = CALLS[i // 3 % len(CALLS)]
        words = OPENINGS[i // 3 % 3].format(name, name.rpartition(".")[2]) * (1 + i // 9 % 5)
        ids: tuple[int, ...] = tuple(tokenizer.encode(words))
        spans: tuple[tuple[str, int], ...] = ()
        if i % 3 == 1:
            ids = (*requests[-1].prompt_ids, *tokenizer.encode(f"\n{i}. "))
        elif i % 3 == 2:
            before = requests[-2]
            continuation = tuple(tokenizer.encode(f"\n{i}. And {name}?\n"))
            reply = tuple(run(engine, [before])[0].tokens)
            ids = (*before.prompt_ids, *reply, *continuation)
            parts = (len(before.prompt_ids), len(reply), len(continuation))
            spans = tuple(zip(("prompt", "generated", "prompt"), parts, strict=True))
        temperature = TEMPERATURES[(i + i // 3) % 3]
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=tokens, ignore_eos=True)
        grammar = GrammarSpec("schema", json.dumps(CALL)) if with_schemas and i % 2 else None
        requests.append(Request(f"r{i}", ids, params, spans, grammar=grammar))
    return requests


def methods_of(folder: Path, draft: Path | None) -> list[EngineOptions]:
    """Return the methods that can draft for a model, as engine options."""
    methods: list[EngineOptions] = [{"spec": "off"}, {"spec": "ngram", "ngram_min": 2}]
    for spec in ("mtp", "draft"):
        options: EngineOptions = {"spec": spec, "draft_model": draft if spec == "draft" else None}
        with contextlib.suppress(SpdError):
            choose_drafter(engine_config(options, model=folder), ModelFolder.from_path(folder))
            methods += [options, {**options, "spec": f"{spec}+ngram", "ngram_min": 2}]
    return methods


def differing(texts: Sequence[Text], expected: Sequence[Text]) -> int:
    """Return the number of tokens that differ, those behind a first difference in length too."""
    pairs = [(f.tokens, w.tokens) for f, w in zip(texts, expected, strict=True)]
    return sum(sum(map(int.__ne__, f, w)) + abs(len(f) - len(w)) for f, w in pairs)


def few_pages(requests: Sequence[Request]) -> int:
    """Return the pages of a cache that is too small for `SLOTS` of the requests at their ends.

    Half of what they need on average, but enough for the longest.
    """
    needs = [
        -(-(len(request.prompt_ids) + (request.params.max_tokens or 0)) // PAGE_SIZE)
        for request in requests
    ]
    return max(max(needs) + 1, SLOTS * sum(needs) // (2 * len(needs)))


def run_cell(
    options: EngineOptions,
    requests: Sequence[Request],
    expected: Sequence[Text],
    *,
    is_varied: bool = False,
) -> dict[str, Any]:
    """Run one drafter and k at every lag; is_varied: as with --agents."""
    began = time.monotonic()
    first = list[Text]()
    row = {
        "tokens": 0,
        "differ": 0,
        "drafted": 0,
        "accepted": 0,
        "drafts_differ": 0,
        "interrupted": 0,
        "cached": 0,
    }
    pages = few_pages(requests)
    for lag in LAGS:
        together: EngineOptions = {"slots": SLOTS, "cache_pages": pages}
        alone: EngineOptions = {"slots": 1}
        for selected, batch_options in ((requests, together), (requests[::ALONE], alone)):
            fixed: EngineOptions = {**options, **batch_options, "adaptive": is_varied}
            pool_tokens = POOL_TOKENS if is_varied else 0
            engine = Engine(engine_config(fixed, ctx=CTX, lag=lag, pool_tokens=pool_tokens))
            if is_varied:
                vary_drafts(engine)
            right = expected[:: 1 if selected is requests else ALONE]
            texts = run(engine, selected)
            row["tokens"] += sum(len(text.tokens) for text in texts)
            row["differ"] += differing(texts, right) + sum(
                t.finish != w.finish for t, w in zip(texts, right, strict=True)
            )
            row["interrupted"] += sum(text.interrupted for text in texts)
            row["cached"] += sum(text.cached for text in texts)
            engine.close()
            if selected is requests:
                first = first or texts
            if selected is requests and not is_varied:
                row["drafts_differ"] += sum(
                    a.drafts != b.drafts and not a.interrupted + b.interrupted
                    for a, b in zip(texts, first, strict=True)
                )
    row["drafted"] = sum(len(drafts) for text in first for drafts, _ in text.drafts)
    row["accepted"] = sum(count for text in first for _, count in text.drafts)
    return {**row, "seconds": round(time.monotonic() - began, 1)}


def cells(
    arguments: argparse.Namespace, folders: Sequence[Path]
) -> Iterator[tuple[str, EngineOptions]]:
    """Yield every cell's name and engine options.

    With several models the name ends with the model's.
    """
    for number, folder in enumerate(folders):
        ending = f"/{folder.stem}" if len(folders) > 1 else ""
        for dtype in arguments.dtype.split(","):
            for turn, method in enumerate(methods_of(folder, arguments.draft_model)):
                ks: Sequence[int | None] = KS
                if method["spec"] == "off":
                    ks = (None,)
                elif arguments.rotate:
                    ks = (KS[(number + turn) % len(KS)],)
                for k in ks:
                    options: EngineOptions = {
                        "model": folder,
                        "dtype": dtype,
                        "tp": arguments.tp,
                        "kv": arguments.kv,
                        "draft_max": k,
                        **method,
                    }
                    length = "" if k is None else f"/k{k}"
                    yield f"{dtype}/{method['spec']}{length}{ending}", options


def models_name(folders: Sequence[Path]) -> str:
    """Return a model's name, of several the first one's."""
    others = f" and {len(folders) - 1} more" if len(folders) > 1 else ""
    return folders[0].name + others


def parse_settings(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equality", description=__doc__)
    parser.add_argument("-m", "--model", nargs="+", default=["demo-hybrid"])
    parser.add_argument("--draft-model", type=Path)
    parser.add_argument("--dtype", default="bfloat16,float32")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--kv", choices=KV_FORMS, default="auto")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rotate", action="store_true", help="one k of each drafter, in turn")
    parser.add_argument("--agents", action="store_true", help="schemas, a pool, varying drafts")
    parser.add_argument("--only", default="*", help="cells by name: * stands for anything")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cell later")
    parser.add_argument("--out", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the cells that are missing; returns the exit status."""
    settings = parse_settings(arguments)
    folders = [resolve_model(model) for model in settings.model]
    end = time.monotonic() + 60 * settings.minutes
    head = {
        "schema": SCHEMA,
        **describe_commit("spd", "benchmarks/equality.py"),
        "machine": describe_machine(),
    }
    head |= {
        "model": models_name(folders),
        "draft_model": settings.draft_model and settings.draft_model.name,
        "tp": settings.tp,
    }
    head |= {"kv": settings.kv, "requests": settings.requests, "tokens": settings.tokens}
    if settings.agents:
        head["agents"] = True
    earlier = (
        json.loads(settings.out.read_text())
        if settings.out is not None and settings.out.exists()
        else {}
    )
    rows: dict[str, Any] = {}
    if not head["changed"] and all(earlier.get(key) == value for key, value in head.items()):
        rows = earlier["cells"]
    all_cells = {
        name: options for name, options in cells(settings, folders) if fnmatch(name, settings.only)
    }
    right: dict[tuple[str, str], tuple[list[Request], list[Text]]] = {}
    for name, options in all_cells.items():
        if name in rows or time.monotonic() > end:
            continue
        dtype = options["dtype"]
        key = (str(options["model"]), dtype)
        if key not in right:
            plain: EngineOptions = {
                "model": options["model"],
                "dtype": dtype,
                "tp": options["tp"],
                "kv": options["kv"],
                "spec": "off",
            }
            config = engine_config(plain, ctx=CTX, slots=1, prefix_sharing=False, graphs=False)
            engine = Engine(config)
            requests = make_requests(
                engine, settings.requests, settings.tokens, with_schemas=settings.agents
            )
            expected = [run(engine, [request])[0] for request in requests]
            right[key] = requests, expected
            engine.close()
        requests, expected = right[key]
        is_varied = settings.agents and options["spec"] != "off"
        rows[name] = run_cell(options, requests, expected, is_varied=is_varied)
        print(name, json.dumps(rows[name]), flush=True)
        if settings.out is not None:
            settings.out.write_text(json.dumps({**head, "cells": rows}, indent=1) + "\n")
    done = [rows[name] for name in all_cells if name in rows]
    tokens, differ, drafts = (
        sum(row[key] for row in done) for key in ("tokens", "differ", "drafts_differ")
    )
    print(f"{tokens:,} tokens, {differ} differ; drafts of {drafts} requests differ")
    return 6 if differ or drafts else 7 if len(done) < len(all_cells) else 0


if __name__ == "__main__":
    sys.exit(main())
