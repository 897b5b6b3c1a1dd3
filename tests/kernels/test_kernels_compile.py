"""Every kernel compiled ahead of time, without a GPU: none spills, and products use the matrix
units."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeGuard

import pytest

pytest.importorskip("triton")

import triton

from spd.kernels.dispatch import load_kernels
from tests.kernels.compile_ahead import DEVICES, access_order

ROOT = Path(__file__).resolve().parents[2]
COLD = ("prefill_attention_kernel",)
"""Kernels of no round: a spill is not paid for every token."""
BIAS_FIRST = "gate_up_kernel"
"""A kernel that loads its bias before the wait: nothing on the device writes a bias."""
HAND_OVER = (
    r"st\.global( bar\.sync)+ atom\.global\.gpu\.acq_rel\.add\.u32( bar\.sync)+( st\.global| bar\.sync)* "
    r"ld\.global\.cg"
)
READ_BACK = r"ld\.global st\.global( st\.global)*( bar\.sync)+( ld\.global)+$"
"""The rows that attention rotates are stored, and after a barrier its queries are loaded."""
SOURCES = {
    path: path.read_text(encoding="utf-8") for path in (ROOT / "spd/kernels").rglob("*_triton.py")
}
MODULES = ["tests.kernels.launches"]
NOTHING = "-"
FEW = (
    "fp16|wide|i8|fp8|int4 (64|32)|e2m1 32|int8 |e4m3 |out_8b_(int4|e2m1)|0.6b|v3|odd|one_hot|ids|down|7168"
    "|commit_8|commit_32|many|lookup_2048|sliding|logits"
    "|gelu|greedy|noise|^truncated|law_plain|rejection|kept|^plain_"
    "|out_|30b_int4|8b_e2m1|mamba|^1$|^32$"
    "|sinks|lite|limited|^oss|^gemma|^step|^nemotron"
    "|_(Q4_[01]|Q5|Q6|Q8|IQ4|MXFP4)|30b_Q4_K"
)
"""What the default lane leaves out: every kernel is compiled, and not in each of its forms."""


def version_of(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(".")[:2]))


RECORDED = ROOT / "benchmarks/results/compiled_kernels.json"
OF_TRITON_3_5 = """
abs add arange atomic_add bfloat16 cdiv ceil constexpr cumprod cumsum debug_barrier div_rn dot exp exp2
float16 float32 float64 floor fma full inline_asm_elementwise int16 int32 int64 int8 join load log max
maximum min minimum multiple_of num_programs permute program_id range reshape rsqrt sigmoid split static_range
store sum tensor trans uint16 uint32 uint64 uint8 where zeros
"""
"""Names of `triton.language` that kernels use, each there in 3.5, which torch 2.9 brings."""
BRINGS_OLDER_ASSEMBLER = version_of(triton.__version__) < version_of(
    json.loads(RECORDED.read_text())["triton"]
)
"""True with a Triton whose assembler keeps more in memory: 32 to 136 bytes of a tile of latents."""
AMPERE_STATES = {"9b_bf16": 16, "9b_fp16": 16, "mamba_bf16": 8, "mamba_fp16": 8}
ADA = {"linear_chunk_8b_int4 128_bf16": 8}
KNOWN_SPILLS = {
    80: {f"delta_rule_{name}": size for name, size in AMPERE_STATES.items()},
    86: ADA,
    89: ADA,
    100: {"experts_down_30b_Q4_0": 8},
    120: {
        "gate_up_8b_wide_bf16": 16,
        "linear_chunk_8b_int4 64_bf16": 48,
        "experts_gate_up_30b_int4 32": 8,
        "experts_gate_up_oss_e2m1": 8,
        **dict.fromkeys((f"delta_rule_{name}" for name in AMPERE_STATES), 16),
    },
}
"""Bytes of local memory of kernels on architectures that have not been tuned for yet.

A loop of one of them loads one value back a step, that of states two of a row, and chunks of `int4`
on the older ones none. Shorter tiles would repeat more; the rest of a state's row is its columns.
"""


def compile_all(
    arch: int, modules: list[str], cache: Path, without: str = NOTHING
) -> list[dict[str, Any]]:
    """Return the assembler's counts of each kernel, compiled by a process without the
    interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {
        "PYTHONPATH": os.pathsep.join(places),
        "TRITON_CACHE_DIR": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("compile_ahead.py")
    run = subprocess.run(
        [sys.executable, str(script), str(arch), without, *modules],
        env=environment,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return [json.loads(line) for line in run.stdout.splitlines()]


def check(programs: list[dict[str, Any]], arch: int) -> None:
    """Assert that no kernel of a round spills, and that products use the matrix units."""
    assert programs
    for kernel in programs:
        assert kernel["target"][0].startswith(f"sm_{arch}"), kernel
        assert kernel["shared"] <= DEVICES[arch].shared, kernel
        # A program that is launched before the one before it has ended waits for it, and neither
        # reads nor writes memory before that.
        assert kernel["waits"] == kernel["launched_early"], kernel
        assert not kernel["early"] or kernel["kernel"] == BIAS_FIRST, kernel
        # The sums of other parts are stored before a part counts itself, and read after that.
        assert not kernel["hand_over"] or re.search(HAND_OVER, kernel["hand_over"]), kernel
        if re.search("chunk_(plain_)?rotary_(?!.*i8)", kernel["name"]):
            assert re.search(READ_BACK, kernel["read_back"]), kernel
        # Where middle bytes are swapped, four bytes of a word are four neighbouring columns.
        assert kernel["packed_columns"] in (None, *range(4, 65, 4)), kernel
        if kernel["kernel"] not in COLD and not BRINGS_OLDER_ASSEMBLER:
            assert kernel["local"] <= KNOWN_SPILLS.get(arch, {}).get(kernel["name"], 0), kernel
        if re.search(
            "linear|gate_up|head_kernel|down|attend|prefill|delta_(chunks|solve)", kernel["kernel"]
        ):
            # One that the compiler gave up holds a trap and nothing else.
            assert kernel["wgmma"] or kernel["mma"] or kernel["tcgen05"], kernel
            # What each head multiplies by itself is a tile or two, which the older ones load at
            # once; beside heads of 512 elements they have room for no second stage.
            small = re.search("^head_linear|(chunk|attention|rotary)_wide", kernel["name"])
            assert kernel["async_copies"] or arch >= 100 or (small and arch < 90), kernel


def test_kernels_compile_for_hopper(request: pytest.FixtureRequest) -> None:
    """Triton's cache holds each kernel by its source: only changed kernels compile again."""
    programs = compile_all(90, MODULES, request.config.cache.mkdir("triton"), without=FEW)
    check(programs, 90)
    latent = [
        k
        for k in programs
        if k["kernel"] in ("attend_latent_chunk_kernel", "prefill_latent_kernel")
    ]
    assert len(latent) == 2 and all(kernel["wgmma"] for kernel in latent)
    kernel_names = {
        name for text in SOURCES.values() for name in re.findall(r"^def (\w+_kernel)\(", text, re.M)
    }
    assert {kernel["kernel"] for kernel in programs} == kernel_names, (
        "a kernel that no case launches is not compiled"
    )
    products = [k for k in programs if k["file"].endswith("skinny_kernels_triton")]
    assert products and all("rows" in kernel["any_rows"] for kernel in products)
    assert all(kernel["prefetched_first"] for kernel in products), "weights come before the wait"
    assert not any(kernel["released_first"] for kernel in products)
    assert any(kernel["hand_over"] for kernel in products), "some weight's K is split"
    chunks = {k["name"]: k["prefetches"] for k in programs if k["kernel"] == "attend_chunk_kernel"}
    assert chunks == {
        "attend_chunk_bf16": 4,
        "attend_chunk_rotary_bf16": 4,
    }, "two lines of keys and of values"


def test_accesses_before_the_wait_and_a_hand_over_without_barriers_are_found() -> None:
    body = "{ ld.global.b32 %r1; griddepcontrol.wait; st.global.b32 %r2; %s }"
    counted = "bar.sync 0; atom.global.gpu.acq_rel.add.u32 %r3; bar.sync 0; ld.global.cg.b32 %r4;"
    order = access_order(body.replace("%s", counted))
    assert order["waits"] and order["early"] == ["ld.global.b32"]
    assert re.search(HAND_OVER, order["hand_over"])
    unordered = access_order(body.replace("%s", counted.replace("bar.sync 0;", "")))
    assert unordered["hand_over"] and not re.search(HAND_OVER, unordered["hand_over"])


def is_compiled(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and any(
        "triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def test_no_function_returns_a_tuple_that_may_hold_none() -> None:
    """Triton 3.5 and 3.6 make a tensor of each returned element."""
    nodes = [node for text in SOURCES.values() for node in ast.walk(ast.parse(text))]
    optional = {
        node.name
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any("None" in ast.unparse(n) for n in node.body if isinstance(n, ast.AnnAssign))
    }
    assert {"WeightOperands", "KvPools"} <= optional
    returns = [
        n for f in filter(is_compiled, nodes) for n in ast.walk(f) if isinstance(n, ast.Return)
    ]
    made = [n.value for n in returns if isinstance(n.value, ast.Call)]
    assert made and not [call for call in map(ast.unparse, made) if call.split("(")[0] in optional]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_kernels_say_what_the_oldest_triton_knows(path: Path) -> None:
    """`tl.mul` came later, and `min` of two constants, which 3.5 takes for a call on the device."""
    assert '"triton>=3.5; platform_system' in (ROOT / "pyproject.toml").read_text()
    nodes = list(ast.walk(ast.parse(SOURCES[path])))
    names = [ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute)]
    assert {name[3:] for name in names if re.fullmatch(r"tl\.\w+", name)} <= set(
        OF_TRITON_3_5.split()
    )
    for function in filter(is_compiled, nodes):
        called = {
            ast.unparse(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)
        }
        assert not called & {"min", "max"}, function.name


def test_products_and_sums_fuse_whatever_triton_does_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Triton 3.10 stops fusing, and 3.9 warns of it on stderr where nothing was said."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    load_kernels("triton")
    assert triton.knobs.language.default_fp_fusion
    assert os.environ["TRITON_DEFAULT_FP_FUSION"] == "1", "what a later Triton asks before it warns"


@pytest.mark.slow
@pytest.mark.parametrize("arch", DEVICES)
def test_kernels_compile_for_every_architecture(arch: int, tmp_path: Path) -> None:
    programs = compile_all(arch, MODULES, tmp_path)
    check(programs, arch)
    table = json.loads(RECORDED.read_text())
    if table["triton"] == triton.__version__:
        recorded = {(row[1], row[3]) for row in table["rows"] if row[0] == arch}
        assert recorded == {
            (k["name"], k["local"]) for k in programs if k["name"] in {name for name, _ in recorded}
        }
