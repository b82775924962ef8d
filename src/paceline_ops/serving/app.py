"""The HTTP service: routes, their description at /openapi.json, and a one-sentence reason for each refusal."""

from __future__ import annotations

import asyncio
import base64
import io
import ipaddress
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache
from html import escape
from http import HTTPStatus
from importlib.resources import files
from string import Template
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from PIL import Image
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, Field
from starlette.datastructures import Headers, UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.pages.page import script_digest
from paceline.prediction.predictor import Answer, Predictor
from paceline_ops.serving import texts
from paceline_ops.serving.service import Service, ServiceLimits, busy, while_connected

LARGEST_TOP_K = 1000
_FIELD = "images"
_OVERLAY = 1024
_LONGEST_NAME = 255
_INTERFACE = "1"  # version of the interface, not of the program
_LEAST_BODIES_BYTES = 64 * 2**20

Say = Callable[[str], None]


class ImageAnswer(BaseModel):
    """The prediction for one image."""

    name: str = Field(description="File name given by the client.")
    labels: list[str] = Field(description="Class names, the most probable first.")
    probabilities: list[float] = Field(
        description="Of each label, from 0 to 1; of a segmentation network, its share of the pixels."
    )
    boxes: list[tuple[float, float, float, float]] | None = Field(
        description="Of a detector: left, top, right and bottom edge of each object, in pixels; of others null."
    )
    overlay: str | None = Field(
        default=None,
        description=f"Of a network that predicts pixels: a transparent picture of them, of at most {_OVERLAY} pixels a "
        "side, as the data URL of a PNG. Of others null.",
    )
    numbers: dict[str, float] | None = Field(
        default=None,
        description="Of a network that predicts numbers: each by its name, and no labels. Of one that gives any number "
        "of labels: the probability of every class. Of others null.",
    )
    error: str | None = Field(description="Why this image has no prediction; null if it has one.")


class Answers(BaseModel):
    """The predictions for a request's images."""

    model: str = Field(description="Name of the served model.")
    weights_sha256: str = Field(description="SHA-256 of its weights.")
    predictions: list[ImageAnswer] = Field(description="One for each image, in the request's order.")


class Problem(BaseModel):
    """Why a request was refused."""

    error: str = Field(description="What was found, and the rule it breaks.")


class Health(BaseModel):
    """The service is up and accepts requests."""

    live: bool
    ready: bool
    model: str
    weights_sha256: str


_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body is malformed, or has too many images or texts."},
    403: {"model": Problem, "description": "A page of another site sent it."},
    408: {"model": Problem, "description": "The request was not complete in time."},
    413: {"model": Problem, "description": "Too many bytes."},
    415: {"model": Problem, "description": "The body is not multipart/form-data."},
    422: {"model": Problem, "description": "A parameter is wrong, or no image or text can be read."},
    500: {"model": Problem, "description": "A defect of the service, or of its weights."},
    503: {"model": Problem, "description": "Too busy; try again later.", "headers": _RETRY},
}


def make_app(service: Service, model: str, sites: SiteCheck, say: Say, ready: Callable[[], None]) -> FastAPI:
    """Build the service as an ASGI application.

    Args:
        service: The prediction service.
        model: Its name.
        sites: Rejects requests from other sites' pages.
        say: Receives one log line per request, without its contents.
        ready: Called when the service is ready.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running():
            ready()
            yield

    app = FastAPI(
        title="Paceline",
        version=_INTERFACE,
        description=f"Predictions of {model}. Limits are given in each description.",
        docs_url=None,  # the default docs pages load scripts from other sites
        redoc_url=None,
        redirect_slashes=False,  # a redirect's target would depend on the client's Host header
        responses={403: _REFUSALS[403]},
        lifespan=lifespan,
    )
    app.add_middleware(_RequestGate, service=service, sites=sites, say=say)
    _add_error_handlers(app)
    if service.predictor.unit == "images":
        _add_predict(app, service, model)
    else:
        texts.add_predict(app, service, model, _REFUSALS)
    _add_views(app, service, model)
    return app


def _add_predict(app: FastAPI, service: Service, model: str) -> None:
    limits = service.limits
    images = {
        "type": "array",
        "items": {"type": "string", "format": "binary"},
        "minItems": 1,
        "maxItems": limits.images,
    }
    form = {"type": "object", "required": [_FIELD], "properties": {_FIELD: images}, "additionalProperties": False}
    description = (
        f"At most {limits.images} images, {limits.request_bytes:,} bytes and {limits.pixels:,} pixels an image, within "
        f"{limits.request_seconds:g} seconds. An image that cannot be read gets an error; the others get predictions."
    )

    @app.post(
        "/predict",
        responses=_REFUSALS,
        description=description,
        openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": form}}}},
    )
    async def predict(
        request: Request,
        top_k: Annotated[
            int | None, Query(ge=1, le=LARGEST_TOP_K, description="Maximum labels per image; default if omitted.")
        ] = None,
    ) -> Answers:
        if top_k is not None and service.predictor.number_names:
            raise HTTPException(
                422, "top_k has no effect: a prediction of these weights has all its numbers; leave it out"
            )
        most = top_k or service.predictor.usual_top_k
        uploads: list[tuple[str, bytes]] = []
        try:
            async with asyncio.timeout(limits.request_seconds):
                uploads = await _uploads(request, limits)
                answers = await while_connected(request, service.answers([content for _, content in uploads], most))
        except TimeoutError:
            within = f"within {limits.request_seconds:g} seconds"
            if not uploads:
                raise HTTPException(408, f"the request was not complete {within}") from None
            raise busy(f"there was no answer {within}") from None

        def predictions() -> list[ImageAnswer]:
            pairs = zip(uploads, answers, strict=True)
            return [_shown(name, answer, most, service.predictor) for (name, _), answer in pairs]

        return Answers(
            model=model,
            weights_sha256=service.predictor.digest,
            predictions=await asyncio.to_thread(predictions),  # drawing takes a while
        )


def _shown(name: str, answer: Answer, top_k: int, predictor: Predictor) -> ImageAnswer:
    # A batch is answered with the most labels that any of its requests allows.
    answer = replace(answer, labels=answer.labels[:top_k], probabilities=answer.probabilities[:top_k])
    row, overlay = answer.row(), answer.overlay(_OVERLAY, predictor.classes)
    return ImageAnswer(
        name=name,
        labels=list(answer.labels),
        probabilities=list(answer.probabilities),
        boxes=list(row["boxes"][:top_k]) if "boxes" in predictor.kind.per_label else None,
        overlay=None if overlay is None else _data_url(overlay),
        numbers=row.get("numbers") or None,
        error=answer.error,
    )


def _data_url(image: Image.Image) -> str:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class _Form(MultiPartParser):
    """A multipart body, parsed in memory: no file is written."""

    is_complete = False

    def on_end(self) -> None:
        """Record the final boundary: a truncated body lacks it."""
        self.is_complete = True


async def _uploads(request: Request, limits: ServiceLimits) -> list[tuple[str, bytes]]:
    """Return the name and content of each image in a request.

    Raises:
        HTTPException: If the body is malformed, or has other fields, no image or too many images.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise HTTPException(415, f"send images as multipart/form-data, in fields called {_FIELD}")
    parser = _Form(request.headers, request.stream(), max_files=limits.images, max_fields=0)
    parser.spool_max_size = limits.request_bytes + 1
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise HTTPException(400, f"{error.message} Send files, at most {limits.images} images.") from error
    except ClientDisconnect:
        raise HTTPException(400, "the client disconnected before its request was complete") from None
    try:
        if not parser.is_complete:
            raise HTTPException(400, "the body is cut off: its last boundary is missing")
        if unknown := sorted(set(form) - {_FIELD}):
            raise HTTPException(422, f"the field {unknown[0][:50]!r} is unknown; images are called {_FIELD}")
        files = [each for each in form.getlist(_FIELD) if isinstance(each, UploadFile)]
        if not files:
            raise HTTPException(422, f"there is no image; send at least one, in a field called {_FIELD}")
        return [((each.filename or "")[:_LONGEST_NAME], await each.read()) for each in files]
    finally:
        await form.close()


def _add_views(app: FastAPI, service: Service, model: str) -> None:
    digest = service.predictor.digest
    shown = page(service, model)
    style, script = (script_digest(each.encode()) for each in (_part("page.css"), _script(service)))
    # The page may run its script, show chosen files and call this service; nothing else.
    policy = (
        f"default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; img-src blob: data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )

    @app.get("/health")
    async def health() -> Health:
        return Health(live=True, ready=True, model=model, weights_sha256=digest)

    @app.get("/metrics", response_class=PlainTextResponse, description="Counts in Prometheus' text format.")
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @app.get("/", response_class=HTMLResponse, description="A page to try the model.")
    async def index() -> HTMLResponse:
        return HTMLResponse(shown, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


def _add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        problems = [f"{each['loc'][-1]}: {each['msg']}" for each in error.errors()]
        return JSONResponse({"error": "; ".join(problems)}, 422)

    @app.exception_handler(HTTPException)
    async def refused(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse({"error": "the service failed; its log says why"}, 500)


class _RequestGate:
    """Rejects requests from other sites' pages and too large bodies; counts and logs every request, not its contents.

    It runs before routing, so it also guards unknown paths.
    """

    def __init__(self, app: ASGIApp, service: Service, sites: SiteCheck, say: Say) -> None:
        self._app = app
        self._service = service
        self._sites = sites
        self._say = say
        self._bodies_bytes = 0
        self._routes = frozenset({"/", "/predict", "/health", "/metrics", "/openapi.json"})
        self._methods = frozenset({"GET", "POST", "HEAD"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, received = time.perf_counter(), 500, 0
        headers = Headers(scope=scope)
        limit = self._service.limits.request_bytes
        declared = headers.get("content-length", "")

        async def counted() -> Message:
            nonlocal received
            is_too_large = declared.isdecimal() and int(declared) > limit
            message = {} if is_too_large else await receive()
            count = len(message.get("body", b""))
            received += count
            self._bodies_bytes += count
            if is_too_large or received > limit:
                raise HTTPException(413, f"the request is larger than {limit:,} bytes; send fewer or smaller images")
            if self._bodies_bytes > max(8 * limit, _LEAST_BODIES_BYTES):
                raise busy("too many uploads at once")
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            problem = self._sites.problem(headers)
            answering = JSONResponse({"error": problem}, 403) if problem else self._app
            await answering(scope, counted, noted)
        finally:
            self._bodies_bytes -= received
            seconds = time.perf_counter() - begin
            route = scope["path"] if scope["path"] in self._routes else "other"
            method = scope["method"] if scope["method"] in self._methods else "other"
            self._service.metrics.requests.labels(route, str(status)).inc()
            if route == "/predict":
                self._service.metrics.seconds.observe(seconds)
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            phrase = HTTPStatus(status).phrase
            self._say(f"{now} {method} {route} {status} {phrase} {1000 * seconds:.1f} ms {received:,} bytes")


_SHOWN = 80


class SiteCheck:
    """Distinguishes requests of programs and of the service's page from those of other sites' pages.

    Any page in the user's browser can reach services on the user's machine. Two headers that a page cannot forge reveal
    it: Host names a domain that was made to resolve to this machine (DNS rebinding), and Origin names the page's site.

    Args:
        names: Host names of the service, in addition to IP addresses; None accepts any.
        pages: Other sites whose pages may send requests.
    """

    def __init__(self, names: Iterable[str] | None, pages: Iterable[str] = ()) -> None:
        self._names = None if names is None else frozenset(map(str.lower, names))
        self._pages = frozenset(map(str.lower, pages))

    def problem(self, headers: Headers) -> str:
        """Return why a request is refused; empty if it is accepted."""
        host, origin = headers.get("host", ""), headers.get("origin")
        name = _name(host)
        if not self._is_known(name):
            return (
                f"this service does not accept the Host header {name[:_SHOWN]}; use its address, or start it with "
                f"--allow-host"
            )
        if origin is not None and origin.partition("//")[2] != (host or None) and _name(origin) not in self._pages:
            return (
                f"a page of {origin[:_SHOWN]} sent this request, and only this service's own page may; to allow that "
                "page, start the service with --allow-host"
            )
        return ""

    def _is_known(self, name: str) -> bool:
        if self._names is None or not name or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name(place: str) -> str:
    """Return the host of a ``host:port`` or a page's URL, in lower case; empty if there is none."""
    try:
        host = urlsplit(place if "//" in place else f"//{place}").hostname
    except ValueError:
        return place
    return (host or "").rstrip(".")


def page(service: Service, model: str) -> str:
    """Return the page as HTML."""
    predictor, limits, digest = service.predictor, service.limits, service.predictor.digest
    numbers, classes = predictor.number_names, len(predictor.classes)
    hidden = {
        "without_labels": numbers or predictor.kind.per_label or not classes,
        "without_writing": not predictor.writes,
    }
    filled = {
        **{name: "hidden" if is_hidden else "" for name, is_hidden in hidden.items()},
        "classes": classes,
        "most": min(classes, 10),
        "images": limits.images,
        "bytes": limits.request_bytes,
        "megabytes": f"{limits.request_bytes / 2**20:.0f}",
        "tokens": texts.MOST_TOKENS,
        "model": escape(model),
        "digest": escape(digest),
    }
    shown = ", ".join(numbers) or ", ".join(predictor.classes[:8]) + (f" and {classes - 8} more" if classes > 8 else "")
    return Template(_part("page.html")).substitute(
        filled,
        style=_part("page.css"),
        script=_script(service),
        answers=escape(shown),
        form=Template(_part(f"{predictor.unit}.html")).substitute(filled),
    )


def _script(service: Service) -> str:
    return _part("page.js") + _part(f"{service.predictor.unit}.js")


@cache
def _part(name: str) -> str:
    return files("paceline_ops.serving").joinpath(name).read_text(encoding="utf-8")
