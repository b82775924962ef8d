"""`paceline serve`: predictions over HTTP, and a page to look at them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from paceline.cli.options import (
    FiniteRange,
    best_option,
    json_option,
    target_argument,
    trust_code_option,
    weights_option,
)
from paceline.cli.output import echo
from paceline.cli.streams import make_optional
from paceline.errors import PacelineError
from paceline.loading import loading

_MEBIBYTE = 2**20
_OPEN = (
    "listens beyond this machine: whoever reaches it can send images, unencrypted and without a password. Put a server "
    "with TLS and a login before it, or leave out --host."
)


@click.command("serve")
@target_argument
@click.option("--host", default="127.0.0.1", show_default=True, metavar="ADDRESS", help="Where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0: any that is free.")
@click.option(
    "--allow-host",
    multiple=True,
    metavar="NAME",
    help="Extra Host header to accept, for example behind a proxy (repeatable).",
)
@click.option("--max-batch", type=click.IntRange(min=1), default=32, show_default=True, help="Images answered at once.")
@click.option(
    "--max-wait-ms",
    type=FiniteRange(0, 1000),
    default=5,
    show_default=True,
    help="How long the first image of a batch waits for others.",
)
@click.option("--max-request-mb", type=FiniteRange(0.01, 2048), default=32, show_default=True, help="MiB of a request.")
@click.option("--max-images", type=click.IntRange(1, 1000), default=16, show_default=True, help="Images of a request.")
@click.option(
    "--max-pixels", type=click.IntRange(min=1), default=50_000_000, show_default=True, help="Pixels of an image."
)
@click.option(
    "--max-seconds",
    type=FiniteRange(0.1, 3600),
    default=30,
    show_default=True,
    help="From a request's head to its answer, a slow upload included.",
)
@click.option(
    "--max-queue", type=click.IntRange(min=1), default=256, show_default=True, help="Images that wait; then come 503s."
)
@weights_option
@best_option
@trust_code_option
@json_option
def command(target: Path, host: str, port: int, allow_host: tuple[str, ...], as_json: bool, **given: Any) -> int:
    """Answer over HTTP with the weights of TARGET, which are given as to `paceline predict`.

    POST /predict takes images as multipart/form-data, in fields called images, and answers in JSON. / is a page to send
    images from, /health and /metrics are for whatever watches the service, and /openapi.json describes it all. SIGTERM
    and SIGINT (Ctrl-C) stop it, after those who wait have been answered. A line is logged for each request on standard
    error, without its contents.

    \b
    Examples:
      paceline serve runs/photos
      paceline serve model.onnx --port 9000 --max-batch 64
      curl -F images=@cat.jpg -F images=@dog.jpg "http://127.0.0.1:8000/predict?top_k=3"
    """
    make_optional(sys.stdout)
    server = _library()
    with loading():
        from paceline.distributed.device import choose_device
        from paceline.inference.predict import open_predictor
        from paceline.inference.serving.service import Limits
        from paceline.world import World

    limits = Limits(
        request_bytes=int(given.pop("max_request_mb") * _MEBIBYTE),
        images=given.pop("max_images"),
        pixels=given.pop("max_pixels"),
        request_seconds=given.pop("max_seconds"),
        queue_images=given.pop("max_queue"),
        batch_images=given.pop("max_batch"),
        batch_wait_seconds=given.pop("max_wait_ms") / 1000,
    )
    address = server.bind(host, port, allow_host)
    with address.socket:
        predictor = open_predictor(target, device=choose_device("auto", World()), **given)

        def ready() -> None:
            _announce(address, target, predictor.digest, as_json=as_json)

        server.serve(predictor, target, address, limits, say=lambda line: echo(line, err=True), ready=ready)
    return 0


def _library() -> Any:
    """What serves, where the extra is installed."""
    try:
        from paceline.inference.serving import server
    except ImportError as error:
        if error.name is None or error.name.startswith("paceline"):
            raise
        raise PacelineError(
            f"paceline serve needs {error.name}, which is not installed; pip install 'paceline[serve]'."
        ) from error
    return server


def _announce(address: Any, target: Path, digest: str, *, as_json: bool) -> None:
    import json

    if not address.is_loopback:
        echo(f"paceline: {address.url} {_OPEN}", err=True)
    if as_json:
        echo(json.dumps({"url": address.url, "target": str(target), "weights_sha256": digest}))
    else:
        echo(f"{target} answers at {address.url} (Ctrl-C stops it)")
