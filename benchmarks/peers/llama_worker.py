"""The llama.cpp worker: its own server on loopback, plain, with a draft model or by n-gram lookup.

`--build DIR` is llama.cpp's source with `build/bin/llama-server`. Checkpoints are converted once by
its own script and kept beside the build. Requests run in threads; the server streams each token, so
tokens that were accepted together arrive as several chunks, and steps are counted from what it says
of drafts.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import (
    NGRAM_MIN,
    Chunk,
    Generation,
    PassResult,
    Speculation,
    WorkerOptions,
    die_with_parent,
    imposed_rates,
    serve,
)

DTYPES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "int4": "Q4_0"}
LOAD_SECONDS = 600.0
WITHHELD = 8
"""Tokens asked for beyond those wanted: the last ones are kept back while they end inside a character."""


def converted(build: Path, model: Path, dtype: str) -> Path:
    """Return the checkpoint in llama.cpp's format, made if missing or older than the weights.

    A GGUF file is returned as it is.
    """
    if model.suffix == ".gguf":
        return model
    out = build / "converted" / f"{model.parent.name}-{model.name}-{DTYPES[dtype]}.gguf"
    newest = max(path.stat().st_mtime for path in model.glob("*.safetensors"))
    if not out.exists() or out.stat().st_mtime < newest:
        out.parent.mkdir(exist_ok=True)
        script = str(Path(__file__).with_name("to_gguf.py"))
        unfinished = out.with_suffix(".part")
        command = [sys.executable, script, str(build), str(model), str(unfinished), DTYPES[dtype]]
        if dtype == "int4":
            target = str(converted(build, model, "bfloat16"))
            command = [
                str(build / "build" / "bin" / "llama-quantize"),
                target,
                str(unfinished),
                DTYPES[dtype],
            ]
        subprocess.run(command, check=True, stdout=sys.stderr)
        os.replace(unfinished, out)
    return out


def server_command(options: WorkerOptions, port: int) -> list[str]:
    """Return llama-server's command with the options of a mode; its slots share the context."""
    assert options.build is not None
    threads = str(options.threads)
    k = str(options.draft_max)
    dtype = "int4" if options.int4 else options.dtype
    command = [str(options.build / "build" / "bin" / "llama-server")]
    command += ["-m", str(converted(options.build, options.model, dtype))]
    command += ["--host", "127.0.0.1", "--port", str(port), "-t", threads, "-tb", threads]
    command += ["-np", str(options.slots), "-c", str(options.ctx * options.slots), "--no-warmup"]
    command += ["--cache-ram", "0"]  # no copies of finished requests, which would count as memory
    if options.ngram:
        command += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(NGRAM_MIN)]
        command += ["--spec-ngram-simple-size-m", k]
    elif options.draft is not None:
        command += ["--spec-type", "draft-simple"]
        command += ["-md", str(converted(options.build, options.draft, dtype)), "-td", threads]
        command += ["--spec-draft-n-max", k, "--spec-draft-n-min", "1", "--spec-draft-p-min", "0"]
        if options.imposed is not None:
            rates = imposed_rates(options.imposed, options.draft_max)
            command += ["--spec-synth-rates", ",".join(f"{rate:.6f}" for rate in rates)]
    return command


class LlamaEngine:
    """A running server."""

    def __init__(self, options: WorkerOptions, port: int | None = None) -> None:
        self.speculates = options.ngram or options.draft is not None
        self.port = port if port is not None else _free_port()
        self.version = "unknown"
        if port is None:
            command = server_command(options, self.port)
            help_text = subprocess.run(
                [command[0], "--version"], capture_output=True, text=True, check=True
            )
            self.version = (
                (help_text.stdout + help_text.stderr).split("version:")[-1].split("\n")[0].strip()
            )
            self.server = subprocess.Popen(
                command, stdout=sys.stderr, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent
            )
            self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + LOAD_SECONDS
        while time.monotonic() < deadline:
            if self.server.poll() is not None:
                raise RuntimeError(f"llama-server ended with status {self.server.returncode}")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.02)
        raise RuntimeError(f"llama-server was not ready in {LOAD_SECONDS:.0f} s")

    def versions(self) -> Mapping[str, str]:
        """Return llama.cpp's version."""
        return {"llama": self.version}

    def generate(self, prompt_ids: Sequence[int], tokens: int, **extra: Any) -> Generation:
        """Generate one request alone."""
        result = self.run([prompt_ids], tokens, 1, None)
        (generation,) = result.requests
        counted = result.speculation
        if counted is None:
            return generation
        extra = {
            "speculation": asdict(counted),
            "tokens_per_step": 1 + counted.accepted / counted.drafts,
        }
        return Generation(generation.token_ids, generation.chunks, extra)

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        concurrency: int,
        arrivals: list[float] | None,
    ) -> PassResult:
        """Run requests `concurrency` at a time, or each at its second in `arrivals`."""
        began = time.perf_counter()

        def ask(number: int) -> tuple[Generation, Mapping[str, Any]]:
            if arrivals is not None:
                time.sleep(max(0.0, began + arrivals[number] - time.perf_counter()))
            return self._ask(prompts[number], tokens)

        workers = len(prompts) if arrivals is not None else concurrency
        with ThreadPoolExecutor(workers) as pool:
            answers = list(pool.map(ask, range(len(prompts))))
        seconds = time.perf_counter() - began
        counted = self._counted([timings for _, timings in answers], tokens)
        return PassResult(seconds, [generation for generation, _ in answers], counted)

    def _ask(self, prompt: Sequence[int], tokens: int) -> tuple[Generation, Mapping[str, Any]]:
        body = {
            "prompt": list(prompt),
            "n_predict": tokens + WITHHELD,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "cache_prompt": False,
        }
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LOAD_SECONDS)
        began = time.perf_counter()
        connection.request(
            "POST", "/completion", json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(
                f"llama-server answered {response.status}: {response.read()[:400]!r}"
            )
        ids: list[int] = []
        chunks: list[Chunk] = []
        timings: Mapping[str, Any] = {}
        for event in _events(response):
            new = event.get("tokens", []) if not event["stop"] else []
            if new:
                ids += new
                chunks.append(Chunk(time.perf_counter() - began, len(new)))
            timings = event.get("timings", timings)
        connection.close()
        return Generation(ids[:tokens], first_tokens(chunks, tokens), {}), timings

    def _counted(self, timings: Sequence[Mapping[str, Any]], tokens: int) -> Speculation | None:
        """Return sums of the server's counters; a step without drafts counts as a round."""
        if not self.speculates:
            return None
        accepted = sum(timing.get("draft_n_accepted", 0) for timing in timings)
        drafted = sum(timing.get("draft_n", 0) for timing in timings)
        rounds = sum(timing.get("predicted_n", tokens) - 1 for timing in timings) - accepted
        return Speculation(rounds, drafted, accepted, ()) if drafted else None


def first_tokens(chunks: Sequence[Chunk], tokens: int) -> list[Chunk]:
    """Return the chunks of the first `tokens` tokens, the last one cut."""
    cut_chunks: list[Chunk] = []
    for chunk in chunks:
        if tokens > 0:
            cut_chunks.append(Chunk(chunk.seconds, min(chunk.tokens, tokens)))
        tokens -= chunk.tokens
    return cut_chunks


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """Yield the objects of a stream of server-sent events."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line[6:])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(serve(LlamaEngine))
