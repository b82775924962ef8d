"""`paceline serve`: predictions over HTTP, and a page to view them."""

from __future__ import annotations

import json
import signal
import sys
from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from paceline.cli.output import echo
from paceline.cli.streams import exit_on_signals, make_optional
from paceline.command import Best, Shape, Target, TrustCode, Weights, command
from paceline.errors import PacelineError
from paceline.plugins.loading import loading

_MEBIBYTE = 2**20
_OPEN = (
    "accepts connections from other machines: anyone who reaches it can send requests, unencrypted and without a "
    "password. Put "
    "a proxy with TLS and a login in front of it, or leave out --host."
)


@command("serve", group="Use", place=3)
@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve predictions over HTTP, with a web page.

    TARGET is given as for `paceline predict`. POST /predict takes images as multipart/form-data, in fields called
    images, or texts and prompts as JSON, and answers in JSON. / is a page to try the model, /health and /metrics are
    for monitoring, and /openapi.json describes the service. SIGTERM and SIGINT (Ctrl-C) stop it after pending requests
    are answered. Each request logs a line on standard error, without its contents.

    Examples:
      paceline serve runs/photos
      paceline serve model.onnx --port 9000 --max-batch 64
      curl -F images=@cat.jpg -F images=@dog.jpg "http://127.0.0.1:8000/predict?top_k=3"
      curl -d '{"texts": ["good cat"]}' http://127.0.0.1:8000/predict
    """

    target: Target
    host: Annotated[str, Shape(metavar="ADDRESS"), "Address to listen on."] = "127.0.0.1"
    port: Annotated[int, Ge(0), Le(65535), "0: any free port."] = 8000
    allow_host: Annotated[
        tuple[str, ...],
        Shape(metavar="NAME", repeatable=True),
        "Extra Host header to accept, for example behind a proxy (repeatable).",
    ] = ()
    max_batch: Annotated[int, Ge(1), "Images or texts per batch."] = 32
    max_wait_ms: Annotated[float, Ge(0), Le(1000), "How long the first image or text of a batch waits for others."] = 5
    max_request_mb: Annotated[float, Ge(0.01), Le(2048), "Maximum MiB per request."] = 32
    max_images: Annotated[int, Ge(1), Le(1000), "Maximum images or texts per request."] = 16
    max_pixels: Annotated[int, Ge(1), "Maximum pixels per image."] = 50_000_000
    max_seconds: Annotated[
        float, Ge(0.1), Le(3600), "Time from a request's header to its response, including a slow upload."
    ] = 30
    max_queue: Annotated[int, Ge(1), "Maximum images or texts waiting; further requests get a 503."] = 256
    weights: Weights = "auto"
    best: Best = False
    trust_code: TrustCode = False

    @exit_on_signals(signal.SIGTERM)  # which a container's first process would otherwise ignore while it loads
    def stream(self, *, as_json: bool) -> int:
        """Serve until it is stopped."""
        make_optional(sys.stdout)
        with loading():
            from paceline.distributed.device import choose_device
            from paceline.host.world import World
            from paceline.inference.predict import open_predictor
            from paceline_ops.serving import server
            from paceline_ops.serving.service import ServiceLimits

        limits = ServiceLimits(
            request_bytes=int(self.max_request_mb * _MEBIBYTE),
            images=self.max_images,
            pixels=self.max_pixels,
            request_seconds=self.max_seconds,
            queue_images=self.max_queue,
            batch_images=self.max_batch,
            batch_wait_seconds=self.max_wait_ms / 1000,
        )
        address = server.bind(self.host, self.port, self.allow_host)
        with address.socket:
            predictor = open_predictor(
                self.target,
                device=choose_device("auto", World()),
                weights=self.weights,
                best=self.best,
                trust_code=self.trust_code,
            )

            if predictor.unit not in ("images", "texts"):
                raise PacelineError(
                    f"{self.target} is a model of {predictor.unit}, and serve takes images and texts; use predict."
                )

            def ready() -> None:
                if not address.is_loopback:
                    echo(f"paceline: {address.url} {_OPEN}", err=True)
                status = {"url": address.url, "target": str(self.target), "weights_sha256": predictor.digest}
                echo(json.dumps(status) if as_json else f"{self.target} answers at {address.url} (Ctrl-C stops it)")

            server.serve(predictor, self.target, address, limits, say=lambda line: echo(line, err=True), ready=ready)
        return 0
