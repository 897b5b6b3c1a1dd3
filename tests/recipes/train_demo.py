"""Train the embedded demos: a tokenizer, a target with its MTP layer, a small draft.

There are two targets, one shaped as DeepSeek-V3, one as Qwen3.5's hybrid.

Plain torch; imports nothing from `spd`, so that the demo is evidence independent of the program
that it demonstrates. Target and MTP layer are trained together, the first by cross entropy, the
second from the target's distributions. The draft is trained from them too. The shipped demo was
first fitted to an earlier model, which was not stored (`spd/formats/demo/README.md`). Run it from
the repository root:

    python tests/recipes/train_demo.py --compile --out spd/formats/demo
    python tests/recipes/train_demo.py --model hybrid --tokenizer spd/formats/demo --steps 1500 \
        --mtp-steps 300 --stages target,mtp,held_out --go-on --threads 1 --out DIR
"""

from __future__ import annotations

import json
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.recipes import demo_model
from tests.recipes.demo_checkpoint import load_decoder, save_checkpoint, write_sums
from tests.recipes.demo_corpus import (
    Batches,
    Corpus,
    build_corpus,
    measure_held_out,
    train_tokenizer,
)
from tests.recipes.demo_model import (
    DRAFT,
    TARGETS,
    Decoder,
    Gate,
    Optimizers,
    make_optimizers,
    new_decoder,
)

MTP_DEPTHS = 3
Json = dict[str, Any]


class Recorder:
    """The loss curve, the number of tokens and the time of a training stage."""

    def __init__(self, stage: str) -> None:
        self.stage = stage
        self.tokens = 0
        self.began = time.monotonic()
        self.curve: list[dict[str, float]] = []

    def point(self, step: int, **figures: Tensor) -> None:
        """Store and print one point."""
        point = {
            "step": step,
            "tokens": self.tokens,
            "seconds": round(time.monotonic() - self.began, 1),
        }
        self.curve.append(point | {name: round(value.item(), 4) for name, value in figures.items()})
        print(self.stage, json.dumps(self.curve[-1]), flush=True)

    def summary(self) -> Json:
        """Return the record for training.json."""
        seconds = round(time.monotonic() - self.began)
        return {"tokens": self.tokens, "seconds": seconds, "curve": self.curve}


Steps = Iterator[tuple[int, float, Tensor]]


def training_steps(
    optimizers: Optimizers, batches: Batches, steps: int, recorder: Recorder, extra: int = 1
) -> Steps:
    """Yield (step, share done, ids [rows, length + extra]) with the learning rate set; then step.

    Every eighth batch of the second half is long.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    bases = [group["lr"] for group in groups]
    for step in range(steps):
        done = step / steps
        for base, group in zip(bases, groups, strict=True):
            # Up over 2 %, level, then linearly to zero over the last 60 %.
            group["lr"] = base * min((done + 1e-3) / 0.02, 1.0, max(0.0, (1.0 - done) / 0.6))
        rows, width = (2, 2048) if step % 8 == 7 and done > 0.5 else (8, 512)
        recorder.tokens += rows * width
        yield step, done, batches.next(rows, width + extra - 1, answer_rows=rows // 4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def compile_parts(*models: nn.Module) -> None:
    """Compile each layer separately: layers of one shape share the compiled code."""
    torch._dynamo.config.recompile_limit = 64
    for model in models:
        for module in model.modules():
            if isinstance(module, demo_model.Layer | demo_model.MtpLayer):
                module.compile(dynamic=False)


def balance(model: Decoder, done: float) -> None:
    """Move each gate's correction bias towards equal loads, in decreasing steps."""
    for module in model.modules():
        if isinstance(module, Gate):
            module.e_score_correction_bias += (
                0.01 * (1 - done) * (module.load.mean() - module.load).sign()
            )
            module.load.zero_()


def train_target(
    arguments: Namespace, corpus: Corpus, tokenizer: Tokenizer, mtp_only: bool = False
) -> Json:
    """Train the target and its MTP layer together, or continue the latter alone.

    Return the record.
    """
    shape = TARGETS[arguments.model]
    target = load_decoder(arguments.out, shape) if mtp_only else new_decoder(shape)
    assert target.mtp is not None
    target.requires_grad_(not mtp_only)
    target.mtp.requires_grad_(True)
    recorder = Recorder("mtp" if mtp_only else "target")
    batches = Batches(corpus, tokenizer, arguments.seed + (2 if mtp_only else 0))
    if arguments.compile:
        compile_parts(target)
    optimizers = make_optimizers(target.mtp if mtp_only else target, arguments.scale)
    steps = arguments.mtp_steps if mtp_only else arguments.steps
    for step, done, ids in training_steps(
        optimizers=optimizers, batches=batches, steps=steps, recorder=recorder, extra=MTP_DEPTHS
    ):
        # Every few batches unroll the layer over its own recycled states, on half the rows.
        depths = MTP_DEPTHS if step % arguments.unroll_every == 0 else 1
        cross_entropy, mtp_loss, agreed = mtp_losses(target, ids, depths, mtp_only)
        if mtp_only:
            mtp_loss.mean().backward()
        else:
            (cross_entropy.mean() + arguments.mtp_weight * mtp_loss.mean()).backward()
            balance(target, done)
        if step % 20 == 0:
            by_row = cross_entropy.detach().mean(dim=1)
            figures = {
                "loss": by_row.mean(),
                "answers": by_row[:2].mean(),
                "source": by_row[2:].mean(),
            }
            figures = {"loss": mtp_loss.mean()} if mtp_only else figures
            recorder.point(
                step, **figures, **{f"mtp{d}": share for d, share in enumerate(agreed, 1)}
            )
    save_checkpoint(target, arguments.out, tokenizer)
    return recorder.summary()


def mtp_losses(
    target: Decoder, ids: Tensor, depths: int, frozen: bool = False
) -> tuple[Tensor, ...]:
    """Return cross entropy [rows, T]; by depth, the MTP layer's loss and agreement.

    ids [rows, T + MTP_DEPTHS]. The MTP layer learns the target's distribution, with the text's own
    tokens.
    """
    length = ids.shape[1] - MTP_DEPTHS
    with target.autocast():
        with torch.set_grad_enabled(not frozen):
            hidden = target(ids[:, :length])
            logits = target.logits(hidden)
        cross_entropy = F.cross_entropy(
            logits.flatten(0, 1), ids[:, 1 : length + 1].flatten(), reduction="none"
        )
        teacher = logits.detach()
        rows = slice(0, None, min(depths, 2))
        losses = []
        agreed = []
        states = target.mtp_hidden(hidden[rows], ids[rows, 1 : length + depths], depths)
        for depth, state in enumerate(states, 1):
            guess = target.logits(state[:, :-depth]).flatten(0, 1)
            truth = teacher[rows, depth:].flatten(0, 1)
            losses.append(F.cross_entropy(guess, truth.softmax(-1)))
            agreed.append((guess.argmax(-1) == truth.argmax(-1)).float().mean())
    return cross_entropy.view(len(ids), -1), torch.stack(losses), torch.stack(agreed)


def measure(arguments: Namespace, corpus: Corpus, tokenizer: Tokenizer) -> Json:
    """Measure the trained target on held-out text."""
    return measure_held_out(arguments.out, corpus, tokenizer, TARGETS[arguments.model])


def train_draft(arguments: Namespace, corpus: Corpus, tokenizer: Tokenizer) -> Json:
    """Train the draft from the saved target's distributions and save it; return its record."""
    target = load_decoder(arguments.out, TARGETS[arguments.model]).eval()
    recorder = Recorder("draft")
    draft = Decoder(DRAFT)
    batches = Batches(corpus, tokenizer, arguments.seed + 1)
    if arguments.compile:
        compile_parts(target, draft)
    optimizers = make_optimizers(draft, 0.5)
    for step, _, ids in training_steps(optimizers, batches, arguments.draft_steps, recorder):
        with target.autocast():
            with torch.no_grad():
                teacher = target.logits(target(ids[:, :-1])).flatten(0, 1)
            logits = draft.logits(draft(ids[:, :-1])).flatten(0, 1)
        agree = (logits.argmax(-1) == teacher.argmax(-1)).float().mean()
        loss = F.cross_entropy(logits, teacher.softmax(-1))
        loss.backward()
        # Without a bound on the gradient the loss of this narrow model diverged.
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        if step % 10 == 0:
            recorder.point(step, loss=loss, agrees=agree)
    save_checkpoint(draft, arguments.out / "draft", tokenizer)
    return {"parameters": sum(p.numel() for p in draft.parameters()), **recorder.summary()}


def begin_record(folder: Path, corpus: Corpus) -> Json:
    """Return the record in training.json, with the versions and the corpus of this run."""
    path = folder / "training.json"
    record: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    record |= {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "corpus_sha256": corpus.digest(),
    }
    return record | {"runs": record.get("runs", [])}


STAGES: dict[str, Callable[[Namespace, Corpus, Tokenizer], Json]] = {
    "target": train_target,
    "mtp": partial(train_target, mtp_only=True),
    "held_out": measure,
    "draft": train_draft,
}


def main(arguments: Namespace) -> None:
    """Run the requested stages.

    `training.json` beside the checkpoint keeps their records for its README.
    """
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    corpus = build_corpus()
    saved = (arguments.tokenizer or arguments.out) / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(saved)) if saved.exists() else train_tokenizer(corpus)
    record = begin_record(arguments.out, corpus)
    path = arguments.out / "training.json"
    record["runs"].append(" ".join(sys.argv[1:]))
    for stage in arguments.stages.split(","):
        if arguments.go_on and stage in record:
            continue
        record[stage] = STAGES[stage](arguments, corpus, tokenizer)
        path.write_text(json.dumps(record, indent=1) + "\n")
    write_sums(arguments.out)


def parse_arguments(arguments: list[str]) -> Namespace:
    """Parse the command line's arguments."""
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=TARGETS, default="deepseek")
    parser.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer to take")
    parser.add_argument("--stages", default="target,mtp,held_out,draft")
    for stage, steps in (("", 1000), ("mtp-", 100), ("draft-", 400)):
        parser.add_argument(f"--{stage}steps", type=int, default=steps)
    parser.add_argument(
        "--mtp-weight", type=float, default=0.3, help="of its loss beside the target's"
    )
    parser.add_argument(
        "--unroll-every", type=int, default=4, help="batches, of which one unrolls the layer"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of the target's learning rates")
    parser.add_argument(
        "--go-on", action="store_true", help="leave out stages that training.json records"
    )
    parser.add_argument("--out", type=Path, default=Path("spd/formats/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--compile", action="store_true", help="compile the layers (needs a C++ compiler)"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse_arguments(sys.argv[1:]))
