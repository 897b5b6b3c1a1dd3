"""Rooflines, energy, profiles and pictures."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spd.cli.bench_report import method_label
from spd.errors import UsageError
from spd.formats.model_config import read_model_config
from spd.runtime.engine.request import Request
from spd.runtime.lab.energy import energy_counter
from spd.runtime.lab.load import run_pass
from spd.runtime.lab.plot import axis_of, check_plot, plot_rows
from spd.runtime.lab.profile import RANGES, named_ranges, profile_requests
from spd.runtime.lab.roofline import Floor, floor_of, measure_read_rate
from spd.runtime.lab.rows import make_rows
from spd.runtime.lab.sweep import Load, Work
from spd.runtime.models.weight_form import WIDE
from spd.runtime.round.sampling_params import SamplingParams
from tests.helpers import make_engine
from tests.runtime.measuring.measuring_helpers import DRAFT, PLAIN, make_sample


def test_the_floor_is_what_must_be_read(tiny: Callable[..., Path]) -> None:
    folder = tiny("qwen3")
    config = read_model_config(folder)
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim * config.hidden_size
    output = config.num_heads * config.head_dim * config.hidden_size
    mlp = 3 * config.hidden_size * config.intermediate_size
    norms = 2 * config.hidden_size + 2 * config.head_dim
    layers = config.num_layers * (qkv + output + mlp + norms)
    head = config.vocab_size * config.hidden_size  # read once, whether it is the embedding or not
    found = floor_of(config, "bfloat16", WIDE)
    assert found is not None and found.weight_bytes == 2 * (layers + head + config.hidden_size)
    assert found.position_bytes == 2 * 2 * config.num_layers * config.num_kv_heads * config.head_dim
    assert found.seconds(10, 1e6) == pytest.approx((found.weight_bytes + 10 * found.position_bytes) / 1e6)
    assert measure_read_rate("cpu") > 1e8


def test_shares_of_the_floor() -> None:
    sample = make_sample(1, 0, 1.0, drafted_per_position=[10, 10], draft_ms=4.0, verify_ms=10.0)
    plain = make_sample(0, 0, 1.0, verify_ms=8.0)
    floors = {0: (Floor(1000, 0), None), 1: (Floor(1000, 0), Floor(100, 0))}
    rows = make_rows([plain, sample], {0: PLAIN, 1: DRAFT}, floors, read_rate=250_000.0)
    assert rows[0]["roofline"]["verify_share"] == pytest.approx(0.5)
    assert rows[1]["roofline"]["verify_share"] == pytest.approx(0.4)
    assert rows[1]["roofline"]["draft_share"] == pytest.approx(0.4 / 2.0)  # 2 ms a draft
    assert make_rows([plain], {0: PLAIN})[0]["roofline"] is None
    beside = make_rows([plain, sample], {0: PLAIN, 1: {**DRAFT, "spec": "draft+ngram"}}, floors, 250_000.0)
    assert beside[1]["roofline"]["draft_share"] is None, "some drafts took no pass"


class FakeLibrary:
    """The three calls, counting half a joule a question."""

    def __init__(self, status: int = 0) -> None:
        self.used, self.status = 0, status
        self.nvmlInit_v2 = lambda: 0
        self.nvmlDeviceGetHandleByIndex_v2 = lambda index, device: 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device: object, value: Any) -> int:
        self.used += 500
        ctypes.cast(value, ctypes.POINTER(ctypes.c_ulonglong))[0] = self.used
        return self.status


def test_energy_where_it_is_counted() -> None:
    joules = energy_counter(load=lambda name: FakeLibrary())
    first, second = joules(), joules()
    assert first is not None and second is not None and second - first == 0.5
    assert energy_counter(load=lambda name: FakeLibrary(status=3))() is None
    assert energy_counter(load=lambda name: SimpleNamespace())() is None

    def absent(name: str) -> Any:
        raise OSError(name)

    assert energy_counter(load=absent)() is None


def test_joules_a_token() -> None:
    samples = [make_sample(0, r, 1.0, joules=22.0) for r in range(2)]
    assert make_rows(samples, {0: PLAIN})[0]["joules_per_token"] == pytest.approx(2.0)


def test_a_profile_names_its_ranges_and_changes_nothing(tiny: Callable[..., Path], tmp_path: Path) -> None:
    folder = tiny("qwen3")
    engine = make_engine(folder, spec="draft", draft_model=folder, draft_max=2)
    asked = [Request("a", (5, 6, 7), SamplingParams(max_tokens=12, ignore_eos=True))]
    plain = run_pass(engine, asked).timelines[0].token_ids
    trace, summary = profile_requests(engine, asked, tmp_path / "p", "one", lambda: None)
    events = json.loads(trace.read_text())["traceEvents"]
    names = {event.get("name") for event in events}
    assert names >= set(RANGES) - {"copy"}  # copies are a GPU's
    said = summary.read_text()
    assert all(name in said for name in ("draft", "verify", "sample", "commit", "times"))
    with named_ranges(engine):
        assert run_pass(engine, asked).timelines[0].token_ids == plain
    assert "forward" not in vars(engine._parts.runner), "the ranges are gone again"


def picture_rows(axis: str) -> list[dict[str, Any]]:
    samples = []
    plans: dict[int, dict[str, Any]] = {0: PLAIN}
    for number in range(1, 4):
        plans[number] = {**DRAFT, "draft_max": number if axis == "draft_max" else 2, "lag": 0}
    loads = (Load(1), Load(4), Load(16)) if axis == "concurrency" else (Load(),)
    for repetition in range(3):
        for load in loads:
            for category in ("code", "edit"):
                work = Work(category, 0.0, None, load)
                for config in range(4) if axis == "draft_max" else range(2):
                    speed = 1.0 / (1 + config) + 0.01 * repetition
                    samples.append(make_sample(config, repetition, speed, work=work))
    return make_rows(samples, plans)


@pytest.mark.parametrize("axis", ["category", "draft_max", "concurrency"])
def test_a_picture_for_each_axis(axis: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = picture_rows(axis)
    assert axis_of(rows) == axis
    for suffix in ("svg", "png"):
        plot_rows(rows, tmp_path / f"p.{suffix}", "a title", lambda row: method_label(row, rows))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "p.svg").read_text().count("<path") > 20


MTP = {**DRAFT, "spec": "mtp"}
SERIES: dict[str, tuple[dict[int, dict[str, Any]], list[dict[str, Any]], set[str]]] = {
    "lengths": (
        {0: PLAIN, 1: MTP},
        [{"prompt_tokens": 64}, {"prompt_tokens": 256}],
        {f"{name}, {size} tokens" for name in ("plain", "mtp k=2") for size in (64, 256)},
    ),
    "rules": (
        {
            0: PLAIN,
            **{k: {**MTP, "draft_max": k} for k in (1, 3, 16)},
            **{10 * k: {**MTP, "draft_max": k, "verify": "rejection"} for k in (1, 3, 16)},
        },
        [{}],
        {"plain", "mtp", "mtp rejection"},
    ),
    "adaptive": (
        {
            0: PLAIN,
            **{k: {**MTP, "draft_max": k} for k in (1, 3, 6)},
            **{10 * k: {**MTP, "draft_max": k, "adaptive": True} for k in (1, 3, 6)},
        },
        [{"temperature": 0.0}, {"temperature": 0.5}],
        {f"{name}, T {t}" for name in ("plain", "mtp", "mtp adaptive") for t in ("0", "0.5")},
    ),
    "machines": (
        {i: {**p, "lag": lag} for i, (p, lag) in enumerate((p, lag) for lag in (0, 1) for p in (PLAIN, MTP))},
        [{"load": Load(1)}, {"load": Load(4)}],
        {"plain lag0", "plain lag1", "mtp k=2 lag0", "mtp k=2 lag1"},
    ),
    "rates": (
        {0: PLAIN, 1: MTP},
        [{"load": Load(slots, rate)} for slots in (1, 4) for rate in (1.0, 2.5)],
        {f"{name}, {rate}/s" for name in ("plain", "mtp k=2") for rate in ("1", "2.5")},
    ),
}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[list[dict[str, Any]]], Any]:
    """The figure of some rows, not written."""
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: figures.append(figure))

    def draw(rows: list[dict[str, Any]]) -> Any:
        plot_rows(rows, tmp_path / "p.png", "", lambda row: method_label(row, rows))
        return figures.pop()

    return draw


@pytest.mark.parametrize("case", SERIES)
def test_a_series_is_named_by_all_that_differs(drawn: Callable[..., Any], case: str) -> None:
    """No two rows share a series and a place of the axis."""
    plans, works, names = SERIES[case]
    fixed = {"temperature": 0.0, "prompt_tokens": None, "load": Load()}
    samples = [
        make_sample(config, r, 1.0 + 0.1 * r, work=Work(category="code", **{**fixed, **work}))
        for config in plans
        for work in works
        for r in range(2)
    ]
    figure = drawn(make_rows(samples, plans))
    found = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(found) == len(names) and set(found) == names
    bars = [(bar.get_x(), bar.get_y()) for bar in figure.axes[0].patches]
    assert len(set(bars)) == len(bars)
    assert all(len(set(line.get_xdata())) == len(line.get_xdata()) for line in figure.axes[0].lines)


@pytest.mark.parametrize("axis", ["category", "concurrency"])
def test_a_wide_interval_hides_no_figure(drawn: Callable[..., Any], axis: str) -> None:
    rows = picture_rows(axis)
    for row in rows:
        for spread in filter(None, (row["tokens_per_second"], row["speed_up"])):
            spread["low"], spread["high"] = 0.0, 500 * spread["median"]
    for panel, name in zip(drawn(rows).axes, ("tokens_per_second", "speed_up"), strict=True):
        highest = max(row[name]["median"] for row in rows if row[name] is not None)
        bottom, top = panel.get_ylim()
        assert bottom >= 0 and highest < top <= 2 * highest


def test_a_picture_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"must end in one of \.svg"):
        check_plot(tmp_path / "p.bmp")
