"""The Typer application: help, completions, and every error in what was typed.

Typer takes half of a short run to import, so that plain arguments are parsed without it
(`plain_arguments`).
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Collection
from inspect import Parameter, Signature, cleandoc
from typing import Annotated, Any, cast, get_type_hints

import typer
from typer.core import TyperCommand
from typer.main import get_command

from spd.cli.commands import COMMAND_TABLE, COMMANDS, CommandBody, run_command
from spd.cli.parser import (
    ADVANCED_PANEL,
    ARGUMENTS_PANEL,
    FOREIGN_OPTIONS,
    INPUT_PANEL,
    MAIN_PANEL,
    OUTPUT_PANEL,
    refuse_foreign_option,
    similar_options,
)
from spd.version import __version__

ROOT_HELP = """Run a language model from its folder or GGUF file, faster, without changing a token.

Standard output carries the answer, standard error everything else. `demo` and `demo-hybrid` are built in:
toys to try things with. --json, -q and -v may stand before the command too.
"""
"""The text of `spd --help` above the commands."""

ROOT_EXAMPLES = """\b
Examples:
  spd chat
  spd generate "What does os.path.join do?"
  git diff | spd generate -m Qwen/Qwen3-4B "Write a commit message"
  spd inspect Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B"""
"""The text of `spd --help` below the commands."""

MIN_HELP_COLUMNS = 30
MAX_HELP_COLUMNS = 118
"""The least and the largest width of the help, whatever the terminal's."""


class Command(TyperCommand):
    """A command as Typer parses it: other tools' options, values that may be left out, panels."""

    def make_parser(self, ctx: Any) -> Any:
        """Return Typer's parser, in which other tools' options are aliases of the command's."""
        parser = super().make_parser(ctx)
        long_options = parser._long_opt
        long_options |= {
            foreign: long_options[ours]
            for foreign, ours in FOREIGN_OPTIONS.items()
            if ours in long_options
        }
        return parser

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments into `ctx` and return the rest; an option with a [VALUE] may stand alone.

        Raises what `refuse_foreign_option` raises, and Typer's errors with similar options.
        """
        optional_value_params = [
            p for p in self.params if p.param_type_name == "option" and (p.metavar or "")[:1] == "["
        ]
        optional_value_names = {name for param in optional_value_params for name in param.opts}
        expanded_args: list[str] = []
        for argument, next_argument in zip(args, [*args[1:], "-"], strict=False):
            expanded_args.append(argument)
            is_value = not next_argument.startswith("-") and "/" not in next_argument
            if argument in optional_value_names and not is_value:  # a model follows, or an option
                expanded_args.append("")
        try:
            return super().parse_args(ctx, expanded_args)
        except Exception as error:
            if type(error).__name__ == "NoSuchOption":
                name = getattr(error, "option_name", "")
                refuse_foreign_option(name)
                options = getattr(error, "possibilities", ()) or ()
                vars(error)["possibilities"] = similar_options(name, options)
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write one section of the help for each panel to the formatter."""
        panels: dict[str, list[tuple[str, str] | None]] = {
            ARGUMENTS_PANEL: [],
            MAIN_PANEL: [],
            INPUT_PANEL: [],
        }
        for param in self.get_params(ctx):
            default_panel = ARGUMENTS_PANEL if param.param_type_name == "argument" else OUTPUT_PANEL
            panel = getattr(param, "rich_help_panel", None) or default_panel
            panels.setdefault(panel, []).append(param.get_help_record(ctx))
        for panel in (OUTPUT_PANEL, ADVANCED_PANEL):
            panels[panel] = panels.pop(panel, [])
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records, col_max=min(30, formatter.width // 2))


def help_columns() -> int:
    """Return the columns of help: the terminal's less 2, from 30 to 118.

    Click alone stops at 50.
    """
    return max(MIN_HELP_COLUMNS, min(MAX_HELP_COLUMNS, shutil.get_terminal_size().columns - 2))


def build_app(names: Collection[str] = COMMANDS) -> typer.Typer:
    """Return the Typer application of the commands in `names`, which are imported.

    Without a known name it has all commands, not imported, with only their names and short help.
    """
    app = typer.Typer(
        name="spd",
        help=ROOT_HELP,
        epilog=ROOT_EXAMPLES,
        add_completion=False,  # its installer edits people's start-up files
        rich_markup_mode=None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "terminal_width": help_columns()},
    )
    app.callback()(root_callback)
    command_names = [name for name in COMMANDS if name in names]
    for name in command_names or COMMANDS:
        body = load_command(name) if command_names else lambda: None
        short = COMMAND_TABLE[name][1]
        help, _, examples = (cleandoc(body.__doc__ or "")).partition("\n\n")
        app.command(name, cls=Command, help=help, short_help=short, epilog=f"\b\n{examples}")(body)
    return app


def print_completions(app: typer.Typer, variable: str) -> int:
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
    body = CommandBody.find(name)
    hints = get_type_hints(body.options)
    annotated = cast(Any, Annotated)

    def run(context: typer.Context, **values: Any) -> int | None:
        """Run the command with the values that Typer has parsed."""
        sources = {name: str(context.get_parameter_source(name)) for name in values}
        typed = frozenset(name for name in values if "COMMANDLINE" in sources[name])
        return run_command(context.obj, body, values, typed)

    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for field in dataclasses.fields(body.options):
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
    run.__doc__ = body.run.__doc__
    run.__dict__["__signature__"] = Signature(parameters)
    return run


def _show_version(requested: bool) -> None:
    """Print the version and exit if --version is set."""
    if requested:
        typer.echo(f"spd {__version__}")
        raise typer.Exit


def root_callback(
    version: bool = typer.Option(
        False,
        "--version",
        "-V",
        callback=_show_version,
        is_eager=True,
        help="Print the version and exit.",
    ),
) -> None:
    """Do nothing: the parameters define the options before a command."""
