"""Ranks as processes: equal text over gloo, counted exchanges, and ends of every kind that leave nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spd import demo_folder
from spd.errors import EngineError
from spd.formats.model_config import read_model_config
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.parallel import cost
from spd.runtime.row_buckets import bucket_for
from tests.helpers import make_engine, random_prompts, run_all

PROMPTS = [*random_prompts(1, 75, 256), *random_prompts(1, 20, 256, seed=1)]
PARAMS = [SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=0.9, seed=4)]
ENDS_WITHIN = 30
"""Seconds in which a run whose rank is lost has to end."""


def damped(layer: int) -> float:
    return 1.0 if layer < 2 else 0.12


def crew_of(engine: Engine) -> Any:
    return engine._device.crew  # type: ignore[attr-defined]


def pids(engine: Engine) -> list[int]:
    return [process.pid for process in crew_of(engine)._processes.values()]


def gone(pid: int) -> bool:
    """Whether a process has ended: a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until(true: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while not true() and time.monotonic() < until:
        time.sleep(0.05)
    return true()


@contextmanager
def nothing_is_left(engine: Engine) -> Iterator[None]:
    started, shared = pids(engine), set(Path("/dev/shm").iterdir())
    yield
    assert wait_until(lambda: all(map(gone, started)), ENDS_WITHIN)
    assert set(Path("/dev/shm").iterdir()) <= shared


def test_tokens_traffic_memory_and_sockets(tiny: Callable[..., Path]) -> None:
    """Over gloo: the text of one rank; what is exchanged a round is what the formula says."""
    target = tiny("qwen3", layers=4, residual_gain=damped, seed=3)
    draft = tiny("qwen3", layers=2, residual_gain=damped, seed=3)
    wishes: dict[str, Any] = {"spec": "draft", "draft_model": draft, "draft_max": 3}
    plain = [run.output for run in run_all(make_engine(target), PROMPTS, PARAMS)]
    for group in (1, 2):
        engine = make_engine(target, tp=2, draft_tp=group, **wishes)
        with nothing_is_left(engine):
            assert [run.output for run in run_all(engine, PROMPTS, PARAMS)] == plain
            before, rounds = crew_of(engine).reports(), engine.totals.rounds
            list(engine.stream([Request("x", PROMPTS[1][:1], SamplingParams(max_tokens=12, seed=1))]))
            after, rounds = crew_of(engine).reports(), engine.totals.rounds - rounds
            check_traffic(engine, target, draft, group, before, after, rounds)
            assert listening(pids(engine)) <= {"0100007F"}, "sockets listen on loopback only"
            engine.close()


def listening(processes: list[int]) -> set[str]:
    """Addresses on which processes, this one too, listen: IPv4 in hexadecimal, as the kernel shows them."""
    inodes = set()
    for pid in (*processes, os.getpid()):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(descriptor).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    assert found, "ranks listen to each other"
    return found


def check_traffic(
    engine: Engine, target: Path, draft: Path, group: int, before: Any, after: Any, rounds: int
) -> None:
    """A prompt of one token has no prefill: its rounds are all that is exchanged."""
    config, small, k = read_model_config(target), read_model_config(draft), engine.plan.draft_max
    buckets = engine._parts.runner.buckets
    assert buckets is not None
    each = cost.pass_exchange(config, 2, bucket_for(k + 1, buckets), 4) + cost.draw_exchange(2, k + 1)
    expected = each.times(rounds)
    narrow = engine._parts.proposer.runner.buckets  # type: ignore[union-attr]
    first, later = bucket_for(2, narrow), bucket_for(1, narrow)
    drafting = cost.pass_exchange(small, group, first, 4)
    drafting += cost.pass_exchange(small, group, later, 4).times(k - 1)
    drafting += cost.draw_exchange(group, 1).times(k)
    for rank in (0, 1):
        delta = {
            name: tuple(b - a for a, b in zip(before[rank][name], after[rank][name], strict=True))
            for name in ("target", "draft", "share")
        }
        shared = cost.shared_drafts(2, group, 1, k, rank).times(rounds)
        assert delta["target"] == (expected.collectives, expected.bytes)
        assert delta["draft"] == (drafting.times(rounds).collectives, drafting.times(rounds).bytes)
        assert delta["share"] == (shared.collectives, shared.bytes)
        assert group == 2 or delta["draft"] == (0, 0)


LONG = SamplingParams(max_tokens=4000, ignore_eos=True)


def run_until_lost(engine: Engine, harm: Callable[[int], None], prompt: tuple[int, ...], after: int) -> str:
    """Run, do harm to rank 1 after some steps, and return how the run ended."""
    engine.add(Request("a", prompt, LONG))
    for _ in range(after):
        engine.step()
    victim, began = pids(engine)[0], time.monotonic()
    harm(victim)
    with pytest.raises(EngineError) as caught:
        while time.monotonic() < began + 2 * ENDS_WITHIN:
            engine.step()
    assert time.monotonic() - began < ENDS_WITHIN
    assert caught.value.exit_code == 9
    return caught.value.message


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stopped(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


@pytest.mark.parametrize(
    ("harm", "after", "said"),
    [
        (killed, 4, "rank 1: was ended by SIGKILL"),
        pytest.param(killed, 0, "rank 1: was ended by SIGKILL", marks=pytest.mark.slow),
        pytest.param(stopped, 4, "rank 1: has not answered", marks=pytest.mark.slow),
    ],
    ids=["killed while decoding", "killed before the prefill", "stopped"],
)
def test_a_lost_rank_ends_the_run(
    harm: Callable[[int], None], after: int, said: str, tiny: Callable[..., Path]
) -> None:
    engine = make_engine(tiny("qwen3", max_positions=4096), tp=2, ctx=4096)
    with nothing_is_left(engine):
        assert said in run_until_lost(engine, harm, random_prompts(1, 300, 256)[0], after)
        assert run_again(engine) and not engine.abort("a")
        engine.close()


def run_again(engine: Engine) -> bool:
    """What comes after the end is refused, and at once."""
    began = time.monotonic()
    with pytest.raises(EngineError):
        engine.add(Request("b", (1, 2, 3), PARAMS[0]))
        engine.step()
    return time.monotonic() - began < 5


ASLEEP = """
import sys, threading, time
from spd.runtime.layers import attention
rank_sleeps = {rank}
def wrap():
    honest = attention.Attention.__call__
    def slow(self, *args):
        slow.calls += 1
        if slow.calls == {calls}:
            {act}
        return honest(self, *args)
    slow.calls = 0
    attention.Attention.__call__ = slow
"""


def with_fault(monkeypatch: pytest.MonkeyPatch, act: str, calls: int) -> None:
    """Ranks other than rank 0 run with a fault in their `calls`-th attention."""
    from spd.runtime.parallel import crew

    lines = ASLEEP.format(rank=1, calls=calls, act=act)
    program = crew.PROGRAM.replace("from spd.cli.rank", f"{lines}\nwrap()\nfrom spd.cli.rank")
    monkeypatch.setattr(crew, "PROGRAM", program)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("act", "calls", "said"),
    [
        ("time.sleep(600)", 60, "rank 1: has kept the others waiting"),
        ("time.sleep(600)", 1, "rank 1: has kept the others waiting"),
        ("raise ValueError('no such page')", 60, "rank 1: ValueError: no such page"),
        ("raise ValueError('no such page')", 1, "rank 1: ValueError: no such page"),
        ("import os; os.kill(os.getpid(), 9)", 1, "rank 1: was ended by SIGKILL"),
    ],
)
def test_a_rank_that_sleeps_or_fails_is_named(
    act: str, calls: int, said: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it loads (the first attention is the probe's) and while it decodes."""
    with_fault(monkeypatch, act, calls)
    began = time.monotonic()
    with pytest.raises(EngineError) as caught:
        engine = make_engine(tiny("qwen3"), tp=2)
        engine.add(Request("a", PROMPTS[0], LONG))
        while time.monotonic() < began + 2 * ENDS_WITHIN:
            engine.step()
    assert said in caught.value.message and caught.value.exit_code == 9


@pytest.mark.slow
def test_a_killed_parent_takes_its_ranks_along() -> None:
    command = [sys.executable, "-m", "spd", "generate", "-m", "demo", "--tp", "2", "--raw", "--ignore-eos"]
    process = subprocess.Popen([*command, "-n", "4000", "def f():"], stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.read(1)
    children = [
        int(pid)
        for task in Path(f"/proc/{process.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    assert children
    process.kill()
    process.wait()
    process.stdout.close()
    assert wait_until(lambda: all(map(gone, children)), ENDS_WITHIN)


@pytest.mark.slow
def test_the_command_line_ends_with_9(tiny: Callable[..., Path]) -> None:
    """One terminal: what a rank's end leaves behind is one error that names it."""
    command = [sys.executable, "-m", "spd", "generate", "-m", "demo", "--tp", "2", "--raw", "--ignore-eos"]
    process = subprocess.Popen(
        [*command, "-n", "4000", "def f():"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.read(1)
    children = [
        int(pid)
        for task in Path(f"/proc/{process.pid}/task").iterdir()
        for pid in (task / "children").read_text().split()
    ]
    os.kill(children[0], signal.SIGKILL)
    _, said = process.communicate(timeout=2 * ENDS_WITHIN)
    assert process.returncode == 9
    assert b"rank 1: was ended by SIGKILL" in said and b"Traceback" not in said


@pytest.mark.slow
def test_a_rank_holds_its_part(tiny: Callable[..., Path]) -> None:
    """Memory beyond that of a rank of a tiny model: a half and a quarter of the whole, and what is shared."""
    large = tiny(
        "llama2", hidden=512, intermediate=4096, layers=8, heads=8, kv_heads=8, head_dim=64, vocab=8192
    )
    found, planned = {}, {}
    for ranks in (2, 4):
        peaks = {}
        for name, folder in (("tiny", tiny("llama2")), ("large", large)):
            engine = make_engine(folder, tp=ranks)
            peaks[name] = max(told["own"] for rank, told in crew_of(engine).reports().items() if rank)
            planned[ranks] = engine.plan.weight_bytes
            engine.close()
        found[ranks] = peaks["large"] - peaks["tiny"]
    assert planned[4] == pytest.approx(planned[2] / 2, rel=0.01)
    for ranks, own in found.items():
        assert planned[ranks] * 0.9 < own < planned[ranks] * 1.3 + 32 * 2**20, (ranks, found, planned)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", ["off", "ngram", "draft", "mtp"])
def test_the_demo_over_gloo(method: str, ranks: int) -> None:
    """The demo's own drafters, at every size of their groups that there is."""
    prompts = [tuple(range(70, 90)), tuple(range(300, 420))]
    wishes = {} if method == "off" else {"draft_max": 3}
    plain = [run.output for run in run_all(make_engine(demo_folder()), prompts, PARAMS)]
    accepted = None
    for group in [n for n in (1, 2, 4) if n <= ranks and (method == "mtp" or n == 1)]:
        engine = make_engine(demo_folder(), spec=method, tp=ranks, draft_tp=group, **wishes)
        with nothing_is_left(engine):
            runs = run_all(engine, prompts, PARAMS)
            assert [run.output for run in runs] == plain, group
            accepted = accepted or [run.drafts for run in runs]
            assert [run.drafts for run in runs] == accepted, group
            engine.close()


@pytest.mark.slow
def test_eight_ranks_and_every_group(tiny: Callable[..., Path]) -> None:
    target = tiny("gqa1", layers=4, residual_gain=damped, seed=3)
    draft = tiny("gqa1", layers=2, residual_gain=damped, seed=3)
    plain = [run.output for run in run_all(make_engine(target), PROMPTS, PARAMS)]
    for group in (1, 2, 4, 8):
        wishes: dict[str, Any] = {"spec": "draft", "draft_model": draft, "draft_max": 3}
        engine = make_engine(target, tp=8, draft_tp=group, **wishes)
        with nothing_is_left(engine):
            runs = run_all(engine, PROMPTS, PARAMS)
            assert [run.output for run in runs] == plain, group
            records = [record for run in runs for record in run.rounds]
            drafts = sum(record.draft_forwards for record in records)
            print(f"draft TP {group}: {sum(r.ms['draft'] for r in records) / drafts:.2f} ms a draft token")
            engine.close()


@pytest.mark.slow
def test_two_agents_of_torchrun_are_one_run(tmp_path: Path) -> None:
    """As on two machines, met over loopback: rank 0 alone answers, with the text of ranks that it starts."""
    wanted = ["-m", "spd", "generate", "-m", "demo", "--tp", "2", "--spec", "mtp", "--draft-tp", "1", "--raw"]
    wanted += ["--dtype", "float32", "--temperature", "0", "--ctx", "256", "--threads", "1", "-n", "12"]
    wanted += ["def read_lines(path):"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    agent += ["--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
    second = subprocess.Popen([*agent, "1", *wanted], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    first = subprocess.run([*agent, "0", *wanted], capture_output=True, timeout=240, check=False)
    said, _ = second.communicate(timeout=60)
    alone = subprocess.run([sys.executable, *wanted], capture_output=True, timeout=120, check=True)
    assert (first.returncode, second.returncode, said) == (0, 0, b"")
    assert first.stdout == alone.stdout and len(alone.stdout) > 10


@pytest.mark.slow
def test_more_ranks_than_torchrun_started(tmp_path: Path) -> None:
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*agent, "-m", "spd", "generate", "-m", "demo", "--tp", "4", "-n", "4", "Hi"]
    done = subprocess.run(command, capture_output=True, timeout=240, check=False)
    assert done.returncode and b"--tp 4, but torchrun started 2 ranks" in done.stderr
