"""vLLM's tests of tool parsers, run as they are over spd's `CallParser` by a `vllm` module of
ours."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.environment import ROOT
from benchmarks.suites.junit import count_junit
from benchmarks.suites.report import Report

LIMIT_SECONDS = 600
FILES = (
    "deepseekv31",
    "deepseekv3",
    "gemma4",
    "gigachat3",
    "glm47_moe",
    "glm4_moe",
    "granite4",
    "granite",
    "hermes",
    "kimi_k2",
    "lfm2",
    "llama3_json",
    "minimax_m2",
    "qwen3coder",
    "step3p5",
)
"""Files of tests for forms that spd has."""
BLANKS = "blanks between a text and a call are dropped in spd"
BEHIND = "a text behind a call is kept in spd"
BROKEN = "a broken call is text with a note in spd, as docs/serve.md says"
INSIDE = "about vLLM's own functions"
OTHER_FORM = "a form, or an older one, that spd does not have"
UNTYPED = "no schema says that the value is a text"
NOT_APPLICABLE: Mapping[str, str] = {
    "message:vllm_stub._parse": INSIDE,
    "*structural_tag*": INSIDE,
    "*adjust_request*": INSIDE,
    "*regex_timeout*": INSIDE,
    "*namespace_tool_call_round_trip*": INSIDE,
    "*uses_shared_glm47_parser*": INSIDE,
    "*sets_skip_special_tokens_false*": INSIDE,
    "*skips_structured_outputs*": INSIDE,
    "*full_input_mixed_content*": INSIDE,
    "*streaming_incremental*": "vLLM's parser hands out pieces; spd whole calls, where none is held",
    "*just_forward_text*": "spd holds blanks back that may stand before a call",
    "*extract_tool_calls_with_multiple_tools": BEHIND,
    "*content_after_tool*": BEHIND,
    "*mixed_content_and_multiple_tool_calls": BEHIND,
    "granite4::test_tool_call_parser_complex*": BLANKS,
    "kimi_k2::test_extract_tool_calls[[]*": BLANKS,
    "minimax_m2::test_content_before_tool_call": BLANKS,
    "minimax_m2::test_multiple_params": UNTYPED,
    "minimax_m2::test_header_and_params_in_separate_chunks": UNTYPED,
    "kimi_k2::test_invalid_funcall_id_skipped": "spd reads a call whose id has another form",
    "kimi_k2::test_truncated_tool_call_no_end_marker": BROKEN,
    "kimi_k2::test_invalid_json_still_extracted": BROKEN,
    "kimi_k2::test_noise_between_markers_suppressed": BROKEN,
    "lfm2::*echoed_tool_call*": BROKEN,
    "lfm2::*parallel_calls_streaming*": "spd hands out at once calls that end at once",
    "gemma4::test_incomplete_tool_call": BROKEN,
    "gemma4::*bare*": BROKEN,
    "gemma4::*malformed*": BROKEN,
    "gemma4::test_three_mixed_calls": BROKEN,
    "gemma4::test_colon_in_content_not_broken": BROKEN,
    "gigachat3::*[[]gigachat3]": OTHER_FORM,
    "gigachat3::*_gigachat3]": OTHER_FORM,
    "gigachat3::*_eos_gigachat31]": "a reply's text has no end token in spd",
    "granite::*": OTHER_FORM,
    "llama3_json::test_extract_tool_calls_simple": "calls without marks inside a text",
    "llama3_json::*surrounding_text*": "calls without marks inside a text",
    "llama3_json::*missing_parameters*": "a call without arguments is one in spd",
}
"""Tests that do not apply to spd, by their names (with wildcards), with the reasons."""


def run(vllm: Path) -> Report:
    """Run the tests of an unpacked vllm."""
    report = Report("tool parsers", "tests of tool parsers in vllm's sdist")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        tests = place / "tests"
        shutil.copytree(vllm / "tests" / "tool_parsers", tests / "tool_parsers")
        (tests / "__init__.py").touch()
        engine = vllm / "tests" / "parser" / "engine"
        if engine.is_dir():
            shutil.copytree(engine, tests / "parser" / "engine")
            (tests / "parser" / "__init__.py").touch()
        shutil.copy(Path(__file__).with_name("vllm_stub.py"), place / "vllm_stub.py")
        test_files = [f"tests/tool_parsers/test_{name}_tool_parser.py" for name in FILES]
        command = [sys.executable, "-m", "pytest", "-q", "-p", "vllm_stub", "--rootdir", "."]
        command += ["-p", "no:cacheprovider", "--junitxml", "found.xml", *test_files]
        paths = os.pathsep.join((str(place), str(ROOT)))
        with (place / "log").open("wb") as log:
            subprocess.run(
                command,
                cwd=place,
                env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
                stdout=log,
                stderr=log,
                check=False,
                timeout=LIMIT_SECONDS,
            )
        if not (place / "found.xml").exists():
            raise RuntimeError((place / "log").read_text("utf-8", "replace")[-3000:])
        count_junit(report, place / "found.xml", NOT_APPLICABLE)
    return report
