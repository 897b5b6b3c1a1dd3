"""Start-up, help, the version, and modules that must not be imported."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from typer.main import get_command, get_group

import spd
from spd import errors
from spd.cli.commands import COMMAND_TABLE, COMMANDS
from spd.cli.options import GenerateOptions
from spd.cli.run_settings import plan_settings
from spd.cli.typer_app import build_app
from spd.formats.chat_template import TemplateProcess
from spd.formats.folder import ModelFolder
from tests.cli.conftest import ROOT, assert_refused

LIGHT = {"torch", "triton", "numpy", "transformers", "huggingface_hub", "pydantic", "jinja2"}
LIGHT |= {"prompt_toolkit", "uvicorn"}
HEAVY = LIGHT | {
    "tokenizers",
    "safetensors",
    "importlib.metadata",
    "secrets",
    "spd.formats.model_config",
}
WRITERS = {"spd.formats.writer", "tempfile"}
STYLED = {"rich.markdown", "rich.traceback", "markdown_it", "pygments"}
BARS = {"spd.cli.terminal.bars", "spd.cli.terminal.tables", "spd.runtime.plan.config"}
BODIES = {f"spd.cli.commands.{module}" for module, *_ in COMMAND_TABLE.values()}
COMPLETIONS = "spd.cli.commands.doctor"
COMPLETION = {"COMP_WORDS": "spd ls --j", "COMP_CWORD": "2", "_SPD_COMPLETE": "complete_bash"}
MODEL_COMPLETION = {
    **COMPLETION,
    "COMP_WORDS": "spd generate -m ",
    "COMP_CWORD": "3",
    "HF_HUB_CACHE": "CACHE",
}
OPTION_COMPLETION = {**COMPLETION, "COMP_WORDS": "spd generate --spe", "COMP_CWORD": "2"}
COMMAND_COMPLETION = {**COMPLETION, "COMP_WORDS": "spd ", "COMP_CWORD": "1"}
CACHE = {"HF_HUB_CACHE": "CACHE"}
STARTS = [
    ("--version", {}, f"spd {spd.__version__}\n", {"typer", "rich", "spd.cli", *HEAVY}),
    ("--help", {}, "inspect", HEAVY | BODIES | STYLED | BARS),
    ("completions bash", {}, "complete", HEAVY),
    ("inspect --help", {}, "spd inspect", HEAVY | STYLED | BODIES - {"spd.cli.commands.inspect"}),
    ("inspect demo", {}, "DeepseekV3ForCausalLM", LIGHT | WRITERS),
    ("ls", CACHE, "Qwen/Qwen3-0.6B", LIGHT),
    ("", COMPLETION, "--json\n", HEAVY | BODIES - {"spd.cli.commands.models", COMPLETIONS}),
    ("", OPTION_COMPLETION, "--spec\n", HEAVY | {"spd.conversation", "logging", "hashlib"}),
    ("", COMMAND_COMPLETION, "\n".join(COMMANDS) + "\n", HEAVY | BODIES - {COMPLETIONS}),
    ("", MODEL_COMPLETION, "Qwen/Qwen3-0.6B\ndemo\ndemo-hybrid\n", HEAVY),
]


def loaded_after(
    argv: Sequence[str] = (), run: str = "from spd.__main__ import main\nmain()", **environment: str
) -> Any:
    """Run `spd ARGV` in a new process; return its output and the modules it has imported."""
    report_modules = (
        "os._exit = sys.exit\n"
        "atexit.register(lambda: print('\\n'.join(sys.modules), file=sys.stderr))\n"
    )
    code = f"import sys, os, atexit\n{report_modules}sys.argv = ['spd', *{list(argv)!r}]\n{run}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        check=True,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return done.stdout, set(done.stderr.split())


@pytest.mark.parametrize(("argv", "environment", "expected", "never"), STARTS)
def test_a_start_loads_none_of_these_modules(argv, environment, expected, never, tmp_path) -> None:
    (tmp_path / "models--Qwen--Qwen3-0.6B" / "snapshots" / "abc").mkdir(parents=True)
    environment = {
        name: value.replace("CACHE", str(tmp_path)) for name, value in environment.items()
    }
    out, modules = loaded_after(argv.split(), **environment)
    assert (
        out == expected if expected.endswith("\n") else expected in out
    ) and not modules & never, out


def test_help_of_no_command_loads_anything_heavy() -> None:
    run = f"from spd.cli.app import main\nfor name in {COMMANDS!r}: main([name, '-h'])"
    out, modules = loaded_after(run=run)
    assert all(f"spd {name}" in out for name in COMMANDS) and not modules & HEAVY


COMPILERS = {"torch._decomp", "torch._prims", "torch._refs"}
"""What torch imports for its compilers: a quarter of its time."""


def test_an_engine_starts_without_torchs_compilers() -> None:
    run = "import spd.__main__ as start\nstart.NVIDIA_DEVICE = '/none'\nstart.main()"
    words = ["generate", "-m", "demo", "--no-server", "--device", "cpu", "-n", "1", "hi"]
    out, modules = loaded_after(words, run)
    assert out.strip() and "torch" in modules and not modules & COMPILERS


def test_a_deferred_module_is_imported_when_a_name_is_used() -> None:
    code = (
        "import sys; from spd.lazy_names import DeferredModule; DeferredModule.install('colorsys')\n"
        "import colorsys; before = sys.modules['colorsys']; hasattr(colorsys, '__file__')\n"
        "print(before is colorsys, colorsys.rgb_to_hls(0, 1, 0)[1], hasattr(colorsys, 'other'))\n"
        "print(sys.modules['colorsys'] is colorsys, sys.modules['colorsys'].__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "True 0.5 False\nFalse colorsys\n", done.stderr


def test_seeded_numbers_are_the_same_without_torchs_compilers() -> None:
    code = (
        "from spd.lazy_names import DeferredModule; DeferredModule.install('torch._meta_registrations')\n"
        "from spd.kernels.seeded import seeded_generator\n"
        "import torch; print(torch.rand(3, generator=seeded_generator()).tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert done.stdout == f"{expected.tolist()}\n", done.stderr
    users = [p.name for p in (ROOT / "spd").rglob("*.py") if "torch.Generator(" in p.read_text()]
    assert users == ["seeded.py"], "others must not make one without what is deferred"


@pytest.mark.parametrize("raw", [False, True])
def test_the_template_process_starts_before_the_prompt_is_rendered(raw, monkeypatch) -> None:
    started: list[TemplateProcess] = []
    monkeypatch.setattr(TemplateProcess, "start", lambda process: started.append(process))
    folder = ModelFolder.resolve("demo")
    settings = plan_settings(GenerateOptions(model="demo", raw=raw), folder)
    assert len(started) == (not raw) and settings.vocabulary.template is folder.template


def test_a_missing_numpy_is_no_news() -> None:
    """A torch without NumPy warns on import, and spd filters the warning."""
    code = (
        "import warnings; from spd.cli.app import main; main(['completions', 'bash']); "
        "warnings.warn('Failed to initialize NumPy: No module named numpy'); warnings.warn('other news')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert "NumPy" not in done.stderr and "other news" in done.stderr


def test_a_missing_numpy_is_no_news_from_python_either() -> None:
    """The import of torch through the library's names shows no warning.

    Other warnings are shown.
    """
    code = (
        "import sys, warnings; sys.modules['numpy'] = None; import spd; spd.Engine; spd.chat; "
        "warnings.warn('other news')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "other news" in done.stderr
    assert "NumPy" not in done.stderr, done.stderr


def test_programs_are_not_looked_for_in_the_working_folder(spd_run, tmp_path, monkeypatch) -> None:
    """Libraries do not either: Triton looks a compiler up by name, and headers by the environment."""
    (tmp_path / "gcc").touch(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f":.:bin:{tmp_path}/own:{os.environ['PATH']}")
    monkeypatch.setenv("CPATH", ":include")
    assert spd_run("--version").code == 0
    assert os.path.isabs(shutil.which("gcc") or "/none")
    assert os.environ["PATH"].startswith(f"{tmp_path}/own:") and os.environ["CPATH"] == ""


def test_help_shows_this_editions_commands_panels_and_examples(spd_run) -> None:
    names = "chat generate serve bench compare explain verify inspect convert-mtp quantize pull ls rm doctor"
    assert tuple(get_group(build_app()).commands) == COMMANDS == (*names.split(), "completions")
    ran = spd_run()
    rows = re.findall(r"^  (\S+) +(.*)", ran.text, re.MULTILINE)
    assert ran.code == 0 and ran.err == ""
    assert [row for row in rows if row[0] in COMMANDS] == [
        (name, COMMAND_TABLE[name][1]) for name in COMMANDS
    ]
    text = spd_run("generate", "--help").text
    panels = ["Most used", "Prompt and sampling", "Model and drafts", "Output", "Advanced"]
    assert [
        name for name in re.findall(r"^(\w.*):$", text, re.MULTILINE) if name in panels
    ] == panels
    assert "spd generate --stats" in text.partition("Examples:")[2] and "\x1b" not in text


@pytest.mark.covers(count=16)
@pytest.mark.parametrize("columns", [40, 100, 200])
@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_cuts_no_name_at_any_width_and_is_short(name, columns, spd_run, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    ran = spd_run([name] if name else [], "--help")
    text, _, examples = ran.text.partition("Examples:")
    assert ran.code == 0 and examples and max(map(len, text.splitlines())) <= columns
    assert columns != 100 or len(ran.text.splitlines()) <= 70
    app: Any = get_command(build_app())
    command = app.commands[name] if name else app
    names = {option for param in command.params for option in (*param.opts, *param.secondary_opts)}
    expected = {option for option in names if option.startswith("-")} | (
        {"--help"} if name else set(COMMANDS)
    )
    first = re.findall(r"^[│ ]*((?:--?[\w-]+(?: / |, ?| +)?)+|[\w-]+)", ran.text, re.MULTILINE)
    printed = {word for first_column in first for word in re.findall(r"[\w-]+", first_column)}
    assert expected <= printed and not re.search(r"--[\w-]*…", ran.text)


HELP = "spd generate --help"
ERRORS = [
    (errors.UsageError("x"), HELP),
    (errors.NotFoundError("x"), "check the name"),
    (errors.CheckpointError("x"), "give another model"),
    (errors.IncompatibleError("x"), HELP),
    (errors.ResourceError("x"), "ask for less"),
    (errors.EngineError("x"), "-vv"),
    (errors.CheckFailedError("x", fix=["y"]), "fix: y"),
    (errors.PartialError("x"), "--help"),
    (errors.NetworkError("x"), "--help"),
    (errors.IncompleteError("x"), "--help"),
    (errors.SpdError("x"), "-vv"),
    (ValueError("x"), "-vv"),
]


def test_errors_are_written_in_one_place_with_every_exit_code() -> None:
    """The exception is a rank that has lost the others."""
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    codes = {kind.exit_code for kind in kinds if issubclass(kind, errors.SpdError)}
    assert {getattr(error, "exit_code", 1) for error, _ in ERRORS} == codes == set(range(1, 11))
    documented = (
        (ROOT / "docs" / "guide.md").read_text().partition("Exit codes: ")[2].partition("\n\n")[0]
    )
    assert [int(number) for number in re.findall(r"\b\d+\b", documented)] == [
        *range(11),
        130,
        141,
        143,
    ]
    writers = [
        path
        for path in (ROOT / "spd").rglob("*.py")
        if re.search(r"""["']error:""", path.read_text())
    ]
    assert sorted(path.name for path in writers) == ["console.py", "rank.py"]


@pytest.mark.parametrize(("error", "fix"), ERRORS)
def test_every_error_has_a_fix_and_keeps_its_status(error, fix, spd_run, model, script) -> None:
    script.fail = error
    script.pieces = ["", "", ""]
    ran = spd_run("generate", "-m", model, "Hi", "-o", os.devnull)
    assert_refused(ran, getattr(error, "exit_code", 1), fix)


def test_a_deleted_working_folder_is_named(spd_run, tmp_path, monkeypatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    ran = spd_run("generate", "-m", "demo", "-n", "1", "hi")
    assert ran.code == 3
    assert ran.err.startswith("error: the working folder cannot be used: No such file")
    assert spd_run("generate", "--help").code == 0


@pytest.mark.parametrize(
    ("variables", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_of_torch_do_not_spin_long_unless_the_environment_says_how(
    variables: dict[str, str], spins: str
) -> None:
    """They are started when torch is imported, behind this."""
    code = (
        "import os; from spd.cli.app import main; main(['--version']); "
        "print(os.environ.get('GOMP_SPINCOUNT'))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**environment, **variables},
        check=True,
    )
    assert done.stdout.splitlines()[-1] == spins


def test_a_command_that_cannot_be_imported_is_an_error(spd_run, monkeypatch) -> None:
    """The error names the cause: the module that failed also holds the command's options."""

    def fail(name: str) -> None:
        raise ImportError("a broken installation")

    monkeypatch.setattr("spd.cli.app.CommandBody.find", fail)
    ran = spd_run("ls")
    assert ran.code == 1 and "ImportError: a broken installation" in ran.err


def test_a_start_imports_no_module_that_others_seldom_use() -> None:
    code = (
        "import sys; from spd.__main__ import RARELY_USED, main\n"
        "import os; os._exit = lambda status: print(status)\n"
        "main(); names = [name for name in RARELY_USED if sys.modules[name].__class__.__name__ == 'module']\n"
        "print(names, len(RARELY_USED)); import inspect; print(inspect.signature(len))"
    )
    command = [sys.executable, "-c", code, "completions", "bash"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    expected = "0\n[] 3\n(obj, /)\n"
    assert done.stdout.endswith(expected) or sys.version_info >= (3, 13), done.stderr
