"""The models whose shapes are measured: config-only folders, and how many bytes a round of them
must read.

Nothing but `config.json` is written; the weights are random, made on the device (`load="dummy"`),
so only speed and equality can be measured with them, never text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """A dense decoder's sizes; `family` is "qwen3" (norms of query and key heads) or "llama"."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int = 151936
    tied: bool = False
    head_dim: int = 128
    family: str = "qwen3"

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return the matrices [N, K] of one layer and the head, fused if they share x."""
        rotated = (self.heads + 2 * self.kv_heads) * self.head_dim
        return {
            "qkv": (rotated, self.hidden),
            "out": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
            "head": (self.vocab, self.hidden),
        }

    def parameters(self) -> int:
        """Return the number of a checkpoint's weights, a tied head counted once."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.family == "qwen3" else 0)
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * (self._layer_weights() + norms) + tables + self.hidden

    def _layer_weights(self) -> int:
        return sum(n * k for name, (n, k) in self.weights().items() if name != "head")

    def read_weights(self) -> int:
        """Return the weights that a forward pass reads: every matrix once, the head, no embedding
        table."""
        return self.layers * self._layer_weights() + self.head_weights()

    def head_weights(self) -> int:
        """Return the weights that a forward pass reads for logits."""
        return self.vocab * self.hidden

    def once_a_round(self) -> int:
        """Return the weights that a draft model reads once a round, for any k."""
        return 0

    def kv_bytes(self, itemsize: int = 2) -> int:
        """Return the bytes of keys and values for one position."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def config(self) -> dict[str, Any]:
        """Return the `config.json` of this family's published checkpoints, with these sizes."""
        return {
            "architectures": ["Qwen3ForCausalLM" if self.family == "qwen3" else "LlamaForCausalLM"],
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "vocab_size": self.vocab,
            "tie_word_embeddings": self.tied,
            "attention_bias": False,
            "torch_dtype": "bfloat16",
            **_FAMILY_KEYS[self.family],
        }


@dataclass(frozen=True)
class Eagle3Shape(Shape):
    """An EAGLE-3 head of one Llama layer, as wide as its target: `vocab` is the target's."""

    draft_vocab: int = 32000

    def weights(self) -> dict[str, tuple[int, int]]:
        """Return `Shape.weights`: the layer reads a token and a state concatenated, the head has
        some ids."""
        sizes = super().weights()
        pairs = (sizes["qkv"][0], 2 * self.hidden)
        return {**sizes, "qkv": pairs, "head": (self.draft_vocab, self.hidden), "fuse": self.fused}

    @property
    def fused(self) -> tuple[int, int]:
        """Return the matrix [N, K] of the target's streams after three layers."""
        return self.hidden, 3 * self.hidden

    def _layer_weights(self) -> int:
        return sum(n * k for name, (n, k) in self.weights().items() if name not in ("head", "fuse"))

    def parameters(self) -> int:
        """Return `Shape.parameters` of a head with its target's embeddings, four norms, and a list
        of ids."""
        fuse = self.fused[0] * self.fused[1]
        return self._layer_weights() + fuse + self.head_weights() + 4 * self.hidden

    def head_weights(self) -> int:
        """See `Shape`."""
        return self.draft_vocab * self.hidden

    def once_a_round(self) -> int:
        """Return `Shape.once_a_round`: the matrix that combines the target's streams."""
        return self.fused[0] * self.fused[1]

    def config(self) -> dict[str, Any]:
        """Return `Shape.config` in the research layout."""
        return {
            **super().config(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": self.draft_vocab,
        }


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_FAMILY_KEYS: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_theta": 1000000.0, "rms_norm_eps": 1e-06, "max_position_embeddings": 40960},
    "llama": {
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072,
        "rope_scaling": _LLAMA3,
        "mlp_bias": False,
    },
}

QWEN3_06B = Shape("Qwen3-0.6B", 1024, 28, 16, 8, 3072, tied=True)
QWEN3_17B = Shape("Qwen3-1.7B", 2048, 28, 16, 8, 6144, tied=True)
QWEN3_4B = Shape("Qwen3-4B", 2560, 36, 32, 8, 9728, tied=True)
QWEN3_8B = Shape("Qwen3-8B", 4096, 36, 32, 8, 12288)
QWEN3_32B = Shape("Qwen3-32B", 5120, 64, 64, 8, 25600)
LLAMA_8B = Shape("Llama-3.1-8B", 4096, 32, 32, 8, 14336, vocab=128256, family="llama")
EAGLE_SIZE = Shape("EAGLE-size", 2048, 1, 32, 8, 15360, tied=True)
"""A drafter of one layer that reads 0.85 GB a forward, as the EAGLE-3 head of an 8B model does.

A published head has the target's width and a vocabulary of 32k; with the whole vocabulary the same
bytes need half the width: 0.62 GB of head and 0.23 GB of layer.
"""
EAGLE3_8B = Eagle3Shape("EAGLE-3", 4096, 1, 32, 8, 12288, family="llama")
"""The head of an 8B model: 0.70 GB a draft, and 0.10 GB a round."""
SHAPES = (QWEN3_06B, QWEN3_17B, QWEN3_4B, QWEN3_8B, QWEN3_32B, LLAMA_8B)


def write_folder(shape: Shape, parent: Path) -> Path:
    """Write the shape's config-only folder below `parent` and return it."""
    folder = parent / shape.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps(shape.config(), indent=1) + "\n", encoding="utf-8"
    )
    return folder


def shortened(shape: Shape, layers: int = 1) -> Shape:
    """Return the shape with fewer layers, which compiles the same kernels in less time and
    memory."""
    return replace(shape, name=f"{shape.name}-short", layers=min(layers, shape.layers))


Parts = dict[str, int]
"""Bytes by what they are read for."""


def forward_parts(shape: Shape, contexts: Sequence[int], rows: int = 1, itemsize: int = 2) -> Parts:
    """Return the bytes that a forward pass of `rows` rows a slot must read, by part.

    contexts: positions each slot attends to. Weights once, every slot's keys and values once (its
    rows share one read), one embedding row a row. What is written is not counted, nor activations.
    """
    head = shape.head_weights()
    return {
        "layers": (shape.read_weights() - head) * itemsize,
        "head": head * itemsize,
        "embedding": len(contexts) * rows * shape.hidden * itemsize,
        "keys and values": sum(contexts) * shape.kv_bytes(itemsize),
    }


def draft_parts(shape: Shape, contexts: Sequence[int], k: int, itemsize: int = 2) -> Parts:
    """Return the bytes that k drafting passes must read, by part; the first has two rows a slot."""
    passes = [
        forward_parts(shape, [c + i for c in contexts], 1 if i else 2, itemsize) for i in range(k)
    ]
    parts = {
        part: sum(pass_parts[part] for pass_parts in passes)
        for part in (passes[0] if passes else ())
    }
    once = shape.once_a_round() * itemsize
    return {**parts, "target's streams": once} if once and passes else parts


def round_parts(
    target: Shape, draft: Shape | None, contexts: Sequence[int], k: int, itemsize: int = 2
) -> Parts:
    """Return the bytes that a round must read, by part: k + 1 target rows a slot, then k drafts."""
    parts = {
        f"target {part}": n for part, n in forward_parts(target, contexts, k + 1, itemsize).items()
    }
    drafts = {} if draft is None else draft_parts(draft, contexts, k, itemsize)
    return {**parts, **{f"draft {part}": n for part, n in drafts.items()}}


def forward_bytes(shape: Shape, contexts: Sequence[int], rows: int = 1, itemsize: int = 2) -> int:
    """Return the sum of `forward_parts`."""
    return sum(forward_parts(shape, contexts, rows, itemsize).values())


def draft_bytes(shape: Shape, contexts: Sequence[int], k: int, itemsize: int = 2) -> int:
    """Return the sum of `draft_parts`."""
    return sum(draft_parts(shape, contexts, k, itemsize).values())


def round_bytes(
    target: Shape, draft: Shape | None, contexts: Sequence[int], k: int, itemsize: int = 2
) -> int:
    """Return the sum of `round_parts`."""
    return sum(round_parts(target, draft, contexts, k, itemsize).values())
