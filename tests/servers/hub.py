"""The part of a Hugging Face hub that takes uploads: it keeps the files of every commit in memory."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Hub(ThreadingHTTPServer):
    """`files` has the bytes of the newest commit, `titles` the message of every commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.titles: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def commit(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.titles.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            else:
                raise ValueError(f"this hub knows no {line['key']}")


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path.startswith("/api/whoami"):
            self._answer({"name": "somebody", "type": "user", "orgs": []})
        else:
            self._answer({"id": "somebody/model", "sha": "0" * 40, "siblings": []})

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/api/repos/create":
            self._answer({"url": f"{self.server.url}/somebody/model", "id": "somebody/model"})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in json.loads(body)["files"]
            ]
            self._answer({"files": files})
        elif "/commit/" in self.path:
            self.server.commit([json.loads(line) for line in body.splitlines() if line])
            oid = f"{len(self.server.titles):040x}"
            where = f"{self.server.url}/somebody/model/commit/{oid}"
            self._answer({"commitUrl": where, "commitOid": oid, "pullRequestUrl": None})
        else:
            self._answer({"errors": [], "warnings": []})

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _answer(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
