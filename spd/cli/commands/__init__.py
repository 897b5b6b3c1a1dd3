"""The table of commands, and how one runs; it is imported only when it is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from spd.cli.terminal.console import Session

COMMAND_TABLE: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "chat": ("chat", "Talk with a model; -c continues the last chat."),
        "generate": ("generate", "Answer one prompt, or a file of them, for pipes and scripts."),
        "serve": ("serve", "Serve a model over HTTP, and keep it warm for spd itself."),
        "bench": ("bench", "Measure speculation against plain decoding."),
        "compare": ("compare", "Compare results of spd bench."),
        "explain": ("explain", "Say in words what a trace shows, and what to try next."),
        "verify": ("verify", "Check that speculation changes no token."),
        "inspect": ("inspect", "Show what a model is and needs; loads no weights."),
        "convert-mtp": ("convert", "Copy a checkpoint's MTP head into a small folder."),
        "quantize": ("convert", "Write a model in four bits (compressed-tensors)."),
        "pull": ("models", "Download a model into the Hugging Face cache."),
        "ls": ("models", "List the models on this machine, and who keeps them."),
        "rm": ("models", "Remove models from the Hugging Face cache, after asking."),
        "doctor": ("doctor", "Check this machine, and try it out with the demo."),
        "completions": ("doctor", "Print the completion script of a shell."),
    }
)
"""The module of each command and its line in the list of commands; its help is its docstring."""
COMMANDS = tuple(COMMAND_TABLE)
"""The names of all commands, in the order of the help."""


class CommandBody(NamedTuple):
    """The function of a command, and the class of its options."""

    run: Callable[..., int | None]
    options: type[Any]

    @classmethod
    def find(cls, name: str) -> CommandBody:
        """Import the module of a command; return the command's function and options."""
        module = import_module(f"{__name__}.{COMMAND_TABLE[name][0]}")
        body = getattr(module, name.replace("-", "_"))
        return cls(body, getattr(module, body.__annotations__["options"]))


def run_command(
    session: Session, body: CommandBody, values: dict[str, Any], typed: Collection[str]
) -> int | None:
    """Run a command with the parsed values of its options; return its exit status, None for 0.

    Colour, -q and -v are applied to the session. `values` is changed in place: --set is split into
    parameters, and the model argument becomes the model. typed: names of the values that were on
    the command line. Raises UsageError, and what the command raises.
    """
    from spd.cli.options import merge_model_argument, parse_sampling_settings, separate_served_model

    session.apply_output_options(values["color"], values["quiet"], values["verbose"])
    values |= parse_sampling_settings(values.get("set") or ())
    names = {field.name for field in dataclasses.fields(body.options)}
    if "served_model" in names:
        separate_served_model(values, typed)
    merge_model_argument(values, typed)
    if "rendezvous" in names:
        values["rendezvous"] = session.rendezvous
    if "typed" in names:
        values["typed"] = frozenset(typed)
    return body.run(session, body.options(**values))
