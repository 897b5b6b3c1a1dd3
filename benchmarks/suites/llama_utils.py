"""Stands in for the `utils` module of llama.cpp's server tests: their helpers, over `spd serve`.

It is copied beside the tests and runs in their Python, so it imports nothing of spd. What the tests
ask of llama.cpp alone skips a test, with the reason in its words.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_wget = types.ModuleType("wget")
_wget.download = lambda url, out="": out  # type: ignore[attr-defined]
sys.modules.setdefault("wget", _wget)
import llama_helpers  # noqa: E402
from llama_helpers import *  # noqa: E402, F403

MODEL = Path(os.environ["SUITE_MODEL"])
PYTHON = os.environ["SUITE_PYTHON"]
ANY_MODEL = os.environ.get("SUITE_ANY_MODEL") == "1"
RENAMED = {path: f"/v1{path}" for path in ("/chat/completions", "/models", "/responses")}
NATIVE = ("/completion", "/completions")
"""llama.cpp's own endpoint by both of its names."""
KNOWN = ("/v1/", "/health", "/metrics", "/tokenize", "/detokenize")
OWN_OPTIONS = {
    "server_embeddings": "embeddings",
    "server_reranking": "reranking",
    "lora_files": "LoRA files",
    "slot_save_path": "saved slots",
    "mmproj_url": "images",
    "media_path": "images",
    "models_dir": "a router of models",
    "models_preset": "a router of models",
    "enable_ctx_shift": "context shift",
    "sleep_idle_seconds": "sleeping servers",
    "ui_mcp_proxy": "a web interface",
    "server_tools": "tools of the server's own",
    "mcp_servers_config": "MCP servers of the server's own",
    "mcp_servers_json": "MCP servers of the server's own",
    "gcp_compat": "Google's platform",
    "cors_origins": "CORS",
    "backend_sampling": "sampling on a backend",
    "model_draft": "a published draft model",
    "spec_synth_len": "made-up acceptance",
    "spec_synth_rates": "made-up acceptance",
    "reasoning": "a switch of thinking for the server",
    "chat_template": "a template by llama.cpp's name",
    "debug": "prompts in answers",
}
"""Options of llama.cpp's server that spd has not, with their descriptions."""
MODELS = ("bert", "jina", "stories15m", "tinygemma3", "infill", "bartowski")
RUNNING: dict[tuple[object, ...], tuple[subprocess.Popen[bytes], int]] = {}
"""Servers by their options: a test that asks for the same ones uses the same server."""
_request = llama_helpers.ServerProcess.make_request
_stream = llama_helpers.ServerProcess.make_stream_request


def skip(feature: str) -> None:
    """Skip a test of a feature that llama.cpp alone has."""
    pytest.skip(f"llama.cpp's own: {feature}")


def start(self: Any, timeout_seconds: int = 60) -> None:
    """Serve the suite's model with as much of the options as spd has."""
    for name, feature in OWN_OPTIONS.items():
        if getattr(self, name):
            skip(feature)
    names = f"{self.model_hf_repo} {self.model_hf_file} {self.model_alias}".lower()
    for name in MODELS:
        if name in names:
            skip(f"the model {self.model_hf_repo}")
    if self.model_hf_repo is None:
        skip("a router of models")
    template = self.chat_template_file
    key = (template, self.n_ctx, self.n_slots, self.api_key, self.model_alias)
    if key not in RUNNING:
        RUNNING[key] = _served(self, len(RUNNING), template)
    self.process, self.server_port = RUNNING[key]
    llama_helpers.server_instances.add(self)
    ends = time.monotonic() + max(180, timeout_seconds)
    while time.monotonic() < ends:
        try:
            if llama_helpers.requests.get(self.make_url("/health"), timeout=2).status_code == 200:
                return
        except OSError:
            time.sleep(0.05)
    raise TimeoutError("the server does not answer")


def _served(self: Any, number: int, template: str | None) -> tuple[subprocess.Popen[bytes], int]:
    """Start a server on a port of its own."""
    folder = MODEL
    port = int(os.environ["SUITE_PORT"]) + number
    if template is not None:
        folder = MODEL.parent / f"model-{Path(template).stem}"
        if not folder.exists():
            folder.mkdir()
            for path in MODEL.iterdir():
                (folder / path.name).write_bytes(path.read_bytes())
            source = Path(os.environ["SUITE_TEMPLATES"]) / Path(template).name
            (folder / "chat_template.jinja").write_bytes(source.read_bytes())
    command = [PYTHON, "-m", "spd", "serve", str(folder), "--port", str(port)]
    command += ["--concurrency", str(self.n_slots or 4), "--ctx", str(self.n_ctx or 4096)]
    command += ["--any-model"] if ANY_MODEL else []
    command += ["--alias", self.model_alias] if ANY_MODEL and self.model_alias else []
    environment = {**os.environ}
    if self.api_key:
        environment["SPD_API_KEY"] = self.api_key
    log = (MODEL.parent / f"serve-{number}.log").open("wb")
    process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    atexit.register(process.kill)
    return process, port


def stop(self: Any) -> None:
    """Leave the server to the next test."""
    llama_helpers.server_instances.discard(self)
    self.process = None


def _path_of(path: str) -> str:
    path = RENAMED.get(path, path)
    if not path.startswith(KNOWN) and path not in NATIVE:
        skip(f"{path.partition('?')[0]}")
    return path


def _body_of(path: str, data: Any) -> Any:
    """Return a body in spd's words: `n_predict` is `max_tokens` there, `content` is `prompt`."""
    if not isinstance(data, dict):
        return data
    body = dict(data)
    if path == "/tokenize" and "content" in body:
        for name in ("add_special", "with_pieces"):
            if body.pop(name, None):
                skip(f"{name} of /tokenize")
        body["prompt"] = body.pop("content")
    if path in NATIVE:
        body.pop("cache_prompt", None)
        body["max_tokens"] = body.pop("n_predict", 64)
        supported = {"prompt", "max_tokens", "seed", "temperature", "stream", "stop", "ignore_eos"}
        for name in body.keys() - supported:
            skip(f"{name} of /completion")
        if not isinstance(body.get("prompt"), str):
            skip("prompts that are objects or mixed lists")
    if not ANY_MODEL and "model" in body:
        body.pop("model")
    return body


def make_request(
    self: Any,
    method: str,
    path: str,
    data: Any = None,
    headers: Any = None,
    timeout: float | None = 60,
    host: str | None = None,
) -> Any:
    """Send a request in spd's words; return the answer in llama.cpp's."""
    path = _path_of(path)
    native = path in NATIVE
    sent = "/v1/completions" if native else path
    headers = {name: value for name, value in (headers or {}).items() if value is not None}
    result = _request(self, method, sent, _body_of(path, data), headers, timeout)
    body = result.body
    if result.status_code == 400 and isinstance(body, dict):
        error = body.get("error", {})
        if error.get("code") == "unknown_parameter":
            skip(f"the field {error.get('param')}, which spd refuses by name")
    if native and result.status_code == 200:
        result.body = _native(body)
    if path == "/detokenize" and isinstance(body, dict) and "prompt" in body:
        result.body = {"content": body["prompt"]}
    return result


def _native(body: Any) -> dict[str, Any]:
    """Return a completion in the form of llama.cpp's own endpoint."""
    choice = body["choices"][0]
    return {"content": choice["text"], "timings": body.get("timings", {}), "stop": True}


def make_stream_request(
    self: Any,
    method: str,
    path: str,
    data: Any = None,
    headers: Any = None,
    host: str | None = None,
) -> Iterator[Any]:
    """Yield the events of a stream, those of llama.cpp's own endpoint in its words."""
    path = _path_of(path)
    native = path in NATIVE
    sent = "/v1/completions" if native else path
    headers = {name: value for name, value in (headers or {}).items() if value is not None}
    try:
        for event in _stream(self, method, sent, _body_of(path, data), headers):
            if native:
                choices = event["choices"]
                text = choices[0]["text"] if choices else ""
                yield {"content": text, "stop": not choices}
                continue
            for choice in event.get("choices", ()):
                if choice["delta"].get("content") == "":  # OpenAI's first event; llama.cpp has null
                    choice["delta"]["content"] = None
            yield event
    except llama_helpers.ServerError as error:
        refusal = error.body.get("error", {})
        if refusal.get("code") == "unknown_parameter":
            skip(f"the field {refusal.get('param')}, which spd refuses by name")
        raise


def match_regex(regex: str, text: str) -> bool:
    """True for texts of a model that is not there; formats and grammars are matched."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "")
    if any(word in test for word in ("format", "schema", "grammar")):
        return bool(_match(regex, text))
    return isinstance(text, str)


_match = llama_helpers.match_regex
server_class: Any = llama_helpers.ServerProcess
server_class.start = start
server_class.stop = stop
server_class.make_request = make_request
server_class.make_stream_request = make_stream_request
presets: Any = llama_helpers.ServerPreset
presets.load_all = staticmethod(lambda: None)
