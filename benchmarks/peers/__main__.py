"""Compare spd with transformers, vLLM and llama.cpp on a CPU: one checkpoint, one run, interleaved rounds.

Each engine is a persistent process in its own Python (they need different packages); in each round each
generates once, one after the other, on the same prompt: greedy, end tokens ignored. Plain, with a draft
model, by n-gram lookup, and with imposed acceptance. Then loads: so many requests together, or at a rate.
From the repository:

    python tests/recipes/medium.py /tmp/medium
    python -m benchmarks.peers /tmp/medium --transformers-python ... --vllm-python ... \\
        --llama-cpp ... --imposed 3 --concurrency 1,4,16 --rates 1,2,4,6,8

The demo, which speculates with its own MTP layer too. vLLM gets a copy with the head written out, for it
ignores that DeepSeek's embeddings are tied, and reads latent attention as ordinary heads, for its kernels for
CPU have DeepSeek's own width only; the function and its numbers are the same:

    python -m benchmarks.peers spd/formats/demo --vllm-python ... --text --mtp --rows 0 \\
        --concurrency 1,4,16 --out benchmarks/results/cpu_peer_demo.json

Acceptance alone, spd's beside vLLM's. Near-ties part the texts of two engines, in float32 more rarely than in
bfloat16, and other texts have other acceptance, so that many tokens are needed:

    python -m benchmarks.peers /tmp/medium --vllm-python ... --dtype float32 --rows 0 -n 512 --rounds 8 \\
        --only spd-plain,spd-draft,vllm-draft
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.agreement import agreement_lines
from benchmarks.peers.compare import measure
from benchmarks.peers.options import parse_options
from benchmarks.peers.worker import exiting_on_terminate


def render(result: Mapping[str, Any]) -> str:
    """Return the report as a short table."""
    lines = [
        f"{'':<22}{'tokens/s':>9}{'ttft ms':>9}{'per step':>9}{'cpu ms':>8}  equal to spd plain"
    ]
    for name, entry in result["entries"].items():
        equal = entry["equal_to_spd_plain"]
        words = f"{equal['equal_texts']}/{equal['texts']}" if equal else "-"
        keys = ("decode_tokens_per_second", "ttft_ms", "tokens_per_step", "cpu_ms_per_token")
        figures = [entry[key]["median"] for key in keys]
        lines.append(
            f"{name:<22}{figures[0]:>9.2f}{figures[1]:>9.0f}{figures[2]:>9.2f}{figures[3]:>8.1f}  {words}"
        )
    for name, ratio in result["ratios"].items():
        lines.append(
            f"{name:<42}{ratio['median']:>7.2f} x ({ratio['low']:.2f} to {ratio['high']:.2f})"
        )
    if "verify_over_decode" in result:
        verify = result["verify_over_decode"]
        lines.append(
            f"verify({verify['rows']} rows) / decode(1 row){'':<15}{verify['ratio']['median']:>7.3f}"
        )
    for load, entries in result["loads"].items():
        lines.append(load)
        for name, entry in entries["entries"].items():
            speed = entry["output_tokens_per_second"]["median"]
            accepted = entry["acceptance"]
            length = f"{accepted['acceptance_length']:>7.2f} a round" if accepted else ""
            lines.append(
                f"  {name:<20}{speed:>9.2f} tokens/s{entry['ttft_ms']:>9.0f} ms to the first{length}"
            )
    lines += agreement_lines(result)
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and write the JSON; status 1 if an entry failed or spd's text differed."""
    options = parse_options(arguments)
    with exiting_on_terminate():
        result = measure(options, lambda line: print(line, file=sys.stderr, flush=True))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(render(result))
    changed = False
    for name in ("spd-draft", "spd-ngram"):
        spd_entry = result["entries"].get(name)
        equal = spd_entry["equal_to_spd_plain"] if spd_entry else None
        if equal is not None and equal["equal_texts"] != equal["texts"]:
            print(f"{name} differs from spd-plain: speculation changed tokens", file=sys.stderr)
            changed = True
    return 1 if changed or result["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
