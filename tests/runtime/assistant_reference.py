"""The assistant of `transformers` with its target: no cache, every text computed anew, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tests.runtime.mtp_reference import LIBRARY_OPTIONS, choose_token


class LibraryAssistant:
    """An assistant of `transformers` with its target: no cache, every text computed anew, in
    float64.
    """

    def __init__(self, target: Path, folder: Path, bias: Mapping[int, float] | None = None) -> None:
        from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM

        self.bias = bias or {}
        self.target = AutoModelForCausalLM.from_pretrained(target, **LIBRARY_OPTIONS).eval()
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(
            folder, **LIBRARY_OPTIONS
        ).eval()
        # The library's mask includes this distance and its own position: one more than the target's.
        self.assistant.config.text_config.sliding_window -= 1

    def hidden(self, tokens: list[int]) -> Tensor:
        """Return nothing: each draft computes its text anew."""
        return torch.empty(0)

    @torch.inference_mode()
    def draft(self, tokens: list[int], k: int, hidden: Tensor) -> tuple[list[int], float]:
        """Return the k greedy drafts after `tokens`, and the smallest gap to a second choice."""
        output_options = {"output_hidden_states": True, "return_shared_kv_states": True}
        target_output = self.target(torch.tensor([tokens[:-1]]), **output_options)
        state = target_output.hidden_states[-1][:, -1:]
        last = tokens[-1]
        drafts = list[int]()
        gap = float("inf")
        position = torch.tensor([[len(tokens) - 1]])
        for _ in range(k):
            token = self.target.get_input_embeddings()(torch.tensor([[last]]))
            options = {
                "position_ids": position,
                "shared_kv_states": target_output.shared_kv_states,
                "use_cache": False,
            }
            output = self.assistant(inputs_embeds=torch.cat((token, state), -1), **options)
            for token_id, bias in self.bias.items():
                output.logits[0, -1, token_id] += bias
            last, second_gap = choose_token(output.logits[0, -1])
            state = output.last_hidden_state
            drafts = [*drafts, last]
            gap = min(gap, second_gap)
        return drafts, gap
