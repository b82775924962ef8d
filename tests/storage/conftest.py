"""A real S3 server on loopback, and a proxy before it that lets requests fail."""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SECRET = "planted-secret-Zm9vYmFyYmF6"  # what nothing may ever say
KEY_ID = "PLANTEDKEYID0815"
BUCKET = "bucket"

_SERVE = """
import sys, threading
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the tests are over
"""


class Proxy:
    """Passes requests on to the server, and lets a share of them fail: refused, dropped, answered with half a body.

    Attributes:
        share: Of the requests that fail, 0 to 1.
        log: Method and path of what was passed on.
        failed: How many were let fail.
    """

    def __init__(self, port: int) -> None:
        self.behind, self.share, self.log, self.failed = port, 0.0, list[tuple[str, str]](), 0
        self.draws, self.lock = random.Random(7), threading.Lock()
        self.only = ""  # lets those fail in whose method and path this pattern is found, and no others
        self.fates = ("refused", "dropped", "unanswered", "halved")
        self.is_over = threading.Event()  # ends what is "silent": accepted, and never answered
        self.port = 0
        self.up()

    def up(self) -> None:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do(self) -> None:
                proxy.handle(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do  # noqa: N815  # the names that http.server calls

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """Clients that are killed hang up; what matters is what they left."""

        self.server = Server(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    def down(self) -> None:
        """Refuse connections, as a server does that is being started again."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def _fate(self, request: str) -> str:
        with self.lock:
            if not re.search(self.only, request) or self.draws.random() >= self.share:
                return "well"
            self.failed += 1
            return self.draws.choice(self.fates)

    def handle(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length", 0)))
        fate = self._fate(f"{handler.command} {handler.path}")
        # Its handler's thread ends with the connection.
        handler.close_connection = fate != "well"
        if fate == "silent":
            self.is_over.wait(120)
        if fate in ("dropped", "silent"):
            return
        if fate == "refused":
            handler.send_response(503)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        status, headers, content = self._passed_on(handler, body)
        if fate == "unanswered":
            return
        handler.send_response_only(status)
        for name, value in headers:
            handler.send_header(name, value)
        handler.end_headers()
        with contextlib.suppress(OSError):
            handler.wfile.write(content[: len(content) // 2] if fate == "halved" else content)

    def _passed_on(self, handler: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=30)
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                if name.lower() not in ("connection", "expect"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            with self.lock:
                self.log.append((handler.command, handler.path))
            answer = connection.getresponse()
            content = answer.read()
            headers = [(k, v) for k, v in answer.getheaders() if k.lower() not in ("connection", "transfer-encoding")]
            if not any(name.lower() == "content-length" for name, _ in headers):
                headers.append(("Content-Length", str(len(content))))
            return answer.status, headers, content
        finally:
            connection.close()

    def wait_for(self, part: str, *, seconds: float = 60) -> None:
        """Wait until a request whose method and path hold this was passed on."""
        deadline = time.monotonic() + seconds
        while not any(part in f"{method} {path}" for method, path in list(self.log)):
            assert time.monotonic() < deadline, f"no request with {part!r} came: {self.log[-5:]}"
            time.sleep(0.02)


@pytest.fixture(scope="session")
def moto_port() -> Iterator[int]:
    pytest.importorskip("moto.server", reason="needs moto")
    pytest.importorskip("s3fs", reason="needs s3fs")
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        connection.request("PUT", f"/{BUCKET}")
        assert connection.getresponse().status == 200
        connection.close()
        yield port
        server.kill()


@pytest.fixture
def proxy(moto_port: int) -> Iterator[Proxy]:
    found = Proxy(moto_port)
    yield found
    found.is_over.set()
    found.down()


@pytest.fixture
def s3(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Proxy:
    """The proxy, with the credentials and the endpoint in this process's environment."""
    for name, value in environment_for(proxy, tmp_path).items():
        monkeypatch.setenv(name, value)
    return proxy


@pytest.fixture
def variables(proxy: Proxy, tmp_path: Path) -> dict[str, str]:
    """What a process of its own needs in its environment."""
    return environment_for(proxy, tmp_path)


def environment_for(proxy: Proxy, folder: Path) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": proxy.endpoint,
        "AWS_EC2_METADATA_DISABLED": "true",
        "PACELINE_CACHE": str(folder / "cache"),
    }


@pytest.fixture
def secret() -> str:
    return SECRET


@pytest.fixture
def put(moto_port: int) -> Any:
    """Put an object into the bucket, past the proxy."""

    def send(name: str, content: bytes) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", moto_port, timeout=30)
        # Signed by anybody: the server asks for a signature, and does not check it.
        credential = "Credential=x/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
        headers = {"Authorization": f"AWS4-HMAC-SHA256 {credential}", "x-amz-acl": "public-read"}
        connection.request("PUT", f"/{BUCKET}/{name}", body=content, headers=headers)
        assert connection.getresponse().status == 200
        connection.close()

    return send
