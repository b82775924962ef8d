"""A stand-in for the Hugging Face hub on loopback: the few calls that downloads and uploads use."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree|preupload|commit)/([^/?]+))?.*")
_FILE = re.compile(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class HubServer:
    """Repositories by kind and name, such as ``models/me/net``; each holds files, one commit at a time.

    Attributes:
        files: Content of each file, by repository.
        requests: Method and path of each request.
        tokens: Tokens that came with uploads.
        private: Whether each created repository is private.
        gated: Repositories whose files are refused.
        fault: Answers a request in place of this server, unless it returns False.
    """

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.requests: list[str] = []
        self.tokens: set[str | None] = set()
        self.private: dict[str, bool] = {}
        self.gated: set[str] = set()
        self.fault: Callable[[BaseHTTPRequestHandler], bool] = lambda _: False
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"  # no connection outlives its answer

            def _answer(self) -> None:
                hub.answer(self)

            do_GET = do_HEAD = do_POST = _answer  # noqa: N815  # the names that the server looks for

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def commit(self, repository: str) -> str:
        """The hash of the files there are now."""
        digest = hashlib.sha1()
        for name, content in sorted(self.files[repository].items()):
            digest.update(name.encode() + content)
        return digest.hexdigest()

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = unquote(urlsplit(request.path).path)
        body = request.rfile.read(int(request.headers.get("Content-Length") or 0))
        self.requests.append(f"{request.command} {path}")
        if self.fault(request):
            return None
        if request.command == "POST":
            self.tokens.add(request.headers.get("Authorization"))
            return self._post(request, path, body)
        if found := _FILE.fullmatch(path):
            return self._file(request, f"{'datasets' if found[1] else 'models'}/{found[2]}", found[4])
        match = _API.fullmatch(path)
        repository = f"{match[1]}/{match[2]}" if match else ""
        if match is None or repository not in self.files:
            return self._missing(request, "RepoNotFound")
        if match[4] not in (None, "main", self.commit(repository)):
            return self._missing(request, "RevisionNotFound")
        if match[3] == "tree":
            return self._json(request, [_entry(*each) for each in self.files[repository].items()])
        return self._json(request, {"id": match[2], "sha": self.commit(repository), "siblings": [], "private": False})

    def _post(self, request: BaseHTTPRequestHandler, path: str, body: bytes) -> None:
        if path == "/api/validate-yaml":
            return self._json(request, {"errors": [], "warnings": []})
        if path == "/api/repos/create":
            match = json.loads(body)
            name = f"{match['organization']}/{match['name']}"
            self.private[name] = match.get("private", match.get("visibility") == "private")
            self.files.setdefault(f"models/{name}", {})
            return self._json(request, {"url": f"{self.endpoint}/{name}", "name": name})
        found = _API.fullmatch(path)
        assert found is not None, path
        if found[3] == "preupload":
            expected = [each["path"] for each in json.loads(body)["files"]]
            files = [{"path": each, "uploadMode": "regular", "shouldIgnore": False} for each in expected]
            return self._json(request, {"files": files})
        assert found[3] == "commit", path
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "file":
                self.files[f"{found[1]}/{found[2]}"][line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        oid = self.commit(f"{found[1]}/{found[2]}")
        return self._json(request, {"commitUrl": f"{self.endpoint}/{found[2]}/commit/{oid}", "commitOid": oid})

    def _file(self, request: BaseHTTPRequestHandler, repository: str, name: str) -> None:
        content = self.files.get(repository, {}).get(name)
        if repository in self.gated:
            return self._missing(request, "GatedRepo", 403)
        if content is None:
            return self._missing(request, "EntryNotFound")
        more = {"X-Repo-Commit": self.commit(repository), "ETag": f'"{hashlib.sha1(content).hexdigest()}"'}
        return self._send(request, 200, content, more)

    def _json(self, request: BaseHTTPRequestHandler, value: Any) -> None:
        self._send(request, 200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _missing(self, request: BaseHTTPRequestHandler, code: str, status: int = 404) -> None:
        self._send(request, status, b"{}", {"X-Error-Code": code, "Content-Type": "application/json"})

    def _send(self, request: BaseHTTPRequestHandler, status: int, content: bytes, more: dict[str, str]) -> None:
        request.send_response(status)
        for name, value in {**more, "Content-Length": str(len(content))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command != "HEAD":
            request.wfile.write(content)


def _entry(name: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
