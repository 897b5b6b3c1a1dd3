"""The parent side of a worker: start it on its CPUs, wait until it is loaded, ask, and end it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from benchmarks.environment import ROOT


class WorkerError(Exception):
    """A worker reported an error, died, or did not answer in time."""


@dataclass(frozen=True)
class Entry:
    """One line of the comparison: a program, its arguments and environment."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    together: bool = True
    """Whether it runs several requests at once."""


@dataclass(frozen=True)
class Answer:
    """The output of one generation, with the figures derived from the arrival times."""

    token_ids: list[int]
    ttft_seconds: float
    decode_tokens_per_second: float
    tokens_per_step: float
    extra: dict[str, Any]
    foreign_cpus: float
    cpu_seconds: float


def read_answer(
    value: Mapping[str, Any], foreign_cpus: float = 0.0, cpu_seconds: float = 0.0
) -> Answer:
    """Derive the figures: tokens after the first chunk over the time after it.

    A chunk is one step, unless the worker says how many tokens a step brought.

    Raises WorkerError when a single chunk came, since then nothing was decoded step by step.
    """
    chunks = value["chunks"]
    if len(chunks) < 2:
        raise WorkerError(f"{len(chunks)} chunks came: no decode step to time")
    first = chunks[0]
    last = chunks[-1]
    later = sum(chunk["tokens"] for chunk in chunks[1:])
    return Answer(
        token_ids=value["token_ids"],
        ttft_seconds=first["seconds"],
        decode_tokens_per_second=later / (last["seconds"] - first["seconds"]),
        tokens_per_step=value["extra"].get("tokens_per_step", later / (len(chunks) - 1)),
        extra=value["extra"],
        foreign_cpus=foreign_cpus,
        cpu_seconds=cpu_seconds,
    )


def peak_memory(group: int) -> int:
    """Return the bytes that were resident at most in the largest process of a process group."""
    peaks = [0]
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):  # of a process that ended meanwhile
            fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
            if os.getpgid(int(fields["Pid"])) == group:
                peaks.append(1024 * int(fields["VmHWM"].split()[0]))
    return max(peaks)


@contextmanager
def exiting_on_terminate() -> Iterator[None]:
    """Let SIGTERM raise SystemExit, so that a benchmark ends its workers.

    A stopped worker would outlive it.
    """
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Worker:
    """A running worker process; stderr goes to `log`."""

    def __init__(self, entry: Entry, log: Path, cpus: Sequence[int]) -> None:
        self.entry = entry
        self.log = log
        self._log = log.open("w", encoding="utf-8")
        environment = {**os.environ, **entry.environment}
        path = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(ROOT) + (os.pathsep + path if path else "")
        # The worker inherits the CPUs of the thread that starts it, so set them around the start.
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cpus)
        try:
            self._process = subprocess.Popen(
                entry.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        finally:
            os.sched_setaffinity(0, before)
        self._buffer = b""

    @property
    def group(self) -> int:
        """Return the process group of the worker and of the processes it starts."""
        return self._process.pid

    def pause(self) -> None:
        """Stop the worker's processes, so that no thread of theirs spins beside another worker."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let the worker's processes run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.poll() is None:
            os.killpg(self.group, number)

    def wait_ready(self, timeout: float) -> dict[str, Any]:
        """Wait for the load to end; returns its versions and seconds."""
        return self._read(timeout)

    def generate(
        self, prompt_ids: Sequence[int], tokens: int, timeout: float, **extra: Any
    ) -> dict[str, Any]:
        """Ask for `tokens` tokens and return the worker's object; see `protocol.Generation`."""
        answer = self._ask(
            {"op": "generate", "prompt_ids": list(prompt_ids), "tokens": tokens, "extra": extra},
            timeout,
        )
        if len(answer["token_ids"]) != tokens:
            raise self._failure(f"gave {len(answer['token_ids'])} tokens, not {tokens}")
        return answer

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        concurrency: int,
        arrivals: Sequence[float] | None,
        timeout: float,
    ) -> dict[str, Any]:
        """Ask for `tokens` tokens of each prompt; return a `protocol.PassResult` as JSON."""
        request = {"op": "pass", "prompts": prompts, "tokens": tokens, "concurrency": concurrency}
        answer = self._ask({**request, "arrivals": arrivals}, timeout)
        for generation in answer["requests"]:
            if len(generation["token_ids"]) != tokens:
                raise self._failure(f"gave {len(generation['token_ids'])} tokens, not {tokens}")
        return answer

    def _ask(self, request: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failure("died") from error
        return self._read(timeout)

    def close(self) -> None:
        """End the process, kindly at first."""
        assert self._process.stdin is not None
        self.resume()
        try:
            self._process.stdin.close()
            self._process.wait(20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._signal(signal.SIGKILL)
            self._process.wait()
        with suppress(ProcessLookupError):
            os.killpg(self.group, signal.SIGKILL)  # what the engine started and left behind
        self._log.close()

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                raise self._failure(f"did not answer in {timeout:.0f} s")
            data = os.read(descriptor, 1 << 20)
            if not data:
                raise self._failure("died")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        value = cast(dict[str, Any], json.loads(line))
        if "error" in value:
            raise WorkerError(f"{self.entry.name}: {value['error'].strip()}")
        return value

    def _failure(self, problem: str) -> WorkerError:
        tail = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]
        return WorkerError(
            "\n  ".join([f"{self.entry.name} {problem}; the end of {self.log}:", *tail])
        )
