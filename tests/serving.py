"""A service of `paceline serve` in a separate process."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fork_server
from calls import SOURCES

BOUNDARY = "of-a-kind"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
PATIENCE_SECONDS = 120


class Serving:
    """A service in a separate process."""

    def __init__(self, target: Path, folder: Path, *options: object, command: str = "serve") -> None:
        self.log = folder / f"{command}.err"
        with self.log.open("wb") as log:
            self.process = fork_server.Popen(
                [sys.executable, "-m", "paceline", command, str(target), "--port", "0", "--json", *map(str, options)],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONPATH": str(SOURCES), "OMP_NUM_THREADS": "1"},
            )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()
        self.said = json.loads(line)
        self.address = (urlsplit(self.said["url"]).hostname, urlsplit(self.said["url"]).port)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """The status, the answer, and its headers."""
        connection = http.client.HTTPConnection(*self.address, timeout=PATIENCE_SECONDS)
        with contextlib.closing(connection):
            connection.request(method, path, body, {key.replace("_", "-"): value for key, value in headers.items()})
            response = connection.getresponse()
            content = response.read()
            kind = response.headers.get_content_type()
            return (
                response.status,
                json.loads(content) if kind == "application/json" else content,
                dict(response.headers),
            )

    def predict(self, *images: bytes, query: str = "") -> tuple[int, Any, dict[str, str]]:
        return self.ask("POST", f"/predict{query}", form(*images), Content_Type=FORM)

    def metric(self, name: str) -> float:
        """One figure of /metrics."""
        text = self.ask("GET", "/metrics")[1].decode()
        found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def connect(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=PATIENCE_SECONDS)

    def stop(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(PATIENCE_SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code


def form(*images: bytes, field: str = "images") -> bytes:
    """Images as a multipart body."""
    parts = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="{field}"; filename="{number}.png"\r\n'
        "Content-Type: image/png\r\n\r\n".encode()
        + image
        + b"\r\n"
        for number, image in enumerate(images)
    )
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()
