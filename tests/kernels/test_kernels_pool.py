"""The C kernels' threads: the same bits whichever thread works, and never a hang or a lost item."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from spd.kernels.native.library import Ending, NativeLibrary
from tests.kernels.forms import needs_compiled, noise

pytestmark = needs_compiled
WIDTH, DEPTH = 2080, 512
"""Enough work for several threads, in blocks that no number of them divides."""


def test_products_by_any_number_of_threads(native: NativeLibrary) -> None:
    """Hundreds of calls in a row, by 1 to 9 threads: every item once, in any order."""
    x, packed, usual = noise(33, DEPTH).to(native.dtype), native.pack(noise(WIDTH, DEPTH)), native.threads
    native.threads = 1
    alone = {rows: native.linear(x[:rows], packed, None, Ending.FLOAT32) for rows in (1, 4, 33)}
    try:
        for call in range(300):
            native.threads = 1 + call % 9
            rows = (1, 4, 33)[call // 9 % 3]
            assert torch.equal(native.linear(x[:rows], packed, None, Ending.FLOAT32), alone[rows])
            assert torch.equal(native.pack(noise(WIDTH, DEPTH)).tiles, packed.tiles) if call < 9 else True
    finally:
        native.threads = usual


def test_two_callers_at_once(native: NativeLibrary) -> None:
    """One has the pool, the other works alone."""
    x, weight, usual = noise(64, 4096).to(native.dtype), torch.randn(64, 4096), native.threads
    alone = native.router_logits(x, weight)
    native.threads = 3
    try:
        with ThreadPoolExecutor(2) as callers:
            made = callers.map(lambda _: native.router_logits(x, weight), range(200))
            assert all(torch.equal(each, alone) for each in made)
    finally:
        native.threads = usual


@pytest.mark.covers(count=2)
def test_a_forked_child_computes(native: NativeLibrary) -> None:
    """It has none of its parent's threads, even where they were at work."""
    x, packed, usual = noise(4, DEPTH).to(native.dtype), native.pack(noise(WIDTH, DEPTH)), native.threads
    native.threads = 3
    try:
        made = native.linear(x, packed, None)
        with ThreadPoolExecutor(1) as caller:
            many = noise(2000, DEPTH).to(native.dtype)
            busy = caller.submit(lambda: [native.linear(many, packed, None) for _ in range(30)])
            for _ in range(5):
                child = os.fork()
                if child == 0:
                    signal.alarm(30)
                    os._exit(0 if torch.equal(native.linear(x, packed, None), made) else 1)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            busy.result()
    finally:
        native.threads = usual
