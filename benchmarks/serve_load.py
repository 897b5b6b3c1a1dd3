"""What serving costs: a load by guidellm, the front beside the bare engine, vLLM's server, and warm commands.

    python -m benchmarks.serve_load --guidellm PROGRAM [--vllm PYTHON] [--medium FOLDER] [--seconds 15]
                                    [--threads N] [--only PART,...] [--out FILE]

Parts: `rates` asks the demo so many times a second; `overhead` has 16 requests decode together in the engine
alone and through the server, in turns; `peer` has 16 clients of guidellm ask spd and vLLM for the 0.35 B
checkpoint, which `python tests/recipes/medium.py FOLDER` writes; `warm` is the time from Enter to the first
byte of `spd generate` with a server and without one, in turns. FILE keeps parts that a later call leaves out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.environment import ForeignLoad, describe_commit, describe_machine, group_cpu_seconds
from benchmarks.peers.entries import find_preload
from benchmarks.summaries import paired_ratio, summarize
from spd.cli.commands.serve import ServeOptions
from spd.cli.run_settings import plan_settings
from spd.formats.demo import demo_folder
from spd.runtime import Engine, Request, SamplingParams

SCHEMA = "spd.benchmarks.serve_load/1"
PARTS = "rates", "overhead", "peer", "warm"
RATES = 1, 2, 4, 8, 16, 32
TOGETHER = 16
CTX = 1024
PROMPT = 64
TOKENS = 64
ROUNDS = 5
RUNS = 20
LONGEST = 60
QUESTION = "What does os.path.join do?"


@contextmanager
def running(
    command: Sequence[str], ready: str, **environment: str
) -> Iterator[tuple[int, re.Match[str]]]:
    """Run a server in a process group of its own; yield it and its ready message."""
    with tempfile.TemporaryFile("w+") as log:
        environment = {**os.environ, "SPD_CONFIG": os.devnull, **environment}
        server = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            ends = time.monotonic() + 600
            while (match := re.search(ready, os.pread(log.fileno(), 1 << 20, 0).decode())) is None:
                if server.poll() is not None or time.monotonic() > ends:
                    raise RuntimeError(os.pread(log.fileno(), 1 << 20, 0).decode()[-2000:])
                time.sleep(0.1)
            yield server.pid, match
        finally:
            server.send_signal(signal.SIGTERM)
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)


@contextmanager
def serving(home: str, options: ServeOptions) -> Iterator[tuple[int, int]]:
    """Run a server of spd; yield its process and port."""
    words = [f"--{name}={value}" for name in ("spec", "ctx", "concurrency", "threads")
             if (value := getattr(options, name)) is not None]  # fmt: skip
    command = [sys.executable, "-m", "spd", "serve", options.model, "--port", "0", *words]
    with running(command, r":(\d+)/v1 \(", XDG_RUNTIME_DIR=home) as (process, match):
        yield process, int(match[1])


def guidellm(
    arguments: argparse.Namespace, port: int, model: str, folder: Path, count: int, profile: str
) -> list[dict[str, Any]]:
    """Return figures of each load of `count` requests of guidellm that ends in a minute."""
    with tempfile.TemporaryDirectory() as home:
        data = Path(home) / "data.jsonl"
        out = Path(home) / "out.json"
        lines = (
            {"prompt": f"{i}. {QUESTION}", "output_tokens_count": TOKENS // 2} for i in range(4000)
        )
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        chat = "/v1/chat/completions" if model == "demo" else "/v1/completions"
        target = f"target=http://127.0.0.1:{port},model={model},http2=false,request_format={chat}"
        command = [arguments.guidellm, "run", "--backend", f"kind=openai_http,{target}"]
        command += ["--constraint", f"kind=max_requests,count={count}"]
        command += ["--constraint", f"kind=max_duration,seconds={LONGEST}"]
        command += ["--data", f"kind=json_file,path={data}", "--disable-console"]
        command += ["--profile", profile]
        command += ["--tokenizer", f"kind=huggingface_auto,model={folder}"]
        command += ["--output", f"kind=json,path={out}"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(ran.stderr[-2000:] or ran.stdout[-2000:])
        return [figures_of(benchmark) for benchmark in json.loads(out.read_text())["benchmarks"]]


def figures_of(benchmark: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of one load of guidellm: counts, tokens a second, ms at p50 and p99."""
    metrics = benchmark["metrics"]
    figures = dict[str, Any]()
    figures["requests"] = metrics["request_totals"]
    for name, key in (("ttft_ms", "time_to_first_token_ms"), ("itl_ms", "inter_token_latency_ms")):
        percentiles = metrics[key]["successful"]["percentiles"]
        figures[name] = {at: round(percentiles[at], 2) for at in ("p50", "p99")}
    figures["tokens_per_second"] = round(
        metrics["output_token_count"]["successful"]["total_sum"] / benchmark["duration"], 1
    )
    return figures


def measure_rates(arguments: argparse.Namespace, home: str) -> list[dict[str, Any]]:
    """Measure the demo at each rate; its prompts differ, so that each has a prefill."""
    options = ServeOptions(model="demo", concurrency=TOGETHER, threads=arguments.threads)
    rows = []
    with serving(home, options) as (_, port):
        folder = demo_folder()
        for rate in RATES:
            profile = f"kind=poisson,rate={rate}"
            count = rate * arguments.seconds
            (figures,) = guidellm(
                arguments=arguments,
                port=port,
                model="demo",
                folder=folder,
                count=count,
                profile=profile,
            )
            rows.append({"rate": rate, **figures})
            print(rows[-1], flush=True)
    return rows


def measure_overhead(arguments: argparse.Namespace, home: str) -> dict[str, Any]:
    """Measure tokens a second and CPU of 16 requests, bare and served, in turns.

    Models: the demo and the 0.35 B.
    """
    overheads: dict[str, Any] = {}
    for model in ("demo", *([] if arguments.medium is None else [str(arguments.medium)])):
        options = ServeOptions(
            model=model, spec="off", ctx=CTX, concurrency=TOGETHER, threads=arguments.threads
        )
        engine = Engine(plan_settings(options.to_generate_options()).config)
        rows: list[dict[str, float]] = []
        with serving(home, options) as (process, port):
            for number in range(-1, ROUNDS):
                draws = random.Random(number)
                prompts = [
                    [draws.randrange(300, 3000) for _ in range(PROMPT)] for _ in range(TOGETHER)
                ]
                foreign = ForeignLoad(os.getpgid(0))
                seconds, cpu = bare(engine, prompts)
                before = group_cpu_seconds(process)
                served_seconds, events = together(port, prompts)
                served_cpu = group_cpu_seconds(process) - before
                if number >= 0:  # the first one warms up
                    medians = {
                        "bare": seconds,
                        "served": served_seconds,
                        "bare_cpu": cpu,
                        "served_cpu": served_cpu,
                    }
                    rows.append({**medians, "events": events, "foreign_cpus": foreign.read()[0]})
        engine.close()
        ratio = paired_ratio([row["served"] for row in rows], [row["bare"] for row in rows])
        cpu_us = [1e6 * (row["served_cpu"] - row["bare_cpu"]) / row["events"] for row in rows]
        overheads["demo" if model == "demo" else "0.35 B"] = {
            "tokens_per_second": {
                name: round(TOGETHER * TOKENS / summarize([row[name] for row in rows]).median, 1)
                for name in ("bare", "served")
            },
            "served_over_bare": ratio.as_dict(),
            "cpu_us_an_event": summarize(cpu_us).as_dict(),
            "rounds": rows,
        }
        print(model, "served / bare:", ratio, "· CPU µs an event:", summarize(cpu_us), flush=True)
    return overheads


def bare(engine: Engine, prompts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return seconds and CPU seconds of an engine for these prompts together."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    requests = [
        Request(f"{time.monotonic_ns()}-{i}", tuple(ids), params) for i, ids in enumerate(prompts)
    ]
    began = time.perf_counter()
    cpu = time.process_time()
    for _ in engine.stream(requests):
        pass
    return time.perf_counter() - began, time.process_time() - cpu


def together(port: int, prompts: Sequence[Sequence[int]]) -> tuple[float, int]:
    """Return the seconds in which a server streams the replies, and the number of their events."""
    shared = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    heads = []
    for prompt in prompts:
        body = json.dumps({"prompt": prompt, **shared}).encode()
        line = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n"
        heads.append(f"{line}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    began = time.perf_counter()
    replies = {}
    with selectors.DefaultSelector() as waiting:
        for head in heads:
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(head)
            replies[connection] = bytearray()
            waiting.register(connection, selectors.EVENT_READ)
        while waiting.get_map():
            for key, _ in waiting.select():
                ready = key.fileobj
                assert isinstance(ready, socket.socket)
                if data := ready.recv(1 << 16):
                    replies[ready] += data
                else:
                    waiting.unregister(ready)
    seconds = time.perf_counter() - began
    for connection, reply in replies.items():
        connection.close()
        if b"data: [DONE]" not in reply:
            raise RuntimeError(reply[-500:].decode())
    return seconds, sum(reply.count(b"data: {") for reply in replies.values())


def measure_peer(arguments: argparse.Namespace, home: str) -> dict[str, Any]:
    """Let 16 clients at once ask for the 0.35 B: spd's server, then vLLM's."""
    profile = f"kind=concurrent,streams={TOGETHER}"
    figures = dict[str, Any]()
    options = ServeOptions(
        model=str(arguments.medium),
        spec="off",
        ctx=CTX,
        concurrency=TOGETHER,
        threads=arguments.threads,
    )
    with serving(home, options) as (_, port):
        (figures["spd"],) = guidellm(
            arguments=arguments,
            port=port,
            model=str(arguments.medium),
            folder=arguments.medium,
            count=4 * TOGETHER,
            profile=profile,
        )
    print("spd", figures["spd"], flush=True)
    if arguments.vllm is None:
        return figures
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        arguments.vllm,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(arguments.medium),
    ]
    command += ["--port", str(port), "--max-model-len", str(CTX), "--max-num-seqs", str(TOGETHER)]
    command += ["--dtype", "bfloat16", "--enforce-eager"]  # its compiler takes longer than the run
    environment = {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment |= {"HF_HUB_OFFLINE": "1", "LD_PRELOAD": find_preload(Path(arguments.vllm))}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    try:
        with running(command, "Application startup complete", **environment):
            (figures["vllm"],) = guidellm(
                arguments=arguments,
                port=port,
                model=str(arguments.medium),
                folder=arguments.medium,
                count=4 * TOGETHER,
                profile=profile,
            )
    except RuntimeError as error:
        figures["vllm"] = {"failed": str(error)}
    print("vllm", figures["vllm"], flush=True)
    return figures


def measure_warm(arguments: argparse.Namespace, home: str) -> dict[str, Any]:
    """Return milliseconds from Enter to the first byte, warm and cold, in turns."""
    options = ServeOptions(model="demo", threads=arguments.threads)
    seconds: dict[str, list[float]] = {"warm": [], "cold": []}
    threads = [] if arguments.threads is None else [f"--threads={arguments.threads}"]
    command = [
        sys.executable,
        "-m",
        "spd",
        "generate",
        *threads,
        "--temperature=0",
        "-n",
        "8",
        QUESTION,
    ]
    environment = {**os.environ, "SPD_CONFIG": os.devnull, "XDG_RUNTIME_DIR": home}
    environment |= {
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": home,
    }  # as it is once installed
    with serving(home, options):
        for _ in range(RUNS + 1):
            for name, flags in (("warm", []), ("cold", ["--no-server"])):
                began = time.perf_counter()
                with subprocess.Popen(
                    [*command, *flags], env=environment, stdout=subprocess.PIPE
                ) as process:
                    assert process.stdout is not None
                    os.read(process.stdout.fileno(), 1)
                    seconds[name].append(1000 * (time.perf_counter() - began))
                    process.stdout.read()
    figures = {
        name: summarize(values[1:]) for name, values in seconds.items()
    }  # the first one fills caches
    medians = " ".join(f"{name} {value}" for name, value in figures.items())
    print(f"first byte, ms: {medians}", flush=True)
    return {name: value.as_dict() for name, value in figures.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the parts that are asked for, and write them beside the others."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve_load", description=__doc__)
    parser.add_argument("--guidellm", help="the program; rates and peer need it")
    parser.add_argument("--vllm", help="an interpreter that has vllm-cpu")
    parser.add_argument("--medium", type=Path, help="the 0.35 B checkpoint")
    parser.add_argument("--seconds", type=int, default=15, help="for which each rate is asked")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    earlier = (
        json.loads(options.out.read_text())
        if options.out is not None and options.out.exists()
        else {}
    )
    head = {"schema": SCHEMA, **describe_commit("spd", "benchmarks/serve_load.py")}
    result = {**earlier, **head, "machine": describe_machine(), "together": TOGETHER}
    measures = {
        "rates": measure_rates,
        "overhead": measure_overhead,
        "peer": measure_peer,
        "warm": measure_warm,
    }
    with tempfile.TemporaryDirectory(prefix="spd-load-") as home:
        for part in options.only.split(","):
            if (part != "peer" or options.medium) and (
                part not in ("rates", "peer") or options.guidellm
            ):
                result[part] = measures[part](options, home)
                if options.out is not None:
                    options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
