"""The `spd bench` results of docs/measurements.md: a name is a command line; its single passes are left out.

    python -m benchmarks.bench_results demo [-- --repetitions 3 --threads 1]

What follows `--` is given to `spd bench` too. The file says which command line made it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.environment import ROOT, describe_commit

RESULTS = ROOT / "benchmarks" / "results"
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "demo": "-m demo --spec mtp,eagle3,draft,ngram --draft-max 1,2,3,4 --temperature 0",
        "demo_hybrid": "-m demo-hybrid --spec mtp,ngram --draft-max 1,2,3,4 --temperature 0",
        "pairs": (
            "-m demo --spec mtp,mtp+ngram,eagle3,eagle3+ngram,draft,draft+ngram,ngram --temperature 0,0.8 "
            "--repetitions 7"
        ),
        "concurrency": "-m demo --spec auto --temperature 0 --concurrency 1,2,4,8,16,32,100 --category code",
        "rate_draft_tp": (
            "-m demo --spec mtp --draft-max 2 --temperature 0 --concurrency 16 --rate 1,2,4,6,8 "
            "--tp 2 --draft-tp 1,2 --category code -n 32"
        ),
    }
)
"""Options of `spd bench` by the name of the result."""


def result_file(name: str) -> Path:
    """Return the path of a result."""
    return RESULTS / f"bench_{name}.json"


def command_words(name: str, extra_words: Sequence[str] = ()) -> list[str]:
    """Return the options of a result; `extra_words` override them."""
    words = COMMANDS[name].split()
    for flag in [word for word in extra_words if word.startswith("-") and word in words]:
        at = words.index(flag)
        del words[at : at + 2]
    return [*words, *extra_words]


def main(arguments: Sequence[str]) -> int:
    """Run `spd bench` and keep its rows; returns its status."""
    if not arguments or arguments[0] not in COMMANDS:
        print(
            f"usage: python -m benchmarks.bench_results {'|'.join(COMMANDS)} [-- OPTIONS]",
            file=sys.stderr,
        )
        return 2
    name = arguments[0]
    extra_words = [word for word in arguments[1:] if word != "--"]
    words = command_words(name, extra_words)
    command = [sys.executable, "-m", "spd", "bench", *words, "--json"]
    run = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if not run.stdout.strip():
        return run.returncode or 1
    result = json.loads(run.stdout.replace(f"{ROOT}/", ""))  # folders as the command names them
    if "rows" not in result:
        print(run.stdout, file=sys.stderr)
        return run.returncode or 1
    del result["samples"]
    stored = {"command": " ".join(["spd bench", *words]), **describe_commit(), **result}
    result_file(name).parent.mkdir(parents=True, exist_ok=True)
    result_file(name).write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
    return run.returncode


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
