"""The commands: where each is, what it is for, and the application built of them.

A command is imported only when it is named: help of all of them, and TAB, need no more than this table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from inspect import Parameter, Signature
from types import MappingProxyType
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer

from spd import __version__
from spd.cli.help import GroupHelp, Help
from spd.cli.options import CommonOptions, Session, as_utf8, read_settings

ROOT_HELP = """Run a language model from its Hugging Face folder, faster, without changing a token.

Standard output carries the answer, standard error everything else. `demo` and `demo-hybrid` are built in.
--json, --color, -q and -v may stand before the command too.
"""

ROOT_EXAMPLES = (
    "spd chat",
    'spd generate "What does os.path.join do?"',
    'git diff | spd generate -m Qwen/Qwen3-4B "Write a commit message"',
    "spd inspect Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
)


@dataclass(frozen=True, eq=False, repr=False)
class Command:
    """Where a command's body and options are, as `module:name`, the body's docstring, and examples."""

    body: str
    options: str
    help: str
    examples: tuple[str, ...]


COMMAND_TABLE: Mapping[str, Command] = MappingProxyType(
    {
        "chat": Command(
            "chat:chat",
            "chat:ChatOptions",
            "Talk with a model; what is said is saved, and -c continues it.",
            (
                "spd chat",
                'spd chat Qwen/Qwen3-4B -s "Be terse"',
                "spd chat -c",
                "spd chat --show-drafts -f notes.md",
                "spd chat demo < messages.txt",
            ),
        ),
        "generate": Command(
            "generate:generate",
            "generate:GenerateOptions",
            "Answer one prompt, for pipes and scripts; the text is the same with and without speculation.",
            (
                'spd generate --stats "What does os.path.join do?"',
                'cat notes.md | spd generate -s "Be terse" "Summarise"',
                'spd generate --json "Hello" | jq .metrics.speculative_decoding',
            ),
        ),
        "serve": Command(
            "serve:serve",
            "serve:ServeOptions",
            "Serve a model over HTTP on this machine, and keep it warm for spd generate and spd chat.",
            (
                "spd serve",
                "spd serve Qwen/Qwen3-4B --detach --idle 15m",
                "spd serve --status",
                "curl http://127.0.0.1:7373/v1/models",
            ),
        ),
        "bench": Command(
            "bench:bench",
            "bench:BenchOptions",
            "Measure speculation against plain decoding; exits 6 if texts differ or --fail-if-slower holds.",
            (
                "spd bench",
                "spd bench -m FOLDER --spec draft,ngram --draft-max 2,4,8 --temperature 0 -o today.json",
                "spd bench --concurrency 1,4,16 --category code --fail-if-slower 3%",
            ),
        ),
        "compare": Command(
            "compare:compare",
            "compare:CompareOptions",
            "Compare results of spd bench with the first of them; exits 6 if a row became slower.",
            (
                "spd compare yesterday.json today.json",
                "spd compare --threshold 5% --json main.json branch.json",
            ),
        ),
        "explain": Command(
            "explain:explain",
            "explain:ExplainOptions",
            "Say in words what a trace shows: costs, acceptance, the best K, and what to try next.",
            (
                'spd generate -n 256 --trace run.jsonl "Write a poem" && spd explain run.jsonl',
                "spd explain plain.jsonl draft.jsonl --json",
            ),
        ),
        "verify": Command(
            "verify:verify",
            "verify:VerifyOptions",
            "Replay prompts with two settings and compare every token; exits 6 if speculation changed one.",
            (
                "spd verify",
                "spd verify -m FOLDER --spec draft --draft-model FOLDER --lag 2 --json > certificate.json",
                "spd verify --against lag=0 --lag 2 --tokens 50000 --concurrency 8",
            ),
        ),
        "inspect": Command(
            "inspect:inspect",
            "inspect:InspectOptions",
            "Show what a model is and needs, and whether a draft model fits it; loads no weights.",
            ("spd inspect demo", "spd inspect Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --json"),
        ),
        "convert-mtp": Command(
            "convert_mtp:convert_mtp",
            "convert_mtp:ConvertOptions",
            "Cut a checkpoint's MTP head into a small folder, for targets that lost theirs.",
            (
                "spd convert-mtp deepseek-ai/DeepSeek-V3.1 --dry-run",
                "spd convert-mtp deepseek-ai/DeepSeek-V3.1 v31-mtp --attach my/DeepSeek-V3.1-AWQ",
                'spd generate -m my/DeepSeek-V3.1-AWQ --spec mtp --mtp v31-mtp "Hello"',
            ),
        ),
        "pull": Command(
            "models:pull",
            "models:PullOptions",
            "Download a model's safetensors, configuration and tokenizer into the Hugging Face cache.",
            ("spd pull Qwen/Qwen3-0.6B", "spd pull Qwen/Qwen3-8B --dry-run"),
        ),
        "ls": Command(
            "models:ls",
            "models:ListOptions",
            "List the models in the Hugging Face cache: size, type, architecture, and whether they run.",
            ("spd ls", "spd ls -q"),
        ),
        "rm": Command(
            "models:rm",
            "models:RemoveOptions",
            "Remove models from the Hugging Face cache, every revision of each, after asking.",
            ("spd rm Qwen/Qwen3-0.6B", "spd rm -y org/one org/two"),
        ),
        "doctor": Command(
            "doctor:doctor",
            "doctor:DoctorOptions",
            "Check this machine and try it out: compile, time, compare; exits 1 if a check failed.",
            ("spd doctor", "spd doctor --quick --json"),
        ),
        "completions": Command(
            "completions:completions",
            "completions:CompletionOptions",
            "Print the completion script of a shell.",
            (
                'eval "$(spd completions bash)"',
                "spd completions zsh > ~/.zfunc/_spd",
                "spd completions fish > ~/.config/fish/completions/spd.fish",
            ),
        ),
    }
)
COMMANDS = tuple(COMMAND_TABLE)


def build_app(loaded: Collection[str] = COMMANDS, *, completing: bool = False) -> typer.Typer:
    """The Typer application: the commands in `loaded` have their options, the others only name and help.

    `completing` registers the shells with Typer.
    """
    app = typer.Typer(
        name="spd",
        cls=GroupHelp,
        help=ROOT_HELP,
        epilog="\n".join(ROOT_EXAMPLES),
        add_completion=completing,
        rich_markup_mode=None,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(root)
    for name, command in COMMAND_TABLE.items():
        body = load_command(command) if name in loaded else _nothing
        app.command(name, cls=Help, help=command.help, epilog="\n".join(command.examples))(body)
    return app


def load_command(command: Command) -> Any:
    """Import a command: a function with a parameter for each of its options."""
    return as_command(_find(command.body), _find(command.options))


def _find(place: str) -> Any:
    """What `module:name` says, of a module beside this one."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"{__name__}.{module}"), name)


def _nothing() -> None:
    """Stands for a command that is not run."""


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


TEXTS = ("prompt", "template_arg", "stop", "set")
"""Options whose value is text and never a path, which has to stay as the system gave it."""


Options = TypeVar("Options", bound=CommonOptions)


def as_command(
    body: Callable[[Session, Options], int | None], options: type[Options]
) -> Callable[..., int | None]:
    """A function with one parameter for each field of `options`, as Typer reads commands."""

    def run(context: typer.Context, **values: Any) -> int | None:
        session: Session = context.obj
        console = dataclasses.replace(session.console, verbose=values["verbose"] > 0)
        for line in session.told:
            console.detail(f"config  {line}")
        values |= {name: as_utf8(values[name]) for name in TEXTS if name in values}
        values |= read_settings(values.get("set") or ())
        if "rendezvous" in hints:
            values["rendezvous"] = session.rendezvous
        if "typed" in hints:
            sources = {name: context.get_parameter_source(name) for name in values}
            values["typed"] = frozenset(name for name in sources if "COMMANDLINE" in str(sources[name]))
        return body(dataclasses.replace(session, console=console), options(**values))

    hints, form = get_type_hints(options), cast(Any, Annotated)
    parameters = [Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    for field in dataclasses.fields(options):
        if "option" not in field.metadata:  # not typed: set by name, or found
            continue
        names, shown = field.metadata["names"], field.metadata["option"]
        if names is None:
            kind = typer.Argument(**shown)
        else:
            long = [] if any(name.startswith("--") for name in names) else [_flag(field.name)]
            kind = typer.Option(*names, *long, **shown)
        default = Parameter.empty if field.default is dataclasses.MISSING else field.default
        hint = form[hints[field.name], kind]
        parameters.append(Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint))
    run.__name__ = body.__name__
    run.__doc__ = body.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__dict__["__signature__"] = Signature(parameters)
    return run


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
