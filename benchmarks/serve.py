"""Does `paceline serve` answer many clients at once without an error, and without its memory growing?

A service in a process of its own; clients are threads of this one, each with a connection of its own that it keeps, and
each sends one image at a time and waits for its answer. The service's memory is what it says of itself in /metrics,
after each tenth of the requests. Clients and service share the cores, so that the figures are a
lower bound of what the service alone could do.

    python benchmarks/serve.py --images FOLDER [--requests 10000] [--concurrency 32]
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from hardware import write_result

import paceline
from paceline.metrics.intervals import quantile
from paceline.parsing.files import SkippedItems
from paceline.prediction.sources import pictures_of

BOUNDARY = "paceline-benchmark"
SIZE = 32


def trained(scratch: Path) -> Path:
    """A small network after two steps."""
    data = {"dataset": "synthetic", "image_size": SIZE, "channels": 3, "augment": None}
    overrides = {
        "model": {"name": "small_resnet"},
        "data": data,
        "batch.global_size": 8,
        "train.duration": "2 steps",
        "evaluate.every": "off",
        "telemetry.report": False,
    }
    return paceline.train("digits", overrides=overrides, run_dir=scratch / "run", quiet=True).run_dir


def form(image: bytes) -> bytes:
    """One image as a multipart body."""
    head = f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="images"; filename="x.jpg"\r\n\r\n'
    return head.encode() + image + f"\r\n--{BOUNDARY}--\r\n".encode()


class Clients:
    """So many clients that share a number of requests."""

    def __init__(self, host: str, port: int, bodies: list[bytes]) -> None:
        self._address = (host, port)
        self._bodies = bodies
        self.seconds: list[float] = []
        self.errors: list[str] = []

    def run(self, requests: int, concurrency: int) -> float:
        """Send them all; how long it took."""
        turns = iter(range(requests))
        threads = [threading.Thread(target=self._client, args=(turns,)) for _ in range(concurrency)]
        begin = time.perf_counter()
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        return time.perf_counter() - begin

    def _client(self, turns: Iterator[int]) -> None:
        connection = http.client.HTTPConnection(*self._address, timeout=60)
        headers = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
        for number in turns:  # a range's iterator may be shared by threads
            begin = time.perf_counter()
            try:
                connection.request("POST", "/predict", self._bodies[number % len(self._bodies)], headers)
                response = connection.getresponse()
                told = json.loads(response.read())
                if response.status != 200 or not told["predictions"][0]["labels"]:
                    self.errors.append(f"{response.status}: {told}")
            except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
                self.errors.append(repr(error))
                connection.close()
            self.seconds.append(time.perf_counter() - begin)
        connection.close()


def metrics(host: str, port: int) -> dict[str, float]:
    """What the service says of itself."""
    connection = http.client.HTTPConnection(host, port, timeout=60)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    return {name: float(value) for name, value in re.findall(r"^([a-z_]+) (\S+)$", text, re.MULTILINE)}


def measure(url: str, bodies: list[bytes], requests: int, concurrency: int) -> dict[str, Any]:
    """Send the requests, and look at the memory after each tenth of them."""
    host, port = urlsplit(url).hostname or "", urlsplit(url).port or 0
    clients = Clients(host, port, bodies)
    took, told = 0.0, []
    for _ in range(10):
        took += clients.run(requests // 10, concurrency)
        told.append(metrics(host, port))
    return {
        "requests": len(clients.seconds),
        "concurrency": concurrency,
        "errors": len(clients.errors),
        "first_errors": clients.errors[:3],
        "requests_per_second": len(clients.seconds) / took,
        "median_seconds": statistics.median(clients.seconds),
        "p99_seconds": quantile(sorted(clients.seconds), 0.99),
        "images_per_batch": told[-1]["paceline_batch_images_sum"] / told[-1]["paceline_batch_images_count"],
        "resident_mebibytes": [each["process_resident_memory_bytes"] / 2**20 for each in told],
    }


def main() -> None:
    """Start a service, ask it, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder or archive of images")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=32)
    arguments = parser.parse_args()
    bodies = [form(each.read()) for each in islice(pictures_of([arguments.images], SkippedItems()), 500)]
    with tempfile.TemporaryDirectory() as folder:
        run = trained(Path(folder))
        command = [sys.executable, "-m", "paceline", "serve", str(run), "--port", "0", "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as service:
            assert service.stdout is not None
            url = json.loads(service.stdout.readline())["url"]
            result = measure(url, bodies, arguments.requests, arguments.concurrency)
            service.terminate()
            result["exit_code"] = service.wait(60)
    size = sum(map(len, bodies)) // len(bodies)
    resident = ", ".join(f"{each:.0f}" for each in result["resident_mebibytes"])
    half, most = (1000 * result[each] for each in ("median_seconds", "p99_seconds"))
    speed = f"{result['requests_per_second']:.0f} requests a second; half of them answered within {half:.0f} ms, 99 %"
    lines = [
        f"small_resnet at {SIZE} pixels; {len(bodies)} JPEG files of {size:,} bytes, one a request, on shared cores.",
        "",
        f"- {result['requests']:,} requests, {result['concurrency']} at once: {result['errors']} errors",
        f"- {speed} within {most:.0f} ms",
        f"- {result['images_per_batch']:.1f} images a batch",
        f"- memory of the service, in MiB, after each tenth of the requests: {resident}",
        f"- exit code after SIGTERM: {result['exit_code']}",
    ]
    print("\n".join(lines))
    print(write_result("serve", result, lines))


if __name__ == "__main__":
    main()
