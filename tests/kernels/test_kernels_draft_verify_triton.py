"""The Triton forms of rejection and block verification decide and draw as the references do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from spd.kernels.sampling import draft_verify

pytest.importorskip("triton")

from spd.kernels.sampling import draft_verify_triton

rules = pytest.mark.parametrize("rule", ["rejection", "block"])
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of log(0)


@dataclass(frozen=True)
class Operands:
    """What the rules decide by, but for the rule."""

    target: Tensor
    draft_probs: Tensor | None
    draft: Tensor
    num_drafts: Tensor
    seed: Tensor
    positions: Tensor

    def verified(
        self, verify_drafts: Callable[..., tuple[Tensor, Tensor]], by_block: bool
    ) -> tuple[Tensor, Tensor]:
        return verify_drafts(
            self.target,
            self.draft_probs,
            self.draft,
            num_drafts=self.num_drafts,
            seed=self.seed,
            positions=self.positions,
            by_block=by_block,
        )


def random_arguments(
    slots: int, k: int, vocab: int, seed: int, one_hot: bool, device: str
) -> Operands:
    """Return distributions of drafts near the target's, so that prefixes of every length pass."""
    g = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(slots, k + 1, vocab, generator=g)
    logits[torch.rand(logits.shape, generator=g) < 0.1] = -1e4  # probability 0
    near = logits[:, :k] + 0.7 * torch.randn(slots, k, vocab, generator=g)
    laws = near.softmax(dim=-1)
    draft = torch.multinomial(laws.reshape(-1, vocab), 1, generator=g).view(slots, k)
    if one_hot and k:
        draft = near.argmax(dim=-1)
    num_drafts = (k - torch.randint(0, 3, (slots,), generator=g)).clamp(min=0)
    seeds = torch.randint(2**62, (slots,), generator=g)
    positions = torch.randint(2**30, (slots, 1), generator=g) + torch.arange(k + 1)
    target = logits.softmax(dim=-1).to(device)
    laws = laws.to(device)
    return Operands(
        target,
        None if one_hot else laws,
        draft=draft.to(device),
        num_drafts=num_drafts.to(device),
        seed=seeds.to(device),
        positions=positions.to(device),
    )


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set blocks so small that the vocabularies fill several."""
    monkeypatch.setattr(draft_verify_triton, "BLOCK", 256)


def decided(rule: str, operands: Operands, share: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return the kernels' decisions, checked against the reference except where a last bit
    decides."""
    by_block = rule == "block"
    result = operands.verified(draft_verify_triton.verify_drafts, by_block)
    expected = operands.verified(draft_verify.verify_drafts, by_block)
    assert result[0].dtype == result[1].dtype == torch.int64
    different = (result[0] != expected[0]).any(dim=-1) | (result[1] != expected[1])
    assert different.float().mean() <= share
    return result


@pytest.mark.covers(1, count=4)
@rules
@pytest.mark.parametrize("one_hot", [False, True], ids=["sampled", "one-hot"])
@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_kernels_do_as_the_reference(rule: str, one_hot: bool, k: int, device: str) -> None:
    lengths = set()
    slots, share = (5, 0.0) if device == "cpu" else (2000, 1e-3)
    for vocab in (1, 2, 17, 600):
        operands = random_arguments(
            slots=slots, k=k, vocab=vocab, seed=vocab + k, one_hot=one_hot, device=device
        )
        lengths |= set(decided(rule, operands, share=share)[1].tolist())
    assert len(lengths) > min(k, 2)


@rules
def test_drafts_at_the_edges_of_distributions_are_verified(rule: str, device: str) -> None:
    """The target's own; above it everywhere, which leaves no residual; of drafts that it could not
    draw."""
    operands = random_arguments(slots=3, k=2, vocab=300, seed=8, one_hot=False, device=device)
    target = operands.target
    laws = operands.draft_probs
    draft = operands.draft
    assert laws is not None
    draft_probs = target[:, :2]
    real = torch.full_like(operands.seed, 2)
    impossible = laws.scatter(-1, draft[..., None], 0.0)
    for law, accepted in ((draft_probs, [2] * 3), (draft_probs * 4, None), (impossible, [0] * 3)):
        tokens, count = decided(
            rule, replace(operands, draft_probs=law.contiguous(), num_drafts=real)
        )
        assert accepted in (None, count.tolist())
        rows = target.gather(1, count[:, None, None].expand(-1, 1, 300))[:, 0]
        assert (rows.gather(1, tokens.gather(1, count[:, None])) > 0).all()


def test_a_blocks_residual_is_scaled(device: str) -> None:
    """After one draft of joint ratio 1/2, half the row exceeds the drafter's at token 1 only."""
    slots = 12
    target = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], device=device)
    laws = torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.1, 0.6]], device=device)
    seed = torch.arange(slots, device=device)
    draft = torch.tensor([[0, 2]], device=device)
    places = torch.arange(3, device=device)
    operands = Operands(
        target=target.expand(slots, 3, 3).contiguous(),
        draft_probs=laws.expand(slots, 2, 3).contiguous(),
        draft=draft.expand(slots, 2),
        num_drafts=torch.full_like(seed, 2),
        seed=seed,
        positions=places.expand(slots, 3),
    )
    tokens, accepted = decided("block", operands)
    assert 2 <= int((accepted == 1).sum()) < slots
    assert (tokens[accepted == 1, 1] == 1).all()


@rules
def test_a_slot_is_the_same_alone_and_among_others(rule: str, device: str) -> None:
    operands = random_arguments(slots=4, k=3, vocab=1003, seed=21, one_hot=False, device=device)
    together = decided(rule, operands)
    for slot in range(4):
        rows = {name: t[slot : slot + 1].contiguous() for name, t in vars(operands).items()}
        alone = Operands(**rows)
        for result, right in zip(decided(rule, alone), together, strict=True):
            assert torch.equal(result[0], right[slot])
