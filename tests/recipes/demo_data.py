"""The demo's tokenizer, and its corpus as batches of token ids."""

from __future__ import annotations

import random

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from tests.recipes.demo_checkpoint import SPECIAL_TOKENS
from tests.recipes.demo_corpus import QUESTIONS, Corpus

VOCAB_SIZE = 4096


def train_tokenizer(corpus: Corpus) -> Tokenizer:
    """Byte-level BPE with Qwen's split pattern, trained on the training side only."""
    tokenizer = Tokenizer(models.BPE())
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    answers = "\n".join(answer for _, answer in corpus.answers)
    tokenizer.train_from_iterator((*corpus.training, answers), trainer)
    return tokenizer


class Batches:
    """Windows of tokens: source text, and questions with their answers packed end to end."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.corpus, self.random = tokenizer, corpus, random.Random(seed)
        end = tokenizer.token_to_id(SPECIAL_TOKENS[0])
        stream = []
        for encoding in tokenizer.encode_batch(list(corpus.training)):
            stream += [*encoding.ids, end]
        self.source = torch.tensor(stream)
        self.end = end
        self.queue: list[tuple[str, str]] = []
        self.source_starts: list[int] = []

    def _chat(self, name: str, answer: str) -> list[int]:
        question = self.random.choice(QUESTIONS).format(name=name)
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n{answer}<|im_end|>\n"
        return [*self.tokenizer.encode(text).ids, self.end]

    def _answers(self, length: int) -> Tensor:
        ids: list[int] = []
        while len(ids) < length + 1:
            if not self.queue:
                self.queue = self.random.sample(self.corpus.answers, len(self.corpus.answers))
            ids += self._chat(*self.queue.pop())
        return torch.tensor(ids[: length + 1])

    def _source(self, length: int) -> Tensor:
        if not self.source_starts:
            offset = self.random.randrange(length)
            self.source_starts = list(range(offset, len(self.source) - length - 1, length))
            self.random.shuffle(self.source_starts)
        start = self.source_starts.pop()
        return self.source[start : start + length + 1]

    def next(self, rows: int, length: int, answer_rows: int) -> Tensor:
        """Token ids [rows, length + 1]; the first `answer_rows` rows are questions and answers."""
        return torch.stack(
            [self._answers(length) if r < answer_rows else self._source(length) for r in range(rows)]
        )
