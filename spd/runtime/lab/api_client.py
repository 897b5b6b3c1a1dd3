"""A client of servers with OpenAI's API, which bounds the time and size of replies. No torch here.

It follows no redirect, so that prompts and keys go to the address that was typed.
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from spd.errors import IncompatibleError, NetworkError, NotFoundError, SpdError, UsageError

CONNECT_SECONDS = 10.0
REPLY_SECONDS = 600.0
"""Seconds until a reply has to be complete, waiting in the server's queue included."""
MAX_REPLY_BYTES = 16 * 2**20
"""The largest reply that is read."""
CHUNK_BYTES = 2**16
BUSY_STATUSES = (429, 503)
MAX_WAITS = 5
MAX_WAIT_SECONDS = 30.0
"""A busy server is asked again after what its `Retry-After` says, at most so long and so often."""
MESSAGE_LENGTH = 200
"""Characters of a server's own message that are shown."""
DRAFT_COUNTERS = {
    b"vllm:spec_decode_num_draft_tokens_total": "drafted",
    b"vllm:spec_decode_num_accepted_tokens_total": "accepted",
}
"""What servers that count drafts for all requests together call them at `/metrics`: vLLM."""
TOP_LOGPROBS = 20
"""Likeliest tokens that are asked for at each position: the most that the API allows."""


class TokenEntry(NamedTuple):
    """A token of a reply, its log-probability, and those of the likeliest tokens there."""

    data: bytes
    logprob: float
    top: Mapping[bytes, float]


@dataclass(frozen=True)
class ApiReply:
    """A whole reply. Fields that the server does not report are None or empty."""

    text: str
    """Thinking and answer; lone surrogates as backslash escapes."""
    finish_reason: str
    tokens: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    entries: tuple[TokenEntry, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """Return what makes a reply the same as another: its text, and why it ends."""
        return self.text, self.finish_reason


class ApiClient:
    """A client of one server, with its address and key. Every request has a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Check an address; without a path it stands for `/v1`. Raises UsageError."""
        parts = _split_url(url)
        self._is_secure = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port
        self._path = parts.path.rstrip("/") or "/v1"
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self._headers = {"Accept-Encoding": "identity", "Connection": "close"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise UsageError("--api-key holds characters that no header may have")
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self) -> list[str]:
        """Ask the server for the names of its models, and return them. Raises SpdError."""
        answer = self._request("GET", "/models")
        entries = value_at(answer, "data")
        if not isinstance(entries, list):
            raise self._wrong_answer("/models", "has no list `data`")
        return [name for entry in entries if isinstance(name := value_at(entry, "id"), str)]

    def chat(self, body: Mapping[str, object]) -> ApiReply:
        """Send a chat completion that is not streamed, wait, and return the reply. Raises
        SpdError.
        """
        answer = self._request("POST", "/chat/completions", {**body, "stream": False})
        choices = value_at(answer, "choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        message = value_at(choice, "message")
        if not isinstance(message, dict):
            raise self._wrong_answer("/chat/completions", "has no `choices` with a `message`")
        # Servers name the part of a reply that is thinking differently; some repeat it.
        parts = [_text_at(message, "reasoning_content") or _text_at(message, "reasoning")]
        parts.append(_text_at(message, "content"))
        details = "usage.completion_tokens_details"
        timings = value_at(answer, "timings")
        return ApiReply(
            text="".join(parts).encode("utf-8", "backslashreplace").decode(),
            finish_reason=_text_at(choice, "finish_reason"),
            tokens=_count_at(answer, "usage.completion_tokens"),
            drafted=_count_at(answer, f"{details}.draft_tokens", _count_at(timings, "draft_n")),
            accepted=_count_at(
                answer, f"{details}.accepted_draft_tokens", _count_at(timings, "draft_n_accepted")
            ),
            entries=_token_entries(value_at(choice, "logprobs.content")),
        )

    def read_draft_counts(self) -> Counter[str]:
        """Read how many drafts the server has counted so far, of all requests; empty if none.

        Counters stand beside the API, at `/metrics` of the same address.
        """
        counts = Counter[str]()
        with suppress(SpdError):  # few servers have them, and nothing depends on it
            status, _, data = self._exchange("GET", "/metrics", None, root="")
            for line in data.splitlines() if status == 200 else ():
                name = DRAFT_COUNTERS.get(line.partition(b"{")[0].partition(b" ")[0])
                with suppress(ValueError, OverflowError):
                    if name is not None:
                        counts[name] += max(0, int(float(line.rpartition(b" ")[2])))
        return counts

    def _request(
        self, method: str, path: str, body: Mapping[str, object] | None = None
    ) -> dict[str, object]:
        """Send a request and return the JSON object of its answer; repeat it while the server is
        busy.

        Raises SpdError.
        """
        for number in range(MAX_WAITS + 1):
            status, headers, data = self._exchange(method, path, body)
            if status not in BUSY_STATUSES or number == MAX_WAITS:
                break
            time.sleep(_wait_seconds(headers.get("Retry-After"), number))
        if not 200 <= status < 300:
            raise self._refusal(status, path, headers, data)
        try:
            answer = json.loads(data)
        except (ValueError, RecursionError):
            reason = [line] if (line := _one_line(data)) else []
            raise self._wrong_answer(path, "is no JSON", reason) from None
        if not isinstance(answer, dict):
            raise self._wrong_answer(path, "is no JSON object")
        return answer

    def _exchange(
        self, method: str, path: str, body: Mapping[str, object] | None, root: str | None = None
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send one request; return status, headers and body of its answer. Raises NetworkError.

        root: what the path is below; None: the API's, whose replies may take long.
        """
        seconds = REPLY_SECONDS if root is None else CONNECT_SECONDS
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        connection = self._connect()
        deadline = time.monotonic() + seconds
        # The timeout of a socket holds for each packet, so a server could send one byte at a time.
        timer = threading.Timer(seconds, connection.sock.shutdown, (socket.SHUT_RDWR,))
        timer.daemon = True
        timer.start()
        try:
            with closing(connection):
                data = None if body is None else json.dumps(body).encode()
                place = (self._path if root is None else root) + path
                connection.request(method, place, data, headers)
                response = connection.getresponse()
                answer = response.status, response.headers, self._read_body(response, path)
            if time.monotonic() >= deadline:  # a connection that is shut looks like an end
                raise TimeoutError
            return answer
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() >= deadline:
                reason = f"no whole reply within {seconds:g} s"
                fix = ["a smaller -n, or --concurrency 1"]
                raise self._network_error(path, reason, fix) from None
            fault = str(error) or type(error).__name__
            if isinstance(error, http.client.IncompleteRead):
                fault = "the reply ended before it was whole"
            raise self._network_error(path, fault, ["see the server's log"]) from None
        finally:
            timer.cancel()

    def _connect(self) -> http.client.HTTPConnection:
        """Open a connection to the server. Raises NetworkError."""
        connect = http.client.HTTPSConnection if self._is_secure else http.client.HTTPConnection
        connection = connect(self._host, self._port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(None)
        except ssl.SSLError as error:
            reason = [f"TLS failed: {error.reason or error}"]
            fix = ["a server with a certificate that this machine trusts, or http://"]
            raise NetworkError(f"cannot connect to {self.url}", reason=reason, fix=fix) from None
        except (OSError, UnicodeError) as error:
            reason = [str(error) or "no answer"]
            fix = ["start the server, or correct the address"]
            raise NetworkError(f"cannot connect to {self.url}", reason=reason, fix=fix) from None
        return connection

    def _read_body(self, response: http.client.HTTPResponse, path: str) -> bytes:
        """Read the body of an answer.

        Raises NetworkError for one above `MAX_REPLY_BYTES`, IncompleteRead for one that breaks off.
        """
        body = bytearray()
        while chunk := response.read1(CHUNK_BYTES):
            body += chunk
            if len(body) > MAX_REPLY_BYTES:
                raise self._network_error(
                    path, f"the reply is larger than {MAX_REPLY_BYTES >> 20} MiB"
                )
        if response.length:  # `read1` does not say that bytes are missing
            raise http.client.IncompleteRead(bytes(body), response.length)
        return bytes(body)

    def _network_error(self, path: str, reason: str, fix: Sequence[str] = ()) -> NetworkError:
        """Return the NetworkError for a path of this server."""
        return NetworkError(
            f"{self.url}{path}: {reason}", fix=fix or ["is this a server of OpenAI's API?"]
        )

    def _wrong_answer(self, path: str, fault: str, reason: Sequence[str] = ()) -> SpdError:
        """Return the error for an answer that is not the API's."""
        message = f"{self.url}{path}: the answer {fault}"
        fix = ["give the address of an OpenAI-compatible server: http://HOST:PORT/v1"]
        return IncompatibleError(message, reason=reason, fix=fix)

    def _refusal(
        self, status: int, path: str, headers: http.client.HTTPMessage, data: bytes
    ) -> SpdError:
        """Return the error for a status that is no success."""
        place = f"{self.url}{path}"
        if 300 <= status < 400:
            target = headers.get("Location", "nowhere")[:MESSAGE_LENGTH]
            message = f"{place} redirects to {target}, which is not followed"
            return NetworkError(message, fix=["give the address that answers itself"])
        reason = [message] if (message := _server_message(data)) else []
        if status in (401, 403):
            fix = ["--api-key KEY, or SPD_API_KEY"]
            return NetworkError(f"{place} wants another key ({status})", reason=reason, fix=fix)
        if status == 404:
            fix = ["correct the path (http://HOST:PORT/v1) or --model"]
            return NotFoundError(f"{place} is not there (404)", reason=reason, fix=fix)
        if status in BUSY_STATUSES:
            message = f"{place} stayed busy ({status}), asked {MAX_WAITS + 1} times"
            return NetworkError(message, reason=reason, fix=["--concurrency 1, or try later"])
        if status < 500:
            message = f"{place} refuses the request ({status})"
            fix = ["correct --model, --toggle, -n or --temperature"]
            return IncompatibleError(message, reason=reason, fix=fix)
        message = f"{place} failed ({status})"
        return NetworkError(message, reason=reason, fix=["see the server's log"])


def value_at(value: object, path: str) -> object:
    """Return what stands at a dotted path of nested objects; None where there is nothing."""
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _text_at(value: object, path: str) -> str:
    """Return the text at a path, empty where there is none."""
    text = value_at(value, path)
    return text if isinstance(text, str) else ""


def _count_at(value: object, path: str, default: int | None = None) -> int | None:
    """Return the count at a path, or the default."""
    count = value_at(value, path)
    return count if isinstance(count, int) and 0 <= count < 2**31 else default


def _token_entries(value: object) -> tuple[TokenEntry, ...]:
    """Return tokens with their log-probabilities; none if one of them is not as the API has it."""
    entries = []
    for item in value if isinstance(value, list) else ():
        data, logprob = _token_of(item)
        top_items = value_at(item, "top_logprobs")
        top = dict(map(_token_of, top_items)) if isinstance(top_items, list) else {}
        if not data or logprob is None:
            return ()
        top_logprobs = {token: number for token, number in top.items() if number is not None}
        entries.append(TokenEntry(data, logprob, top_logprobs))
    return tuple(entries)


def _token_of(item: object) -> tuple[bytes, float | None]:
    """Return the bytes of a token and its log-probability."""
    data = value_at(item, "bytes")
    logprob = value_at(item, "logprob")
    token = _text_at(item, "token").encode("utf-8", "backslashreplace")
    if isinstance(data, list) and all(isinstance(byte, int) and 0 <= byte < 256 for byte in data):
        token = bytes(data) or token
    return token, float(logprob) if isinstance(logprob, int | float) else None


def _split_url(url: str) -> SplitResult:
    """Return the parts of a server's address. Raises UsageError."""
    fix = ["http://HOST:PORT/v1"]
    try:
        parts = urlsplit(url)
        is_valid = bool(parts.hostname) and parts.port != 0
    except ValueError as error:
        raise UsageError(f"{url} is no address", reason=[str(error)], fix=fix) from None
    if not is_valid or not (url.isascii() and url.isprintable()) or " " in url:
        raise UsageError(f"{url} is no address of a server", fix=fix)
    if parts.query or parts.fragment or "@" in parts.netloc:
        reason = ["an address has no user, query or fragment; a key is --api-key"]
        raise UsageError(f"{url} is no address of a server", reason=reason, fix=fix)
    return parts


def _wait_seconds(retry_after: str | None, number: int) -> float:
    """Return the seconds to wait for a busy server the `number`-th time."""
    try:
        seconds = float(retry_after or 2**number)
    except ValueError:  # a date
        seconds = float(2**number)
    return min(max(0.1, seconds), MAX_WAIT_SECONDS)  # in this order also for NaN


def _server_message(data: bytes) -> str:
    """Return the first line of what a server says about an error."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        return _one_line(data)
    message = (
        _text_at(answer, "error.message")
        or _text_at(answer, "error")
        or _text_at(answer, "message")
    )
    return _one_line((message or _text_at(answer, "detail")).encode("utf-8", "backslashreplace"))


def _one_line(data: bytes) -> str:
    """Return the beginning of a text on one line."""
    return " ".join(data[: 8 * MESSAGE_LENGTH].decode("utf-8", "replace").split())[:MESSAGE_LENGTH]
