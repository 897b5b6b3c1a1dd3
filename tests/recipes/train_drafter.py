"""Train a drafter for a served target on a CPU: data from the target's own replies, then slices.

Plain torch and `transformers`; imports nothing of `spd`. From the repository root:

    python -m tests.recipes.train_drafter data  --target FOLDER|FILE.gguf --work WORK --files 100
    python -m tests.recipes.train_drafter train --target FOLDER|FILE.gguf --work WORK --files 100 \
        --out OUT --steps 2000 --minutes 150

`data` writes files of prompts and replies with the target's states (about 5 KB a token), those that
are missing; several processes share the work with --part 0/2 and --part 1/2. `train` stops after
--minutes or at --steps, and goes on from WORK/KIND.pt as if it had not stopped; without that file
from the weights in OUT, with new optimizers. `OUT/training.json` records each slice.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.recipes import demo_model
from tests.recipes.drafter_blocks import Block
from tests.recipes.drafter_data import DataPlan, Target, data_digest, data_path, make_files
from tests.recipes.drafter_heads import (
    DrafterShape,
    Eagle3,
    Rows,
    Start,
    at,
    load_weights,
    save_drafter,
)
from tests.recipes.drafter_prompts import MAX_TEXT, make_prompt, read_sources

DECAY = 0.8
"""The weight of a draft step's loss, of that of the step before it."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SORTED_STEPS = 32
"""Steps whose rows are sorted by length together."""
START_TEXTS = 384
"""Texts that a drafter's first weights follow from."""
WARM_UP = 20
"""Steps in which the learning rate rises."""


@dataclass(frozen=True)
class Schedule:
    """Rows of a step, draft steps that are unrolled, and how the learning rate changes.

    It falls to zero over the last `decay` steps before `steps`.
    """

    steps: int
    decay: int
    rows: int = 24
    depths: int = 3
    scale: float = 1.0
    dtype: torch.dtype = torch.float32

    def rate(self, step: int) -> float:
        """Return the factor of the learning rate."""
        return min(1.0, (step + 1) / WARM_UP, (self.steps - step) / max(1, self.decay))


def products_in(dtype: torch.dtype) -> torch.autocast:
    """Return the context in which matrix products are computed in a type."""
    return torch.autocast("cpu", dtype, enabled=dtype != torch.float32)


class Data:
    """Rows of files in memory, and the drafter's ids."""

    def __init__(self, paths: Sequence[Path]) -> None:
        files = [load_file(path) for path in paths]
        self.ids = torch.cat([file["ids"] for file in files]).long()
        self.streams = torch.cat([file["streams"].flatten(1) for file in files])
        self.best = torch.cat([file["best"] for file in files])
        self.logits = torch.cat([file["logits"] for file in files])
        self.lengths = torch.cat([file["lengths"] for file in files])
        self.starts = torch.cat([file["starts"] for file in files])
        self.shared = torch.cat([file["shared"] for file in files])
        self.offsets = self.lengths.cumsum(0) - self.lengths

    def in_replies(self) -> Tensor:
        """Return which positions' next token belongs to a reply [N]."""
        counted = torch.zeros(len(self.ids), dtype=torch.bool)
        for first, start, length in zip(self.offsets, self.starts, self.lengths, strict=True):
            counted[first + start - 1 : first + length - 1] = True
        return counted

    def frequent_ids(self, count: int) -> Tensor:
        """Return the target's most frequent choices in replies, ascending."""
        best = self.best[self.in_replies(), 0].long()
        ranks = torch.bincount(best).argsort(descending=True, stable=True)
        return ranks[:count].sort().values

    def rows(self, chosen: Tensor, places: Tensor) -> Rows:
        """Return rows by their indices; places [V]: an id's index among the drafter's, or -1."""
        lengths = self.lengths[chosen]
        span = torch.arange(int(lengths.max()))
        index = self.offsets[chosen][:, None] + torch.minimum(span, lengths[:, None] - 1)
        best = places[self.best[index].long()]
        chances = self.logits[index].float().softmax(-1) * (best >= 0)
        total = chances.sum(-1, keepdim=True)
        # What the drafter cannot say counts where it is not the best token.
        is_known = (best[..., 0] >= 0) & (span < lengths[:, None] - 1)
        return Rows(
            ids=self.ids[index],
            streams=self.streams[index].float(),
            best=best.clamp(min=0),
            chances=chances / total.clamp(min=1e-6),
            is_known=is_known,
            firsts=self.shared[chosen].clamp(min=1),
            starts=self.starts[chosen],
            lengths=lengths,
        )

    def order(self, step: int, rows: int, seed: int) -> Tensor:
        """Return the rows of a step: every epoch has an order of its own.

        Rows of about one length make a step, as shorter ones are filled up to the longest.
        """
        per_epoch = max(1, len(self.lengths) // rows)
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step // per_epoch)
        order = torch.randperm(len(self.lengths), generator=generator)[: per_epoch * rows]
        pools = order.split(SORTED_STEPS * rows)
        by_length = torch.cat([pool[self.lengths[pool].argsort(stable=True)] for pool in pools])
        place = int(torch.randperm(per_epoch, generator=generator)[step % per_epoch])
        return by_length[place * rows : (place + 1) * rows]


@dataclass(frozen=True)
class Tables:
    """The target's tables: embeddings [V, H], the head's rows of the drafter's ids [D, H]."""

    embedding: Tensor
    head: Tensor
    places: Tensor

    @classmethod
    def of(cls, target: Target, draft_ids: Tensor) -> Tables:
        """Return them of a target."""
        places = torch.full((len(target.embedding),), -1)
        places[draft_ids] = torch.arange(len(draft_ids))
        return cls(target.embedding, target.head[draft_ids].clone(), places)


Drafter = Eagle3 | Block


def draft_losses(
    drafter: Drafter, rows: Rows, tables: Tables, depth: int, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return by draft step the loss against the target's chances, and the share of equal choices.

    A position counts in the loss if the target's choice is among the drafter's ids; in the
    agreement all of replies do. A confidence head learns which drafts are equal.
    """
    anchors = drafter.anchors(rows, draws)
    losses = []
    agreed = []
    for step, state in enumerate(drafter.states(rows, tables.embedding, anchors, depth)):
        positions = anchors + 1 + step
        counts = at(rows.is_known, positions) & (positions < rows.lengths[:, None])
        states = state[counts]
        before = at(rows.ids, positions)[counts]
        logits = (states @ tables.head.T).float()
        if (bias := drafter.bias(before)) is not None:
            logits = logits + bias
        ids = at(rows.best, positions)[counts].long()
        chances = at(rows.chances, positions)[counts]
        loss = (logits.logsumexp(-1) - (chances * logits.gather(1, ids)).sum(-1)).mean()
        hits = logits.argmax(-1) == ids[:, 0]
        if (confidence := drafter.confidence(states, before)) is not None:
            loss = loss + F.binary_cross_entropy_with_logits(confidence, hits.float())
        losses.append(loss)
        last = rows.lengths[:, None] - 1
        replies = (positions >= rows.starts[:, None] - 1) & (positions < last)
        agreed.append((hits & replies[counts]).sum() / replies.sum().clamp(min=1))
    return torch.stack(losses), torch.stack(agreed)


class Training:
    """A drafter, its optimizers and how far they are."""

    def __init__(self, drafter: Drafter, draft_ids: Tensor, schedule: Schedule, seed: int) -> None:
        self.drafter = drafter
        self.draft_ids = draft_ids
        self.schedule = schedule
        self.seed = seed
        self.step = 0
        self.tokens = 0
        self.optimizers = demo_model.make_optimizers(
            drafter, schedule.scale, outer=("markov", "confidence"), rate=0.002
        )

    def save(self, path: Path) -> None:
        """Write all that the next step depends on."""
        partial_path = path.with_suffix(".part")
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {
            "drafter": self.drafter.state_dict(),
            "draft_ids": self.draft_ids,
            "optimizers": optimizers,
            "step": self.step,
            "tokens": self.tokens,
        }
        torch.save(state, partial_path)
        partial_path.rename(path)

    def restore(self, path: Path) -> None:
        """Read what `save` wrote."""
        state = torch.load(path, weights_only=True)
        self.drafter.load_state_dict(state["drafter"])
        self.draft_ids = state["draft_ids"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step = state["step"]
        self.tokens = state["tokens"]

    def advance(self, data: Data, tables: Tables) -> tuple[Tensor, Tensor]:
        """Take one step; return its losses and agreement by draft step."""
        schedule = self.schedule
        for optimizer, rate in zip(self.optimizers, (0.006, 0.002), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * schedule.scale * schedule.rate(self.step)
        rows = data.rows(data.order(self.step, schedule.rows, self.seed), tables.places)
        draws = torch.Generator().manual_seed(self.seed * 1_000_003 + self.step)
        with products_in(schedule.dtype):
            losses, agreed = draft_losses(self.drafter, rows, tables, schedule.depths, draws)
        (losses * DECAY ** torch.arange(len(losses))).sum().backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += int((rows.lengths - rows.firsts).sum())
        return losses.detach(), agreed


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the streams that are read: four from a third of the layers to the last one's input."""
    return tuple(sorted({max(1, round(layers * part)) for part in (0.3, 0.6, 0.83)} | {layers - 1}))


def read_taps(folder: Path) -> tuple[int, ...]:
    """Return the streams that files of data have."""
    return tuple(json.loads((folder / "plan.json").read_text())["taps"])


@torch.no_grad()
def start_of(target: Target, data: Data, dtype: torch.dtype) -> Start:
    """Return what first weights follow from: the target over the first texts of the data."""
    parts = []
    for first, length in zip(data.offsets[:START_TEXTS], data.lengths, strict=False):
        span = slice(int(first), int(first + length) - 1)
        ids = data.ids[span.start + 1 : span.stop + 1]
        with products_in(dtype):
            out = target.model.model(data.ids[span.start : span.stop + 1][None])
        states = out.last_hidden_state[0, 1:].float() / target.final_norm
        normed = F.rms_norm(states, states.shape[-1:])
        parts.append((data.streams[span].float(), F.embedding(ids, target.embedding), normed))
    return Start(target.final_norm, *(torch.cat(part) for part in zip(*parts, strict=True)))


def new_drafter(target: Target, draft_vocab: int, arguments: argparse.Namespace) -> Drafter:
    """Return a drafter of the kind and the sizes that were asked for."""
    config = target.config
    heads = arguments.heads or config.num_attention_heads
    shape = DrafterShape(
        hidden=config.hidden_size,
        layers=arguments.layers,
        heads=heads,
        kv_heads=arguments.kv_heads or heads,
        head_dim=arguments.head_dim or config.hidden_size // config.num_attention_heads,
        intermediate=arguments.intermediate or config.intermediate_size,
        max_positions=config.max_position_embeddings,
        vocab=config.vocab_size,
        taps=read_taps(arguments.work / "data"),
        block_size=arguments.block,
        markov_rank=arguments.markov_rank if arguments.kind == "dspark" else 0,
    )
    torch.manual_seed(arguments.seed)
    return Eagle3(shape) if arguments.kind == "eagle3" else Block(shape, draft_vocab)


def new_training(target: Target, data: Data, arguments: argparse.Namespace) -> Training:
    """Return a training at its beginning, or where it stopped."""
    state = arguments.work / f"{arguments.kind}.pt"
    weights = arguments.out / "model.safetensors"
    draft_ids = data.frequent_ids(arguments.draft_vocab)
    drafter = new_drafter(target, len(draft_ids), arguments)
    if weights.exists():
        saved, draft_ids = load_weights(arguments.out)
        drafter.load_state_dict(saved)
    elif not state.exists():
        drafter.start_from(start_of(target, data, DTYPES[arguments.dtype]))
    depths = arguments.depths if isinstance(drafter, Eagle3) else drafter.max_drafts
    schedule = Schedule(
        arguments.steps,
        arguments.decay,
        arguments.rows,
        depths,
        arguments.scale,
        DTYPES[arguments.dtype],
    )
    training = Training(drafter, draft_ids, schedule, arguments.seed)
    if state.exists():
        training.restore(state)
    return training


def train(target: Target, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train until the last step or for the minutes of a slice; return its record."""
    began = time.monotonic()
    numbers = range(arguments.first, arguments.files)
    paths = [data_path(arguments.work / "data", number) for number in numbers]
    data = Data(paths)
    training = new_training(target, data, arguments)
    tables = Tables.of(target, training.draft_ids)
    config = training.drafter.config(len(tables.embedding), len(training.draft_ids))
    state = arguments.work / f"{arguments.kind}.pt"

    def save() -> None:
        """Write what training continues from, and the drafter."""
        training.save(state)
        save_drafter(training.drafter, config, arguments.out, training.draft_ids)

    first = training.step
    points: list[dict[str, Any]] = []
    sums: list[Tensor] = []
    saved = began
    while training.step < arguments.steps and time.monotonic() < began + 60 * arguments.minutes:
        losses, agreed = training.advance(data, tables)
        sums.append(torch.stack((losses, agreed)))
        if training.step % arguments.report == 0 or training.step == arguments.steps:
            loss, share = torch.stack(sums).mean(0).tolist()
            sums.clear()
            point = {"step": training.step, "loss": rounded(loss), "agreed": rounded(share)}
            points.append(point)
            print(json.dumps(point), f"{time.monotonic() - began:.0f} s", flush=True)
        if time.monotonic() > saved + 60 * arguments.save_minutes:
            save()
            saved = time.monotonic()
    save()
    return {
        "steps": [first, training.step],
        "tokens_seen": training.tokens,
        "data": {
            "sha256": data_digest(paths),
            "files": [arguments.first, arguments.files],
            "tokens": len(data.ids),
            "reply_tokens": int((data.lengths - data.starts).sum()),
        },
        "points": points,
    }


def rounded(values: Sequence[float]) -> list[float]:
    """Return values with four digits behind the point."""
    return [round(value, 4) for value in values]


def make_data(target: Target, arguments: argparse.Namespace) -> None:
    """Write the files of data that are missing, or a part of them."""
    part, parts = map(int, arguments.part.split("/"))
    sources = read_sources(max_text=arguments.text_characters)
    plan = DataPlan(
        tuple(arguments.taps) if arguments.taps else default_taps(target.config.num_hidden_layers),
        prompt_tokens=arguments.prompt_tokens,
        reply_tokens=arguments.reply_tokens,
    )
    numbers = range(arguments.first + part, arguments.files, parts)
    files = make_files(
        target, lambda n: make_prompt(sources, n)[1], arguments.work / "data", plan, numbers
    )
    for path, batch in files:
        print(path.name, f"{len(batch['ids']):,} tokens", flush=True)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("data", "train"))
    parser.add_argument("--kind", choices=("eagle3", "dflash", "dspark"), default="eagle3")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--files", type=int, default=100, help="of about 64 replies each")
    parser.add_argument("--first", type=int, default=0, help="file: a later slice takes new ones")
    parser.add_argument("--prompt-tokens", type=int, default=160, help="of data, at most")
    parser.add_argument("--reply-tokens", type=int, default=88, help="of data, at most")
    parser.add_argument("--text-characters", type=int, default=MAX_TEXT, help="quoted in prompts")
    parser.add_argument("--part", default="0/1", help="which files this process writes")
    parser.add_argument("--minutes", type=float, default=150.0, help="of a slice")
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=2000, help="at the end of training")
    parser.add_argument("--decay", type=int, default=400, help="last steps, with a falling rate")
    parser.add_argument("--rows", type=int, default=24, help="texts of a step")
    parser.add_argument("--depths", type=int, default=3, help="EAGLE-3: draft steps unrolled")
    parser.add_argument("--layers", type=int, default=1, help="DFlash and DSpark: 1 to 3")
    parser.add_argument("--block", type=int, default=8, help="DFlash and DSpark: rows of a block")
    parser.add_argument("--markov-rank", type=int, default=32, help="DSpark: of its bias")
    parser.add_argument("--draft-vocab", type=int, default=6144)
    parser.add_argument("--scale", type=float, default=1.0, help="of the learning rates")
    for name in ("heads", "kv-heads", "head-dim", "intermediate"):
        parser.add_argument(f"--{name}", type=int, help="of the drafter; default: the target's")
    parser.add_argument("--taps", type=int, nargs="+", help="of data: layers that streams passed")
    parser.add_argument("--report", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of matrix products")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args(words)


def main(arguments: argparse.Namespace) -> None:
    """Make data, or train and record it."""
    torch.set_num_threads(arguments.threads)
    if arguments.what == "data":
        make_data(Target.open(arguments.target, DTYPES[arguments.dtype]), arguments)
        return
    target = Target.open(arguments.target)
    record = train(target, arguments)
    path = arguments.out / "training.json"
    slices = json.loads(path.read_text())["slices"] if path.exists() else []
    path.write_text(json.dumps({"slices": [*slices, record]}, indent=1) + "\n")


if __name__ == "__main__":
    main(parse())
