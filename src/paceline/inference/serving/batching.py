"""How do images of several requests become one batch? They wait a few milliseconds for one another, and no longer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from paceline.inference.answers import Answer, ImagePredictor, Prepared
from paceline.inference.serving.limits import Limits
from paceline.inference.serving.metrics import Metrics


@dataclass
class _Waiting:
    """An image that waits for the network, and who waits for its answer."""

    image: Prepared
    top_k: int
    answer: asyncio.Future[Answer]


class Batcher:
    """Asks the network, in a thread of its own, about whatever waits.

    Args:
        predictor: Answers.
        limits: How large a batch is, and how long it is waited for.
        metrics: Told of each batch.
    """

    def __init__(self, predictor: ImagePredictor, limits: Limits, metrics: Metrics) -> None:
        self._predictor = predictor
        self._most = min(limits.batch_images, predictor.largest_batch or limits.batch_images)
        self._wait_seconds = limits.batch_wait_seconds
        self._metrics = metrics
        self._queue: asyncio.Queue[_Waiting] = asyncio.Queue()
        self._network = ThreadPoolExecutor(1, thread_name_prefix="network")
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to answer."""
        self._task = asyncio.create_task(self._answer_all())

    async def stop(self) -> None:
        """Stop; whoever waits has been answered before."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._network.shutdown()

    async def answers(self, images: Sequence[Prepared], top_k: int) -> list[Answer]:
        """One answer for each image, in order; each may have more labels than were asked for."""
        loop = asyncio.get_running_loop()
        waiting = [_Waiting(image, top_k, loop.create_future()) for image in images]
        for each in waiting:
            self._queue.put_nowait(each)
        try:
            return list(await asyncio.gather(*(each.answer for each in waiting)))
        finally:
            # Those that nobody waits for any more stay in the queue until the network comes to them: without the image.
            for each in waiting:
                each.image = None

    async def _answer_all(self) -> None:
        while True:
            # Those whose client was told to come back are not asked about.
            batch = [each for each in await self._batch() if not each.answer.done()]
            if not batch:
                continue
            self._metrics.batch(len(batch))
            ask = partial(self._predictor.answer, [each.image for each in batch], max(each.top_k for each in batch))
            try:
                answers = await asyncio.get_running_loop().run_in_executor(self._network, ask)
            except Exception as error:  # noqa: BLE001  # each request says it, and the next batch may be answered
                for each in batch:
                    if not each.answer.done():
                        each.answer.set_exception(error)
                continue
            for each, answer in zip(batch, answers, strict=True):
                if not each.answer.done():
                    each.answer.set_result(answer)

    async def _batch(self) -> list[_Waiting]:
        """What waits, or comes within the time that is waited for more."""
        batch = [await self._queue.get()]
        with suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds):
                while len(batch) < self._most:
                    batch.append(await self._queue.get())
        while len(batch) < self._most and not self._queue.empty():
            batch.append(self._queue.get_nowait())
        return batch
