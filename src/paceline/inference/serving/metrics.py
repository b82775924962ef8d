"""What the service tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

_IMAGES = (1, 2, 4, 8, 16, 32, 64)


class Metrics:
    """Counts since the service began, and the process's memory and time.

    Args:
        model: What is served.
        digest: SHA-256 of its weights.
    """

    def __init__(self, model: str, digest: str) -> None:
        self.registry = CollectorRegistry()
        Info("paceline_model", "The model that is served.", registry=self.registry).info(
            {"model": model, "weights_sha256": digest}
        )
        ProcessCollector(registry=self.registry)
        self.requests = Counter(
            "paceline_requests", "Requests by route and status.", ("route", "status"), registry=self.registry
        )
        self.images = Counter("paceline_images", "Images by outcome.", ("outcome",), registry=self.registry)
        self.queue = Gauge(
            "paceline_queue_images", "Images that are decoded, or wait for the network.", registry=self.registry
        )
        self.seconds = Histogram(
            "paceline_request_seconds", "Seconds from a request's head to its answer.", registry=self.registry
        )
        self.batches = Histogram(
            "paceline_batch_images", "Images in each batch.", buckets=_IMAGES, registry=self.registry
        )
