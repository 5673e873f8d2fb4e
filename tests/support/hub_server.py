"""A small hub: the requests that huggingface_hub and Quire send, over models in memory, with faults on demand.

Large files are answered with a redirect to `/cdn/`, as a real hub does; small ones directly.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".gguf", "tokenizer.json")


@dataclass
class Hub:
    """The models of a hub, the requests that it got, and its faults."""

    url: str
    models: dict[str, dict[str, bytes]] = field(default_factory=dict)  # name -> file -> content
    commits: dict[str, str] = field(default_factory=dict)  # name -> commit, if it is not COMMIT
    requests: list[str] = field(default_factory=list)  # method, path, and range
    refusals: dict[str, list[tuple[int, dict[str, str]]]] = field(default_factory=dict)  # end of path -> next answers
    cut_after: list[int] = field(default_factory=list)  # bytes of the next answers about large files
    digests: dict[str, str] = field(default_factory=dict)  # file -> stated digest, if it is wrong
    answer: bytes | None = None  # answer about every model, if it is not its listing
    ranges: bool = True
    token: str | None = None  # needed for everything

    def downloads(self) -> list[str]:
        """Return the requests for bytes of files from the hub's store of large files."""
        return [request for request in self.requests if " /cdn/" in request]

    def listing(self, model: str) -> dict[str, Any]:
        """Return the answer about a model."""
        siblings = []
        for name, content in self.models[model].items():
            entry: dict[str, Any] = {"rfilename": name, "size": len(content), "blobId": git_id(content)}
            if name.endswith(LARGE):
                sha256 = self.digests.get(name, hashlib.sha256(content).hexdigest())
                entry["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
            siblings.append(entry)
        return {"id": model, "modelId": model, "sha": self.commits.get(model, COMMIT), "siblings": siblings}


def git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def running_hub(models: Mapping[str, dict[str, bytes]]) -> Iterator[Hub]:
    """Serve `models` on a free port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_port}", dict(models))
    server.hub = hub  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Stay quiet."""

    def do_GET(self) -> None:
        hub: Hub = self.server.hub  # type: ignore[attr-defined]
        hub.requests.append(" ".join(filter(None, ("GET", self.path, self.headers.get("Range", "")))))
        for end, answers in hub.refusals.items():
            if self.path.partition("?")[0].endswith(end) and answers:
                status, headers = answers.pop(0)
                self._answer(status, b"{}", headers)
                return
        if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}" and "/cdn/" not in self.path:
            self._answer(401, b"{}", {})
            return
        if found := re.fullmatch(r"/api/models/([^/]+/[^/?]+)(\?.*)?", self.path):
            self._list(hub, found[1])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", self.path):
            self._resolve(hub, found[1], found[3])
        elif found := re.fullmatch(r"/cdn/([^/]+/[^/]+)/(.+)", self.path):
            assert "Authorization" not in self.headers or hub.token, "a token goes to the hub only"
            self._content(hub, hub.models[found[1]][found[2]], hub.cut_after)
        else:
            self._answer(404, b"{}", {})

    def _list(self, hub: Hub, model: str) -> None:
        if hub.answer is not None:
            self._answer(200, hub.answer, {"Content-Type": "application/json"})
        elif model in hub.models:
            self._answer(200, json.dumps(hub.listing(model)).encode(), {"Content-Type": "application/json"})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _resolve(self, hub: Hub, model: str, name: str) -> None:
        if name not in hub.models.get(model, {}):
            self._answer(404, b"", {"X-Error-Code": "EntryNotFound"})
        elif name.endswith(LARGE):
            self._answer(302, b"", {"Location": f"/cdn/{model}/{name}"})
        else:
            self._content(hub, hub.models[model][name], [])

    def _content(self, hub: Hub, content: bytes, cuts: list[int]) -> None:
        status, headers = 200, {}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and hub.ranges:
            begin, end = int(asked[1]), int(asked[2] or len(content) - 1) + 1
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(content)}"
            status, content = 206, content[begin:end]
        self._answer(status, content, headers, cuts.pop(0) if cuts else None)

    def _answer(self, status: int, body: bytes, headers: Mapping[str, str], cut: int | None = None) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if cut is None else body[:cut])
        if cut is not None and cut < len(body):
            self.wfile.flush()
            self.close_connection = True
