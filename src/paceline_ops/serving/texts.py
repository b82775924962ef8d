"""The route of a service of texts: classes, tags, masked words, or text that continues a prompt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from paceline.prediction.predictor import Answer, Prompt
from paceline_ops.serving.service import Service, busy, while_connected

MOST_TOKENS = 4096
_LONGEST_WAIT = "there was no answer within {:g} seconds"


class Texts(BaseModel, extra="forbid"):
    """A request: texts, and for a language model how to go on."""

    texts: list[str] = Field(min_length=1, description="The texts, or the prompts of a language model.")
    top_k: int | None = Field(None, ge=1, le=1000, description="Classes per text, or tokens to choose from.")
    tokens: int | None = Field(None, ge=1, le=MOST_TOKENS, description="Maximum tokens to generate (200).")
    temperature: float | None = Field(None, ge=0, le=100, description="Sampling temperature (0.8).")
    seed: int | None = Field(None, ge=0, lt=2**63, description="The same seed gives the same text (0).")
    stream: bool = Field(default=False, description="Answer one prompt piece by piece: a JSON object on each line.")


class TextAnswer(BaseModel, extra="allow"):
    """The prediction for one text: which fields it has depends on the model."""

    labels: list[str] | None = Field(None, description="Classes, most probable first, or the tag of each word.")
    probabilities: list[float] | None = Field(None, description="Of each label, from 0 to 1.")
    words: list[str] | None = Field(None, description="The words that were tagged.")
    entities: list[dict[str, Any]] | None = Field(None, description="type, begin, end and text of each entity.")
    text: str | None = Field(None, description="What the model wrote, or the text with its masks filled in.")
    guesses: list[dict[str, Any]] | None = Field(None, description="texts and probabilities for each mask.")
    error: str | None = Field(None, description="Why this text has no prediction; null if it has one.")


class TextAnswers(BaseModel):
    """The predictions for a request's texts."""

    model: str = Field(description="Name of the served model.")
    weights_sha256: str = Field(description="SHA-256 of its weights.")
    predictions: list[TextAnswer] = Field(description="One for each text, in the request's order.")


def add_predict(app: FastAPI, service: Service, model: str, refusals: dict[int | str, dict[str, Any]]) -> None:
    """Add POST /predict for texts.

    Args:
        app: Where to add it.
        service: The prediction service, of a predictor of texts.
        model: Its name.
        refusals: Responses that refuse a request, for the description.
    """
    limits, predictor = service.limits, service.predictor
    schema = Texts.model_json_schema()
    schema["properties"]["texts"]["maxItems"] = limits.images

    @app.post(
        "/predict",
        responses=refusals,
        response_model_exclude_unset=True,
        description=f"At most {limits.images} texts and {limits.request_bytes:,} bytes, within "
        f"{limits.request_seconds:g} seconds. A text that cannot be read gets an error; the others get predictions.",
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}},
        response_model=TextAnswers,
    )
    async def predict(request: Request) -> Any:
        asked = await _asked(request, service)
        if asked.stream:
            return await _streamed(service, _prompt(asked, asked.texts[0]))
        try:
            async with asyncio.timeout(limits.request_seconds):
                rows = await while_connected(request, _answers(service, asked))
        except TimeoutError:
            raise busy(_LONGEST_WAIT.format(limits.request_seconds)) from None
        return {"model": model, "weights_sha256": predictor.digest, "predictions": rows}


async def _asked(request: Request, service: Service) -> Texts:
    """Return what a request asks for.

    Raises:
        HTTPException: If the body is malformed, or asks for what these weights cannot do.
    """
    limits, predictor = service.limits, service.predictor
    try:
        async with asyncio.timeout(limits.request_seconds):
            body = await request.body()
    except TimeoutError:
        raise HTTPException(408, f"the request was not complete within {limits.request_seconds:g} seconds") from None
    except ClientDisconnect:
        raise HTTPException(400, "the client disconnected before its request was complete") from None
    try:
        asked = Texts.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))[:50]
        raise HTTPException(
            422, f'{place + ": " if place else ""}{problem["msg"]}; send JSON such as {{"texts": ["a text"]}}'
        ) from None
    if len(asked.texts) > limits.images:
        raise HTTPException(400, f"{len(asked.texts)} texts in one request; at most {limits.images} are answered")
    given = asked.model_dump(exclude_unset=True, exclude={"texts", "stream"})
    for name, why in predictor.unused_options.items():
        if name in given:
            raise HTTPException(422, f"{name} has no effect: {why}; leave it out")
    if asked.stream and not (predictor.writes and len(asked.texts) == 1):
        rule = "takes one text at a time" if predictor.writes else "is for models that write text"
        raise HTTPException(422, f"stream {rule}; leave it out")
    return asked


def _prompt(asked: Texts, text: str) -> Prompt:
    return Prompt(text=text, **asked.model_dump(include={"tokens", "temperature", "seed", "top_k"}))


async def _answers(service: Service, asked: Texts) -> list[dict[str, Any]]:
    predictor = service.predictor
    if predictor.classes:
        most = asked.top_k or predictor.usual_top_k
        answers = await service.answers([text.encode() for text in asked.texts], most)
        # A batch has as many labels as the request that wants most; tags are one for each word.
        return [_row(each, most=None if predictor.kind.per_label else most) for each in answers]
    rows = [await _reply(service, _prompt(asked, each)) for each in asked.texts]
    if all("error" in row for row in rows):
        raise HTTPException(422, str(rows[0]["error"]))
    return rows


async def _reply(service: Service, prompt: Prompt) -> dict[str, Any]:
    try:
        if service.predictor.writes:
            return {"text": "".join([piece async for piece in service.pieces(prompt)])}
        return dict((await service.reply(prompt)).document)
    except HTTPException as error:
        if error.status_code != HTTPStatus.UNPROCESSABLE_ENTITY:
            raise
        return {"error": error.detail}


def _row(answer: Answer, *, most: int | None) -> dict[str, Any]:
    row = {name: value for name, value in answer.row().items() if name != "path"}
    return {**row, **{name: row[name][:most] for name in ("labels", "probabilities")}}


async def _streamed(service: Service, prompt: Prompt) -> StreamingResponse:
    """Return a response of JSON lines: what is wrong with the request is known before its first line."""
    pieces = service.pieces(prompt)
    end = asyncio.get_running_loop().time() + service.limits.request_seconds
    first = await _next(pieces, end)

    async def lines() -> AsyncIterator[str]:
        piece = first
        try:
            while piece is not None:
                if piece:
                    yield json.dumps({"text": piece}) + "\n"
                piece = await _next(pieces, end)
            yield json.dumps({"done": True}) + "\n"
        except HTTPException as error:
            yield json.dumps({"error": error.detail}) + "\n"
        finally:
            await pieces.aclose()

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def _next(pieces: AsyncGenerator[str, None], end: float) -> str | None:
    try:
        async with asyncio.timeout_at(end):
            return await anext(pieces, None)
    except TimeoutError:
        raise busy("the answer was not complete in time") from None
