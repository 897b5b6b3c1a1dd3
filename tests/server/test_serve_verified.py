"""`spd verify URL` against `spd serve`: the demo's text is the same with and without speculation."""

import pytest

from tests.cli.conftest import Run
from tests.server.conftest import Served


@pytest.mark.slow
def test_the_server_changes_no_token(served: Served, spd_run: Run) -> None:
    url = f"http://127.0.0.1:{served.port}"
    toggle = ("--toggle", "speculative.spec=auto/off")
    ran = spd_run("verify", url, toggle, "--json", "--tokens", 2000, "-n", 48)
    assert ran.code == 0 and ran.json["passed"], ran
    assert ran.json["different_tokens"] > 1000 and ran.json["drafts"]["accepted"] > 500
    assert all(setting["on_on"]["differing"] == 0 for setting in ran.json["settings"])
