"""Train the embedded demos: a tokenizer, a target with its MTP layer, a small draft.

There are two targets, one DeepSeek-V3-shaped, one hybrid as Qwen3.5 is.

Plain torch, importing nothing from `spd`, so that the demo is evidence independent of the program it
demonstrates. The target may start from the first edition, a Qwen3-shaped folder of the same tokenizer
(`--start`): its layers are imitated one by one, then target and MTP layer learn together, the first by
cross entropy, the second from the target's distributions. The draft learns from the target's
distributions too. Run it from the repository root:

    python tests/recipes/train_demo.py --compile --out spd/formats/demo
    python tests/recipes/train_demo.py --model hybrid --tokenizer spd/formats/demo --steps 1500 \
        --mtp-steps 300 --stages target,mtp,held_out --go-on --threads 1 --out DIR
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.recipes.demo_card import read_record, write_card
from tests.recipes.demo_checkpoint import load_decoder, save_checkpoint
from tests.recipes.demo_corpus import Corpus, build_corpus
from tests.recipes.demo_data import Batches, train_tokenizer
from tests.recipes.demo_held_out import held_out
from tests.recipes.demo_hybrid import new_decoder
from tests.recipes.demo_model import (
    DRAFT,
    FIRST_EDITION,
    TARGET,
    TARGETS,
    Decoder,
    Gate,
    Layer,
    MoE,
    MtpLayer,
)
from tests.recipes.demo_optimizers import make_optimizers

MTP_DEPTHS = 3
KEPT_SECONDS = 300.0


class Recorder:
    """The loss curve, the tokens seen and the time taken; goes on with what `out` records of the stage."""

    def __init__(self, stage: str, out: Path) -> None:
        earlier = read_record(out).get(stage, {})
        self.stage, self.tokens = stage, int(earlier.get("tokens", 0))
        self.began = time.monotonic() - earlier.get("seconds", 0)
        self.curve: list[dict[str, float]] = list(earlier.get("curve", []))

    @property
    def seconds(self) -> float:
        """Since the stage began."""
        return time.monotonic() - self.began

    def point(self, step: int, **figures: float) -> None:
        """Keep and print one point."""
        rounded = {name: round(value, 4) for name, value in figures.items()}
        point = {"step": step, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
        self.curve.append(point | rounded)
        print(self.stage, json.dumps(self.curve[-1]), flush=True)

    def summary(self) -> dict[str, Any]:
        """What goes into training.json."""
        return {"tokens": self.tokens, "seconds": round(self.seconds), "curve": self.curve}


def learning_rate(done: float) -> float:
    """The factor after `done` of the stage: up over 2 %, level, then linearly to zero over the last 60 %."""
    return min((done + 1e-3) / 0.02, 1.0, max(0.0, (1.0 - done) / 0.6))


def steps_of(
    optimizers: list[torch.optim.Optimizer],
    batches: Batches,
    steps: int,
    recorder: Recorder,
    extra: int = 1,
    first: int = 0,
) -> Iterator[tuple[int, float, Tensor]]:
    """(step, share done, ids [rows, length + extra]) with the learning rate set, and the step taken after.

    Every eighth batch of the second half is long.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    bases = [group.setdefault("peak", group["lr"]) for group in groups]
    for step in range(first, steps):
        done = step / steps
        for base, group in zip(bases, groups, strict=True):
            group["lr"] = base * learning_rate(done)
        rows, width = (2, 2048) if step % 8 == 7 and done > 0.5 else (8, 512)
        recorder.tokens += rows * width
        yield step, done, batches.next(rows, width + extra - 1, answer_rows=rows // 4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def compile_parts(*models: nn.Module) -> None:
    """Compile each layer by itself: they share what is compiled."""
    torch._dynamo.config.recompile_limit = 64
    for model in models:
        for module in model.modules():
            if isinstance(module, Layer | MtpLayer):
                module.compile(dynamic=False)


def start_from(first: Decoder, target: Decoder) -> None:
    """Copy what fits from the first edition: embedding, norms, values and outputs, the neurons of each MLP.

    A layer's neurons are ordered by the size of their matrices: the largest become the shared experts, the
    next are dealt to the routed ones, the smallest are dropped.
    """
    shape = TARGET
    with torch.no_grad():
        target.embed_tokens.weight.copy_(first.embed_tokens.weight)
        target.norm.weight.copy_(first.norm.weight)
        assert target.mtp is not None
        pairs = [*zip(first.layers, target.layers, strict=True), (first.layers[-1], target.mtp.block)]
        for old, new in pairs:
            new.input_layernorm.weight.copy_(old.input_layernorm.weight)
            new.post_attention_layernorm.weight.copy_(old.post_attention_layernorm.weight)
            new.self_attn.kv_a_proj_with_mqa.weight[: shape.kv_rank].copy_(old.self_attn.v_proj.weight)
            values = new.self_attn.kv_b_proj.weight.view(shape.heads, -1, shape.kv_rank)[:, shape.nope :]
            for head in range(shape.heads):
                first_row = (head * FIRST_EDITION.kv_heads // shape.heads) * shape.value
                values[head] = torch.eye(shape.kv_rank)[first_row : first_row + shape.value]
            new.self_attn.o_proj.weight.copy_(old.self_attn.o_proj.weight)
            gate, up, down = (getattr(old.mlp, f"{part}_proj").weight for part in ("gate", "up", "down"))
            mlp, order = new.mlp, torch.arange(len(gate))
            if isinstance(mlp, MoE):
                sizes = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
                order, mlp = sizes.argsort(descending=True), mlp.experts
                kept, shared = len(mlp.gate_proj.weight), shape.shared * shape.expert
                dealt = order[shared:kept].view(shape.expert, shape.routed).T.flatten()
                order = torch.cat([order[:shared], dealt])
            mlp.gate_proj.weight.copy_(gate[order])
            mlp.up_proj.weight.copy_(up[order])
            mlp.down_proj.weight.copy_(down[:, order])


def imitate(arguments: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Fit each half layer to what the first edition's gives for the same input; returns the record."""
    first, target = load_decoder(arguments.start, FIRST_EDITION), Decoder(TARGET)
    start_from(first, target)
    batches, recorder = Batches(corpus, tokenizer, arguments.seed + 3), Recorder("imitation", arguments.out)

    parameters = nn.ModuleList(layer.self_attn for layer in target.layers)
    if arguments.compile:
        for attention in (*parameters, *first.layers):
            attention.compile(dynamic=False)
    for step, _, ids in steps_of(
        make_optimizers(parameters, 1.0, target.mixed), batches, arguments.imitation_steps, recorder
    ):
        errors, ids = [], ids[:, :512]
        with torch.autocast("cpu", torch.bfloat16):
            x = first.embed(ids)
            old_turns, turns = first.turns(512, x.dtype), target.turns(512, x.dtype)
            for old, new in zip(first.layers, target.layers, strict=True):
                with torch.no_grad():
                    before = old.input_layernorm(x)
                    wanted = old.self_attn(before, *old_turns)
                    x = x + wanted
                    x = x + old.mlp(old.post_attention_layernorm(x))
                error = (new.self_attn(before, *turns) - wanted).float().square().mean()
                errors.append(error / wanted.float().square().mean())
        each = torch.stack(errors)
        each.sum().backward()
        if step % 10 == 0:
            recorder.point(step, **{f"layer{i}": e for i, e in enumerate(each.tolist())})
    save_checkpoint(target, arguments.out, tokenizer)
    return recorder.summary()


def balance(model: Decoder, done: float) -> None:
    """Move each gate's correction bias towards equal loads, less and less, as the released models were."""
    for module in model.modules():
        if isinstance(module, Gate):
            module.e_score_correction_bias += 0.01 * (1 - done) * (module.load.mean() - module.load).sign()
            module.load.zero_()


def train_target(arguments: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Train the target and its MTP layer together and save them; returns the record."""
    shape = TARGETS[arguments.model]
    target = load_decoder(arguments.out, shape) if arguments.start else new_decoder(shape)
    batches, recorder = Batches(corpus, tokenizer, arguments.seed), Recorder("target", arguments.out)
    if arguments.compile:
        compile_parts(target)
    optimizers = make_optimizers(target, arguments.scale, target.mixed)
    keeper = Keeper(arguments.out, target, optimizers, batches, recorder)
    for step, done, ids in steps_of(
        optimizers, batches, arguments.steps, recorder, MTP_DEPTHS, keeper.restore()
    ):
        # Every few batches unroll the layer over its own recycled states, on half the rows.
        depths = MTP_DEPTHS if step % arguments.unroll_every == 0 else 1
        own, missed, agreed = mtp_losses(target, ids, depths)
        (own.mean() + arguments.mtp_weight * missed.mean()).backward()
        balance(target, done)
        if step % 20 == 0:
            by_row = own.detach().mean(dim=1)
            answers, source = by_row[:2].mean().item(), by_row[2:].mean().item()
            accepted = {f"mtp{d}": share.item() for d, share in enumerate(agreed, 1)}
            recorder.point(step, loss=by_row.mean().item(), answers=answers, source=source, **accepted)
        keeper.keep(step)
    save_checkpoint(target, arguments.out, tokenizer)
    keeper.path.unlink(missing_ok=True)
    return recorder.summary()


class Keeper:
    """Everything that a stage needs to go on after a stop, in a file beside the checkpoint while it runs."""

    def __init__(
        self,
        out: Path,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        batches: Batches,
        recorder: Recorder,
    ) -> None:
        self.path, self.model, self.optimizers = out / f"{recorder.stage}-state.pt", model, optimizers
        self.batches, self.recorder, self.kept = batches, recorder, recorder.seconds

    def keep(self, step: int) -> None:
        """Write it before step `step` is taken, every few minutes."""
        if self.recorder.seconds < self.kept + KEPT_SECONDS:
            return
        state = {
            "step": step,
            "model": self.model.state_dict(),
            "gradients": [parameter.grad for parameter in self.model.parameters()],
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "batches": self.batches.state(),
            "recorder": (self.recorder.tokens, self.recorder.curve, self.recorder.seconds),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, self.path.with_suffix(".part"))
        self.path.with_suffix(".part").replace(self.path)
        self.kept = self.recorder.seconds

    def restore(self) -> int:
        """Go on from what was kept, if anything was; returns the next step."""
        if not self.path.exists():
            return 0
        state = torch.load(self.path, weights_only=False)
        self.model.load_state_dict(state["model"])
        for parameter, gradient in zip(self.model.parameters(), state["gradients"], strict=True):
            parameter.grad = gradient
        for optimizer, own in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
            optimizer.step()  # the one that was due
            optimizer.zero_grad(set_to_none=True)
        self.batches.restore(state["batches"])
        self.recorder.tokens, self.recorder.curve, self.kept = state["recorder"]
        self.recorder.began = time.monotonic() - self.kept
        return int(state["step"]) + 1


def mtp_losses(
    target: Decoder, ids: Tensor, depths: int, frozen: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy [rows, T]; by depth, the MTP layer's loss and how often its first choice is the target's.

    ids [rows, T + MTP_DEPTHS]. The MTP layer learns the target's distribution, with the text's own tokens.
    """
    length = ids.shape[1] - MTP_DEPTHS
    with target.precision():
        with torch.set_grad_enabled(not frozen):
            hidden = target(ids[:, :length])
            logits = target.logits(hidden)
        own = F.cross_entropy(logits.flatten(0, 1), ids[:, 1 : length + 1].flatten(), reduction="none")
        teacher, rows = logits.detach(), slice(0, None, min(depths, 2))
        missed, agreed = [], []
        states = target.mtp_hidden(hidden[rows], ids[rows, 1 : length + depths], depths)
        for depth, state in enumerate(states, 1):
            guess = target.logits(state[:, :-depth]).flatten(0, 1)
            truth = teacher[rows, depth:].flatten(0, 1)
            missed.append(F.cross_entropy(guess, truth.softmax(-1)))
            agreed.append((guess.argmax(-1) == truth.argmax(-1)).float().mean())
    return own.view(len(ids), -1), torch.stack(missed), torch.stack(agreed)


def train_mtp(arguments: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Go on with the MTP layer alone, the target fixed; returns the record, with the held-out figures."""
    target = load_decoder(arguments.out, TARGETS[arguments.model])
    recorder = Recorder("mtp", arguments.out)
    batches = Batches(corpus, tokenizer, arguments.seed + 2)
    assert target.mtp is not None
    target.requires_grad_(False)
    target.mtp.requires_grad_(True)
    if arguments.compile:
        compile_parts(target)
    optimizers = make_optimizers(target.mtp, arguments.scale, target.mixed)
    keeper = Keeper(arguments.out, target, optimizers, batches, recorder)
    for step, _, ids in steps_of(
        optimizers, batches, arguments.mtp_steps, recorder, MTP_DEPTHS, keeper.restore()
    ):
        depths = MTP_DEPTHS if step % arguments.unroll_every == 0 else 1
        _, missed, agreed = mtp_losses(target, ids, depths, True)
        missed.mean().backward()
        if step % 20 == 0:
            recorder.point(
                step,
                loss=missed.mean().item(),
                **{f"mtp{d}": share.item() for d, share in enumerate(agreed, 1)},
            )
        keeper.keep(step)
    save_checkpoint(target, arguments.out, tokenizer)
    keeper.path.unlink(missing_ok=True)
    return recorder.summary()


def measure(arguments: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """The held-out figures of what was trained."""
    return held_out(arguments.out, corpus, tokenizer, TARGETS[arguments.model])


def train_draft(arguments: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer) -> dict[str, Any]:
    """Train the draft from the saved target's distributions and save it; returns its record."""
    target = load_decoder(arguments.out, TARGETS[arguments.model]).eval()
    recorder = Recorder("draft", arguments.out)
    draft = load_decoder(arguments.draft_start, DRAFT) if arguments.draft_start else Decoder(DRAFT)
    batches = Batches(corpus, tokenizer, arguments.seed + 1)

    if arguments.compile:
        compile_parts(target, draft)
    optimizers = make_optimizers(draft, 0.5, target.mixed)
    for step, _, ids in steps_of(optimizers, batches, arguments.draft_steps, recorder):
        with target.precision():
            with torch.no_grad():
                teacher = target.logits(target(ids[:, :-1])).flatten(0, 1)
            logits = draft.logits(draft(ids[:, :-1])).flatten(0, 1)
        agree = (logits.argmax(-1) == teacher.argmax(-1)).float().mean()
        loss = F.cross_entropy(logits, teacher.softmax(-1))
        loss.backward()
        # Without a bound on the gradient this narrow model has left its track and not come back.
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        if step % 10 == 0:
            recorder.point(step, loss=loss.item(), agrees=agree.item())
    save_checkpoint(draft, arguments.out / "draft", tokenizer)
    return {"parameters": sum(p.numel() for p in draft.parameters()), **recorder.summary()}


STAGES = {
    "imitation": imitate,
    "target": train_target,
    "mtp": train_mtp,
    "held_out": measure,
    "draft": train_draft,
}


def main(arguments: argparse.Namespace) -> None:
    """Run the wanted stages; `training.json` beside the checkpoint keeps the record of each."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    corpus = build_corpus()
    source = arguments.tokenizer or arguments.start or arguments.out
    saved = source / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(saved)) if saved.exists() else train_tokenizer(corpus)
    path = arguments.out / "training.json"
    record = read_record(arguments.out)
    record |= {"python": sys.version.split()[0], "torch": torch.__version__, "corpus_sha256": corpus.digest()}
    record.setdefault("runs", []).append(" ".join(sys.argv[1:]))
    for stage in arguments.stages.split(","):
        if arguments.go_on and stage in record:
            continue
        record[stage] = STAGES[stage](arguments, corpus, tokenizer)
        path.write_text(json.dumps(record, indent=1) + "\n")
    write_card(arguments.out, record, corpus)


def parsed(words: list[str]) -> argparse.Namespace:
    """The command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=TARGETS, default="deepseek")
    parser.add_argument("--tokenizer", type=Path, help="a folder whose tokenizer to take")
    parser.add_argument("--stages", default="target,mtp,held_out,draft")
    parser.add_argument("--start", type=Path, help="the first edition's folder, to start from")
    parser.add_argument("--draft-start", type=Path, help="a draft's folder, to start from")
    for stage, steps in (("", 1000), ("imitation-", 100), ("mtp-", 100), ("draft-", 400)):
        parser.add_argument(f"--{stage}steps", type=int, default=steps)
    parser.add_argument("--mtp-weight", type=float, default=0.3, help="of its loss beside the target's")
    parser.add_argument("--unroll-every", type=int, default=4, help="batches, of which one unrolls the layer")
    parser.add_argument("--scale", type=float, default=1.0, help="of the target's learning rates")
    parser.add_argument("--go-on", action="store_true", help="leave out stages that training.json records")
    parser.add_argument("--out", type=Path, default=Path("spd/formats/demo"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--compile", action="store_true", help="compile the layers (a C++ compiler is needed)"
    )
    return parser.parse_args(words)


if __name__ == "__main__":
    main(parsed(sys.argv[1:]))
