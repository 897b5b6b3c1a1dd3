"""The options of `spd chat`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from spd.cli.options import ModelArgument, ReplyOptions, main_option, option

_chat_option = partial(option, "Chat")
"""Makes an option in the panel `Chat` of the help."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class ChatOptions(ModelArgument, ReplyOptions):
    """The options of `spd chat`."""

    file: list[str] | None = main_option(
        None, "FILE", "Goes with the first message. Repeatable.", "-f"
    )
    continue_: str | None = main_option(
        None, "[NAME]", "Continue the latest chat, or NAME.", "-c", "--continue"
    )
    tools: str | None = _chat_option(
        None, "FILE", "Commands that the model may call; each runs after your yes."
    )
    no_save: bool = _chat_option(False, None, "Keep this chat in memory only.")
    markdown: Literal["on", "off"] = _chat_option("on", "MODE", "on, or off: the text as it is.")
    show_drafts: bool = _chat_option(False, None, "Colour accepted draft tokens.")
    stats: bool | None = _chat_option(
        None, None, "Figures after each reply. Default: on a terminal.", "--stats/--no-stats"
    )
