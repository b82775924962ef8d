"""How do files become answers without the network waiting for the decoder, in the order they were given in?

Threads read and decode ahead of the network, only so far that memory does not grow with the number of files. A batch is
so many files in a row, unreadable ones among them, so that the same files at the same batch size give the same bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from paceline.data.image.decode import BrokenImageError
from paceline.inference.answers import Answer, ImagePredictor, Prepared
from paceline.inference.sources import PictureFile
from paceline.machine import available_cores

BATCH = 64
"""Images answered at once, unless told otherwise."""

Seen = Callable[[Prepared, Answer], None]


def answers_ahead(
    predictor: ImagePredictor,
    pictures: Iterable[PictureFile],
    *,
    top_k: int,
    batch_size: int = BATCH,
    seen: Seen | None = None,
) -> Generator[Answer, None, None]:
    """Yield one answer for each picture, in order; an unreadable one is an answer too.

    Args:
        predictor: Answers.
        pictures: The files; they are asked for as they are needed.
        top_k: Most labels of each.
        batch_size: Images answered at once; fewer where the predictor says so.
        seen: Told of each image that could be read, and its answer.
    """
    batch_size = min(batch_size, predictor.largest_batch or batch_size)
    threads = available_cores()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="decoder")
    waiting: deque[tuple[PictureFile, Future[Prepared]]] = deque()
    source = iter(pictures)
    try:
        while True:
            for picture in islice(source, 2 * batch_size + threads - len(waiting)):
                waiting.append((picture, pool.submit(_prepared, predictor, picture)))
            if not waiting:
                return
            batch = [waiting.popleft() for _ in range(min(batch_size, len(waiting)))]
            yield from _answered(predictor, batch, top_k, seen)
            batch.clear()
    finally:
        pool.shutdown(cancel_futures=True)


def _prepared(predictor: ImagePredictor, picture: PictureFile) -> Prepared:
    return predictor.prepare(picture.read())


def _answered(
    predictor: ImagePredictor,
    batch: Iterable[tuple[PictureFile, Future[Prepared]]],
    top_k: int,
    seen: Seen | None,
) -> Iterator[Answer]:
    prepared: list[Prepared] = []
    outcomes: list[tuple[PictureFile, str | None]] = []
    for picture, decoding in batch:
        try:
            prepared.append(decoding.result())
            outcomes.append((picture, None))
        except BrokenImageError as error:
            outcomes.append((picture, error.reason))
    answers = iter(zip(prepared, predictor.answer(prepared, top_k), strict=True) if prepared else ())
    for picture, reason in outcomes:
        if reason is not None:
            yield predictor.unreadable(picture.path, reason)
            continue
        image, answer = next(answers)
        answer = answer.at(picture.path)
        if seen is not None:
            seen(image, answer)
        yield answer
