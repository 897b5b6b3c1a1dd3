"""The commands: where each is, what it is for, and the application built of them.

A command is imported only when it is named: help of all of them, and TAB, need no more than this table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, cast, get_type_hints

import typer
from typer.main import get_command

from spd import __version__
from spd.cli.parser import Command
from spd.errors import UsageError

if TYPE_CHECKING:
    from spd.cli.text.output import Session

ROOT_HELP = """Run a language model from its Hugging Face folder, faster, without changing a token.

Standard output carries the answer, standard error everything else. `demo` and `demo-hybrid` are built in.
--json, -q and -v may stand before the command too.
"""

ROOT_EXAMPLES = (
    "spd chat",
    'spd generate "What does os.path.join do?"',
    'git diff | spd generate -m Qwen/Qwen3-4B "Write a commit message"',
    "spd inspect Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
)

COMMAND_TABLE: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "chat": (
            "chat",
            "Talk with a model; what is said is saved, and -c continues it.",
            'spd chat Qwen/Qwen3-4B -s "Be terse"',
            "spd chat demo < messages.txt",
        ),
        "generate": (
            "generate",
            "Answer one prompt, for pipes and scripts; the text is the same with and without speculation.",
            'spd generate --stats "What does os.path.join do?"',
            'cat notes.md | spd generate -s "Be terse" "Summarise"',
        ),
        "serve": (
            "serve",
            "Serve a model over HTTP on this machine, and keep it warm for spd generate and chat.",
            "spd serve Qwen/Qwen3-4B --detach --idle 15m",
            "spd serve --status",
        ),
        "bench": (
            "bench",
            "Measure speculation against plain decoding; exits 6 if texts differ.",
            "spd bench -m FOLDER --spec draft,ngram --draft-max 2,4,8 --temperature 0 -o today.json",
            "spd bench --concurrency 1,4,16 --category code",
        ),
        "compare": (
            "bench",
            "Compare results of spd bench with the first of them; exits 6 if a row became slower.",
            "spd compare yesterday.json today.json",
        ),
        "explain": (
            "explain",
            "Say in words what a trace shows: costs, acceptance, the best K, and what to try next.",
            'spd generate -n 256 --trace run.jsonl "Write a poem" && spd explain run.jsonl',
        ),
        "verify": (
            "verify",
            "Replay prompts with two settings and compare every token; exits 6 if speculation changed one.",
            "spd verify -m FOLDER --spec draft --draft-model FOLDER --lag 2 --json > certificate.json",
            "spd verify --against lag=0 --lag 2 --tokens 50000 --concurrency 8",
        ),
        "inspect": (
            "inspect",
            "Show what a model is and needs, and whether a draft model fits it; loads no weights.",
            "spd inspect Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --json",
        ),
        "convert-mtp": (
            "convert",
            "Cut a checkpoint's MTP head into a small folder, for targets that lost theirs.",
            "spd convert-mtp deepseek-ai/DeepSeek-V3.1 v31-mtp",
            'spd generate -m my/DeepSeek-V3.1-AWQ --spec mtp --mtp v31-mtp "Hello"',
        ),
        "quantize": (
            "convert",
            "Write a model in four bits (compressed-tensors) as --quantize int4 rounds it; the text changes.",
            "spd quantize Qwen/Qwen3-8B qwen3-8b-int4",
        ),
        "pull": (
            "models",
            "Download a model's safetensors, configuration and tokenizer into the Hugging Face cache.",
            "spd pull Qwen/Qwen3-8B --dry-run",
        ),
        "ls": (
            "models",
            "List the models in the Hugging Face cache: size, type, architecture, and whether they run.",
            "spd ls",
        ),
        "rm": (
            "models",
            "Remove models from the Hugging Face cache, every revision of each, after asking.",
            "spd rm -y org/one org/two",
        ),
        "doctor": (
            "doctor",
            "Check this machine and try it out: compile, generate, compare; exits 1 if a check failed.",
            "spd doctor --quick --json",
        ),
        "completions": (
            "doctor",
            "Print the completion script of a shell.",
            'eval "$(spd completions bash)"',
            "spd completions fish > ~/.config/fish/completions/spd.fish",
        ),
    }
)
"""Of each command: its module, the docstring of its body, and examples."""
COMMANDS = tuple(COMMAND_TABLE)


def build_app(loaded: Collection[str] = COMMANDS) -> typer.Typer:
    """The Typer application: the commands in `loaded` have their options, the others only name and help."""
    app = typer.Typer(
        name="spd",
        help=ROOT_HELP,
        epilog=_examples(ROOT_EXAMPLES),
        add_completion=False,  # its installer edits people's start-up files
        rich_markup_mode=None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )
    app.callback()(root)
    for name, (_, help, *examples) in COMMAND_TABLE.items():
        body = load_command(name) if name in loaded else lambda: None
        app.command(name, cls=Command, help=help, short_help=help, epilog=_examples(examples))(body)
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


def _examples(lines: Collection[str]) -> str:
    """Below the help, each on a line of its own."""
    return "\b\n" + "\n".join(["Examples:", *(f"  {line}" for line in lines)])


def load_command(name: str) -> Callable[..., int | None]:
    """Import a command: a function with one parameter for each of its options, as Typer reads commands."""
    from spd.cli.options import read_settings

    body = getattr(import_module(f"{__name__}.{COMMAND_TABLE[name][0]}"), name.replace("-", "_"))
    options = get_type_hints(body)["options"]
    hints, form = get_type_hints(options), cast(Any, Annotated)

    def run(context: typer.Context, **values: Any) -> int | None:
        session: Session = context.obj
        session.listen(values)
        values |= read_settings(values.get("set") or ())
        sources = {name: str(context.get_parameter_source(name)) for name in values}
        typed = frozenset(name for name in values if "COMMANDLINE" in sources[name])
        if (model := values.get("model_argument")) is not None:
            if "model" in typed and values["model"] != model:
                words = "the model is given twice: as an argument and with --model"
                raise UsageError(words, fix=["use one of them"], code="conflict")
            values["model"] = model
        if "rendezvous" in hints:
            values["rendezvous"] = session.rendezvous
        if "typed" in hints:
            values["typed"] = typed
        return cast("int | None", body(session, options(**values)))

    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for field in dataclasses.fields(options):
        if "option" not in field.metadata:  # not typed: set by name, or found
            continue
        names, shown = field.metadata["names"], field.metadata["option"]
        if names is None:
            kind = typer.Argument(**shown)
        else:
            long = [] if any(n.startswith("--") for n in names) else [f"--{field.name.replace('_', '-')}"]
            kind = typer.Option(*names, *long, **shown)
        default = Parameter.empty if field.default is dataclasses.MISSING else field.default
        hint = form[hints[field.name], kind]
        parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
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
        False, "--version", "-V", callback=_show_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Holds the options that stand before a command."""
