"""Train the embedded demo: a byte-level BPE tokenizer, a Qwen3-shaped target and a small draft.

Plain torch, importing nothing from `spd.runtime`, so that the demo is evidence independent of the
program it demonstrates. Two stages: the target learns from the corpus by cross entropy, then the
draft learns from the target's distributions. Run it from the repository root:

    python tests/recipes/train_demo.py --compile --out spd/formats/demo
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
from demo_corpus import QUESTIONS, Corpus, build_corpus

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 4096
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of one Qwen3-shaped decoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    rope_theta: float = 100000.0
    max_positions: int = 4096


TARGET = Shape(hidden=256, intermediate=896, layers=8, heads=4, kv_heads=2, head_dim=64)
DRAFT = Shape(hidden=96, intermediate=256, layers=4, heads=3, kv_heads=1, head_dim=32)


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), 1e-6)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """NeoX rotary embedding of x [B, H, T, D] with cos and sin [T, D / 2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Layer(nn.Module):
    """One pre-norm decoder layer, its parameters named as in a Qwen3 checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.input_layernorm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(shape.hidden, wide, bias=False),
                "k_proj": nn.Linear(shape.hidden, narrow, bias=False),
                "v_proj": nn.Linear(shape.hidden, narrow, bias=False),
                "o_proj": nn.Linear(wide, shape.hidden, bias=False),
                "q_norm": RMSNorm(shape.head_dim),
                "k_norm": RMSNorm(shape.head_dim),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": nn.Linear(shape.hidden, shape.intermediate, bias=False),
                "up_proj": nn.Linear(shape.hidden, shape.intermediate, bias=False),
                "down_proj": nn.Linear(shape.intermediate, shape.hidden, bias=False),
            }
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        h, attn, mlp = self.input_layernorm(x), self.self_attn, self.mlp
        q = attn["q_norm"](attn["q_proj"](h).view(batch, length, self.shape.heads, -1)).transpose(1, 2)
        k = attn["k_norm"](attn["k_proj"](h).view(batch, length, self.shape.kv_heads, -1)).transpose(1, 2)
        v = attn["v_proj"](h).view(batch, length, self.shape.kv_heads, -1).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        x = x + attn["o_proj"](out.transpose(1, 2).reshape(batch, length, -1))
        h = self.post_attention_layernorm(x)
        return x + mlp["down_proj"](F.silu(mlp["gate_proj"](h)) * mlp["up_proj"](h))


class Decoder(nn.Module):
    """A causal decoder with tied embeddings; `forward` gives hidden states after the final norm."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("o_proj.weight", "down_proj.weight"))
                std = 0.02 if "embed" in name else parameter.shape[1] ** -0.5 * (0.3 if last else 0.7)
                nn.init.normal_(parameter, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        half = self.shape.head_dim // 2
        inverse = self.shape.rope_theta ** -(torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(ids.shape[1], dtype=torch.float32)[:, None] * inverse
        x = self.embed_tokens(ids).to(torch.bfloat16)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embed_tokens.weight).float()


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


def make_optimizers(model: nn.Module, scale: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=0.006 * scale, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=0.004 * scale, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def learning_rate(step: int, steps: int) -> float:
    """Warm up, hold, then fall linearly to zero over the last half."""
    return min((step + 1) / 50, 1.0, max(0.0, (steps - step) / (0.5 * steps)))


def held_out_bits_per_byte(
    model: Decoder, corpus: Corpus, tokenizer: Tokenizer, length: int, limit: int
) -> float:
    """Cross entropy of held-out text in bits a byte, over windows of `length` tokens."""
    nats, size, windows = 0.0, 0, 0
    end = tokenizer.token_to_id(SPECIAL_TOKENS[0])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for text in corpus.held_out:
            ids = [end, *tokenizer.encode(text).ids]
            size += len(text.encode())
            for start in range(0, len(ids) - 1, length):
                window = torch.tensor(ids[start : start + length + 1])
                logits = model.logits(model(window[None, :-1]))[0]
                nats += F.cross_entropy(logits, window[1:], reduction="sum").item()
                windows += 1
                if limit and windows >= limit:
                    done = len(
                        tokenizer.decode(ids[1 : start + length + 1], skip_special_tokens=False).encode()
                    )
                    return nats / math.log(2) / (size - len(text.encode()) + done)
    return nats / math.log(2) / size


def save_checkpoint(model: Decoder, folder: Path, tokenizer: Tokenizer) -> None:
    """Write a Hugging Face folder: config, generation config, tokenizer, template, bf16 weights."""
    folder.mkdir(parents=True, exist_ok=True)
    shape = model.shape
    end_of_text, _, end_of_turn = (tokenizer.token_to_id(t) for t in SPECIAL_TOKENS)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": VOCAB_SIZE,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": end_of_turn,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    generation = {"eos_token_id": [end_of_turn, end_of_text], "temperature": 0.0, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    names = {"eos_token": SPECIAL_TOKENS[2], "pad_token": SPECIAL_TOKENS[0], "chat_template": CHAT_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=1) + "\n")
    tensors = {f"model.{n}": p.detach().to(torch.bfloat16).contiguous() for n, p in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_target(folder: Path) -> Decoder:
    """The trained target, read back from its checkpoint."""
    target = Decoder(TARGET)
    weights = load_file(folder / "model.safetensors")
    target.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})
    return target


def compiled(function: Callable[..., Any], wanted: bool) -> Callable[..., Any]:
    """`function`, compiled when asked."""
    return torch.compile(function) if wanted else function


class Recorder:
    """The loss curve, the tokens seen and the time taken."""

    def __init__(self, stage: str) -> None:
        self.stage, self.began, self.tokens = stage, time.monotonic(), 0
        self.curve: list[dict[str, float]] = []

    def point(self, step: int, **figures: float) -> None:
        """Keep and print one point."""
        seconds = round(time.monotonic() - self.began, 1)
        rounded = {name: round(value, 4) for name, value in figures.items()}
        self.curve.append({"step": step, "tokens": self.tokens, "seconds": seconds, **rounded})
        print(self.stage, json.dumps(self.curve[-1]), flush=True)

    def summary(self) -> dict[str, Any]:
        """What goes into training.json."""
        return {"tokens": self.tokens, "seconds": round(time.monotonic() - self.began), "curve": self.curve}


def steps_of(
    optimizers: list[torch.optim.Optimizer], batches: Batches, steps: int, recorder: Recorder
) -> Iterator[tuple[int, int, Tensor]]:
    """(step, rows, ids [rows, length + 1]) with the learning rate set; every eighth late batch is long."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    bases = [group["lr"] for group in groups]
    for step in range(steps):
        for base, group in zip(bases, groups, strict=True):
            group["lr"] = base * learning_rate(step, steps)
        long = step % 8 == 7 and step > steps // 2
        rows, length = (4, 2048) if long else (16, 512)
        recorder.tokens += rows * length
        yield step, rows, batches.next(rows, length, answer_rows=rows // 4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def train_target(arguments: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Train the target by cross entropy and save it; returns its record."""
    target, recorder = Decoder(TARGET), Recorder("target")
    batches = Batches(corpus, tokenizer, arguments.seed)

    def losses(ids: Tensor, labels: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            logits = target.logits(target(ids)).flatten(0, 1)
        return F.cross_entropy(logits, labels, reduction="none")

    losses = compiled(losses, arguments.compile)
    for step, rows, ids in steps_of(make_optimizers(target, 1.0), batches, arguments.steps, recorder):
        each = losses(ids[:, :-1], ids[:, 1:].flatten()).view(rows, -1)
        each.mean().backward()
        if step % 10 == 0 or step == arguments.steps - 1:
            by_row = each.detach().mean(dim=1)
            answers, source = by_row[: rows // 4].mean().item(), by_row[rows // 4 :].mean().item()
            recorder.point(step, loss=by_row.mean().item(), answers=answers, source=source)
    save_checkpoint(target, arguments.out, tokenizer)
    bits = held_out_bits_per_byte(target, corpus, tokenizer, 512, limit=0)
    parameters = sum(p.numel() for p in target.parameters())
    return {"parameters": parameters, "held_out_bits_per_byte": round(bits, 4), **recorder.summary()}


def train_draft(arguments: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Train the draft from the saved target's distributions and save it; returns its record."""
    target, draft, recorder = load_target(arguments.out), Decoder(DRAFT), Recorder("draft")
    batches = Batches(corpus, tokenizer, arguments.seed + 1)

    def losses(ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                teacher = target.logits(target(ids)).flatten(0, 1)
            logits = draft.logits(draft(ids)).flatten(0, 1)
        agree = (logits.argmax(-1) == teacher.argmax(-1)).float().mean()
        return F.cross_entropy(logits, teacher.softmax(-1)), agree

    losses = compiled(losses, arguments.compile)
    for step, _, ids in steps_of(make_optimizers(draft, 0.5), batches, arguments.draft_steps, recorder):
        loss, agree = losses(ids[:, :-1])
        loss.backward()
        # Without a bound on the gradient this narrow model has left its track and not come back.
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        if step % 10 == 0 or step == arguments.draft_steps - 1:
            recorder.point(step, loss=loss.item(), agrees=agree.item())
    save_checkpoint(draft, arguments.out / "draft", tokenizer)
    return {"parameters": sum(p.numel() for p in draft.parameters()), **recorder.summary()}


def main(arguments: argparse.Namespace) -> None:
    """Run the wanted stages; `training.json` beside the checkpoint keeps the record of each."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    corpus = build_corpus()
    saved = arguments.out / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(saved)) if arguments.stage == "draft" else train_tokenizer(corpus)
    path = arguments.out / "training.json"
    record = json.loads(path.read_text()) if path.exists() else {}
    record |= {"python": sys.version.split()[0], "torch": torch.__version__, "corpus_sha256": corpus.digest()}
    for stage, run in (("target", train_target), ("draft", train_draft)):
        if arguments.stage in (stage, "both"):
            record[stage] = run(arguments, corpus, tokenizer)
            path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stage", choices=["target", "draft", "both"], default="both")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--draft-steps", type=int, default=400)
    parser.add_argument("--out", type=Path, default=Path("spd/formats/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--compile", action="store_true", help="compile the losses (a C++ compiler is needed)"
    )
    main(parser.parse_args())
