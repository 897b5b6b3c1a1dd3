"""The tables of README and docs/measurements.md: `python -m benchmarks.readme_tables --write` makes them.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; a test compares it with
its files.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from benchmarks import table_forms
from benchmarks.environment import ROOT
from benchmarks.suites import tables as suite_tables

PAGES = (ROOT / "README.md", ROOT / "docs" / "measurements.md")
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


@dataclass(frozen=True)
class Table:
    """A table: its result files, the function that renders them, and the command to measure."""

    files: str
    """Names in `benchmarks/results`, with a space between two; the function takes one argument for each."""
    form: Callable[..., str | None]
    command: str

    def text(self, results: Path) -> str:
        """Return the table, or a sentence where nothing was measured."""
        paths = [results / name for name in self.files.split()]
        documents = [
            json.loads(path.read_text(encoding="utf-8")) for path in paths if path.exists()
        ]
        text = self.form(*documents) if len(documents) == len(paths) else None
        return text or textwrap.fill(f"Not measured yet; `{self.command}` does it.", 80) + "\n"


PEERS = "python -m benchmarks.peers MODEL"
BENCH = "python -m benchmarks.bench_results"
EQUALITY = "python -m benchmarks.equality"
SUITES = "python -m benchmarks.suites"
TABLES: Mapping[str, Table] = MappingProxyType(
    {
        "headline": Table(
            "cpu_peers.json cpu_peer_loads.json auto_k.json equality_demo_hybrid.json",
            table_forms.headline,
            f"{PEERS}`, `python -m benchmarks.auto_k -m demo` or `{EQUALITY}",
        ),
        "equality": Table(
            "equality_demo_hybrid.json equality_demo_hybrid_tp2.json equality_demo_hybrid_tp2_float32.json "
            "equality_medium_hybrid.json equality_medium_hybrid_draft.json "
            "equality_medium_hybrid_float32.json equality_demo_int4.json equality_demo_int4_float32.json "
            "equality_demo_int4_avx512.json equality_gguf_types.json equality_smollm2.json "
            "equality_gemma3_270m.json",
            table_forms.equality,
            EQUALITY,
        ),
        "serve_equality": Table(
            "serve_equality.json", table_forms.serve_equality, "python -m benchmarks.serve_equality"
        ),
        "serve_load": Table(
            "serve_load.json", table_forms.serve_load, "python -m benchmarks.serve_load"
        ),
        "cpu_peers": Table("cpu_peers.json", table_forms.cpu_peers, PEERS),
        "peer_loads": Table(
            "cpu_peer_loads.json",
            table_forms.peer_loads,
            f"{PEERS} --concurrency 1,4,16 --rates 1,2,4,6,8",
        ),
        "peer_demo": Table(
            "cpu_peer_demo.json",
            table_forms.peer_loads,
            "python -m benchmarks.peers spd/formats/demo --concurrency 1,4,16",
        ),
        "acceptance": Table(
            "acceptance.json", table_forms.acceptance, "python -m benchmarks.acceptance"
        ),
        "bench_demo": Table("bench_demo.json", table_forms.bench_demo, f"{BENCH} demo"),
        "bench_pairs": Table("bench_pairs.json", table_forms.bench_pairs, f"{BENCH} pairs"),
        "bench_concurrency": Table(
            "bench_concurrency.json", table_forms.bench_concurrency, f"{BENCH} concurrency"
        ),
        "bench_rate_draft_tp": Table(
            "bench_rate_draft_tp.json", table_forms.bench_rate_draft_tp, f"{BENCH} rate_draft_tp"
        ),
        "gpu_gates": Table(
            "gpu_suite.json", table_forms.gpu_gates, "python -m benchmarks.gpu_suite"
        ),
        "auto_k": Table("auto_k.json", table_forms.auto_k, "python -m benchmarks.auto_k"),
        "host_cost": Table(
            "host_cost.json", table_forms.host_cost, "python -m benchmarks.host_cost"
        ),
        "explain_check": Table(
            "explain_check.json", table_forms.explain_check, "python -m benchmarks.explain_check"
        ),
        "suites": Table("suites.json", suite_tables.suites, SUITES),
        "suite_schemas": Table("suites.json", suite_tables.suite_schemas, SUITES),
    }
)


def with_tables(text: str, results: Path = RESULTS) -> str:
    """Return the text with every marked table made anew. Raises KeyError for an unknown name."""
    return BLOCK.sub(lambda match: match[1] + TABLES[match[2]].text(results) + match[4], text)


def main(arguments: list[str]) -> int:
    """Write the tables of all pages, or say with status 1 which pages are not current."""
    status = 0
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = with_tables(before)
        if "--write" in arguments:
            page.write_text(after, encoding="utf-8")
        elif before != after:
            print(
                f"{page.name}: other tables than benchmarks/results; run with --write",
                file=sys.stderr,
            )
            status = 1
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
