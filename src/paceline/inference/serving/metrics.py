"""What does the service tell Prometheus? A few counts in its text format, kept here: that needs no library."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_IMAGES = (1, 2, 4, 8, 16, 32, 64)
_STATM = Path("/proc/self/statm")


class _Histogram:
    """How many values lie below each of some bounds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """Count a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str) -> Iterator[str]:
        """In Prometheus' words: how many are at most each bound."""
        below = 0
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            below += count
            yield f'{name}_bucket{{le="{bound}"}} {below}'
        yield f"{name}_sum {self._sum}"
        yield f"{name}_count {below}"


class Metrics:
    """Counts since the service began.

    Args:
        model: What is served.
        digest: SHA-256 of its weights.
    """

    def __init__(self, model: str, digest: str) -> None:
        self.queue_images = 0
        self._info = {"model": model, "weights_sha256": digest}
        self._begin = time.monotonic()
        self._requests: Counter[tuple[str, int]] = Counter()
        self._refusals: Counter[str] = Counter()
        self._images: Counter[str] = Counter({"answered": 0, "unreadable": 0})
        self._seconds = _Histogram(_SECONDS)
        self._batches = _Histogram(_IMAGES)

    def request(self, route: str, status: int, seconds: float) -> None:
        """Count a request that has been answered."""
        self._requests[route, status] += 1
        if route == "/predict":
            self._seconds.add(seconds)

    def refusal(self, reason: str) -> None:
        """Count a request that was refused."""
        self._refusals[reason] += 1

    def images(self, *, answered: int, unreadable: int) -> None:
        """Count images."""
        self._images["answered"] += answered
        self._images["unreadable"] += unreadable

    def batch(self, images: int) -> None:
        """Count a batch."""
        self._batches.add(images)

    def text(self) -> str:
        """Everything, as Prometheus reads it."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield from _head("paceline_model_info", "gauge", "The model that is served.")
        yield f"paceline_model_info{_labels(self._info)} 1"
        yield from _head("paceline_uptime_seconds", "gauge", "Seconds since the service began.")
        yield f"paceline_uptime_seconds {time.monotonic() - self._begin:.3f}"
        yield from _head("paceline_requests_total", "counter", "Requests by route and status.")
        for (route, status), count in sorted(self._requests.items()):
            yield f"paceline_requests_total{_labels({'route': route, 'status': str(status)})} {count}"
        yield from _head("paceline_refusals_total", "counter", "Requests that were refused, by reason.")
        for reason, count in sorted(self._refusals.items()):
            yield f"paceline_refusals_total{_labels({'reason': reason})} {count}"
        yield from _head("paceline_images_total", "counter", "Images by outcome.")
        for outcome, count in sorted(self._images.items()):
            yield f"paceline_images_total{_labels({'outcome': outcome})} {count}"
        yield from _head("paceline_queue_images", "gauge", "Images that are decoded, or wait for the network.")
        yield f"paceline_queue_images {self.queue_images}"
        yield from _head("paceline_request_seconds", "histogram", "Seconds from a request's head to its answer.")
        yield from self._seconds.lines("paceline_request_seconds")
        yield from _head("paceline_batch_images", "histogram", "Images in each batch.")
        yield from self._batches.lines("paceline_batch_images")
        if (resident := resident_bytes()) is not None:
            yield from _head("process_resident_memory_bytes", "gauge", "Main memory of the process.")
            yield f"process_resident_memory_bytes {resident}"


def resident_bytes() -> int | None:
    """Main memory that this process holds; None if the system does not tell."""
    try:
        return int(_STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def _head(name: str, kind: str, what: str) -> tuple[str, str]:
    return f"# HELP {name} {what}", f"# TYPE {name} {kind}"


def _labels(labels: Mapping[str, str]) -> str:
    quoted = (f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return "{" + ",".join(quoted) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
