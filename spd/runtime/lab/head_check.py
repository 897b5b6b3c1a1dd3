"""An MTP head tried on its target: drafts of running rounds against drafts from nothing, acceptance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spd.runtime.engine.request import Request
from spd.runtime.lab.replay import run_requests
from spd.runtime.plan.config import EngineConfig
from spd.runtime.round.sampling_params import SamplingParams


@dataclass(frozen=True)
class HeadCheck:
    """tokens: of the target's own greedy text, each drafted for once with all before it given.

    acceptance: the share of them at which the first 1, 2, … drafts were the text's. rounds: of a run that
    speculates; differing: those whose drafts are not the ones that an empty cache gives.
    """

    tokens: int
    acceptance: tuple[float, ...]
    rounds: int
    differing: int

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


def check_head(
    config: EngineConfig,
    prompts: Sequence[tuple[int, ...]],
    tokens: int,
    check: Callable[[], None] = lambda: None,
) -> HeadCheck:
    """Draft for every token of greedy replies of `tokens` tokens; config names target, head and k.

    Each place is drafted for by a request of its own, whose cache holds nothing of an earlier round: the
    whole of prompt and reply so far is read anew.
    """
    config = replace(config, adaptive=False, prefix_sharing=False)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    asked = [Request(str(number), ids, params) for number, ids in enumerate(prompts)]
    plan, replies = run_requests(config, asked, check)
    k = int(plan["draft_max"])
    once = replace(params, max_tokens=k + 2)
    places, texts = [], {}
    for reply in replies:
        prompt = reply.request.prompt_ids
        texts[reply.request.id] = (*prompt, *reply.token_ids)
        for given in range(len(reply.token_ids) - k):
            spans = (("prompt", len(prompt)), ("generated", given))
            ids, name = (*prompt, *reply.token_ids[:given]), f"{reply.request.id} {len(prompt) + given + 1}"
            places.append(Request(name, ids, once, tuple(span for span in spans if span[1])))
    _, anew = run_requests(config, places, check)
    firsts = {each.request.id: [round_.draft for round_ in each.rounds if round_.draft] for each in anew}
    drafts = {name: found[0] for name, found in firsts.items()}
    accepted = [0] * k
    for name, draft in drafts.items():
        request, position = name.split()
        text = texts[request][int(position) : int(position) + k]
        agreed = next((j for j in range(k) if draft[j] != text[j]), k)
        accepted = [count + (depth < agreed) for depth, count in enumerate(accepted)]
    rounds = [
        (record.draft, drafts[f"{reply.request.id} {record.position}"])
        for reply in replies
        for record in reply.rounds
        if len(record.draft) == k and f"{reply.request.id} {record.position}" in drafts
    ]
    return HeadCheck(
        len(drafts),
        tuple(count / len(drafts) for count in accepted),
        len(rounds),
        sum(ran != fresh for ran, fresh in rounds),
    )
