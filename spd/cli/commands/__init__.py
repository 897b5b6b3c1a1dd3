"""The table of commands and the Typer application; a command is imported only when it is named."""

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
"""The module of each command and its line in the list of commands; its help is its docstring."""
COMMANDS = tuple(COMMAND_TABLE)


def build_app(names: Collection[str] = COMMANDS) -> typer.Typer:
    """Return the Typer application of the commands in `names`.

    Without a known name it has all commands, unloaded, with only their names and help.
    """
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
    command_names = [name for name in COMMANDS if name in names]
    for name in command_names or COMMANDS:
        body = load_command(name) if command_names else lambda: None
        short = COMMAND_TABLE[name][1]
        help, _, examples = (cleandoc(body.__doc__ or "")).partition("\n\n")
        app.command(name, cls=Command, help=help, short_help=short, epilog=f"\b\n{examples}")(body)
    return app


def complete(app: typer.Typer, variable: str) -> int:
    """Print completions for the shell's request in the environment; return the exit status."""
    from typer.completion import completion_init  # type: ignore[attr-defined]

    completion_init()
    try:
        get_command(app)(args=[], prog_name="spd", complete_var=variable, standalone_mode=False)
    except SystemExit as stop:
        return int(stop.code or 0)
    except Exception:  # a traceback must never reach a shell's prompt
        return 1
    return 1


def load_command(name: str) -> Callable[..., int | None]:
    """Import a command; return it for Typer as a function with one parameter per option."""
    from spd.cli.options import merge_model_argument, parse_settings, separate_served_model

    body = getattr(import_module(f"{__name__}.{COMMAND_TABLE[name][0]}"), name.replace("-", "_"))
    options = get_type_hints(body)["options"]
    hints = get_type_hints(options)
    annotated = cast(Any, Annotated)

    def run(context: typer.Context, **values: Any) -> int | None:
        """Run the command with the values that Typer has parsed."""
        session: Session = context.obj
        session.apply_output_options(values["color"], values["quiet"], values["verbose"])
        values |= parse_settings(values.get("set") or ())
        sources = {name: str(context.get_parameter_source(name)) for name in values}
        typed = frozenset(name for name in values if "COMMANDLINE" in sources[name])
        if "served_model" in hints:
            separate_served_model(values, typed)
        merge_model_argument(values, typed)
        if "rendezvous" in hints:
            values["rendezvous"] = session.rendezvous
        if "typed" in hints:
            values["typed"] = typed
        return cast("int | None", body(session, options(**values)))

    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for field in dataclasses.fields(options):
        if "option" not in field.metadata:  # no option: set by name or by the application
            continue
        names = field.metadata["names"]
        settings = field.metadata["option"]
        if names is None:
            parameter_kind = typer.Argument(**settings)
        else:
            long_name = (
                []
                if any(n.startswith("--") for n in names)
                else [f"--{field.name.replace('_', '-')}"]
            )
            parameter_kind = typer.Option(*names, *long_name, **settings)
        default = Parameter.empty if field.default is dataclasses.MISSING else field.default
        hint = annotated[hints[field.name], parameter_kind]
        parameters.append(
            Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        )
    run.__doc__ = body.__doc__
    run.__dict__["__signature__"] = Signature(parameters)
    return run


def _show_version(requested: bool) -> None:
    """Print the version and exit if --version is set."""
    if requested:
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
    """Define the options before a command."""
