"""Runs command lines of spd in the tree that PYTHONPATH names; `python -m benchmarks.freeze` starts it.

A job is a line of JSON on standard input, and so is its answer. The job `--compile ARCH` compiles
the kernels that the tree describes, by the tree's own script.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import runpy
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

TREE = Path(os.environ["PYTHONPATH"])
TTIR_PLACE = re.compile(
    r' ?loc\((?:[^()"]|"[^"]*"|\((?:[^()"]|"[^"]*")*\))*\)|^#loc.*\n', re.MULTILINE
)
PTX_PLACE = re.compile(
    r"\s*//.*|^\s*\.(?:loc|file)\s.*\n|^\$L__(?:tmp|func|info)\w+:\n", re.MULTILINE
)


def answer(argv: list[str], stdin: str, trace: bool) -> dict[str, Any]:
    """Run one command line, with files for its three standard descriptors."""
    from spd.__main__ import main

    Path("in").write_text(stdin, encoding="utf-8")
    Path("trace").write_text("")
    for number, name in enumerate(("in", "out", "err")):
        with open(name, "rww"[number]) as file:
            os.dup2(file.fileno(), number)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(n, "rww"[n], closefd=False) for n in range(3))
    sys.argv = ["spd", *argv[:1], *(["--trace", "trace"] if trace else []), *argv[1:]]
    status: Any
    try:
        with mock.patch("os._exit", sys.exit):  # how a process that loaded torch ends
            status = compile_kernels(argv[1]) if argv[:1] == ["--compile"] else main()
    except SystemExit as end:
        status = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    files = {name: Path(name).read_text("utf-8", "replace") for name in ("out", "err", "trace")}
    return {"status": json.dumps(status), **files}


def code_of(asm: dict[str, str]) -> str:
    """Return TTIR and PTX without their source places, the values of TTIR numbered in order."""
    numbers: dict[str, str] = {}
    ttir = TTIR_PLACE.sub("", asm["ttir"])
    ttir = re.sub(r"%[\w-]+", lambda value: numbers.setdefault(value[0], f"%{len(numbers)}"), ttir)
    return ttir + PTX_PLACE.sub(
        "", re.split(r"^\s*\.section\s+\.debug", asm["ptx"], flags=re.MULTILINE)[0]
    )


def compile_kernels(arch: str) -> int:
    """Print the digest of the code by kernel, argument types, constants and options."""
    import triton

    digests: dict[str, str] = {}
    compile_source = triton.compile

    def compile_and_note(source: Any, *target: Any, **options: Any) -> Any:
        """Compile, and record the digest of the code by kernel, types, constants and options."""
        compiled = compile_source(source, *target, **options)
        constants = sorted((key, repr(value)) for key, value in source.constants.items())
        types = list(source.signature.values())
        launch = [
            source.fn.fn.__name__,
            types,
            constants,
            sorted(source.attrs.items()),
            sorted(options["options"].items()),
        ]
        digest = hashlib.sha256(code_of(compiled.asm).encode()).hexdigest()
        digests[json.dumps(launch, default=repr)] = digest
        return compiled

    script = TREE / "tests/kernels/compile_ahead.py"
    defines_launches = re.compile(r"^def (signatures|launches)\(", re.M)
    rooms = (sorted((TREE / room).rglob("*.py")) for room in ("spd/kernels", "tests/kernels"))
    files = [path for room in rooms for path in room if defines_launches.search(path.read_text())]
    modules = [".".join(path.relative_to(TREE).with_suffix("").parts) for path in files]
    triton.compile = triton.compiler.compile = compile_and_note
    sys.argv = [str(script), arch, "leave none out", *modules]
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        runpy.run_path(str(script), run_name="__main__")
    print(json.dumps(digests))
    return 0


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: the tree comes first
    import spd

    if not Path(spd.__file__).is_relative_to(TREE):
        sys.exit(f"{spd.__file__} is not of {TREE}")
    jobs = os.fdopen(os.dup(0))
    answers = os.fdopen(os.dup(1), "w")
    for line in jobs:
        signal.alarm(3600)  # a job that hangs ends the process
        print(json.dumps(answer(**json.loads(line))), file=answers, flush=True)
