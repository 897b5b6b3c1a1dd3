"""Count tokens that serving changed: 16 clients at once, every drafter, T 0 and 0.8, while others leave.

    python -m benchmarks.serve_equality [--models demo,demo-hybrid] [--tokens 100000] [--out FILE]

What is right is the text of `spd generate --jsonl` that decodes plainly, one prompt at a time. A cell is a
server with one drafter whose cache is too small for 16 requests, so that some are interrupted. 16 clients ask
the same chats, streamed and whole, and 4 more leave in the middle of what they asked for, by both ways. Cells
are repeated with other seeds until so many tokens were compared. Exits 0 where none differs, else 6.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import http.client
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import describe_commit, describe_machine
from spd.cli.commands.serve import ServeOptions
from spd.cli.run_settings import plan_settings
from spd.runtime import Engine
from spd.runtime.engine.driver import EngineThread
from spd.server.run import Server, open_listener
from spd.server.service import Service

SCHEMA = "spd.benchmarks.serve_equality/1"
TEMPERATURES = 0.0, 0.8
CLIENTS = 16
LEAVERS = 4
CTX = 512
LENGTH = 120
PAGES = 20
"""Of 64 tokens each; 16 requests would take 48."""
QUESTIONS = (
    "What does {0} do?",
    "Write a function that uses {0}.",
    "# {0}\nimport {0}\n# {0}\nimport ",
    "def {1}(self, *args):\n    ",
)
CALLS = "os.path.join", "re.sub", "json.dumps", "heapq.heappush", "functools.reduce", "csv.reader"


def drafters(model: str) -> dict[str, dict[str, Any]]:
    """Return options of a server by drafter; the model itself stands for a draft model."""
    draft = {"spec": "draft", "draft_model": model, "draft_max": 3}
    return {
        "off": {"spec": "off"},
        "mtp": {"spec": "mtp"},
        "ngram": {"spec": "ngram"},
        "draft": draft,
    }


@contextmanager
def serving(options: ServeOptions, pages: int | None = None) -> Iterator[tuple[Service, int]]:
    """Serve in this process; yield the service and its port."""
    settings = plan_settings(options.to_generate_options())
    config = dataclasses.replace(settings.config, cache_pages=pages)
    thread = EngineThread(
        lambda progress: Engine(config, progress=progress), lambda: (), lambda error: None
    )
    thread.start()
    service = Service(settings, [options.model], thread)
    listener = open_listener("127.0.0.1", 0)
    server = Server(service, options.to_server_options(Path()))
    loop = threading.Thread(target=lambda: asyncio.run(server._serve([listener])), daemon=True)
    loop.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield service, listener.getsockname()[1]
    finally:
        server.start_draining()
        loop.join(30)
        thread.close(30)


def make_chats(count: int, seed: int, temperature: float, tokens: int) -> list[dict[str, Any]]:
    """Return bodies of chat completions."""
    draws = random.Random(seed)
    chats = []
    for number in range(count):
        name = draws.choice(CALLS)
        content = draws.choice(QUESTIONS).format(name, name.rpartition(".")[2]) + f" ({number % 7})"
        params = {
            "temperature": temperature,
            "seed": seed + number,
            "max_tokens": tokens,
            "ignore_eos": True,
        }
        chats.append({"messages": [{"role": "user", "content": content}], **params})
    return chats


def generated(
    model: str, chats: Sequence[dict[str, Any]], threads: int | None
) -> list[tuple[str, int]]:
    """Return the text and number of tokens of each, as `spd generate` writes them alone."""
    lines = [
        {"messages": chat["messages"], "params": {k: v for k, v in chat.items() if k != "messages"}}
        for chat in chats
    ]
    command = [sys.executable, "-m", "spd", "generate", "-m", model, "--jsonl", "--no-server", "-q"]
    command += ["--spec", "off", "--concurrency", "1", "--ctx", str(CTX)]
    command += [] if threads is None else ["--threads", str(threads)]
    environment = {**os.environ, "SPD_CONFIG": os.devnull}
    input_lines = "".join(json.dumps(line) + "\n" for line in lines)
    completed = subprocess.run(
        command, input=input_lines, env=environment, capture_output=True, text=True, check=True
    )
    answers = map(json.loads, completed.stdout.splitlines())
    return [(answer["text"], answer["usage"]["completion_tokens"]) for answer in answers]


def ask(port: int, chat: dict[str, Any], *, stream: bool) -> str:
    """Return a server's answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps({**chat, "stream": stream}))
        reply_text = connection.getresponse().read().decode()
    if not stream:
        return str(json.loads(reply_text)["choices"][0]["message"]["content"])
    events = [
        json.loads(line[6:]) for line in reply_text.split("\n\n") if line.startswith("data: {")
    ]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def leave(port: int, chat: dict[str, Any], draws: random.Random, over: threading.Event) -> None:
    """Ask and leave, again and again: in the middle of a stream, or before a full answer comes."""
    while not over.is_set():
        stream = draws.random() < 0.5
        body = {**chat, "stream": stream, "seed": draws.randrange(1000)}
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=600)) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(body))
            if stream and (response := connection.getresponse()).status == 200:
                for _ in range(draws.randint(1, 12)):
                    response.readline()
            else:
                over.wait(draws.uniform(0, 0.3))


def run_cell(
    options: ServeOptions, chats: Sequence[dict[str, Any]], right: Sequence[tuple[str, int]]
) -> dict[str, int]:
    """Return the compared and different tokens, and counts of the server."""
    over = threading.Event()
    with (
        serving(options, PAGES) as (service, port),
        ThreadPoolExecutor(CLIENTS) as pool,
        ThreadPoolExecutor(LEAVERS) as leavers,
    ):
        left = [
            leavers.submit(leave, port, chats[i], random.Random(i), over) for i in range(LEAVERS)
        ]
        try:
            answers = pool.map(lambda i: ask(port, chats[i], stream=i % 2 == 0), range(len(chats)))
            answers_by_chat = list(answers)
        finally:
            over.set()
        for thread in left:
            thread.result()
        ends = time.monotonic() + 30
        while service.open_requests and time.monotonic() < ends:
            time.sleep(0.01)
        return {
            "tokens": sum(size for _, size in right),
            "differ": sum(
                size
                for text, (expected, size) in zip(answers_by_chat, right, strict=True)
                if text != expected
            ),
            "left": int(service.counters.get('requests_total{reason="abort"}', 0)),
            "interrupted": int(service.counters["preemptions_total"]),
            "still_open": service.open_requests,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cells until enough tokens were compared; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serve_equality", description=__doc__
    )
    parser.add_argument("--models", default="demo,demo-hybrid")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--requests", type=int, default=56)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args(arguments)
    cells: dict[str, dict[str, int]] = {}
    head = {"schema": SCHEMA, **describe_commit("spd", "benchmarks/serve_equality.py")}
    head |= {"machine": describe_machine(), "clients": CLIENTS, "leaving": LEAVERS}
    seed = 0
    compared = 0
    while compared < settings.tokens:
        for model in settings.models.split(","):
            for temperature in TEMPERATURES:
                chats = make_chats(settings.requests, seed, temperature, LENGTH)
                right = generated(model, chats, settings.threads)
                for spec, drafting_options in drafters(model).items():
                    options = ServeOptions(
                        model=model,
                        ctx=CTX,
                        concurrency=CLIENTS,
                        threads=settings.threads,
                        adaptive=False,
                        **drafting_options,
                    )
                    result = run_cell(options, chats, right)
                    cell = cells.setdefault(
                        f"{model}/{spec}/T{temperature:g}", dict.fromkeys(result, 0)
                    )
                    for name, count in result.items():
                        cell[name] += count
                    print(f"{model}/{spec}/T{temperature:g}", result, flush=True)
                    if settings.out is not None:
                        settings.out.write_text(
                            json.dumps({**head, "cells": cells}, indent=1) + "\n"
                        )
        seed += settings.requests
        compared = sum(cell["tokens"] for cell in cells.values())
    differ = sum(cell["differ"] + cell["still_open"] for cell in cells.values())
    print(f"{compared:,} tokens, {differ} differ")
    return 6 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
