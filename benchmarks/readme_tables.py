"""The README's tables from the result files they stand for: `python -m benchmarks.readme_tables --write`.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`; a test compares it with its file.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.environment import ROOT

README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)
PEERS = ("spd", "transformers", "vllm")
PEER_NAMES = MappingProxyType({"spd": "spd", "transformers": "transformers", "vllm": "vLLM-CPU"})
MODES = MappingProxyType({"plain": "plain", "draft": "draft", "ngram": "n-gram"})


def cpu_peers(result: Mapping[str, Any]) -> str:
    """Tokens a second of each peer, by what proposes."""
    entries, k = result["entries"], result["settings"]["draft_max"]
    modes = [mode for mode in MODES if any(f"{peer}-{mode}" in entries for peer in PEERS)]
    names = [MODES[mode] if mode == "plain" else f"{MODES[mode]}, k = {k}" for mode in modes]
    lines = [f"| tokens/s | {' | '.join(names)} |", "|---" * (len(modes) + 1) + "|"]
    for peer in PEERS:
        own = [entries.get(f"{peer}-{mode}") for mode in modes]
        version = next((_version(peer, entry) for entry in own if entry is not None), None)
        if version is None:
            continue
        cells = ["" if e is None else f"{e['decode_tokens_per_second']['median']:.1f}" for e in own]
        lines.append(f"| {PEER_NAMES[peer]}{version} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _version(peer: str, entry: Mapping[str, Any]) -> str:
    return "" if peer == "spd" else " " + ".".join(entry["versions"][peer].split("+")[0].split(".")[:2])


TABLES: Mapping[str, Callable[[Mapping[str, Any]], str]] = MappingProxyType({"cpu_peers": cpu_peers})


def with_tables(text: str, results: Path = RESULTS) -> str:
    """The text with every marked table made anew. Raises KeyError for a name that nobody makes."""

    def table(match: re.Match[str]) -> str:
        result = json.loads((results / f"{match[2]}.json").read_text(encoding="utf-8"))
        return match[1] + TABLES[match[2]](result) + match[4]

    return BLOCK.sub(table, text)


def main(arguments: list[str]) -> int:
    """Write the README's tables, or say with status 1 that they are not current."""
    before = README.read_text(encoding="utf-8")
    after = with_tables(before)
    if "--write" in arguments:
        README.write_text(after, encoding="utf-8")
    elif before != after:
        print("README.md: tables are not those of benchmarks/results; run with --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
