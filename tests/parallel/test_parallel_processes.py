"""Ranks as processes: equal text over gloo, counted exchanges, memory, and other ways to start."""

import json
import os
import socket
import subprocess
import sys
from contextlib import suppress
from operator import sub
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from docs.parallel_tables import logits_exchange, pass_exchange
from spd.formats.chat_template import isolated_command
from spd.runtime import Engine, Request, SamplingParams
from spd.runtime.proposers.draft_model import DraftModelProposer
from spd.runtime.ranks import leader
from spd.runtime.ranks.leader import LeadingQueue
from spd.runtime.round.row_padding import padded_row_count
from tests import helpers
from tests.helpers import (
    INTERPRETER_MARKS,
    Patch,
    Prompt,
    Tiny,
    collect_drafts,
    collect_outputs,
    make_engine,
    random_prompts,
    run_all,
)
from tests.parallel.process_ranks import (
    assert_nothing_is_left,
    count_traffic,
    process_ids_of,
    record_peak_memory,
)

damped = helpers.DampedLayers(full_layers=2)
PROMPTS = [*random_prompts(1, 75, 256), *random_prompts(1, 20, 256, seed=1)]
PARAMS = [SamplingParams(max_tokens=16), SamplingParams(max_tokens=16, temperature=0.9, seed=4)]


@pytest.mark.parametrize("group", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_tokens_traffic_and_sockets_are_those_expected(
    group: int, tiny: Tiny, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Over gloo: the text of one rank, and the traffic of a round as the formula gives it."""
    target = tiny("qwen3", layers=4, residual_gain=damped, seed=3)
    draft = tiny("qwen3", layers=2, residual_gain=damped, seed=3)
    options: dict[str, Any] = {"spec": "draft", "draft_model": draft, "draft_max": 3}
    plain = collect_outputs(run_all(make_engine(target), PROMPTS, PARAMS))
    before_all = listening_addresses([])
    traffic = count_traffic(monkeypatch, tmp_path)
    engine = make_engine(target, tp=2, draft_tp=group, **options)
    with assert_nothing_is_left(engine):
        assert collect_outputs(run_all(engine, PROMPTS, PARAMS)) == plain
        before = traffic(engine)
        rounds = engine.rounds
        list(engine.stream([Request("x", PROMPTS[1][:1], SamplingParams(max_tokens=12, seed=1))]))
        after = traffic(engine)
        rounds = engine.rounds - rounds
        delta = {
            r: {n: tuple(map(sub, after[r][n], before[r][n])) for n in after[r]} for r in (0, 1)
        }
        check_traffic(
            engine=engine, target=target, draft=draft, group=group, delta=delta, rounds=rounds
        )
        addresses = [
            place.split(":")[0]
            for place in listening_addresses(process_ids_of(engine)) - before_all
        ]
        assert addresses == ["0100007F"] * 2, "gloo's, one a rank, on loopback only"
        engine.close()


def listening_addresses(processes: list[int]) -> set[str]:
    """Return the IPv4 addresses and ports where processes listen, this one included."""
    links = [f for pid in (*processes, os.getpid()) for f in Path(f"/proc/{pid}/fd").iterdir()]
    inodes = set()
    for link in links:
        with suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {fields[1] for fields in lines if fields[3] == "0A" and fields[9] in inodes}


def check_traffic(
    engine: Engine, target: Path, draft: Path, group: int, delta: Any, rounds: int
) -> None:
    """Compare the traffic of rounds with the formula: a prompt of one token has no prefill."""
    config, small = map(helpers.read_model_config, (target, draft))
    k = engine.plan.shape.draft_max
    buckets = engine.round_queue.runner.buckets
    assert buckets is not None
    rows = padded_row_count(k + 1, buckets)
    verifying = pass_exchange(config.num_layers, config.hidden_size, rows, 4)
    verifying += logits_exchange(rows, config.vocab_size, 2)
    leading = engine.round_queue
    assert isinstance(leading, LeadingQueue)
    proposer = leading.queue.proposer
    assert isinstance(proposer, DraftModelProposer)
    narrow = proposer.runners[0].buckets
    first = padded_row_count(2, narrow)
    later = padded_row_count(1, narrow)
    drafting = pass_exchange(small.num_layers, small.hidden_size, first, 4)
    drafting += logits_exchange(later, small.vocab_size, 2) * k
    drafting += pass_exchange(small.num_layers, small.hidden_size, later, 4) * (k - 1)
    for rank in (0, 1):
        assert delta[rank]["target"] == (len(verifying) * rounds, sum(verifying) * rounds)
        drafted = (len(drafting) * rounds, sum(drafting) * rounds)
        # Where ranks draft alone, rank 0's ids, of 8 bytes each, go to the other one.
        assert delta[rank]["draft"] == (drafted if group == 2 else (0, 0))
        assert delta[rank]["broadcast_group"] == (
            (0, 0) if group == 2 else (rounds, 8 * k * rounds * rank)
        )


@pytest.mark.slow
def test_a_rank_holds_its_part(tiny: Tiny, tmp_path: Path) -> None:
    """Private memory beyond that of a tiny model's rank is what is planned.

    Pages of files do not count.
    """
    shape = {
        "hidden": 512,
        "intermediate": 4096,
        "layers": 8,
        "heads": 8,
        "head_dim": 64,
        "vocab": 8192,
    }
    large = tiny("llama2", kv_heads=2, **shape)
    undivided_bytes = 0
    for ranks in (1, 2, 4):
        rank_bytes = {}
        for name, folder in (("tiny", tiny("llama2")), ("large", large)):
            engine = make_engine(folder, tp=ranks) if ranks == 1 else None
            if engine is None:
                with record_peak_memory() as held_by:
                    engine = make_engine(folder, tp=ranks)
                    started = process_ids_of(engine)
                    run_all(engine, PROMPTS, PARAMS)
                    engine.close()
                rank_bytes[name] = [held_by[pid] for pid in started]
        planned = engine.plan.need.weights
        undivided_bytes = undivided_bytes or planned
        if ranks == 1:
            continue
        part_bytes = max(rank_bytes["large"]) - min(rank_bytes["tiny"])
        print(
            f"{ranks} ranks: {part_bytes / 2**20:.1f} MiB; weights {planned / 2**20:.1f} MiB planned"
        )
        assert undivided_bytes / ranks <= planned < undivided_bytes / ranks * 1.1
        assert 0.95 * planned < part_bytes < 1.15 * planned + 8 * 2**20


@pytest.mark.slow
@INTERPRETER_MARKS[0]
@INTERPRETER_MARKS[1]
def test_tritons_kernels_match_one_rank_on_two(tiny: Tiny) -> None:
    """In the interpreter: the tokens of one rank and of torch's kernels, plain and with drafts."""
    prompts: list[Prompt] = [(5, 6, 5, 6, 5, 6)]
    params = [SamplingParams(max_tokens=3, ignore_eos=True)]
    target = tiny("qwen3")
    plain = collect_outputs(run_all(make_engine(target), prompts, params))
    for spec in ({"spec": "off"}, {"spec": "ngram", "ngram_min": 1, "draft_max": 2}):
        engine = make_engine(target, tp=2, kernels="triton", ctx=64, **spec)
        with assert_nothing_is_left(engine):
            assert collect_outputs(run_all(engine, prompts, params)) == plain, spec
            engine.close()


@pytest.mark.slow
def test_eight_ranks_match_one_with_every_group(tiny: Tiny, monkeypatch: Patch) -> None:
    """With so few positions no row counts are tried, which would take eight ranks longest."""
    monkeypatch.setattr(leader, "START_SECONDS", 600)  # eight import torch on few cores
    shape = {"residual_gain": damped, "seed": 3, "max_positions": 31}
    target = tiny("gqa1", layers=3, **shape)
    draft = tiny("gqa1", layers=2, **shape)
    prompts = [tuple(range(4, 13)), (7, 7, 9)]
    expected = None
    params = [
        SamplingParams(max_tokens=10, temperature=t, seed=4, ignore_eos=True) for t in (0.0, 0.9)
    ]
    options: dict[str, Any] = {"ctx": 31, "slots": 2}
    plain = collect_outputs(run_all(make_engine(target, **options), prompts, params))
    options |= {"spec": "draft", "draft_model": draft, "draft_max": 3}
    for group in (1, 2, 4, 8):
        engine = make_engine(target, tp=8, draft_tp=group, **options)
        with assert_nothing_is_left(engine):
            runs = run_all(engine, prompts, params)
            expected = expected or collect_drafts(runs)
            assert (collect_outputs(runs), collect_drafts(runs)) == (plain, expected), group
            assert helpers.count_accepted(runs)
            records = [record for run in runs for record in run.rounds if record.draft_forwards]
            draft_ms = median(record.ms["draft"] / record.draft_forwards for record in records)
            print(f"draft TP {group}: {draft_ms:.2f} ms a draft token")
            engine.close()


@pytest.mark.slow
def test_two_agents_of_torchrun_are_one_run_and_no_ranks_are_missing(tmp_path: Path) -> None:
    """As on two machines, over loopback: rank 0 alone prints, with the text of ranks of its own."""
    command_line = [
        "-m",
        "spd",
        "generate",
        "-m",
        "demo",
        "--tp",
        "2",
        "--spec",
        "mtp",
        "--draft-tp",
        "1",
        "--raw",
    ]
    command_line += [
        "--dtype",
        "float32",
        "--temperature",
        "0",
        "--ctx",
        "256",
        "--threads",
        "1",
        "-n",
        "12",
    ]
    command_line += ["def read_lines(path):"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "1",
    ]
    agent += ["--master-addr", "127.0.0.1", "--master-port", port, "--node-rank"]
    second = subprocess.Popen(
        [*agent, "1", *command_line], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    first = subprocess.run(
        [*agent, "0", *command_line], capture_output=True, timeout=240, check=False
    )
    second_output, _ = second.communicate(timeout=60)
    alone = subprocess.run(
        [sys.executable, *command_line], capture_output=True, timeout=120, check=True
    )
    assert (first.returncode, second.returncode, second_output) == (0, 0, b"")
    assert first.stdout == alone.stdout and len(alone.stdout) > 10
    agent = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    command = [*agent, "-m", "spd", "generate", "-m", "demo", "--tp", "4", "-n", "4", "Hi"]
    done = subprocess.run(command, capture_output=True, timeout=240, check=False)
    assert done.returncode and b"--tp 4, but torchrun started 2 ranks" in done.stderr


def test_no_child_takes_code_from_the_working_folder(tmp_path: Path) -> None:
    """Modules and programs lie there under the names that ranks and templates look for."""
    working_folder = tmp_path / "here"
    mark = tmp_path / "mark"
    working_folder.mkdir()
    modules = {"jinja2", "markupsafe", "numpy", "torch", "triton", "sitecustomize"}
    for name in sys.stdlib_module_names | modules:
        (working_folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'a').write('{name} ')")
    for name in ("env", "uname", "ldconfig"):
        (working_folder / name).write_text(f"#!/bin/sh\necho {name} >> {mark}\nexit 1\n")
        (working_folder / name).chmod(0o755)
    argv = [
        "spd",
        "generate",
        "-m",
        "demo",
        "-n",
        "2",
        "--threads",
        "1",
        "--json",
        "--tp",
        "2",
        "Hi",
    ]
    searched = {name: f":.:{os.environ.get(name, '')}" for name in ("PATH", "PYTHONPATH")}
    command = isolated_command(
        f"sys.argv = {argv}; from spd.__main__ import main; sys.exit(main())"
    )
    process_options: dict[str, Any] = {
        "cwd": working_folder,
        "env": os.environ | searched,
        "text": True,
        "timeout": 300,
    }
    done = subprocess.run(command, capture_output=True, **process_options)
    assert not mark.exists(), mark.read_text()
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["plan"]["tp"] == 2
