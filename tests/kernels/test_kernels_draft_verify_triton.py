"""The Triton forms of rejection and block verification decide and draw as the references do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from spd.kernels.sampling import draft_verify

pytest.importorskip("triton")

from spd.kernels.sampling import draft_verify_triton

RULES = ["rejection", "block"]
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of log(0)

Arguments = tuple[Tensor, "Tensor | None", Tensor, Tensor, Tensor, Tensor]


def random_arguments(slots: int, k: int, vocab: int, seed: int, one_hot: bool, device: str) -> Arguments:
    """Drafters near the target, so that prefixes of every length pass."""
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
    target, laws = logits.softmax(dim=-1).to(device), laws.to(device)
    integers = (draft.to(device), num_drafts.to(device), seeds.to(device), positions.to(device))
    return target, None if one_hot else laws, *integers


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so small that the vocabularies fill several."""
    monkeypatch.setattr(draft_verify_triton, "BLOCK", 256)


def assert_same(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], share: float) -> None:
    """Equal but for a share of slots, where a last bit of a sum or a logarithm decides."""
    assert found[0].dtype == found[1].dtype == torch.int64
    different = (found[0] != expected[0]).any(dim=-1) | (found[1] != expected[1])
    assert different.float().mean() <= share


@pytest.mark.covers(2)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("one_hot", [False, True], ids=["sampled", "one-hot"])
@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_kernels_do_as_the_reference(rule: str, one_hot: bool, k: int, device: str) -> None:
    lengths = set()
    for vocab in (1, 2, 17, 600):
        slots = 5 if device == "cpu" else 2000
        arguments = random_arguments(slots, k, vocab, vocab + k, one_hot, device)
        found = draft_verify_triton.verify_drafts(*arguments, rule == "block")
        expected = draft_verify.verify_drafts(*arguments, rule == "block")
        assert_same(found, expected, 0.0 if device == "cpu" else 1e-3)
        lengths |= set(found[1].tolist())
    assert len(lengths) > min(k, 2)


@pytest.mark.parametrize("rule", RULES)
def test_equal_laws_and_rounded_ones(rule: str, device: str) -> None:
    """Where draft and target agree all is accepted; where rounding leaves no residual, the row is drawn."""
    target, laws, draft, _, seed, positions = random_arguments(3, 2, 300, 8, False, device)
    assert laws is not None
    real = torch.full_like(seed, 2)
    same = (target, target[:, :2].contiguous(), draft, real, seed, positions)
    found = draft_verify_triton.verify_drafts(*same, rule == "block")
    assert found[1].tolist() == [2] * 3
    above = (target[:, :2] * 4).contiguous()  # exceeds the target everywhere: residuals of nothing
    arguments = (target, above, draft, real, seed, positions)
    found = draft_verify_triton.verify_drafts(*arguments, rule == "block")
    assert_same(found, draft_verify.verify_drafts(*arguments, rule == "block"), 0.0)
    rows = target.gather(1, found[1][:, None, None].expand(-1, 1, 300))[:, 0]
    last = found[0].gather(1, found[1][:, None])
    assert (rows.gather(1, last) > 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_a_draft_its_drafter_could_not_draw_is_rejected(rule: str, device: str) -> None:
    target, laws, draft, _, seed, positions = random_arguments(3, 2, 17, 9, False, device)
    assert laws is not None
    laws.scatter_(-1, draft[..., None], 0.0)
    arguments = (target, laws, draft, torch.full_like(seed, 2), seed, positions)
    found = draft_verify_triton.verify_drafts(*arguments, rule == "block")
    assert found[1].tolist() == [0] * 3
    assert_same(found, draft_verify.verify_drafts(*arguments, rule == "block"), 0.0)


def test_a_blocks_residual_is_scaled(device: str) -> None:
    """After one draft of joint ratio 1/2, half the row exceeds the drafter's at token 1 only."""
    slots = 12
    target = torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [1.0, 0.0, 0.0]], device=device)
    laws = torch.tensor([[1.0, 0.0, 0.0], [0.3, 0.1, 0.6]], device=device)
    seed = torch.arange(slots, device=device)
    arguments = (
        target.expand(slots, 3, 3).contiguous(),
        laws.expand(slots, 2, 3).contiguous(),
        torch.tensor([[0, 2]], device=device).expand(slots, 2),
        torch.full_like(seed, 2),
        seed,
        torch.arange(3, device=device).expand(slots, 3),
    )
    tokens, accepted = draft_verify_triton.verify_drafts(*arguments, True)
    assert 2 <= int((accepted == 1).sum()) < slots
    assert (tokens[accepted == 1, 1] == 1).all()
    assert_same((tokens, accepted), draft_verify.verify_drafts(*arguments, True), 0.0)


@pytest.mark.parametrize("rule", RULES)
def test_a_slot_is_the_same_alone_and_among_others(rule: str, device: str) -> None:
    arguments = random_arguments(4, 3, 1003, 21, False, device)
    tokens, accepted = draft_verify_triton.verify_drafts(*arguments, rule == "block")
    for slot in range(4):
        alone = [a[slot : slot + 1].contiguous() for a in arguments if a is not None]
        found = draft_verify_triton.verify_drafts(*alone, rule == "block")
        assert torch.equal(found[0], tokens[slot : slot + 1])
        assert torch.equal(found[1], accepted[slot : slot + 1])
