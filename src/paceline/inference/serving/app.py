"""Which questions does the service answer over HTTP, and in which words?

Its description at /openapi.json is made from what stands here, and a test asks everything that it allows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.inference.answers import Answer
from paceline.inference.serving.limits import RefusedError
from paceline.inference.serving.metrics import CONTENT_TYPE
from paceline.inference.serving.page import PageFacts, content_policy, page
from paceline.inference.serving.service import Service
from paceline.inference.serving.uploads import FIELD, Upload
from paceline.inference.serving.visitors import Visitors

LARGEST_TOP_K = 1000
_INTERFACE = "1"  # of what is asked and answered, not of the program

Say = Callable[[str], None]


class ImageAnswer(BaseModel):
    """What is said of one image."""

    name: str = Field(description="What the client calls it; empty if it does not say.")
    labels: list[str] = Field(description="Class names, the most probable first.")
    probabilities: list[float] = Field(description="Of each label, from 0 to 1.")
    boxes: list[tuple[float, float, float, float]] | None = Field(
        description="Of a detector: left, top, right and bottom edge of each object, in pixels; of others null."
    )
    error: str | None = Field(description="Why there is no answer for this image; null if there is one.")


class Answers(BaseModel):
    """What is said of a request's images."""

    model: str = Field(description="What is served.")
    weights_sha256: str = Field(description="SHA-256 of its weights.")
    predictions: list[ImageAnswer] = Field(description="One for each image, in the request's order.")


class Problem(BaseModel):
    """Why a request is not answered."""

    error: str = Field(description="One sentence: what was found, which rule it breaks, what to change.")


class Health(BaseModel):
    """Whether the service is there, and takes requests."""

    live: bool
    ready: bool
    model: str
    weights_sha256: str


_RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body is malformed."},
    403: {"model": Problem, "description": "A page of somebody else's has sent it."},
    408: {"model": Problem, "description": "The request was not whole in time."},
    413: {"model": Problem, "description": "Too many bytes or images."},
    415: {"model": Problem, "description": "The body is no multipart/form-data."},
    422: {"model": Problem, "description": "A parameter is wrong, or there is no image that can be read."},
    500: {"model": Problem, "description": "A defect of the service, or of its weights."},
    503: {"model": Problem, "description": "Too busy; come back.", "headers": _RETRY},
}


def make_app(service: Service, model: str, visitors: Visitors, say: Say) -> FastAPI:
    """The service as an ASGI application.

    Args:
        service: Answers.
        model: What it is called.
        visitors: Lets requests in.
        say: Told of each request in one line, without its contents.
    """

    def lifespan(_: FastAPI) -> AbstractAsyncContextManager[None]:
        return service.running()

    app = FastAPI(
        title="Paceline",
        version=_INTERFACE,
        description=f"Predictions of {model}. Limits are said in each description.",
        docs_url=None,  # its pages load scripts from elsewhere
        redoc_url=None,
        redirect_slashes=False,  # where to, the client would say by its Host
        responses={403: _REFUSALS[403]},
        lifespan=lifespan,
    )
    app.add_middleware(_Watched, service=service, visitors=visitors, say=say)
    _answer_errors(app, service)
    _add_predict(app, service, model)
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
    form = {"type": "object", "required": [FIELD], "properties": {FIELD: images}, "additionalProperties": False}
    description = (
        f"At most {limits.images} images, {limits.request_bytes:,} bytes and {limits.pixels:,} pixels an image, within "
        f"{limits.request_seconds:g} seconds. Images that cannot be read have an error beside the others' answers."
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
            int | None, Query(ge=1, le=LARGEST_TOP_K, description="Most labels of an image; left out, what is usual.")
        ] = None,
    ) -> Answers:
        most = top_k or service.predictor.usual_top_k
        told = await service.answered(request, most)
        request.state.images = len(told)
        predictions = [_answer(upload, answer, most, boxes=service.predictor.finds_boxes) for upload, answer in told]
        return Answers(model=model, weights_sha256=service.predictor.digest, predictions=predictions)


def _answer(upload: Upload, answer: Answer, top_k: int, *, boxes: bool) -> ImageAnswer:
    row = answer.row()
    return ImageAnswer(
        name=upload.name,
        labels=list(answer.labels[:top_k]),
        probabilities=list(answer.probabilities[:top_k]),
        boxes=list(row["boxes"][:top_k]) if boxes else None,
        error=answer.error,
    )


def _add_views(app: FastAPI, service: Service, model: str) -> None:
    digest = service.predictor.digest
    facts = PageFacts(model=model, digest=digest, limits=service.limits, classes=len(service.predictor.classes))
    shown, policy = page(facts), content_policy()

    @app.get("/health", responses={503: {"model": Health, "description": "It is stopping."}})
    async def health(response: Response) -> Health:
        response.status_code = 503 if service.is_stopping else 200
        return Health(live=True, ready=not service.is_stopping, model=model, weights_sha256=digest)

    @app.get("/metrics", response_class=PlainTextResponse, description="Counts in Prometheus' text format.")
    async def metrics() -> PlainTextResponse:
        return PlainTextResponse(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get("/", response_class=HTMLResponse, description="A page to send images from, and to see the answers.")
    async def index() -> HTMLResponse:
        return HTMLResponse(shown, headers={"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer"})


def _answer_errors(app: FastAPI, service: Service) -> None:
    """Every refusal is one sentence in JSON."""

    @app.exception_handler(RefusedError)
    async def refused(_: Request, error: RefusedError) -> JSONResponse:
        return _refusal(error, service)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        service.metrics.refusal("parameter")
        found = [f"{each['loc'][-1]}: {each['msg']}" for each in error.errors()]
        return JSONResponse({"error": "; ".join(found)}, 422)

    @app.exception_handler(HTTPException)
    async def unknown(_: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse({"error": str(error.detail)}, error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def failed(_: Request, __: Exception) -> JSONResponse:
        return JSONResponse({"error": "the service failed; its log says why"}, 500)


def _refusal(error: RefusedError, service: Service) -> JSONResponse:
    service.metrics.refusal(error.reason)
    return JSONResponse({"error": error.sentence}, error.status, error.headers)


class _Watched:
    """Lets in, counts and logs every request: when, what, how it ended, how long, how many images; not their contents.

    It comes before the routes, so that it also guards addresses without one.
    """

    def __init__(self, app: ASGIApp, service: Service, visitors: Visitors, say: Say) -> None:
        self._app = app
        self._service = service
        self._visitors = visitors
        self._say = say
        self._routes = frozenset({"/", "/predict", "/health", "/metrics", "/openapi.json"})
        self._methods = frozenset({"GET", "POST", "HEAD"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status, received = time.perf_counter(), 500, 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-content-type-options", b"nosniff")]
            await send(message)

        try:
            answering = await self._let_in(scope)
            await answering(scope, counted, noted)
        finally:
            seconds = time.perf_counter() - begin
            route = scope["path"] if scope["path"] in self._routes else "other"
            method = scope["method"] if scope["method"] in self._methods else "other"
            self._service.metrics.request(route, status, seconds)
            images = scope.get("state", {}).get("images")
            counts = f"{received:,} bytes" + (f", {images} images" if images is not None else "")
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            self._say(f"{now} {method} {route} {status} {HTTPStatus(status).phrase} {1000 * seconds:.1f} ms {counts}")

    async def _let_in(self, scope: Scope) -> ASGIApp:
        """What answers a request: the service, or a refusal."""
        try:
            await self._visitors.check(Request(scope))
        except RefusedError as error:
            return _refusal(error, self._service)
        return self._app
