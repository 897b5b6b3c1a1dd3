"""An EAGLE-3 head for the embedded demo in plain torch, written and read as its published folders are.

Imports nothing from `spd`, so that what comes out is evidence independent of the program that reads it.
Parameters carry the published names. The embedding is the target's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.recipes.demo_model import MLP, Decoder, GroupedAttention, RMSNorm, angles, initialise, linear


@dataclass(frozen=True)
class Eagle3Shape:
    """Sizes of one head, and the layers whose input it reads (ascending, at least 1).

    What the head knows of the last token passes through the values of its attention, so they are wide. Of
    8 layers the usual third, L - 3, would be the sixth; the last one tells more.
    """

    hidden: int = 256
    intermediate: int = 32
    heads: int = 3
    kv_heads: int = 3
    head_dim: int = 32
    draft_vocab: int = 2304
    read: tuple[int, int, int] = (2, 4, 7)
    rope_theta: float = 10000.0
    max_positions: int = 4096
    vocab: int = 4096


HEAD = Eagle3Shape()


class MidLayer(nn.Module):
    """The head's one layer: attention over norms of embedding and state, the state itself going on."""

    def __init__(self, shape: Eagle3Shape) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = RMSNorm(shape.hidden), RMSNorm(shape.hidden)
        self.post_attention_layernorm = RMSNorm(shape.hidden)
        self.self_attn = GroupedAttention(shape, 2 * shape.hidden, norms=False)
        self.mlp = MLP(shape.hidden, shape.intermediate)

    def forward(
        self, embedded: Tensor, state: Tensor, cos: Tensor, sin: Tensor, memory: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        """The next state [B, T, hidden]; appends this step's keys and values to `memory`."""
        wide = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], dim=-1)
        x = state + self.self_attn(wide, cos, sin, memory)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Head(nn.Module):
    """Reads three residual streams of the target and drafts from a part of its vocabulary, `kept`."""

    def __init__(self, shape: Eagle3Shape, kept: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("kept", kept, persistent=False)
        self.fc = linear(3 * shape.hidden, shape.hidden)
        self.midlayer = MidLayer(shape)
        self.norm = RMSNorm(shape.hidden)
        self.lm_head = linear(shape.hidden, shape.draft_vocab)
        initialise(self)

    def start_from(self, target: Decoder) -> None:
        """Begin as the target's own head upon the last stream read."""
        with torch.no_grad():
            self.fc.weight.mul_(0.1)[:, -self.shape.hidden :] += torch.eye(self.shape.hidden)
            self.norm.weight.copy_(target.norm.weight)
            self.lm_head.weight.copy_(target.embed_tokens.weight[self.kept])

    def states(self, streams: Tensor, following: Tensor, depth: int) -> list[Tensor]:
        """What goes on at draft steps 0 … depth - 1, each [B, T, hidden], before its norm.

        streams [B, T, 3 * hidden]; following [B, T + depth - 1, hidden], embeddings of the tokens at
        positions 1 on. Row P of step j has seen (streams P, token P + 1) and its own j states, at position
        P + j: keys of step 0 up to P, then one key of each later step, as a drafter's cache holds them.
        """
        length, steps, memory = streams.shape[1], [], []
        state = self.fc(streams)
        for step in range(depth):
            cos, sin = angles(length, self.shape.head_dim, self.shape.rope_theta, step)
            turns = cos.to(state.dtype), sin.to(state.dtype)
            state = self.midlayer(following[:, step : step + length], state, *turns, memory)
            steps.append(state)
        return steps

    def logits(self, state: Tensor) -> Tensor:
        """Float logits [..., draft_vocab]."""
        return self.lm_head(self.norm(state)).float()


def read_target(target: Decoder, ids: Tensor, read: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The residual streams that enter the layers read, side by side, and the logits [B, T, vocab]."""
    x, streams = target.embed(ids), []
    turns = target.turns(ids.shape[1], x.dtype)
    for index, layer in enumerate(target.layers):
        if index in read:
            streams.append(x)
        x = layer(x, *turns)
    return torch.cat(streams, dim=-1), target.logits(target.norm(x))


def soft_losses(head: Eagle3Head, states: list[Tensor], logits: Tensor) -> tuple[Tensor, Tensor]:
    """By step, the loss against the target's distribution over `kept`, and how often the first choice agrees.

    A position counts in the loss where the target's own choice is kept; in the agreement every one does.
    """
    teacher, best = logits[..., head.kept].softmax(-1), logits.argmax(-1)
    within = torch.isin(best, head.kept)
    losses, agreed = [], []
    for depth, state in enumerate(states, 1):
        guess = head.logits(state[:, :-depth])
        log_chances, counts = F.log_softmax(guess, dim=-1), within[:, depth:].float()
        missed = -(teacher[:, depth:] * log_chances).sum(-1)
        losses.append((missed * counts).sum() / counts.sum().clamp(min=1))
        agreed.append((head.kept[guess.argmax(-1)] == best[:, depth:]).float().mean())
    return torch.stack(losses), torch.stack(agreed)


def head_config(shape: Eagle3Shape) -> dict[str, Any]:
    """config.json; the layer ids name those whose output is read."""
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
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [index - 1 for index in shape.read],
            "use_aux_hidden_state": True,
        },
    }


def save_head(head: Eagle3Head, folder: Path) -> None:
    """Write the folder: config.json and model.safetensors, bfloat16 beside the two maps of ids."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_config(head.shape), indent=1) + "\n")
    tensors = {name: value.to(torch.bfloat16).contiguous() for name, value in head.state_dict().items()}
    tensors["d2t"] = head.kept - torch.arange(len(head.kept))
    tensors["t2d"] = torch.zeros(head.shape.vocab, dtype=torch.bool).index_fill(0, head.kept, True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_head(folder: Path, shape: Eagle3Shape) -> Eagle3Head:
    """A saved head, read back in float32."""
    weights = load_file(folder / "model.safetensors")
    offsets = weights.pop("d2t")
    del weights["t2d"]
    head = Eagle3Head(shape, offsets + torch.arange(len(offsets)))
    head.load_state_dict({name: value.float() for name, value in weights.items()})
    return head
