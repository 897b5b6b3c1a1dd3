"""The commit against a plain walk over each slot: every tensor it may write, and every row it may
not."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from spd.kernels.round.commit import EMISSION_HEAD, FAILED, FULL, GOING_ON, STOPPED, emission_width
from spd.kernels.round.window import NUM_TIMES
from tests.kernels.forms import round_state

STEM = "round.commit"
MAX_LEN = 24
VOCAB = 6
DEPTH = 3
SPARE = 2
State = dict[str, torch.Tensor]


def make_state(seed: int, slots: int, k: int, device: str, stops: int = 5) -> State:
    """Return state tensors of SPARE more slots than are run; with few tokens, so that drafts
    match."""
    rng = random.Random(seed)
    rows = slots + SPARE
    max_k = k + 2

    def integers(*shape: int, below: int = VOCAB) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rng.getrandbits(30))
        return torch.randint(below, shape, generator=generator)

    sampled = integers(rows, max_k + 1)
    draft = integers(rows, max_k)
    length = torch.tensor([rng.randint(1, MAX_LEN - 1) for _ in range(rows)])
    stop_ids = torch.full((rows, stops), -1)
    for s in range(rows):
        right = rng.choice((0, k, rng.randint(0, k)))
        draft[s, :right] = sampled[s, :right]
        for j in range(rng.choice((0, 1, stops)) if k < 12 else rng.choice((0, 0, 1))):
            stop_ids[s, j] = rng.choice((rng.randrange(VOCAB), VOCAB + 3))
    doubt = 0.3 / (k + 1)
    state = {
        "draft": draft,
        "num_drafts": torch.tensor(
            [rng.choice((0, k, k + 3, rng.randint(0, k))) for _ in range(rows)]
        ),
        "sampled": sampled,
        "finite": torch.tensor(
            [[rng.random() > doubt for _ in range(max_k + 1)] for _ in range(rows)]
        ),
        "tokens": integers(rows, MAX_LEN + max_k + 1),
        "length": length,
        "length_limit": torch.tensor(
            [min(MAX_LEN, int(n) + rng.choice((0, 1, 2, k, k + 1, k + 2, 20))) for n in length]
        ),
        "stop_ids": stop_ids,
        "active": torch.tensor([rng.random() < 0.8 for _ in range(rows)]),
        "generated": integers(rows, VOCAB + 4, below=9).to(torch.int32),
        "ring": integers(DEPTH, rows, emission_width(max_k), below=1000),
        "counter": torch.tensor([rng.randrange(3 * DEPTH)]),
        "match": integers(rows, below=9),
        "times": torch.full((DEPTH, NUM_TIMES), -5),
    }
    return {name: tensor.to(device) for name, tensor in state.items()}


def expect(state: State, slots: int, k: int, accepted_drafts: list[int] | None = None) -> set[str]:
    """Do to the state, in plain Python, what the commit should; returns what was met."""
    met = set()
    place = int(state["counter"]) % DEPTH
    for s in range(slots):
        draft = state["draft"][s, :k].tolist()
        sampled = state["sampled"][s, : k + 1].tolist()
        before = int(state["length"][s])
        real = int(state["num_drafts"][s])
        accepted = 0
        while accepted < min(k, real) and draft[accepted] == sampled[accepted]:
            accepted += 1
        if accepted_drafts is not None:
            accepted = accepted_drafts[s]
        stops = set(state["stop_ids"][s].tolist())
        finite = state["finite"][s].tolist()
        stop = next((i for i in range(accepted + 1) if sampled[i] in stops), None)
        bad = next((i for i in range(accepted + 1) if not finite[i]), None)
        ends = [
            accepted + 1,
            *([] if stop is None else [stop + 1]),
            *([] if bad is None else [bad]),
        ]
        count = min(ends)
        reason = GOING_ON
        if before + count >= int(state["length_limit"][s]):
            reason = FULL
        if stop is not None and (bad is None or stop < bad):
            reason = STOPPED
        if bad is not None and (stop is None or bad <= stop):
            reason = FAILED
        if not state["active"][s]:
            count = 0
            reason = GOING_ON
            met.add("silent")
        for i in range(count):
            state["tokens"][s, before + i] = sampled[i]
            state["generated"][s, sampled[i]] += 1
        met |= {
            f"reason {reason}",
            *(["stop inside"] if stop is not None and stop < accepted else []),
        }
        met |= {"bad inside"} if bad is not None and 0 < bad < accepted else set()
        met |= {"accepted some"} if 0 < accepted < k else set()
        met |= {"counted twice"} if len(set(sampled[:count])) < count else set()
        met |= {"all"} if count == k + 1 else set()
        state["length"][s] = before + count
        state["active"][s] = bool(state["active"][s]) and reason == GOING_ON
        head = [before, real, accepted, count, reason, k, int(state["match"][s])]
        state["ring"][place, s, : EMISSION_HEAD + 2 * k + 1] = torch.tensor(head + sampled + draft)
    return met


def check(
    op: Any,
    state: State,
    slots: int,
    k: int,
    accepted_drafts: list[int] | None = None,
    counted: bool = True,
) -> set[str]:
    """Hold a commit of the first slots, whose acceptance may be given, against its definition."""
    expected = {name: tensor.cpu().clone() for name, tensor in state.items()}
    met = expect(expected, slots, k, accepted_drafts)
    if not counted:
        expected["generated"] = state["generated"].cpu().clone()
    shared_names = ("ring", "counter", "times")
    widths = {"draft": k, "sampled": k + 1, "finite": k + 1}
    cut = {
        name: t if name in shared_names else t[:slots][..., : widths.get(name)]
        for name, t in state.items()
    }
    window = SimpleNamespace(draft=cut.pop("draft"), num_drafts=cut.pop("num_drafts"))
    accepted = (
        None
        if accepted_drafts is None
        else torch.tensor(accepted_drafts, device=state["draft"].device)
    )
    sampled = cut.pop("sampled")
    finite = cut.pop("finite")
    generated = cut.pop("generated")
    counts = generated if counted else None
    op.round_commit(
        state=round_state(**cut),
        window=window,
        sampled=sampled,
        finite=finite,
        accepted=accepted,
        generated=counts,
    )
    for name, tensor in expected.items():
        assert name == "times" or torch.equal(state[name].cpu(), tensor), name
    return met


@pytest.mark.covers(2)
@pytest.mark.parametrize("k", [0, 1, 4, 7, 31])
@pytest.mark.parametrize("slots", [1, 3, 17])
def test_commit_equals_its_definition(op: Any, device: str, slots: int, k: int) -> None:
    """By the coupled rule and by another one's acceptance, with and without counts."""
    met = set()
    for seed in range(5 if slots < 17 else 3):
        met |= check(op, make_state(seed, slots, k, device), slots, k)
    accepted_drafts = [random.Random(slot).randint(0, k) for slot in range(slots)]
    check(op, make_state(5, slots, k, device), slots, k, accepted_drafts)
    check(op, make_state(6, slots, k, device), slots, k, counted=False)
    if (slots, k) == (17, 7):  # of every kind
        ends = {f"reason {reason}" for reason in (GOING_ON, STOPPED, FULL, FAILED)}
        assert met == ends | {
            "silent",
            "stop inside",
            "bad inside",
            "accepted some",
            "counted twice",
            "all",
        }


@pytest.mark.parametrize("stops", [1, 40])
def test_any_number_of_stop_ids_ends_a_slot(op: Any, device: str, stops: int) -> None:
    """The last one counts, and what pads the kernel's lanes, id 0, is none."""
    for last, reason in ((0, STOPPED), (5, GOING_ON)):
        state = make_state(1, 2, 3, device, stops=stops)
        values = {"sampled": 0, "finite": True, "active": True, "length": 3, "draft": 0}
        for name, value in {**values, "length_limit": MAX_LEN, "stop_ids": -1}.items():
            state[name].fill_(value)
        state["stop_ids"][:, -1] = last
        assert check(op, state, 2, 3) >= {f"reason {reason}"}


def test_a_commit_fills_the_row_to_its_end(op: Any, device: str) -> None:
    """A silent slot as long as can be, and one that fills its row, write nothing beyond it."""
    state = make_state(4, 2, 3, device)
    state["length"][:2] = torch.tensor([MAX_LEN, MAX_LEN - 1], device=device)
    state["active"][:2] = torch.tensor([False, True], device=device)
    for name, value in (
        ("length_limit", MAX_LEN),
        ("finite", True),
        ("stop_ids", -1),
        ("num_drafts", 0),
    ):
        state[name].fill_(value)
    assert check(op, state, 2, 3) == {"silent", "reason 0", f"reason {FULL}"}
