"""Memory is bounded by the pictures that are decoded, however many are sent."""

from __future__ import annotations

import asyncio
import base64
import io
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from paceline.data.image import decode
from paceline.data.image.decode import BrokenImageError
from paceline.prediction.predictor import Answer, Prompt, Reply
from paceline.tasks.labelling import Prediction
from paceline_vision.detection.predictor import Detections
from paceline_vision.segmentation.predictor import Segments

_WHY = "not installed: pip install 'paceline[serve]'"
for _library in ("fastapi", "prometheus_client", "python_multipart"):
    pytest.importorskip(_library, reason=_WHY)

from starlette import requests  # noqa: E402

from paceline_ops.serving import app  # noqa: E402
from paceline_ops.serving import service as services  # noqa: E402
from paceline_ops.serving.service import Metrics  # noqa: E402

SIDE = 4000
LARGE = 16 * SIDE * SIDE
FITTING = 2**30 // LARGE


class LargePictures:
    """Keeps pictures as large as they are, as a detector does, and counts them; answers when it is told to."""

    classes = ("thing",)
    usual_top_k = 1
    largest_batch: int | None = 1
    kind: type[Answer] = Prediction
    number_names: tuple[str, ...] = ()
    unit = "images"
    writes = False
    digest = "0" * 64

    def __init__(self) -> None:
        self.prepared = 0
        self.answered = 0
        self.most = 0
        self.goes_on = threading.Event()
        self._lock = threading.Lock()

    def prepare(self, content: bytes) -> NDArray[np.uint8]:
        with self._lock:
            self.prepared += 1
            self.most = max(self.most, self.prepared - self.answered)
        return np.empty(LARGE, dtype=np.uint8)  # never touched, so never in memory

    def answer(self, prepared: Sequence[NDArray[np.uint8]], top_k: int) -> list[Prediction]:
        assert self.goes_on.wait(60)
        with self._lock:
            self.answered += len(prepared)
        return [Prediction(Path(), ("thing",), (1.0,)) for _ in prepared]

    def unreadable(self, path: Path, reason: str) -> Prediction:
        return Prediction(path, error=reason)


def test_why_a_picture_is_not_read_is_named() -> None:
    def why(content: bytes) -> str:
        with pytest.raises(BrokenImageError) as caught:
            services.check_picture(content, 1000)
        return caught.value.reason

    assert why(b"") == "the file is empty"
    assert why(b"words").startswith("not an image in any of BMP")
    assert why(b"%PDF-1.7").startswith("a PDF document, which is not accepted; send one of BMP")
    assert why(b"II*\0" + bytes(9)).startswith("a TIFF image, which is not accepted")
    assert why(b"P5 99 99 255 ") == "99x99 pixels; at most 1,000 are decoded"
    assert why(b"P5 99999 99999 255 ") == "too large: at most 1,000 pixels are decoded"


def test_heic_is_read_where_its_reader_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pillow_heif", reason="needs pillow-heif")
    content = io.BytesIO()
    Image.new("RGB", (64, 48)).save(content, "HEIF")
    assert services.check_picture(content.getvalue(), 10_000) == 64 * 48
    monkeypatch.setattr(services, "FORMATS", ("PNG",))
    monkeypatch.setattr(decode, "HEIF_ENDINGS", ())
    with pytest.raises(BrokenImageError, match="a HEIC image, which needs pip install"):
        services.check_picture(content.getvalue(), 10_000)


PICTURE = f"P6 {SIDE} {SIDE} 255 ".encode()  # of which there is the head


def test_pictures_wait_until_there_is_memory_and_all_are_answered() -> None:
    predictor = LargePictures()
    assert 2 <= FITTING < 8

    async def ask() -> list[int]:
        service = services.Service(predictor, services.ServiceLimits(), Metrics("large", predictor.digest))
        async with service.running():
            asked = [asyncio.create_task(service.answers([PICTURE] * 8, 1)) for _ in range(2)]
            while predictor.prepared < FITTING:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)  # for more of them, were they let in
            predictor.goes_on.set()
            return [len(each) for each in await asyncio.gather(*asked)]

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == [8, 8]
    assert predictor.most == FITTING
    assert predictor.prepared == predictor.answered == 16


@pytest.mark.parametrize("why", ["overdue", "left"])
def test_work_that_nobody_waits_for_is_stopped(why: str) -> None:
    predictor = LargePictures()

    async def ask() -> int:
        service = services.Service(predictor, services.ServiceLimits(), Metrics("large", predictor.digest))
        leaving = asyncio.Event()

        async def receive() -> dict[str, object]:
            await leaving.wait()
            return {"type": "http.disconnect"}

        client = requests.Request({"type": "http", "method": "POST", "headers": []}, receive)
        async with service.running():
            asked = asyncio.create_task(app.while_connected(client, service.answers([PICTURE] * 8, 1)))
            while predictor.prepared < FITTING:
                await asyncio.sleep(0.01)
            if why == "left":
                leaving.set()
                with pytest.raises(app.HTTPException):
                    await asked
            else:
                asked.cancel()
                await asyncio.wait([asked])
            predictor.goes_on.set()
            return len(await service.answers([PICTURE] * 2, 1))

    assert asyncio.run(asyncio.wait_for(ask(), 60)) == 2
    assert predictor.prepared == FITTING + 2


class Writer:
    """Writes a word or two."""

    largest_batch = None
    unit = "texts"

    def reply(self, prompt: Prompt) -> Reply:
        return Reply({"text": prompt.text}, [])

    def pieces(self, prompt: Prompt) -> Iterator[str]:
        yield from ("one ", "two")


def test_answers_of_a_language_model_are_counted() -> None:
    metrics = Metrics("model", "0")

    async def ask() -> list[str]:
        service = services.Service(Writer(), services.ServiceLimits(), metrics)  # type: ignore[arg-type]  # as much as is used
        async with service.running():
            await service.reply(Prompt(text="a"))
            return [each async for each in service.pieces(Prompt(text="a"))]

    assert asyncio.run(ask()) == ["one ", "two"]
    assert metrics.registry.get_sample_value("paceline_images_total", {"outcome": "answered"}) == 2


def test_the_page_asks_for_all_objects_of_a_detector() -> None:
    predictor = LargePictures()
    service = services.Service(predictor, services.ServiceLimits(), Metrics("large", predictor.digest))
    assert "<p hidden><label>Labels per image" not in app.page(service, "large")
    predictor.kind = Detections
    assert "<p hidden><label>Labels per image" in app.page(service, "large")


def test_predicted_pixels_are_laid_over_the_image() -> None:
    predictor = LargePictures()
    predictor.kind = Segments
    answer = Segments(Path(), ("thing",), (0.25,), classes=np.tri(3000, 2000, dtype=np.uint8))
    shown = app._shown("a.jpg", answer, 1, predictor)
    assert shown.overlay is not None
    overlay = Image.open(io.BytesIO(base64.b64decode(shown.overlay.partition(",")[2])))
    assert (max(overlay.size), shown.boxes, shown.probabilities) == (1024, None, [0.25])
    assert app._shown("a.jpg", Prediction(Path(), ("thing",), (1.0,)), 1, predictor).overlay is None
