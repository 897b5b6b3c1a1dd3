"""A server under many short requests: aborted ones, malformed ones, and a text that must not change.

    python -m benchmarks.soak [--requests 2000] [--clients 12] [--model demo] [--threads N] [--out FILE]

Of 100 requests 10 are aborted while they stream, 5 are malformed, 2 are the canary (one greedy
question, whose answer must always be the first one), 10 come over the Unix socket; the others are
chats and completions, whole, streamed and held to a schema. Memory, descriptors and threads of the
server are read each time it is idle. Status 1 where an answer is not what it should be, or the
server keeps more and more.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.environment import describe_commit, describe_machine
from spd.cli.options import GenerateOptions
from spd.cli.prompt_input import read_prompt
from spd.cli.run_settings import requested_sampling
from spd.cli.served import served_engine
from spd.cli.terminal.console import Console
from spd.errors import SpdError

SCHEMA = "spd.benchmarks.soak/1"
SHARES = {"plain": 73, "aborted": 10, "malformed": 5, "canary": 2, "socket": 10}
QUESTION = "What does os.path.join do?"
CANARY = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 24}
QUESTIONS = (
    "What does len do?",
    "What is a list?",
    "def read_lines(path):",
    "How do I sort?",
    "import ",
)
BOOLEAN = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "boolean"}}}
MALFORMED: tuple[Any, ...] = (
    b"{",
    b"\xff\xfe",
    {"messages": []},
    {"messages": "hello"},
    {"messages": [{"role": "oracle", "content": "x"}]},
    {**CANARY, "temperature": -1},
    {**CANARY, "max_tokens": "many"},
    {**CANARY, "unknown": 1},
    {**CANARY, "response_format": {**BOOLEAN, "json_schema": {"name": "x", "schema": {"type": 3}}}},
    {"messages": [{"role": "user", "content": "word " * 20_000}]},
)
GROWTH = {"memory_mib": 16, "descriptors": 8, "threads": 4}
"""How much more the server may have at the end than at half time."""
SETTLE = 30.0
"""Seconds in which what was aborted has to end."""


class Soak:
    """Requests to one server, and the judgement of its answers."""

    def __init__(
        self, port: int, process: int, runtime_folder: Path, options: GenerateOptions
    ) -> None:
        self._port = port
        self._process = process
        self._options = options
        self._session: Any = SimpleNamespace(
            console=Console(quiet=True), runtime_folder=runtime_folder
        )
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.samples: list[dict[str, float]] = []
        self._canary_text = self._ask_canary()
        self._lock = threading.Lock()

    def ask(self, number: int) -> None:
        """Send the request of this number, and judge its answer."""
        draws = random.Random(number)
        kinds = [kind for kind, share in SHARES.items() for _ in range(share)]
        kind = kinds[
            37 * number % len(kinds)
        ]  # in another order, and each as often as its share says
        try:
            fault = getattr(self, f"_{kind}")(draws)
        except (OSError, http.client.HTTPException, ValueError, KeyError, SpdError) as error:
            fault = f"{type(error).__name__}: {error}"
        with self._lock:
            self.counts[kind] += 1
            self.faults += [f"request {number}, {kind}: {fault}"] if fault else []

    def run(self, count: int, clients: int, sample_interval: int) -> None:
        """Send all requests, `clients` at a time; sample the server every `sample_interval`."""
        self.samples.append(self._sample())
        with ThreadPoolExecutor(clients) as pool:
            for first in range(0, count, sample_interval):
                list(pool.map(self.ask, range(first, min(count, first + sample_interval))))
                ends = time.monotonic() + SETTLE
                while (running := self._health()["running"]) and time.monotonic() < ends:
                    time.sleep(0.02)
                self.faults += [f"{running} requests run on after all have gone"] if running else []
                self.samples.append(self._sample())
                sample_texts = (f"{name} {value:,.0f}" for name, value in self.samples[-1].items())
                print(" · ".join(sample_texts), flush=True)

    def growth(self) -> dict[str, float]:
        """Return the server's growth from half time to the end."""
        half = self.samples[len(self.samples) // 2]
        end = self.samples[-1]
        return {name: end[name] - half[name] for name in GROWTH}

    # -- kinds of requests: each returns what is wrong ---------------------------------------------------

    def _plain(self, draws: random.Random) -> str | None:
        body = self._body(draws, stream=draws.random() < 0.5)
        path = "/v1/chat/completions"
        if draws.random() < 0.2:
            body["prompt"] = body.pop("messages")[0]["content"]
            path = "/v1/completions"
        elif draws.random() < 0.1:
            body["response_format"] = BOOLEAN
        with closing(self._send(path, body)) as connection:
            response = connection.getresponse()
            text = response.read().decode()
        if response.status != 200:
            return f"status {response.status}: {text[:200]}"
        reply = (
            text.endswith("data: [DONE]\n\n") if body["stream"] else "choices" in json.loads(text)
        )
        return None if reply and '{"error"' not in text else f"not whole: {text[-200:]}"

    def _aborted(self, draws: random.Random) -> str | None:
        body = self._body(draws, stream=True, max_tokens=2000, ignore_eos=True)
        with closing(self._send("/v1/chat/completions", body)) as connection:
            response = connection.getresponse()
            for _ in range(draws.randint(1, 6)):
                response.readline()
            response.close()
        return None if response.status == 200 else f"status {response.status}"

    def _malformed(self, draws: random.Random) -> str | None:
        with closing(self._send("/v1/chat/completions", draws.choice(MALFORMED))) as connection:
            response = connection.getresponse()
            error = json.loads(response.read()).get("error", {})
        return (
            None if response.status == 400 and error.get("message") else f"status {response.status}"
        )

    def _canary(self, draws: random.Random) -> str | None:
        text = self._ask_canary()
        return None if text == self._canary_text else f"{text!r} instead of {self._canary_text!r}"

    def _socket(self, draws: random.Random) -> str | None:
        """Send the canary as `spd generate` does, or one that is left."""
        engine = served_engine(self._session, self._options)
        if engine is None:
            return "no server is found"
        with closing(engine):
            options = self._options
            prompt = read_prompt(options, engine.info.ctx)
            served = engine.prepare_request(
                prompt, requested_sampling(options), None, options.think
            )
            engine.add(served.request)
            if draws.random() < 0.2:
                return None
            text = ""
            while engine.has_work:
                text += "".join(event.text for event in engine.step())
        return None if text == self._canary_text else f"{text!r} instead of {self._canary_text!r}"

    # -- what they are made of ---------------------------------------------------------------------------

    def _body(self, draws: random.Random, **fields: Any) -> dict[str, Any]:
        content = f"{draws.choice(QUESTIONS)} {draws.randrange(50)}"
        params = {
            "max_tokens": draws.randint(1, 24),
            "temperature": draws.choice((0, 0.8)),
            **fields,
        }
        return {"messages": [{"role": "user", "content": content}], **params}

    def _send(self, path: str, body: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=300)
        data = body if isinstance(body, bytes) else json.dumps(body)
        connection.request("POST", path, data, {"Content-Type": "application/json"})
        return connection

    def _ask_canary(self) -> str:
        with closing(self._send("/v1/chat/completions", CANARY)) as connection:
            answer = json.loads(connection.getresponse().read())
        return str(answer["choices"][0]["message"]["content"])

    def _health(self) -> dict[str, Any]:
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)) as connection:
            connection.request("GET", "/health")
            health: dict[str, Any] = json.loads(connection.getresponse().read())
        return health

    def _sample(self) -> dict[str, float]:
        folder = Path(f"/proc/{self._process}")
        sample = dict(
            re.findall(r"^(VmRSS|Threads):\s+(\d+)", (folder / "status").read_text(), re.MULTILINE)
        )
        return {
            "requests": self.counts.total(),
            "memory_mib": int(sample["VmRSS"]) / 1024,
            "descriptors": len(os.listdir(folder / "fd")),
            "threads": int(sample["Threads"]),
        }


def faults_of(soak: Soak) -> list[str]:
    """Return the faults of the answers, and the server's growth beyond its limits."""
    grown = soak.growth()
    grown_faults = [
        f"{name} grew by {grown[name]:.1f}" for name, limit in GROWTH.items() if grown[name] > limit
    ]
    return [*soak.faults, *grown_faults]


def main(arguments: Sequence[str] | None = None) -> int:
    """Start a server, ask it, stop it, print and write the figures; status 1 on any fault."""
    parser = argparse.ArgumentParser(description="Many short requests to one server.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("-m", "--model", default="demo")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args(arguments)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="spd-soak-") as home:
        options = {"model": settings.model, "threads": settings.threads}
        command = [sys.executable, "-m", "spd", "serve", settings.model, "--port", "0"]
        command += [] if settings.threads is None else ["--threads", str(settings.threads)]
        environment = {**os.environ, "XDG_RUNTIME_DIR": home, "SPD_CONFIG": os.devnull}
        server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            assert server.stderr is not None
            port = re.search(r":(\d+)/v1", server.stderr.readline())
            assert port is not None, "no server"
            request_options = GenerateOptions(
                **options, prompt=QUESTION, temperature=0, max_tokens=24
            )
            soak = Soak(int(port[1]), server.pid, Path(home) / "spd", request_options)
            soak.run(settings.requests, settings.clients, max(1, settings.requests // 20))
            server.send_signal(signal.SIGTERM)
            ended = server.wait(60)
        finally:
            server.kill()
    faults = faults_of(soak) + ([f"the server ended with status {ended}"] if ended else [])
    result = {
        "schema": SCHEMA,
        "model": settings.model,
        "clients": settings.clients,
        "seconds": round(time.monotonic() - began, 1),
        "counts": soak.counts,
        "growth": soak.growth(),
        "samples": soak.samples,
        "faults": faults,
        "machine": describe_machine(),
        **describe_commit(),
    }
    if settings.out is not None:
        settings.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for fault in faults[:20]:
        print(fault)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in soak.counts.items())
    print(
        f"{len(faults)} faults of {settings.requests:,} requests in {result['seconds']} s: {kinds}"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
