"""Rows rounded to int8, captured and eager, 0 to 2 rounds behind: one text and one story of each drafter."""

from __future__ import annotations

import pytest

from tests.gpu.test_gpu_forms import CASES, Form, make_form


@pytest.fixture(scope="module")
def form(tmp_path_factory: pytest.TempPathFactory) -> Form:
    return make_form("int8", tmp_path_factory.mktemp("form"))


@pytest.mark.parametrize(("method", "k"), CASES)
def test_acceptance_is_the_same_captured_and_eager_at_every_lag(form: Form, method: str, k: int) -> None:
    form.check(method, k)
