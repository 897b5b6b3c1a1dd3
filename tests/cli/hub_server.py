"""A small Hugging Face hub on loopback: one repository, ranges, and faults on request."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

COMMIT = "a" * 40
NAME = "org/Tiny"


@dataclass
class Hub:
    """The files and faults of the server; `log` holds each request as (method, path, range)."""

    files: dict[str, bytes]
    extra: list[str] = field(default_factory=list)  # names that are listed without being offered
    status: int = 200
    error_code: str | None = None
    sent: dict[str, bytes] = field(default_factory=dict)  # other bytes than those listed, by file
    headers: dict[str, str] = field(default_factory=dict)  # other headers of answers about files
    answer: bytes | None = None  # sent in place of the listing
    break_after: dict[str, list[int]] = field(
        default_factory=dict
    )  # bytes of the next answers for a file
    log: list[tuple[str, str, str | None]] = field(default_factory=list)
    url: str = ""

    def fetched_files(self) -> list[str]:
        """Return the names of the files whose bytes were requested."""
        return [
            path.rpartition("/")[2]
            for method, path, _ in self.log
            if method == "GET" and "resolve" in path
        ]

    def listing(self) -> dict[str, Any]:
        """Return the answer about the repository."""
        siblings: list[dict[str, Any]] = [{"rfilename": name} for name in self.extra]
        for name, data in self.files.items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": git_sha1(data)}
            if name.endswith((".safetensors", ".gguf")):
                digest = hashlib.sha256(data).hexdigest()
                entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 1}
            siblings.append(entry)
        return {"id": NAME, "modelId": NAME, "sha": COMMIT, "siblings": siblings, "tags": []}


def git_sha1(data: bytes) -> str:
    """Return the name of a blob in git."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()


class HubHandler(BaseHTTPRequestHandler):
    """Answers requests from the server's `hub`."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        """Write no log."""

    def do_GET(self) -> None:
        """Send headers, and for GET the body."""
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        path = self.path.partition("?")[0]
        has_body = self.command == "GET"
        hub.log.append((self.command, path, self.headers.get("Range")))
        if hub.status != 200:
            headers = {"X-Error-Code": hub.error_code} if hub.error_code else {}
            self._send(hub.status, b"no", headers, has_body)
        elif path.startswith(f"/api/models/{NAME}"):
            data = json.dumps(hub.listing()).encode() if hub.answer is None else hub.answer
            self._send(200, data, {"Content-Type": "application/json"}, has_body)
        elif (file := unquote(path).removeprefix(f"/{NAME}/resolve/{COMMIT}/")) in hub.files:
            self._send_file(hub, file, has_body)
        else:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound"}, has_body)

    do_HEAD = do_GET

    def _send_file(self, hub: Hub, name: str, has_body: bool) -> None:
        data = hub.sent.get(name, hub.files[name])
        etag = hashlib.sha256(hub.files[name]).hexdigest()
        headers = {
            "ETag": f'"{etag}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            **hub.headers,
        }
        range_header = self.headers.get("Range")
        start = int(range_header.removeprefix("bytes=").partition("-")[0]) if range_header else 0
        headers |= (
            {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if range_header else {}
        )
        self._send(
            206 if range_header else 200,
            data[start:],
            headers,
            has_body,
            hub.break_after.get(name, []),
        )

    def _send(
        self, status: int, data: bytes, headers: Any, has_body: bool, breaks: Any = ()
    ) -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if not has_body:
            return
        if breaks:
            self.wfile.write(data[: breaks.pop(0)])
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        else:
            self.wfile.write(data)


def serve(hub: Hub) -> ThreadingHTTPServer:
    """Start the server and return it; `shutdown` ends it."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), HubHandler)
    server.hub = hub  # type: ignore[attr-defined]
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
