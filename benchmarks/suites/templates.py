"""Published chat templates, rendered by spd and by transformers: no prompt may differ."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.suites.conversations import CONVERSATIONS, TOOLS
from benchmarks.suites.report import WRONG, Report
from spd.formats.chat_template import ChatTemplate
from tests.every_template import CONVERSATIONS as EARLIER
from tests.every_template import SPECIAL, render_with_jinja, render_with_spd

EQUAL = "equal"
REFUSED = "refused by both"


def template_files(llama: Path) -> list[Path]:
    """Return the templates of an unpacked llama-cpp-python."""
    return sorted((llama / "vendor" / "llama.cpp" / "models" / "templates").glob("*.jinja"))


def renderings(source: str) -> Iterator[tuple[str, str | None, list[str]]]:
    """Yield each conversation's name, with spd's prompt and what transformers makes of it.

    Arguments of calls reach transformers as objects and as texts, since templates differ in which
    they read.
    """
    template = ChatTemplate("", {"default": source}, SPECIAL)
    switches: list[dict[str, Any]] = [{}]
    if "enable_thinking" in source:
        switches += [{"enable_thinking": on} for on in (True, False)]
    conversations = {**CONVERSATIONS, **{f"{name} (2)": turns for name, turns in EARLIER.items()}}
    for (name, messages), tools, switch in itertools.product(
        conversations.items(), (None, TOOLS), switches
    ):
        variables = {"tools": tools, **switch}
        where = f"{name}, {'with' if tools else 'without'} tools, {switch or 'no switch'}"
        yield (
            where,
            render_with_spd(template, messages, **variables),
            render_with_jinja(source, messages, **variables),
        )


def run(llama: Path) -> Report:
    """Compare every prompt of every template."""
    report = Report("templates", "templates in llama-cpp-python's sdist")
    for path in template_files(llama):
        for where, mine, transformers_prompts in renderings(path.read_text(encoding="utf-8")):
            if mine is None and not transformers_prompts:
                report.add(path.stem, REFUSED)
            elif mine in transformers_prompts:
                report.add(path.stem, EQUAL)
            else:
                report.add(
                    path.stem,
                    WRONG,
                    f"{where}: {mine!r} and not {transformers_prompts[:1]!r}"[:1500],
                )
    return report
