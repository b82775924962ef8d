"""`paceline serve` as clients meet it: a real process, real HTTP, and everything that one should not send."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fork_server
import numpy as np
import pytest
import torch
from calls import SOURCES, Call
from PIL import Image
from run_directories import newest_weights, rewrite_weights
from serving import BOUNDARY, FORM, PATIENCE_SECONDS, Serving, form

for _library in ("fastapi", "prometheus_client", "uvicorn", "python_multipart"):
    pytest.importorskip(_library, reason=f"{_library} is not installed: pip install 'paceline[serve]'")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def head(length: int) -> bytes:
    """Of a request with a body of so many bytes."""
    lines = ("POST /predict HTTP/1.1", "Host: localhost", f"Content-Type: {FORM}", f"Content-Length: {length}", "", "")
    return "\r\n".join(lines).encode()


def picture(seed: int, file_format: str = "PNG", size: int = 8) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (size, size), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, file_format)
    return content.getvalue()


def bomb(width: int, height: int) -> bytes:
    """A PNG of so many white pixels, in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")

    head = width.to_bytes(4, "big") + height.to_bytes(4, "big") + bytes([8, 0, 0, 0, 0])
    packed = zlib.compress(bytes(1000), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """``start(target, …)`` starts a service; all are stopped in the end."""
    services: list[Serving] = []

    def begin(target: Path, *options: object) -> Serving:
        services.append(Serving(target, tmp_path_factory.mktemp("serve"), *options))
        return services[-1]

    yield begin
    for each in services:
        each.stop()


@pytest.fixture(scope="module")
def service(start: Call, finished: Path) -> Serving:
    limits = ("--max-request-mb", 0.1, "--max-images", 4, "--max-pixels", 30_000, "--max-seconds", 60)
    return start(finished, *limits, "--max-wait-ms", 20)


def test_it_answers_as_predict_does(service: Serving, finished: Path, tmp_path: Path, paceline_here: Call) -> None:
    images = [picture(seed) for seed in range(3)]
    for number, image in enumerate(images):
        (tmp_path / f"{number}.png").write_bytes(image)
    expected = paceline_here("predict", finished, "0.png", "1.png", "2.png", "--top-k", 10, "--json").document
    status, reported, headers = service.predict(*images, b"no image", query="?top_k=10")
    assert status == 200
    assert headers["x-content-type-options"] == "nosniff"
    assert [each["name"] for each in reported["predictions"]] == [f"{number}.png" for number in range(4)]
    for found, wanted in zip(reported["predictions"], expected, strict=False):
        assert found["labels"] == wanted["labels"]
        assert found["probabilities"] == pytest.approx(wanted["probabilities"], abs=1e-6)
    assert reported["predictions"][3]["labels"] == []
    assert "not an image" in reported["predictions"][3]["error"]
    summary = json.loads((finished / "summary.json").read_text())
    assert reported["weights_sha256"] == summary["ema_sha256"] == service.said["weights_sha256"]
    assert [len(each["labels"]) for each in service.predict(*images)[1]["predictions"]] == [3, 3, 3]


def test_what_watches_it(service: Serving) -> None:
    before = service.metric('paceline_images_total{outcome="answered"}')
    assert service.predict(picture(1), picture(2))[0] == 200
    assert service.metric('paceline_images_total{outcome="answered"}') == before + 2
    assert service.metric("paceline_queue_images") == 0
    status, health, _ = service.ask("GET", "/health")
    assert (status, health["live"], health["ready"]) == (200, True, True)
    text = service.ask("GET", "/metrics")[1].decode()
    line = re.compile(r'(# (HELP|TYPE) \w+ .+|\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? [0-9.e+-]+)')
    assert all(line.fullmatch(each) for each in text.splitlines())


def test_the_page_needs_nothing_from_elsewhere(service: Serving) -> None:
    status, page, headers = service.ask("GET", "/")
    assert status == 200
    assert "default-src 'none'" in headers["content-security-policy"]
    assert b"//" not in page.replace(b"http://www.w3.org/2000/svg", b"")


REFUSED = {
    "too long, and says so": (lambda: form(bytes(200_000)), {}, 413, "larger than 104,857 bytes"),
    "too many": (lambda: form(*[picture(0)] * 5), {}, 400, "at most 4 images"),
    "too many pixels": (lambda: form(bomb(301, 100)), {}, 422, "301x100 pixels; at most 30,000"),
    "a bomb": (lambda: form(bomb(2**31 - 1, 2**31 - 1)), {}, 422, "at most 30,000 pixels"),
    "beyond what Pillow opens": (lambda: form(bomb(100_000, 100_000)), {}, 422, "at most 30,000"),
    "a program": (lambda: form(picture(0, "EPS")), {}, 422, "not an image"),
    "tiles": (lambda: form(picture(0, "TIFF")), {}, 422, "a TIFF image, which is not accepted"),
    "cut off": (lambda: form(picture(0))[:-20], {}, 400, "last boundary"),
    "no form": (lambda: b"{}", {"Content_Type": "application/json"}, 415, "multipart/form-data"),
    "no boundary": (lambda: form(picture(0)), {"Content_Type": "multipart/form-data"}, 400, "boundary"),
    "no image": (form, {}, 422, "no image"),
    "an unknown field": (lambda: form(picture(0), field="image"), {}, 422, "'image' is unknown"),
    "long headers": (lambda: b"--of-a-kind\r\n" + b"x" * 50_000, {}, 400, "multipart"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(service: Serving, case: str) -> None:
    body, headers, expected, words = REFUSED[case]
    status, reported, _ = service.ask("POST", "/predict", body(), **{"Content_Type": FORM, **headers})
    assert (status, set(reported)) == (expected, {"error"})
    assert words in reported["error"]
    assert service.predict(picture(0))[0] == 200


def test_a_body_without_a_length_is_counted(service: Serving) -> None:
    """In chunks, and more of it than is held in memory."""

    def pieces() -> Iterator[bytes]:
        yield form(b"")[: -len(f"--{BOUNDARY}--\r\n") - 2]
        for _ in range(100):
            yield bytes(20_000)

    status, reported, _ = service.ask("POST", "/predict", pieces(), Content_Type=FORM)
    assert status == 413
    assert "104,857" in reported["error"]


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("POST", "/predict?top_k=0", 422),
        ("POST", "/predict?top_k=x", 422),
        ("GET", "/predict", 405),
        ("GET", "/x", 404),
        ("GET", "/predict/", 404),
        ("OPTIONS", "/predict", 405),
        ("GET", "http://localhost/health", 404),
    ],
)
def test_other_questions(service: Serving, method: str, path: str, expected: int) -> None:
    status, reported, _ = service.ask(method, path, form(picture(0)) if method == "POST" else None, Content_Type=FORM)
    assert (status, set(reported)) == (expected, {"error"})


OTHERS = {
    "a name made to point here": ({"Host": "evil.example:80"}, "does not accept the Host header evil.example"),
    "a page from elsewhere": ({"Origin": "https://evil.example"}, "a page of https://evil.example"),
    "a page of another port": ({"Origin": "http://127.0.0.1:1"}, "a page of http://127.0.0.1:1"),
    "a page without an address": ({"Origin": "null"}, "a page of null"),
    "no name at all": ({"Host": "[x"}, "does not accept the Host header [x"),
    "no address at all": ({"Origin": "http://[x"}, "a page of http://[x"),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", path) for path in ("/", "/metrics", "/openapi.json", "/docs", "/nowhere", "/health/")),
        *(("POST", "/predict"), ("POST", "/health"), ("OPTIONS", "/predict")),
    ],
)
def test_pages_of_others_are_not_answered(service: Serving, method: str, path: str, case: str) -> None:
    headers, words = OTHERS[case]
    body = form(picture(0)) if method == "POST" else None
    status, reported, _ = service.ask(method, path, body, Content_Type=FORM, X_Forwarded_Host="localhost", **headers)
    assert status == 403
    assert words in reported["error"]


def test_who_is_let_in(service: Serving) -> None:
    port = service.address[1]
    for headers in (
        {"Host": "LOCALHOST:1"},
        {"Host": f"[::1]:{port}", "Origin": f"http://[::1]:{port}"},
        {"Host": "127.0.0.1", "Origin": "http://127.0.0.1"},
    ):
        assert service.ask("POST", "/predict", form(picture(0)), Content_Type=FORM, **headers)[0] == 200, headers


def test_an_answer_that_overflows_is_a_failure(start: Call, finished: Path, tmp_path: Path) -> None:
    def huge(state: dict[str, Any]) -> dict[str, Any]:
        return {name: torch.full_like(each, 3e38) if each.is_floating_point() else each for name, each in state.items()}

    path = rewrite_weights(newest_weights(finished), tmp_path / "huge.safetensors", huge)
    service = start(path)  # which answers black pictures
    assert service.predict(bomb(8, 8))[0] == 200
    status, found, _ = service.predict(picture(0))
    assert status == 500
    assert "not a finite number" in found["error"]
    assert service.metric('paceline_requests_total{route="/predict",status="500"}') == 1


def test_a_very_long_picture_takes_no_more_memory(start: Call, finished: Path) -> None:
    service, content = start(finished), io.BytesIO()
    Image.new("L", (50_000_000, 1), 99).save(content, "PNG")

    def peak() -> int:
        """In MiB."""
        status = Path(f"/proc/{service.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) // 1024

    assert service.predict(picture(0))[0] == 200
    before = peak()
    assert service.predict(content.getvalue())[0] == 200
    assert peak() - before < 500  # of which the picture is 48, and its copies


def test_the_log_names_no_contents(service: Serving) -> None:
    service.ask("GET", "/secret-path?secret-query")
    service.predict(b"secret-content")
    assert service.ask("POST", "/predict", b"", Content_Type=FORM.replace("of-a-kind", "secret-boundary"))[0] == 400
    log = service.log.read_text()
    assert re.search(r"^\S+Z POST /predict 422 \S+ .* ms [\d,]+ bytes$", log, re.MULTILINE)
    assert "GET other 404" in log
    assert "secret" not in log


def answer_of(connection: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def test_a_slow_upload_is_refused_and_broken_http_harms_nobody(start: Call, finished: Path) -> None:
    service = start(finished, "--max-seconds", 1)
    with service.connect() as slow, service.connect() as broken, service.connect() as answered:
        answered.sendall(b"POST /nothing HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n")
        assert answered.recv(12) == b"HTTP/1.1 404"
        answered.sendall(b"no size of a chunk\r\n")
        answer_of(answered)
        slow.sendall(head(5000).replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + form(picture(0))[:50])
        broken.sendall(b"no http at all\r\n\r\n")
        assert answer_of(broken).startswith(b"HTTP/1.1 400")
        answer = answer_of(slow)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'{"error":"the request was not complete within 1 seconds"}' in answer
    assert "Traceback" not in service.log.read_text()
    # Within that second, which a busy machine may take for itself now and then.
    assert any(service.predict(picture(0))[0] == 200 for _ in range(10))


def test_a_full_queue_says_when_to_come_back(start: Call, finished: Path) -> None:
    service = start(finished, "--max-queue", 1)
    status, reported, headers = service.predict(picture(0), picture(1))
    assert (status, headers["retry-after"]) == (503, "1")
    assert "try again" in reported["error"]
    assert service.predict(picture(0))[0] == 200


def takes_connections(service: Serving) -> bool:
    try:
        service.connect().close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_finishes_what_it_took(start: Call, finished: Path, number: int) -> None:
    """A request whose body is not whole yet when the signal comes is answered; new ones find nobody."""
    service = start(finished)
    body = form(picture(0))
    with service.connect() as started:
        started.sendall(head(len(body)) + body[:50])
        assert service.predict(picture(1))[0] == 200  # so that the first one has been taken
        service.process.send_signal(number)
        while takes_connections(service):
            time.sleep(0.05)
        started.sendall(body[50:])
        answer = answer_of(started)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b'"labels"' in answer
    assert service.stop() == 0
    assert "Traceback" not in service.log.read_text()


def test_a_stop_while_it_loads_is_heard(finished: Path, tmp_path: Path) -> None:
    """Also by the first process of a container, for which a signal without a handler does nothing."""
    command = [sys.executable, "-m", "paceline", "serve", str(finished), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        status, mask = Path(f"/proc/{process.pid}/status"), 1 << (signal.SIGTERM - 1)
        while not int(re.findall(r"SigCgt:\s(\w+)", status.read_text())[0], 16) & mask:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        said = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, *said) == (128 + signal.SIGTERM, "", "")


def test_it_stops_in_time_whatever_its_clients_do(start: Call, finished: Path) -> None:
    """One reads no answer, one sends half a head, one half a body, and one nothing."""
    service = start(finished)
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with service.connect() as deaf, service.connect() as slow, service.connect() as half, service.connect():
        slow.sendall(ask[:20])
        half.sendall(head(1000) + b"--")
        deaf.setblocking(False)
        for _ in range(3):
            with contextlib.suppress(BlockingIOError):  # when neither side takes more
                while deaf.send(ask * 100):
                    pass
            service.metric("process_open_fds")
        begin = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - begin < 10
    assert "Traceback" not in service.log.read_text()


def test_a_second_signal_ends_it_at_once(start: Call, finished: Path) -> None:
    service = start(finished)
    with service.connect() as half:
        half.sendall(head(1000) + b"--")
        assert service.predict(picture(1))[0] == 200
        service.process.send_signal(signal.SIGTERM)
        while takes_connections(service):
            time.sleep(0.05)
        begin = time.monotonic()
        assert service.stop() == 0
        assert time.monotonic() - begin < 3


@pytest.mark.thorough
def test_connections_that_send_nothing_or_do_not_read_are_closed(start: Call, finished: Path) -> None:
    service = start(finished)
    ask = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(service.connect()) for _ in range(600)]
        silent[1].sendall(ask[:20])
        silent[2].setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):  # full, or already closed
            while silent[2].send(ask * 100):
                pass
        assert answer_of(silent[0]) == b""
        assert answer_of(silent[1]) == b""
        while service.metric("process_open_fds") > 100:  # of a service that is free again
            time.sleep(0.1)


def test_five_hundred_requests_at_once_and_no_memory(service: Serving) -> None:
    """At concurrency 32; images of several requests are answered together. Each is 30 kB, so that none can stay."""
    images = [picture(seed, "BMP", 170) for seed in range(8)]

    def labels(image: bytes) -> list[str]:
        status, reported, _ = service.predict(image)
        assert status == 200, reported
        return reported["predictions"][0]["labels"]

    wanted = [labels(image) for image in images]

    def client(number: int) -> list[bool]:
        return [labels(images[number % 8]) == wanted[number % 8] for _ in range(16)]

    with ThreadPoolExecutor(32) as pool:
        assert all(all(each) for each in pool.map(client, range(32)))
        settled = service.metric("process_resident_memory_bytes")
        batches, answered = (service.metric(f"paceline_batch_images_{name}") for name in ("count", "sum"))
        assert all(all(each) for each in pool.map(client, range(32)))
        grown = service.metric("process_resident_memory_bytes") - settled
        batches = service.metric("paceline_batch_images_count") - batches
        answered = service.metric("paceline_batch_images_sum") - answered
    assert answered == 512
    assert batches < 512
    assert grown < 12 * 2**20, f"{grown / 2**20:.1f} MiB after 512 requests more"


@pytest.mark.timeout(900)
def test_schemathesis_finds_nothing(service: Serving, tmp_path: Path) -> None:
    """Everything that the service's own description allows, and much that it does not: no 5xx, nothing undescribed."""
    pytest.importorskip("schemathesis", reason="needs schemathesis")
    checks = (
        "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
        "response_schema_conformance", "unsupported_method", "allow_header_conformance",
    )  # fmt: skip
    done = subprocess.run(
        [
            *(sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()", "run"),
            *(f"{service.said['url']}/openapi.json", "--checks", ",".join(checks), "--max-examples", "150"),
            *("--seed", "1", "--request-timeout", "60", "--suppress-health-check", "all", "--continue-on-failure"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    generated = re.search(r"(\d+) generated", done.stdout)
    assert generated is not None, done.stdout
    assert int(generated[1]) >= 200
    assert service.predict(picture(0))[0] == 200


def test_places_that_cannot_be_had(paceline_here: Call, finished: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        done = paceline_here("serve", finished, "--port", used.getsockname()[1])
    assert (done.code, done.out) == (2, "")
    assert "cannot listen" in done.err
    assert paceline_here("serve", finished, "--host", "nowhere.invalid").code == 2


def test_addresses_beyond_this_machine_are_known() -> None:
    from paceline_ops.serving.server import bind

    for host, is_loopback in {"127.0.0.1": True, "localhost": True, "0.0.0.0": False}.items():
        address = bind(host, 0)  # bound, and never listened at
        with address.socket:
            assert address.is_loopback is is_loopback


@pytest.mark.parametrize(
    ("host", "allowed", "name", "is_let_in"),
    [
        ("127.0.0.1", (), "shop.example", False),
        ("127.0.0.1", ("Shop.example",), "shop.example", True),
        ("0.0.0.0", (), "shop.example", True),
        ("0.0.0.0", ("shop.example",), "other.example", False),
    ],
)
def test_names_it_may_be_asked_as(host: str, allowed: tuple[str, ...], name: str, is_let_in: bool) -> None:
    from starlette.datastructures import Headers

    from paceline_ops.serving.server import bind

    address = bind(host, 0, allowed)
    address.socket.close()
    assert (name in address.sites.problem(Headers({"host": name}))) != is_let_in


def test_without_the_extra(finished: Path, tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['fastapi'] = None; from paceline.cli.main import run; sys.exit(run(sys.argv[1:]))"
    )
    done = fork_server.run(
        [sys.executable, "-c", program, "serve", str(finished)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'paceline[serve]'" in done.stderr
