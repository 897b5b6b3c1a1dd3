"""The commands: where each is, and what it is for; one is imported only when it is named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from inspect import Parameter, Signature, cleandoc
from types import MappingProxyType
from typing import Annotated, Any, cast, get_type_hints

import typer
from typer.main import get_command

from spd.cli.parser import Command
from spd.cli.terminal.console import Session
from spd.version import __version__

ROOT_HELP = """Run a language model from its folder or GGUF file, faster, without changing a token.

Standard output carries the answer, standard error everything else. `demo` and `demo-hybrid` are built in:
toys to try things with. --json, -q and -v may stand before the command too.
"""

ROOT_EXAMPLES = """\b
Examples:
  spd chat
  spd generate "What does os.path.join do?"
  git diff | spd generate -m Qwen/Qwen3-4B "Write a commit message"
  spd inspect Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B"""

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
        "ls": ("models", "List the models in the Hugging Face cache."),
        "rm": ("models", "Remove models from the Hugging Face cache, after asking."),
        "doctor": ("doctor", "Check this machine, and try it out with the demo."),
        "completions": ("doctor", "Print the completion script of a shell."),
    }
)
"""Of each command: its module, and what the list of commands says; its own help is its docstring."""
COMMANDS = tuple(COMMAND_TABLE)


def build_app(loaded: Collection[str] = COMMANDS) -> typer.Typer:
    """The Typer application of the commands in `loaded`; of none: of all, with only their names and help."""
    app = typer.Typer(
        name="spd",
        help=ROOT_HELP,
        epilog=ROOT_EXAMPLES,
        add_completion=False,  # its installer edits people's start-up files
        rich_markup_mode=None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback()(root)
    known = [name for name in COMMANDS if name in loaded]
    for name in known or COMMANDS:
        body = load_command(name) if known else lambda: None
        short = COMMAND_TABLE[name][1]
        help, _, examples = (cleandoc(body.__doc__ or "")).partition("\n\n")
        app.command(name, cls=Command, help=help, short_help=short, epilog=f"\b\n{examples}")(body)
    return app


def complete(app: typer.Typer, variable: str) -> int:
    """Answer a shell's question from the environment and end."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
    try:
        get_command(app)(args=[], prog_name="spd", complete_var=variable, standalone_mode=False)
    except SystemExit as stop:
        return int(stop.code or 0)
    except Exception:  # a broken answer must never spill into a shell's prompt
        return 1
    return 1


def load_command(name: str) -> Callable[..., int | None]:
    """Import a command: a function with one parameter for each of its options, as Typer reads commands."""
    from spd.cli.options import read_settings, take_model

    body = getattr(import_module(f"{__name__}.{COMMAND_TABLE[name][0]}"), name.replace("-", "_"))
    options = get_type_hints(body)["options"]
    hints = get_type_hints(options)
    form = cast(Any, Annotated)

    def run(context: typer.Context, **values: Any) -> int | None:
        session: Session = context.obj
        session.listen(values)
        values |= read_settings(values.get("set") or ())
        sources = {name: str(context.get_parameter_source(name)) for name in values}
        typed = frozenset(name for name in values if "COMMANDLINE" in sources[name])
        take_model(values, typed)
        if "rendezvous" in hints:
            values["rendezvous"] = session.rendezvous
        if "typed" in hints:
            values["typed"] = typed
        return cast("int | None", body(session, options(**values)))

    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for field in dataclasses.fields(options):
        if "option" not in field.metadata:  # not typed: set by name, or found
            continue
        names = field.metadata["names"]
        shown = field.metadata["option"]
        if names is None:
            kind = typer.Argument(**shown)
        else:
            long = (
                []
                if any(n.startswith("--") for n in names)
                else [f"--{field.name.replace('_', '-')}"]
            )
            kind = typer.Option(*names, *long, **shown)
        default = Parameter.empty if field.default is dataclasses.MISSING else field.default
        hint = form[hints[field.name], kind]
        parameters.append(
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )
    run.__doc__ = body.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__dict__["__signature__"] = Signature(parameters)
    return run


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"spd {__version__}")
        raise typer.Exit


def root(
    version: bool = typer.Option(
        False,
        "--version",
        "-V",
        callback=_show_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    """Holds the options that stand before a command."""
