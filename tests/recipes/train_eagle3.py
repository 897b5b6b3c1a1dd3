"""Train an EAGLE-3 head for the embedded demo, and write it in the published layout.

Plain torch; imports nothing from `spd`. The head is trained on the target's distributions over the
corpus of the demo, unrolled over its states as a drafter unrolls it. Parameters have the published
names; the embedding is the target's. Run it from the repository root:

    python tests/recipes/train_eagle3.py --out OUT
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.recipes import demo_model as model
from tests.recipes.demo_checkpoint import load_decoder
from tests.recipes.demo_corpus import (
    Batches,
    Corpus,
    build_corpus,
    held_out_windows,
    measure_held_out,
)
from tests.recipes.demo_model import TARGET, Decoder, Memory, RMSNorm, Shape, linear
from tests.recipes.train_demo import Recorder, begin_record, training_steps

DEPTHS = 3
MEASURED = 4
DECAY = 0.8


@dataclass(frozen=True)
class Eagle3Shape(Shape):
    """Sizes of one head, and the layers whose input it reads (ascending, at least 1).

    The last token reaches the head through the values of its attention, so they are wide. Of 8
    layers the default third, L - 3, would be the sixth; the last one gives better drafts.
    """

    intermediate: int = 32
    heads: int = 3
    kv_heads: int = 3
    head_dim: int = 32
    draft_vocab: int = 2304
    read_layers: tuple[int, int, int] = (2, 4, 7)


HEAD = Eagle3Shape()


class MidLayer(nn.Module):
    """The head's layer: attention over norms of embedding and state, the state as residual."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden)
        self.hidden_norm = RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.self_attn = model.GroupedAttention(shape, 2 * shape.hidden, norms=False)
        self.mlp = model.MLP(shape.hidden, shape.intermediate)

    def forward(
        self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor, memory: Memory
    ) -> Tensor:
        """Return the next state [B, T, hidden]; append this step's keys and values to `memory`."""
        wide = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], dim=-1)
        x = state + self.self_attn(wide, cos, sin, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """A head that reads three residual streams of the target and drafts `draft_ids` alone."""

    draft_ids: Tensor

    def __init__(self, shape: Eagle3Shape, draft_ids: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("draft_ids", draft_ids, persistent=False)
        self.fc = linear(3 * shape.hidden, shape.hidden)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden)
        self.lm_head = linear(shape.hidden, shape.draft_vocab)
        model.initialise(self)

    def start_from(self, target: Decoder) -> None:
        """Initialise as the target's head on the last stream."""
        with torch.no_grad():
            self.fc.weight.mul_(0.1)[:, -self.shape.hidden :] += torch.eye(self.shape.hidden)
            self.norm.weight.copy_(target.norm.get_parameter("weight"))
            self.lm_head.weight.copy_(target.embed_tokens.weight[self.draft_ids])

    def states(self, streams: Tensor, following: Tensor, depth: int) -> list[Tensor]:
        """Return the states at draft steps 0 … depth - 1, each [B, T, hidden], before the norm.

        streams [B, T, 3 * hidden]; following [B, T + depth - 1, hidden], embeddings of the tokens
        at positions 1 on. Row P of step j has seen (streams P, token P + 1) and its own j states,
        at position P + j: keys of step 0 up to P, then one key of each later step, as a drafter's
        cache holds them.
        """
        length = streams.shape[1]
        steps = []
        memory: Memory = []
        state = self.fc(streams)
        for step in range(depth):
            cos, sin = model.rotary_angles(length, self.shape.head_dim, self.shape.rope_theta, step)
            cos = cos.to(state.dtype)
            sin = sin.to(state.dtype)
            state = self.midlayer(following[:, step : step + length], state, cos, sin, memory)
            steps.append(state)
        return steps

    def logits(self, state: Tensor) -> Tensor:
        """Return float logits [..., draft_vocab]."""
        return self.lm_head(self.norm(state)).float()


def read_target(target: Decoder, ids: Tensor, read: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the joined residual streams at the inputs of some layers, and logits [B, T, vocab]."""
    x = target.embed(ids)
    streams = []
    cos, sin = target.rotary(ids.shape[1], x.dtype)
    for index, layer in enumerate(target.layers):
        if index in read:
            streams.append(x)
        x = layer(x, cos, sin)
    return torch.cat(streams, dim=-1), target.logits(target.norm(x))


def soft_losses(head: Eagle3Head, states: list[Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return by step the loss against the target's distribution, and the agreement.

    A position counts in the loss if the target's choice is in `draft_ids`; in the agreement all
    count.
    """
    teacher = logits[..., head.draft_ids].softmax(-1)
    best = logits.argmax(-1)
    within = torch.isin(best, head.draft_ids)
    losses = []
    agreed = []
    for depth, state in enumerate(states, 1):
        guess = head.logits(state[:, :-depth])
        log_chances = F.log_softmax(guess, dim=-1)
        counts = within[:, depth:].float()
        position_losses = -(teacher[:, depth:] * log_chances).sum(-1)
        losses.append((position_losses * counts).sum() / counts.sum().clamp(min=1))
        agreed.append((head.draft_ids[guess.argmax(-1)] == best[:, depth:]).float().mean())
    return torch.stack(losses), torch.stack(agreed)


def head_config(shape: Eagle3Shape) -> dict[str, Any]:
    """Return config.json; its layer ids are those whose output is read."""
    read = [index - 1 for index in shape.read_layers]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": shape.rope_theta,
        "max_position_embeddings": shape.max_positions,
        "vocab_size": shape.vocab,
        "draft_vocab_size": shape.draft_vocab,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": read, "use_aux_hidden_state": True},
    }


def save_head(head: Eagle3Head, folder: Path) -> None:
    """Write config.json and model.safetensors: weights in bfloat16, and two maps of ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_config(head.shape), indent=1) + "\n")
    tensors = {
        name: value.to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()
    }
    tensors["d2t"] = head.draft_ids - torch.arange(len(head.draft_ids))
    tensors["t2d"] = torch.zeros(head.shape.vocab, dtype=torch.bool).index_fill(
        0, head.draft_ids, True
    )
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_head(folder: Path, shape: Eagle3Shape) -> Eagle3Head:
    """Read a saved head back in float32."""
    weights = load_file(folder / "model.safetensors")
    offsets = weights.pop("d2t")
    del weights["t2d"]
    head = Eagle3Head(shape, offsets + torch.arange(len(offsets)))
    head.load_state_dict({name: value.float() for name, value in weights.items()})
    return head


@torch.no_grad()
def count_tokens(target: Decoder, batches: Batches, count: int) -> Tensor:
    """Count each id [vocab] as the target's choice, three times, and as the text's token."""
    counts = torch.zeros(target.shape.vocab, dtype=torch.long)
    for _ in range(count):
        ids = batches.next(8, 512, answer_rows=2)
        with torch.autocast("cpu", torch.bfloat16):
            best = target.logits(target(ids[:, :-1])).argmax(-1)
        for tokens, times in ((best, 3), (ids, 1)):
            counts += times * torch.bincount(tokens.flatten(), minlength=len(counts))
    return counts


make_optimizers = partial(model.make_optimizers, outer=("lm_head.weight",), rate=0.002)
"""Muon for matrices between states, AdamW for the output head and the norms."""


def draft_losses(
    head: Eagle3Head, target: Decoder, ids: Tensor, depths: int
) -> tuple[Tensor, Tensor]:
    """Return by draft step the head's loss and agreement on ids [rows, T + depths]."""
    length = ids.shape[1] - depths
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            streams, logits = read_target(target, ids[:, :length], head.shape.read_layers)
            following = target.embed(ids[:, 1:])
        return soft_losses(
            head, head.states(streams, following[:, : length + depths - 1], depths), logits
        )


def train(
    head: Eagle3Head, target: Decoder, batches: Batches, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Train and save the head; return the record."""
    recorder = Recorder("eagle3")
    optimizers = make_optimizers(head, arguments.scale)
    for step, _, ids in training_steps(
        optimizers=optimizers,
        batches=batches,
        steps=arguments.steps,
        recorder=recorder,
        extra=DEPTHS,
    ):
        # Two steps a batch: half the rows train the first draft only, the other half all depths.
        draft_losses(head, target, ids[1::2, : 1 - DEPTHS], 1)[0].sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses, agreed = draft_losses(head, target, ids[::2], DEPTHS)
        loss = (losses * DECAY ** torch.arange(DEPTHS)).sum()
        loss.backward()
        if step % 20 == 0 or step == arguments.steps - 1:
            accepted = {f"depth{d}": share for d, share in enumerate(agreed, 1)}
            recorder.point(step, loss=loss, first=losses[0], **accepted)
        if step % 200 == 199:
            save_head(head, arguments.out)
    save_head(head, arguments.out)
    return recorder.summary()


@torch.no_grad()
def measure(
    head: Eagle3Head, target: Decoder, corpus: Corpus, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Measure, on held-out text, how often the head's first choice at each depth is the target's.

    The windows and positions are those of `demo_corpus.held_out`.
    """
    agreed = torch.zeros(MEASURED)
    in_vocabulary = 0
    tokens = 0
    for window in held_out_windows(corpus, tokenizer):
        length = window.shape[1] - 1 - MEASURED
        if length < 1:
            continue
        with torch.autocast("cpu", torch.bfloat16):
            streams, logits = read_target(target, window[:, :-1], head.shape.read_layers)
            best = logits[0].argmax(-1)
            following = target.embed(window[:, 1 : length + MEASURED])
            for depth, state in enumerate(head.states(streams[:, :length], following, MEASURED), 1):
                guess = head.draft_ids[head.logits(state[0]).argmax(-1)]
                agreed[depth - 1] += (guess == best[depth : depth + length]).sum()
        in_vocabulary += int(torch.isin(best[1 : 1 + length], head.draft_ids).sum())
        tokens += length
    return {
        "acceptance": [round(share, 4) for share in (agreed / tokens).tolist()],
        "kept": round(in_vocabulary / tokens, 4),
        "tokens": tokens,
        "parameters": sum(p.numel() for p in head.parameters()),
    }


def main(arguments: argparse.Namespace) -> None:
    """Train the head; `training.json` beside it has the record."""
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    corpus = build_corpus()
    tokenizer = Tokenizer.from_file(str(arguments.target / "tokenizer.json"))
    target = load_decoder(arguments.target, TARGET).eval().requires_grad_(False)
    batches = Batches(corpus, tokenizer, arguments.seed + 4)
    path = arguments.out / "training.json"
    if arguments.go_on:
        head = load_head(arguments.out, HEAD)
    else:
        counts = count_tokens(target, batches, arguments.count_batches)  # the most frequent ids
        head = Eagle3Head(HEAD, counts.argsort(descending=True)[: HEAD.draft_vocab].sort().values)
        head.start_from(target)
        path.unlink(missing_ok=True)
    record = begin_record(arguments.out, corpus)
    command = " ".join(sys.argv[1:]).replace(
        str(arguments.out), "OUT"
    )  # without this machine's path
    record["runs"].append(command)
    record["eagle3"] = train(head, target, batches, arguments)
    path.write_text(json.dumps(record, indent=1) + "\n")
    record["held_out"] = measure(load_head(arguments.out, HEAD), target, corpus, tokenizer)
    record["target_held_out"] = measure_held_out(arguments.target, corpus, tokenizer)
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
