"""The row counts that an engine admits: those whose rows agree bit for bit."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from spd.formats.demo import demo_folder
from spd.runtime import SamplingParams
from spd.runtime.layers.base import ForwardBatch, ModelOutput
from spd.runtime.layers.torch_linear import Linear
from spd.runtime.round import arithmetic_probe
from spd.runtime.round.arithmetic_probe import CANDIDATE_BUCKETS, WIDEST_BUCKET, matching_buckets
from spd.runtime.round.row_padding import padded_row_count
from tests.helpers import Patch, Tiny, make_engine, run_all

pytestmark = pytest.mark.usefixtures("every_trial")
ROWS = torch.randn(WIDEST_BUCKET, 8, generator=torch.Generator().manual_seed(0))


class Windows:
    """A forward pass in which one bit of one row depends on the number or place of rows, where
    `odd` has it.
    """

    def __init__(self, odd: dict[tuple[int, int, int], int]) -> None:
        self.odd = odd
        self.rows_by_count = dict[int, set[int]]()

    def __call__(self, first: int, rows: int, blocks: int) -> tuple[Tensor, Tensor]:
        self.rows_by_count.setdefault(rows, set()).update(range(first, first + rows))
        hidden = ROWS[first : first + rows].clone()
        logits = ROWS[first : first + rows, :2].clone()
        row = self.odd.get((rows, first, blocks))
        if row is not None:
            logits[row, 1] = torch.nextafter(logits[row, 1], torch.tensor(9.0))
        return hidden, logits


@pytest.mark.parametrize("odd", [None, (5, 20, 1), (8, 24, 2), (2, 30, 2)])
def test_row_counts_that_agree_are_admitted(odd: tuple[int, int, int] | None) -> None:
    """One bit in one row refuses a row count, at every place of the widest window."""
    windows = Windows({odd: odd[0] - 1} if odd else {})
    assert matching_buckets(windows) == (
        *(w for w in CANDIDATE_BUCKETS if not odd or w != odd[0]),
        WIDEST_BUCKET,
    )
    assert odd or windows.rows_by_count[16] == windows.rows_by_count[2] == set(range(WIDEST_BUCKET))


class Sums:
    """A product by random numbers [64, 256] in bfloat16 that sums in another order for `odd` row
    counts.
    """

    def __init__(self, odd: tuple[int, ...]) -> None:
        self.odd = odd
        self.weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(1)).bfloat16()

    def exact(self, x: Tensor) -> Tensor:
        """Return the product in float32, summed in an order that depends on the number of rows."""
        terms = x.float().unsqueeze(1) * self.weight.float()
        cut = (4, 64) if x.shape[0] in self.odd else (64, 4)
        return terms.view((*terms.shape[:2], *cut)).sum(-1).cumsum(-1)[..., -1]

    def multiply_in_tiles(self, x: Tensor, tile: int) -> Tensor:
        return self.exact(x).bfloat16()

    def rounding_error(self, x: Tensor, y: Tensor) -> Tensor | None:
        return (self.exact(x) - y.float()).bfloat16()

    def make_example_rows(self, count: int) -> Tensor:
        return torch.randn(count, 256, generator=torch.Generator().manual_seed(0)).bfloat16()


@pytest.mark.parametrize("odd", [(), (5,), (2, 16)])
def test_another_order_of_a_sum_refuses_a_row_count_though_rounding_hides_it(
    odd: tuple[int, ...],
) -> None:
    widths = (*CANDIDATE_BUCKETS, WIDEST_BUCKET)
    product = Sums(odd)
    x = product.make_example_rows(WIDEST_BUCKET)
    differing = [
        w
        for w in odd
        if not torch.equal(
            product.multiply_in_tiles(x[:w], w), product.multiply_in_tiles(x, WIDEST_BUCKET)[:w]
        )
    ]
    assert differing == [], "no result differs"
    assert arithmetic_probe.widths_with_matching_sum_order(cast(Linear, product), widths) == tuple(
        w for w in widths if w not in odd
    )


def test_products_report_their_rounding_error() -> None:
    plain = torch.randn(48, 64).bfloat16()
    product = Linear(plain, torch.bfloat16)
    x = torch.randn(4, 64).bfloat16()
    y = product.multiply_in_tiles(x, WIDEST_BUCKET)
    error = product.rounding_error(x, y)
    if error is None:
        pytest.skip("no bfloat16 products on this processor")
    exact = x.double() @ plain.double().T
    assert (
        ((y.double() + error.double()) - exact).abs().max()
        < 1e-3
        < 1e-2
        < (y.double() - exact).abs().max()
    )


@pytest.mark.parametrize(("spec", "width"), [("off", 1), ("ngram", 4)])
def test_rows_of_empty_slots_are_not_run(
    tiny: Tiny, spec: str, width: int, monkeypatch: Patch
) -> None:
    """With one or three requests in eight slots, no pass has more rows than the bucket of their
    windows.
    """
    engine = make_engine(tiny("qwen3"), spec=spec, draft_max=width - 1, slots=8)
    runner = engine.round_queue.runner
    head = runner.model.logits
    forward = runner.model.forward
    model = runner.model
    row_counts: list[int] = []
    head_row_counts: list[int] = []

    def spy(batch: ForwardBatch, caches: Any) -> ModelOutput:
        if batch.chunk_start is None:
            row_counts.append(batch.token_ids.shape[0])
        return forward(batch, caches)

    def scoring(hidden: Tensor, tile: int) -> Tensor:
        head_row_counts.append(len(hidden))
        return head(hidden, tile)

    monkeypatch.setattr(model, "forward", spy)
    monkeypatch.setattr(model, "logits", scoring)
    for count in (1, 3):
        row_counts.clear()
        head_row_counts.clear()
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        run_all(engine, [tuple(range(40 + i, 60 + i)) for i in range(count)], [params] * count)
        limit = padded_row_count(count * width, runner.buckets)
        assert row_counts and max(row_counts[-4:]) <= limit and max(head_row_counts[-4:]) <= limit


@pytest.mark.covers(1, count=2)
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("draft_max", [1, 3])
@pytest.mark.parametrize("spec", ["off", "ngram", "draft", "mtp"])
def test_texts_do_not_depend_on_row_counts_or_slots(
    tiny: Tiny, spec: str, draft_max: int, lag: int
) -> None:
    """Two requests in six slots, by all row counts and by the widest alone, give the text of each
    alone.
    """
    target = demo_folder() if spec == "mtp" else tiny("qwen3")
    prompts = [tuple(range(40 + i, 60 + i)) for i in range(2)]
    params = [
        SamplingParams(temperature=t, seed=5, max_tokens=12, ignore_eos=True) for t in (0.0, 0.8)
    ]
    plain = make_engine(target, spec="off")
    alone = [run_all(plain, [prompts[i]], [params[i]])[0].tokens for i in range(2)]
    options: dict[str, Any] = {} if spec == "off" else {"draft_max": draft_max}
    options |= {"draft_model": target} if spec == "draft" else {}
    engine = make_engine(target, spec=spec, slots=6, lag=lag, **options)
    runner = engine.round_queue.runner
    assert runner.buckets is not None
    for counts in (runner.buckets, (WIDEST_BUCKET,)):
        runner.buckets = counts
        assert [run.tokens for run in run_all(engine, prompts, params)] == alone
