"""The back-end that decodes, crops and resizes with NVIDIA's DALI, on threads of this process or on the GPU.

DALI orders nothing and draws nothing here. It is fed each image's file, and the box, size and flip that every back-end
computes alike, so that the same sample is shown alike whoever reads it, and there is no state of DALI's to save. A file
that is no plain JPEG, or that DALI cannot decode, is read as by the other back-ends, which also decide whether it is
broken.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from paceline.data.backends.dali.graph import Asked, Graph, GraphSettings
from paceline.data.batch import Batch, BrokenSample
from paceline.data.image.augmentation import Box, Draws, draw, random_resized_box, shrinkage, snapped
from paceline.data.image.batched import shrunk, vary
from paceline.data.image.decode import DecodedPicture, Picture
from paceline.data.image.jpeg_head import plain_jpeg
from paceline.data.image.source import BrokenImageError, EncodedSource
from paceline.data.image.transforms import (
    Shape,
    View,
    evaluation_geometry,
    evaluation_image,
    grows_too_large,
    resized_part,
)
from paceline.data.slices import SampleSlice
from paceline.errors import OneProcessError

_READ_AT_ONCE = 8
_LONGEST_WAIT_SECONDS = 600  # for one batch's files; storage that stalls for longer will not come back

_Row = Asked | torch.Tensor | BrokenSample
"""A sample: for DALI, or made already (uint8 [C, H, W]), or broken."""


@dataclass
class _Work:
    """A slice on its way to a batch.

    Attributes:
        piece: The slice.
        draws: How its images are varied; None in evaluation.
        shape: Height and width of what the model sees.
        reading: Its rows, while files are read.
        rows: Its rows, one for each sample.
        images: What DALI made of those that it was asked for, uint8 [N, C, H, W].
    """

    piece: SampleSlice
    draws: Draws | None
    shape: Shape
    reading: list[Future[list[_Row]]]
    rows: list[_Row] = field(default_factory=list)
    images: torch.Tensor | None = None

    @property
    def asked(self) -> list[Asked]:
        """The rows that are DALI's."""
        return [row for row in self.rows if isinstance(row, Asked)]


class DaliBackend:
    """Serves one split from image files; satisfies :class:`paceline.data.batch.Backend`.

    One call's batches are served at a time.
    """

    def __init__(
        self,
        source: EncodedSource,
        view: View,
        *,
        threads: int,
        prefetch: int = 2,
        decode_on: torch.device | str = "cpu",
        pin_memory: bool = False,
    ) -> None:
        """Read ``source`` with ``threads`` threads of DALI's, and as many that read files.

        Args:
            source: The split's image files.
            view: What the model sees of them; its augmentation has no more than a crop and a flip.
            threads: Threads of each kind.
            prefetch: Batches that DALI works on ahead, and batches whose files are read ahead of those.
            decode_on: The CPU, or the GPU on which batches are made and stay.
            pin_memory: Whether what is made on the CPU is moved to page-locked memory, for faster copies to a GPU.
        """
        self._source = source
        self._view = view
        self._ahead = prefetch
        self._pin_memory = pin_memory
        self._settings = GraphSettings(
            threads=threads,
            ahead=prefetch,
            device=torch.device(decode_on),
            channels=view.channels,
            interpolation=view.interpolation,
        )
        # A crop of the padded image comes before the flip: both are then made of the whole batch.
        self._flips_later = view.augment is not None and view.augment.crop == "pad"
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="dali-reader")
        self._last_read = -1
        self._refused: set[int] = set()  # files that DALI is not asked for again
        self._graph: Graph | None = None
        self._stream: Generator[Batch, None, None] | None = None

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice, in order; a stream of an earlier call ends here.

        Raises:
            OneProcessError: If reading hangs, or fails for another reason than a broken file; the message names the
                sample.
        """
        if self._stream is not None:
            self._stream.close()
        self._stream = self._serve(slices)
        return self._stream

    def reading(self) -> str:
        """Which file was begun last; for people."""
        return f"the last file begun is sample {self._named(self._last_read)}" if self._last_read >= 0 else ""

    def close(self) -> None:
        """End the threads."""
        if self._stream is not None and inspect.getgeneratorstate(self._stream) != inspect.GEN_RUNNING:
            self._stream.close()
        self._stream = self._graph = None
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _serve(self, slices: Iterable[SampleSlice]) -> Generator[Batch, None, None]:
        pieces = iter(slices)
        reading: deque[_Work] = deque()
        running: deque[_Work] = deque()
        try:
            while True:
                while len(reading) + len(running) < 2 * self._ahead and (piece := next(pieces, None)) is not None:
                    reading.append(self._begin(piece))
                while reading and len(running) < self._ahead:
                    self._run(reading.popleft(), running)
                if not running:
                    return
                self._finish(running[0], running)
                yield self._batch(running.popleft())
        finally:
            for work in reading:
                for future in work.reading:
                    future.cancel()
            if running:
                self._graph = None  # with what it was asked for in vain

    def _begin(self, piece: SampleSlice) -> _Work:
        """Have a slice's files read."""
        view, ids = self._view, piece.ids.tolist()
        draws = None if view.augment is None else draw(view.augment, view.seed, piece.epoch, piece.ids)
        size = view.read_size_at(piece.epoch)
        work = _Work(piece, draws, piece.shape or (size, size), [])
        for at in range(0, len(ids), _READ_AT_ONCE):
            rows = range(at, min(at + _READ_AT_ONCE, len(ids)))
            work.reading.append(self._readers.submit(lambda rows: [self._row(work, row) for row in rows], rows))
        return work

    def _run(self, work: _Work, running: deque[_Work]) -> None:
        """Wait for a slice's files, and hand them to DALI."""
        for future in work.reading:
            try:
                work.rows += future.result(_LONGEST_WAIT_SECONDS)
            except TimeoutError:
                raise OneProcessError(f"no batch came for {_LONGEST_WAIT_SECONDS} s: {self.reading()}.") from None
        work.reading = []
        if self._graph is not None and len(work.asked) > self._graph.most:
            for each in running:
                self._finish(each, running)
            self._graph = None
        running.append(work)
        try:
            self._ask(work)
        except RuntimeError as error:
            self._recover(running, error)

    def _ask(self, work: _Work) -> None:
        asked = work.asked
        if not asked:
            return
        if self._graph is None:
            self._graph = Graph(len(asked), self._settings)
        self._graph.ask(asked)

    def _finish(self, work: _Work, running: deque[_Work]) -> None:
        """Wait for DALI's part of a slice, the oldest that is unfinished."""
        while work.images is None and work.asked:
            assert self._graph is not None
            try:
                work.images = self._graph.take()
            except RuntimeError as error:
                self._recover(running, error)

    def _recover(self, running: Iterable[_Work], error: RuntimeError) -> None:
        """Read those files that DALI cannot decode, and ask it for the others anew.

        DALI gives up its graph, with all that it works on, for one file, and does not say which.

        Raises:
            OneProcessError: If it can decode each of them: then something else is wrong.
        """
        self._graph = None
        unfinished = [work for work in running if work.images is None]
        if not sum(map(self._read_refused, unfinished)):
            what = str(error).splitlines()[0]
            raise OneProcessError(f"DALI failed, though it can decode each image: {what}") from error
        most = max(len(work.asked) for work in unfinished)
        self._graph = Graph(most, self._settings) if most else None
        for work in unfinished:
            self._ask(work)

    def _read_refused(self, work: _Work) -> int:
        """Read those files of a slice that DALI cannot decode; each is tried alone, so that none suffers for others."""
        graph = Graph(1, self._settings)
        refused = 0
        for row, asked in enumerate(work.rows):
            if not isinstance(asked, Asked):
                continue
            try:
                graph.ask([asked])
                graph.take()
            except RuntimeError:
                graph = Graph(1, self._settings)
                self._refused.add(int(work.piece.ids[row]))
                work.rows[row] = self._decoded(work, row)
                refused += 1
        return refused

    def _row(self, work: _Work, row: int) -> _Row:
        sample = int(work.piece.ids[row])
        self._last_read = sample
        try:
            content = self._source.encoded(sample)
            size = plain_jpeg(content)
            if size is None or sample in self._refused:
                return self._decoded(work, row)
        except BrokenImageError as error:
            return BrokenSample(sample, error.path, error.reason)
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise OneProcessError(f"Reading sample {self._named(sample)} failed: {what}") from error
        box, flip = self._box(work, row, size), self._flip(work, row)
        if box is not None:
            box = self._as_shrunk(box, size, work.shape[0])
            return Asked(content, box, work.shape, (0, 0), work.shape, flip)
        scaled, corner = evaluation_geometry(size, work.shape, self._view.evaluation_crop)
        if grows_too_large(size, scaled):
            return self._decoded(work, row)
        return Asked(content, Box(0, 0, *size), scaled, corner, work.shape, flip)

    def _decoded(self, work: _Work, row: int) -> torch.Tensor | BrokenSample:
        """Read a sample without DALI, as the other back-ends do."""
        view, sample = self._view, int(work.piece.ids[row])
        try:
            picture: Picture | DecodedPicture
            if sample in self._refused:
                picture = DecodedPicture(self._source.read(sample))
            else:
                picture = Picture(self._source.encoded(sample), view.channels, self._source.path(sample))
            box = self._box(work, row, picture.size)
            shrink = 1
            if box is not None and view.augment is not None and view.augment.shrink_on_load and picture.shrinks:
                shrink = shrinkage(box, work.shape[0])
                box = snapped(box, shrink)
            pixels = picture.part(box, shrink)
        except BrokenImageError as error:
            return BrokenSample(sample, error.path, error.reason)
        if box is None:
            shown = evaluation_image(pixels, work.shape, view.evaluation_crop, view.interpolation)
        else:
            shown = resized_part(pixels, work.shape[0], view.interpolation)
        return shown.flip(-1) if self._flip(work, row) else shown

    def _box(self, work: _Work, row: int, size: Shape) -> Box | None:
        """The part of an image that is shown; None where the whole is, but for its edges."""
        augment, draws = self._view.augment, work.draws
        if augment is None or draws is None or draws.attempts is None:
            return None
        return random_resized_box(draws.attempts[row], size, augment.scale, augment.ratio)

    def _as_shrunk(self, box: Box, size: Shape, target: int) -> Box:
        """Where the other back-ends move a box's edges to decode its file smaller, move them too."""
        if self._view.augment is None or not self._view.augment.shrink_on_load:
            return box
        moved = snapped(box, shrinkage(box, target))
        # Of a smaller picture, the last row and column may stand for fewer than a whole step.
        return Box(
            moved.top, moved.left, min(moved.height, size[0] - moved.top), min(moved.width, size[1] - moved.left)
        )

    def _flip(self, work: _Work, row: int) -> bool:
        return work.draws is not None and not self._flips_later and bool(work.draws.flip[row])

    def _batch(self, work: _Work) -> Batch:
        """Put together what DALI made, what was read otherwise, and what is broken."""
        broken = tuple(row for row in work.rows if isinstance(row, BrokenSample))
        whole = np.array([not isinstance(row, BrokenSample) for row in work.rows], dtype=bool)
        ids = work.piece.ids[whole] if broken else work.piece.ids
        inputs = self._inputs(work)
        if self._flips_later and self._view.augment is not None and work.draws is not None:
            inputs = vary(inputs, self._view.augment, work.draws.where(whole))
        if work.draws is not None:
            inputs = shrunk(inputs, self._view.size_at(work.piece.epoch), self._view.interpolation)
        targets = torch.from_numpy(self._source.labels[ids])
        if self._pin_memory:
            targets = targets.pin_memory()
            inputs = inputs.pin_memory() if inputs.device.type == "cpu" else inputs
        return Batch(inputs, targets, ids, work.piece, broken)

    def _inputs(self, work: _Work) -> torch.Tensor:
        rows = [row for row in work.rows if not isinstance(row, BrokenSample)]
        made = [(at, row) for at, row in enumerate(rows) if isinstance(row, torch.Tensor)]
        if work.images is not None and not made:
            return work.images
        shape = (len(rows), self._view.channels, *work.shape)
        inputs = torch.empty(shape, dtype=torch.uint8, device=self._settings.device)
        if work.images is not None:
            places = torch.tensor([at for at, row in enumerate(rows) if isinstance(row, Asked)])
            inputs[self._there(places)] = work.images
        if made:
            pictures = self._there(torch.stack([picture for _, picture in made]))
            inputs[self._there(torch.tensor([at for at, _ in made]))] = pictures
        return inputs

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host where the batch is; from pageable memory, the copy would make the host wait for it."""
        device = self._settings.device
        on_gpu = self._pin_memory and device.type != "cpu"
        return (tensor.pin_memory() if on_gpu else tensor).to(device, non_blocking=True)

    def _named(self, sample: int) -> str:
        return f"{sample} ({self._source.path(sample)})"
