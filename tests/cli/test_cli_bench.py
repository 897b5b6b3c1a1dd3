"""`spd bench`: when a run counts as slower than plain decoding."""

from __future__ import annotations

from spd.cli.commands.bench import is_slower


def test_slower_than_plain_fails_where_asked() -> None:
    row = {"speed_up": {"median": 0.9, "low": 0.85, "high": 0.95}}
    assert is_slower(row, 0.03) and not is_slower(row, 0.2)
    assert not is_slower({"speed_up": {"median": 0.9, "low": 0.7, "high": 1.1}}, 0.03)
    assert not is_slower({"speed_up": None}, 0.03)
