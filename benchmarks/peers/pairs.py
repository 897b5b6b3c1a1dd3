"""The pairs of entries that are compared, and those whose acceptance must be equal."""

REFERENCE = "spd-plain"
PAIRS = (
    ("spd-plain", "vllm-plain"),
    ("spd-draft", "vllm-draft"),
    ("spd-ngram", "vllm-ngram"),
    ("spd-imposed", "vllm-imposed"),
    ("spd-mtp", "vllm-mtp"),
    ("spd-eagle3", "vllm-eagle3"),
    ("spd-plain", "transformers-plain"),
    ("spd-draft", "transformers-draft"),
    ("spd-ngram", "transformers-ngram"),
    ("spd-draft", "transformers-plain"),
    ("spd-plain", "llama-plain"),
    ("spd-draft", "llama-draft"),
    ("spd-ngram", "llama-ngram"),
    ("spd-imposed", "llama-imposed"),
    ("spd-int4", "llama-int4"),
    ("spd-int4-imposed", "llama-int4"),
    ("spd-int4-imposed", "llama-int4-imposed"),
    *(
        (f"{peer}-{mode}", f"{peer}-plain")
        for peer in ("spd", "vllm", "transformers", "llama")
        for mode in ("draft", "ngram", "imposed", "mtp", "eagle3", "int4")
    ),
)
AGREEING = tuple((f"spd-{mode}", f"vllm-{mode}") for mode in ("draft", "ngram", "mtp", "eagle3"))
"""Entries that propose the same drafts at temperature 0, so that their acceptance can be compared."""
