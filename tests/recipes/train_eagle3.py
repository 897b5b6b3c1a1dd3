"""Train an EAGLE-3 head for the embedded demo, its target left as it is.

Plain torch, importing nothing from `spd`. The head learns the target's distributions over the corpus of
the demo, unrolled over its own states as a drafter unrolls it. Run it from the repository root:

    python tests/recipes/train_eagle3.py --out OUT
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.recipes import demo_model
from tests.recipes.demo_checkpoint import load_decoder, read_record
from tests.recipes.demo_corpus import Corpus, build_corpus
from tests.recipes.demo_data import Batches
from tests.recipes.demo_held_out import held_out, windows_of
from tests.recipes.demo_model import TARGET, Decoder
from tests.recipes.eagle3_model import HEAD, Eagle3Head, load_head, read_target, save_head, soft_losses
from tests.recipes.train_demo import Recorder, steps_of

DEPTHS = 3
MEASURED = 4
DECAY = 0.8


@torch.no_grad()
def count_tokens(target: Decoder, batches: Batches, count: int) -> Tensor:
    """How often each id is the target's choice, three times over, or the text's own token [vocab]."""
    counts = torch.zeros(target.shape.vocab, dtype=torch.long)
    for _ in range(count):
        ids = batches.next(8, 512, answer_rows=2)
        with torch.autocast("cpu", torch.bfloat16):
            best = target.logits(target(ids[:, :-1])).argmax(-1)
        for tokens, times in ((best, 3), (ids, 1)):
            counts += times * torch.bincount(tokens.flatten(), minlength=len(counts))
    return counts


make_optimizers = partial(demo_model.make_optimizers, outer=("lm_head.weight",), rate=0.002)
"""Muon for the matrices that work on states, AdamW for the output's and the norms."""


def losses_of(head: Eagle3Head, target: Decoder, ids: Tensor, depths: int) -> tuple[Tensor, Tensor]:
    """By draft step, the head's loss and agreement on ids [rows, T + depths]."""
    length = ids.shape[1] - depths
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            streams, logits = read_target(target, ids[:, :length], head.shape.read)
            following = target.embed(ids[:, 1:])
        return soft_losses(head, head.states(streams, following[:, : length + depths - 1], depths), logits)


def train(
    head: Eagle3Head, target: Decoder, batches: Batches, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train and save the head; returns the record."""
    recorder, optimizers = Recorder("eagle3"), make_optimizers(head, arguments.scale)
    for step, _, ids in steps_of(optimizers, batches, arguments.steps, recorder, DEPTHS):
        # Two steps a batch: half the rows ask for the first draft only, the other half for every depth.
        losses_of(head, target, ids[1::2, : 1 - DEPTHS], 1)[0].sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        missed, agreed = losses_of(head, target, ids[::2], DEPTHS)
        loss = (missed * DECAY ** torch.arange(DEPTHS)).sum()
        loss.backward()
        if step % 20 == 0 or step == arguments.steps - 1:
            accepted = {f"depth{d}": share.item() for d, share in enumerate(agreed, 1)}
            recorder.point(step, loss=loss.item(), first=missed[0].item(), **accepted)
        if step % 200 == 199:
            save_head(head, arguments.out)
    save_head(head, arguments.out)
    return recorder.summary()


@torch.no_grad()
def measure(head: Eagle3Head, target: Decoder, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """On held-out text, how often the head's first choice at each depth is the target's.

    The windows and positions are those of `demo_held_out.held_out`.
    """
    agreed, kept, tokens = torch.zeros(MEASURED), 0, 0
    for window in windows_of(corpus, tokenizer):
        length = window.shape[1] - 1 - MEASURED
        if length < 1:
            continue
        with torch.autocast("cpu", torch.bfloat16):
            streams, logits = read_target(target, window[:, :-1], head.shape.read)
            best = logits[0].argmax(-1)
            following = target.embed(window[:, 1 : length + MEASURED])
            for depth, state in enumerate(head.states(streams[:, :length], following, MEASURED), 1):
                guess = head.kept[head.logits(state[0]).argmax(-1)]
                agreed[depth - 1] += (guess == best[depth : depth + length]).sum()
        kept += int(torch.isin(best[1 : 1 + length], head.kept).sum())
        tokens += length
    return {
        "acceptance": [round(share, 4) for share in (agreed / tokens).tolist()],
        "kept": round(kept / tokens, 4),
        "tokens": tokens,
        "parameters": sum(p.numel() for p in head.parameters()),
    }


def new_head(target: Decoder, batches: Batches, count: int) -> Eagle3Head:
    """A head that drafts the ids seen most often in `count` batches, begun as the target's own."""
    counts = count_tokens(target, batches, count)
    head = Eagle3Head(HEAD, counts.argsort(descending=True)[: HEAD.draft_vocab].sort().values)
    head.start_from(target)
    return head


def main(arguments: argparse.Namespace) -> None:
    """Train the head; `training.json` beside it keeps the record."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    corpus, tokenizer = build_corpus(), Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    target = load_decoder(arguments.target, TARGET).eval().requires_grad_(False)
    batches, path = Batches(corpus, tokenizer, arguments.seed + 4), arguments.out / "training.json"
    if arguments.go_on:
        head = load_head(arguments.out, HEAD)
    else:
        head = new_head(target, batches, arguments.count_batches)
        path.unlink(missing_ok=True)
    record = read_record(arguments.out)
    record |= {"python": sys.version.split()[0], "torch": torch.__version__, "corpus_sha256": corpus.digest()}
    said = " ".join(sys.argv[1:]).replace(str(arguments.out), "OUT")  # where it lay says nothing
    record.setdefault("runs", []).append(said)
    record["eagle3"] = train(head, target, batches, arguments)
    path.write_text(json.dumps(record, indent=1) + "\n")
    record["held_out"] = measure(load_head(arguments.out, HEAD), target, corpus, tokenizer)
    record["target_held_out"] = held_out(arguments.target, corpus, tokenizer)
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps({name: record[name] for name in ("held_out", "target_held_out")}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=Path("spd/formats/demo"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--count-batches", type=int, default=60)
    parser.add_argument("--scale", type=float, default=1.0, help="of the learning rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--go-on", action="store_true", help="start from the head in the folder")
    main(parser.parse_args())
