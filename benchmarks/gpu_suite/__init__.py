"""One command for the first GPU at hand: `python -m benchmarks.gpu_suite --out benchmarks/results`.

Each probe runs in a process of its own, so that a fault in one does not take the others' figures
with it, and the JSON is written again after every probe. Without `--only` the usual probes run,
those that matter most first, within nine minutes.
"""
