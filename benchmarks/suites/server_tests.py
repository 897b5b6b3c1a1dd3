"""llama.cpp's server tests, run as they are against `spd serve` by a `utils` module of ours.

The tests are copied to a scratch folder. Assertions about llama.cpp's own model (its tokens, its
build's name) are left out there; a test that is about what llama.cpp alone has is set aside with
its reason.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.suites.folders import TEMPLATE, write_model
from benchmarks.suites.junit import ASIDE, count_junit
from benchmarks.suites.report import Report
from benchmarks.suites.served import clean_environment, free_port

LIMIT_SECONDS = 900
OF_THE_MODEL = re.compile(r"\bn_prompt\b|\bn_cache\b|system_fingerprint|prompt_n|created_by")
"""Assertions that are about llama.cpp's model or build."""
FILES = (
    "basic",
    "chat_completion",
    "compat_anthropic",
    "compat_oai_responses",
    "completion",
    "ctx_shift",
    "ignore_eos",
    "infill",
    "metrics",
    "security",
    "speculative",
    "template",
    "tokenize",
    "tool_call",
)
"""Files of tests of features that spd has; the other files are set aside."""
OWN_WORDS = "words of llama.cpp's own endpoint"
CORS = "spd has no CORS: no web page may ask"
OWN_METRICS = "names of llama.cpp's own metrics and timings"
NOT_APPLICABLE: Mapping[str, str] = {
    "basic::test_server_multiple_addresses": "spd listens at one address",
    "basic::test_server_models": "spd lists a model by its own name, and by its alias",
    "message:== 'llama-test-model'": "answers name the model by its own name, not by an alias",
    "chat_completion::test_logprobs_stream": (
        "the first event has an empty content, as OpenAI's has; llama.cpp's has null"
    ),
    "basic::test_no_ui": "spd has no web interface",
    "basic::test_server_model_aliases_and_tags": "spd has one alias and no tags",
    "chat_completion::test_invalid_chat_completion_req[[]messages7]": (
        "two assistant messages at the end, which spd reads"
    ),
    "chat_completion::test_context_size_exceeded*": "the error's type is llama.cpp's own; it is 400",
    "compat_anthropic::test_anthropic_tool_result_with_image": (
        "an image of a tool is left out and the model is told so, as docs/serve.md says"
    ),
    "compat_anthropic::test_anthropic_vision_format_accepted": "refused with 400 instead of 500",
    "compat_anthropic::test_anthropic_empty_messages": "an empty list of messages is refused",
    "compat_oai_responses::test_responses_stream_with_llama_telemetry": OWN_WORDS,
    "completion::test_completion_stream[[]*": OWN_WORDS,
    "completion::test_completion_prompt_cache": OWN_WORDS,
    "ctx_shift::*": "a context is a request's own in spd; slots of llama.cpp share theirs",
    "ignore_eos::*": OWN_WORDS,
    "metrics::*": OWN_METRICS,
    "security::test_openai_library_correct_api_key": "paths of the API begin with /v1 in spd",
    "security::test_cors_options*": CORS,
}
"""Tests that do not apply to spd, by their names (with wildcards), with the reasons."""

WITHOUT_NAMES: Mapping[str, str] = {
    "message:does not exist: '": "another model's name is a 404 here",
    "message:/model' == '": "this server has no alias",
}
"""Tests that fail if `spd serve` accepts only its model's own name."""


def without_model(source: str) -> str:
    """Return a test file's source without assertions about llama.cpp's own model."""

    class Dropper(ast.NodeTransformer):
        def visit_Assert(self, node: ast.Assert) -> ast.AST:
            return ast.Pass() if OF_THE_MODEL.search(ast.unparse(node)) else node

    return ast.unparse(ast.fix_missing_locations(Dropper().visit(ast.parse(source))))


def copy_tests(llama: Path, place: Path) -> Path:
    """Copy the tests with our `utils` beside their helpers; return the folder."""
    source = llama / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    folder = place / "tests"
    shutil.copytree(source, folder)
    (folder / "utils.py").rename(folder / "llama_helpers.py")
    shutil.copy(Path(__file__).with_name("llama_utils.py"), folder / "utils.py")
    for path in (folder / "unit").glob("test_*.py"):
        path.write_text(without_model(path.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def takes_any_model() -> bool:
    """True if `spd serve` has an option to answer to every model's name."""
    command = [sys.executable, "-m", "spd", "serve", "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return "--any-model" in result.stdout


def run(llama: Path, client: str) -> Report:
    """Run the tests in the Python `client`, which has pytest, requests, openai and filelock."""
    report = Report("server tests", "llama.cpp's server tests in llama-cpp-python's sdist")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        folder = copy_tests(llama, place)
        model = write_model(place / "model", TEMPLATE, ("<tool_call>", "</tool_call>"))
        environment = clean_environment(place) | {
            "SUITE_MODEL": str(model),
            "SUITE_PYTHON": sys.executable,
            "SUITE_PORT": str(free_port()),
            "SUITE_TEMPLATES": str(llama / "vendor" / "llama.cpp" / "models" / "templates"),
            "SUITE_ANY_MODEL": "1" if takes_any_model() else "0",
        }
        test_files = [f"unit/test_{name}.py" for name in FILES]
        command = [client, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
        command += ["--junitxml", str(place / "found.xml"), *test_files]
        with (place / "log").open("wb") as log:
            subprocess.run(
                command,
                cwd=folder,
                env=environment,
                stdout=log,
                stderr=log,
                check=False,
                timeout=LIMIT_SECONDS,
            )
        if not (place / "found.xml").exists():
            raise RuntimeError((place / "log").read_text("utf-8", "replace")[-3000:])
        not_applicable = (
            NOT_APPLICABLE if takes_any_model() else {**NOT_APPLICABLE, **WITHOUT_NAMES}
        )
        count_junit(report, place / "found.xml", not_applicable)
        for path in sorted((folder / "unit").glob("test_*.py")):
            name = path.stem.removeprefix("test_")
            if name not in FILES:
                tests = path.read_text(encoding="utf-8").count("\ndef test_")
                report.rows.setdefault(name, type(report.total)())[ASIDE] += tests
                report.reasons[name] = "llama.cpp's own feature"
    return report
