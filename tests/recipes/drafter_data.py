"""A target's own replies with the states that its drafters read: a file for each batch of prompts.

Plain torch and `transformers`; imports nothing of `spd`. A reply is greedy or sampled at 0.8.
Each position keeps the residual streams behind a few layers (`taps`) and the likeliest next
tokens with their logits, all in the pass that the text is made by. A file is a function of the
target, the prompts and its number.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TOP = 16
"""Next tokens that a position keeps."""
HEAD_ROWS = 128
"""Rows that the head is applied to at once."""
TEMPERATURES = (0.0, 0.0, 0.0, 0.8)
"""Temperatures of rows, in turn."""


@dataclass(frozen=True)
class DataPlan:
    """What is made: rows of a batch, tokens of a prompt and of a reply at most, and the taps."""

    taps: tuple[int, ...]
    rows: int = 64
    prompt_tokens: int = 160
    reply_tokens: int = 88


class Target:
    """A target as `transformers` runs it."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.config = model.config

    @classmethod
    def open(cls, path: Path, dtype: torch.dtype = torch.float32) -> Target:
        """Return the target of a folder, or of a GGUF file with its weights dequantised."""
        import transformers

        options: dict[str, Any] = {}
        folder = path
        if path.suffix == ".gguf":
            folder = path.parent
            options["gguf_file"] = path.name
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **options)
        if options:
            form = transformers.GgufConfig(dequantize=True, gguf_file=path.name)
            options["quantization_config"] = form
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, **options
        )
        return cls(model.to(dtype), tokenizer)

    @property
    def embedding(self) -> Tensor:
        """Return the table of embeddings [V, H]."""
        table: Tensor = self.model.get_input_embeddings().weight
        return table

    @property
    def head(self) -> Tensor:
        """Return the output head [V, H]."""
        head: nn.Module = self.model.get_output_embeddings()
        return head.get_parameter("weight")

    @property
    def final_norm(self) -> Tensor:
        """Return the weights of the norm before the head [H]."""
        norm: nn.Module = self.model.model.norm
        return norm.get_parameter("weight")

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of a user's message in the target's template."""
        messages = [{"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self.tokenizer.encode(prompt, add_special_tokens=False)
        return ids

    def end_ids(self) -> Tensor:
        """Return the ids that end a reply."""
        ends = self.model.generation_config.eos_token_id
        return torch.tensor([ends] if isinstance(ends, int) else list(ends or []))

    def run(self, ids: Tensor, mask: Tensor, cache: Any, taps: Sequence[int]) -> Step:
        """Run ids [B, T] behind a cache; mask [B, all]: the positions that are no padding."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        out = self.model.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=True,
        )
        streams = torch.stack([out.hidden_states[tap] for tap in taps], dim=2)
        states = out.last_hidden_state.flatten(0, 1)
        # The logits of all rows would be large.
        parts = [self.likeliest(part) for part in states.split(HEAD_ROWS)]
        logits, best = (
            torch.cat(part).unflatten(0, ids.shape) for part in zip(*parts, strict=True)
        )
        return Step(streams, best, logits, out.past_key_values)

    def likeliest(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [N, TOP] of the likeliest tokens behind states [N, H], and their ids.

        A head in few bits chooses them; their logits are float32 and decide the order.
        """
        ids = (states @ self.head.T).topk(TOP, dim=-1).indices
        logits = (self.head[ids].float() @ states.float()[..., None])[..., 0]
        logits, order = logits.sort(dim=-1, descending=True, stable=True)
        return logits, ids.gather(-1, order)


@dataclass(frozen=True)
class Step:
    """What a pass gives: streams [B, T, taps, H], best ids and logits [B, T, TOP], a cache."""

    streams: Tensor
    best: Tensor
    logits: Tensor
    cache: Any


def choose(step: Step, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Return the next token of each row [B]: the best one, or one of the best by its chance."""
    logits = step.logits[:, -1] / temperatures.clamp(min=0.1)[:, None]
    drawn = torch.multinomial(logits.softmax(-1), 1, generator=generator)
    rank = torch.where(temperatures[:, None] > 0, drawn, 0)
    return step.best[:, -1].gather(1, rank)[:, 0]


class Recorder:
    """What passes over rows of left-padded ids give: one table for each, filled in place."""

    def __init__(self, ids: Tensor, room: int, plan: DataPlan, hidden: int) -> None:
        """Take ids [B, T]; room: positions behind them."""
        rows, width = ids.shape
        self.ids = torch.cat((ids, torch.zeros(rows, room, dtype=torch.long)), dim=1)
        size = self.ids.shape
        self.streams = torch.zeros((*size, len(plan.taps), hidden), dtype=torch.bfloat16)
        self.best = torch.zeros((*size, TOP), dtype=torch.int32)
        self.logits = torch.zeros((*size, TOP), dtype=torch.float16)
        self.length = width

    def write(self, step: Step, rows: Tensor, first: int) -> None:
        """Write a pass over some rows, from a position on."""
        span = slice(first, first + step.best.shape[1])
        self.streams[rows, span] = step.streams.to(torch.bfloat16)
        self.best[rows, span] = step.best.int()
        self.logits[rows, span] = step.logits.half()

    def joined(self, pad: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        """Return the rows end to end, without padding."""
        spans = list(zip(pad.tolist(), lengths.tolist(), strict=True))
        tables = {name: getattr(self, name) for name in ("streams", "best", "logits")}
        tables["ids"] = self.ids.int()
        return {
            name: torch.cat([table[row, first:end] for row, (first, end) in enumerate(spans)])
            for name, table in tables.items()
        }


def common_length(prompts: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens all prompts share, less than the shortest has."""
    first = prompts[0]
    shared = min(map(len, prompts)) - 1
    for prompt in prompts:
        while list(prompt[:shared]) != list(first[:shared]):
            shared -= 1
    return shared


@torch.inference_mode()
def make_batch(
    target: Target, prompts: Sequence[Sequence[int]], plan: DataPlan, number: int
) -> dict[str, Tensor]:
    """Return rows joined end to end: `ids`, `streams`, `best`, `logits`, and rows' `lengths`.

    `starts`: the first position of each row's reply; `shared`: the first that is a prompt's own.
    The beginning that all prompts share is run once, and rows that ended leave the batch.
    """
    generator = torch.Generator().manual_seed(number)
    shared = common_length(prompts)
    width = max(map(len, prompts))
    pad = width - torch.tensor([len(prompt) for prompt in prompts])
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
    own_ids = ids[:, shared:]  # the shared beginning stands before the padding here
    mask = (torch.arange(width) >= pad[:, None] + shared).long()
    mask[:, :shared] = 1
    record = Recorder(ids, plan.reply_tokens, plan, target.config.hidden_size)
    alive = torch.arange(len(prompts))
    cache = None
    if shared:
        head = torch.tensor([list(prompts[0][:shared])])
        step = target.run(head, torch.ones_like(head), None, plan.taps)
        for row in range(len(prompts)):
            record.write(step, torch.tensor([row]), int(pad[row]))
        cache = step.cache
        cache.batch_repeat_interleave(len(prompts))
    step = target.run(own_ids, mask, cache, plan.taps)
    keep = torch.arange(shared, width) >= pad[:, None] + shared
    for name in ("streams", "best", "logits"):
        table = getattr(record, name)[:, shared:width]
        table[keep] = getattr(step, name)[keep].to(table.dtype)
    temperatures = torch.tensor([TEMPERATURES[i % len(TEMPERATURES)] for i in range(len(prompts))])
    lengths = torch.full((len(prompts),), width)
    ends = target.end_ids()
    for position in range(width, width + plan.reply_tokens):
        token = choose(step, temperatures[alive], generator)
        record.ids[alive, position] = token
        lengths[alive] += 1
        goes_on = ~torch.isin(token, ends)
        if not goes_on.any() or position + 1 == width + plan.reply_tokens:
            break
        cache = step.cache
        if not goes_on.all():
            running = goes_on.nonzero()[:, 0]
            cache.batch_select_indices(running)
            alive = alive[running]
            mask = mask[running]
            token = token[running]
        mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
        step = target.run(token[:, None], mask, cache, plan.taps)
        record.write(step, alive, position)
    return record.joined(pad, lengths) | {
        "lengths": lengths - pad,
        "starts": width - pad,
        "shared": torch.full_like(lengths, shared),
    }


def make_files(
    target: Target,
    make_prompt: Callable[[int], str],
    folder: Path,
    plan: DataPlan,
    numbers: Sequence[int],
) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """Write the files of these numbers that are missing; yield each with what it holds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(asdict(plan)) + "\n")
    for number in numbers:
        path = data_path(folder, number)
        if path.exists():
            continue
        texts = [make_prompt(number * plan.rows + row) for row in range(plan.rows)]
        prompts = [target.encode_chat(text) for text in texts]
        prompts = [prompt for prompt in prompts if len(prompt) <= plan.prompt_tokens]
        batch = make_batch(target, prompts, plan, number)
        partial = path.with_suffix(".part")
        save_file({name: value.contiguous() for name, value in batch.items()}, partial)
        partial.rename(path)
        yield path, batch


def data_path(folder: Path, number: int) -> Path:
    """Return the path of a file of data."""
    return folder / f"{number:05}.safetensors"


def data_digest(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of the token ids of files, in order."""
    state = hashlib.sha256()
    for path in paths:
        data = load_file(path)
        for name in ("lengths", "starts", "ids"):
            state.update(data[name].numpy().tobytes())
    return state.hexdigest()
