"""What the demo's target and MTP layer are worth on text that training never saw."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tests.recipes.demo_checkpoint import SPECIAL_TOKENS, load_decoder
from tests.recipes.demo_corpus import VOCAB_SIZE, Batches, Corpus
from tests.recipes.demo_model import TARGET, Sizes

WINDOW = 512


def windows_of(corpus: Corpus, tokenizer: Tokenizer) -> Iterator[Tensor]:
    """The held-out texts' ids [1, T + 1] in windows of at most WINDOW predicted ones."""
    end = tokenizer.token_to_id(SPECIAL_TOKENS[0])
    for text in corpus.held_out:
        ids = torch.tensor([end, *tokenizer.encode(text).ids])
        for start in range(0, len(ids) - 1, WINDOW):
            yield ids[None, start : start + WINDOW + 1]


@torch.no_grad()
def held_out(folder: Path, corpus: Corpus, tokenizer: Tokenizer, shape: Sizes = TARGET) -> dict[str, Any]:
    """On held-out text: bits a byte, how often the MTP layer's first choice at each depth is the target's.

    Beside it, how often the most frequent successor of the last token is, counted on the training side.
    """
    target = load_decoder(folder, shape).eval()
    stream = Batches(corpus, tokenizer, 0).source
    pairs = torch.bincount(stream[:-1] * VOCAB_SIZE + stream[1:], minlength=VOCAB_SIZE**2)
    successor = pairs.view(VOCAB_SIZE, VOCAB_SIZE).argmax(-1)
    nats, tokens, guessed, depths = 0.0, 0, 0.0, 4
    agreed = torch.zeros(depths)
    for window in windows_of(corpus, tokenizer):
        with target.precision():
            hidden = target(window[:, :-1])
            logits = target.logits(hidden)[0]
            nats += F.cross_entropy(logits, window[0, 1:], reduction="sum").item()
            length = window.shape[1] - 1 - depths
            if length < 1:
                continue
            best = logits.argmax(-1)
            states = target.mtp_hidden(hidden[:, :length], window[:, 1 : length + depths], depths)
            for depth, state in enumerate(states):
                guess = target.logits(state[0]).argmax(-1)
                agreed[depth] += (guess == best[depth + 1 : depth + 1 + length]).sum()
            guessed += (successor[window[0, 1 : length + 1]] == best[1 : length + 1]).sum().item()
            tokens += length
    size = sum(len(text.encode()) for text in corpus.held_out)
    return {
        "bits_per_byte": round(nats / math.log(2) / size, 4),
        "mtp_acceptance": [round(share, 4) for share in (agreed / tokens).tolist()],
        "bigram_acceptance": round(guessed / tokens, 4),
        "tokens": tokens,
        "parameters": sum(p.numel() for p in target.parameters()),
    }
