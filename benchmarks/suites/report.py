"""The report of a suite: outcomes of its cases by row, and the text of each wrong one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WRONG = "wrong"
"""The outcome that may not occur; suites name their other outcomes themselves."""
KEPT_DETAILS = 40
"""Details that a report shows of one row."""
STORED_DETAILS = 2
"""Details that a result file has of one row, and the characters of each."""
STORED_CHARACTERS = 300


@dataclass
class Report:
    """Outcomes of one suite's cases."""

    suite: str
    source: str
    """The package that the cases come from, or their generator."""
    rows: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    """Reasons why cases are set aside, by name."""
    details: list[str] = field(default_factory=list)

    def add(self, row: str, outcome: str, detail: str = "") -> None:
        """Count one case; keep the detail of a wrong one."""
        counts = self.rows.setdefault(row, Counter())
        counts[outcome] += 1
        if outcome == WRONG and counts[WRONG] <= KEPT_DETAILS:
            self.details.append(f"{row}: {detail}")

    def merge(self, other: Report) -> None:
        """Add another part's outcomes, reasons and details."""
        for row, counts in other.rows.items():
            self.rows.setdefault(row, Counter()).update(counts)
        self.reasons.update(other.reasons)
        self.details += other.details

    @property
    def total(self) -> Counter[str]:
        """Outcomes over all rows."""
        return sum(self.rows.values(), Counter[str]())

    def as_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "source": self.source,
            "total": dict(self.total),
            "rows": {row: dict(counts) for row, counts in self.rows.items()},
            "reasons": self.reasons,
            "details": self._stored(),
        }

    def _stored(self) -> list[str]:
        """Return the first details of each row, cut short."""
        stored: list[str] = []
        counts = Counter[str]()
        for detail in self.details:
            row = detail.partition(": ")[0]
            counts[row] += 1
            if counts[row] <= STORED_DETAILS:
                stored.append(detail[:STORED_CHARACTERS])
        return stored

    def text(self) -> str:
        """Return a table for a terminal: a line a row, with its outcomes."""
        lines = [f"{self.suite} ({self.source})"]
        width = max(map(len, self.rows), default=0)
        for row, counts in [*self.rows.items(), ("all", self.total)]:
            lines.append(f"  {row:{width}}  {_in_words(counts)}")
        return "\n".join(lines)


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(counts.items()))
