"""The options of `spd verify`, of models and of servers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from spd.cli.options import EngineOptions, ModelArgument, argument, main_option, model_option

SERVER_HELP = "A folder, GGUF file, org/name or demo; or http://HOST:PORT, a server."
"""The help of the argument with a model or a server."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class VerifyOptions(ModelArgument, EngineOptions):
    """The options of `spd verify`."""

    adaptive: bool = False
    model_argument: str | None = argument("MODEL", SERVER_HELP, None)
    served_model: str | None = None
    """The model's name at a server: --model where the argument is the server's address."""
    against: str = main_option(
        "spec=off",
        "SETTING=…|URL",
        "Compare with spec=off, lag=0, kernels=torch, slots=1 …; a server with another.",
    )
    toggle: str | None = main_option(
        None,
        "FIELD=ON/OFF",
        "Of a server: what in a request's body switches speculation on and off.",
    )
    api_key: str | None = main_option(
        None, "KEY", "Of a server. Better in SPD_API_KEY.", envvar="SPD_API_KEY"
    )
    temperature: str = main_option("0,0.8", "T,…", "Sampling temperatures. Default: 0,0.8.")
    max_tokens: int = main_option(64, "N", "Most tokens in a reply. Default: 64.", "-n", min=2)
    tokens: int = main_option(
        0, "N", "Repeat with new seeds until replies could hold N tokens.", min=0
    )
    concurrency: int = main_option(
        1, "N", "Requests at a time. Default: 1; of a server alone and 4.", min=1, max=1024
    )
    json: bool = main_option(False, None, "Print the certificate as JSON.")
    prompts: Path | None = model_option(None, "FILE", "Your own, as for spd bench.")
