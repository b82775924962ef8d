"""The back-end that decodes, crops and resizes with NVIDIA DALI, on threads of this process or on the GPU.

DALI does not control the order or the random draws of samples. It receives each image's file, and the box, size and
flip that all back-ends compute alike. So a sample looks the same in any back-end, and DALI has no state to save. DALI
gets only plain JPEG files, whose markers guarantee that all decoders produce the same picture (ISO/IEC 10918-1, annex
B). Other files (rotated by EXIF, CMYK, arithmetic coding, several pictures, damaged, other formats), and those that
DALI cannot decode, are read as in the other back-ends, which also determine whether a file is broken.
"""

from __future__ import annotations

import inspect
import io
import re
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.dlpack import from_dlpack

from paceline.data.batch import Batch, BrokenSample
from paceline.data.image.decode import Box, DecodedImage, LazyImage
from paceline.data.image.image_store import shrunk, vary
from paceline.data.image.pillow_pixels import LARGEST_PIXELS, ORIENTATION
from paceline.data.image.source import BrokenImageError, Content, EncodedSource
from paceline.data.image.transforms import (
    Draws,
    Shape,
    View,
    draw,
    evaluation_geometry,
    evaluation_image,
    is_too_large,
    random_resized_box,
    resized_part,
    shrinkage,
    snapped,
)
from paceline.data.slices import SampleSlice
from paceline.errors import DataError, OneProcessError

_BEGIN, _END = b"\xff\xd8", b"\xff\xd9"
_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive, all with Huffman coding
_OTHER_FRAMES = (0xC3, *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0))
_SCAN = 0xDA
_EXIF_SEGMENT, _SEVERAL_SEGMENT, _ADOBE_SEGMENT = 0xE1, 0xE2, 0xEE
# Tables, restart intervals, scans, application data and comments: everything allowed between two scans.
_BETWEEN_SCANS = (0xC4, 0xDB, 0xDD, _SCAN, *range(0xE0, 0xF0), 0xFE)
_MARKER: re.Pattern[bytes] = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")  # except restart markers within a scan
_LUMA_CHROMA = (1, 2, 3)


def plain_jpeg(content: Content) -> Shape | None:
    """Return height and width of a plain JPEG file, or None for any other content.

    Args:
        content: The whole file.
    """
    if len(content) < len(_BEGIN + _END) or content[:2] != _BEGIN or content[-2:] != _END:
        return None
    size = None
    position = len(_BEGIN)
    while position + 4 <= len(content) and content[position] == 0xFF:
        marker = content[position + 1]
        if marker == 0xFF:  # fill bytes
            position += 1
            continue
        if marker == _SCAN:
            return size if _only_scans_follow(content, position) else None
        end = position + 2 + int.from_bytes(content[position + 2 : position + 4], "big")
        segment = content[position + 4 : end]
        if marker in _FRAMES and size is None:
            size = _plain_size(segment)
        elif marker in _FRAMES + _OTHER_FRAMES or _may_change_the_picture(marker, bytes(segment)):
            return None
        position = end
    return None


def _only_scans_follow(content: Content, position: int) -> bool:
    """Whether the rest of the file, from its first scan ``position``, has only scans and segments allowed between them.

    In scan data, a byte of 255 is followed by a zero. An unexpected marker in it is damage, which only some decoders
    tolerate.
    """
    while (match := _MARKER.search(content, position)) is not None:
        position = match.start()
        if content[position + 1] not in _BETWEEN_SCANS or position + 4 > len(content):
            return position == len(content) - len(_END)
        position += 2 + int.from_bytes(content[position + 2 : position + 4], "big")
    return False


def _plain_size(frame: Content) -> Shape | None:
    """Return height and width from a frame segment, if its components are those of a usual picture."""
    if len(frame) < 6 or len(frame) < 6 + 3 * frame[5] or frame[0] != 8:
        return None
    components = tuple(frame[6 : 6 + 3 * frame[5] : 3])
    height, width = (int.from_bytes(frame[at : at + 2], "big") for at in (1, 3))
    # Other component ids may mean other colours; a height of 0 means that it follows after the scan.
    is_usual = len(components) == 1 or components == _LUMA_CHROMA
    return (height, width) if is_usual and 0 < height * width <= LARGEST_PIXELS else None


def _may_change_the_picture(marker: int, segment: bytes) -> bool:
    """Whether an application segment indicates that the samples are not the upright picture."""
    if marker == _EXIF_SEGMENT and not segment.startswith(b"Exif\0"):
        return b"Orientation" in segment  # in XMP, which is XML
    if marker == _EXIF_SEGMENT:
        exif = Image.Exif()
        try:
            exif.load(segment)
            return bool(exif.get(ORIENTATION, 1) != 1)
        except Exception:  # noqa: BLE001 (metadata of any kind of damage; the other decoder says what they say)
            return True
    if marker == _SEVERAL_SEGMENT:
        return segment.startswith(b"MPF\0")
    # The last byte of Adobe's segment gives the colour transform: 0 none, 1 YCbCr.
    return marker == _ADOBE_SEGMENT and segment.startswith(b"Adobe") and segment[11:12] != b"\x01"


# Buffers sized for ImageNet's largest image, so that none is reallocated in training (NVIDIA DeepLearningExamples,
# ConvNets, dataloaders.py; DALI's guide to the hardware decoder). Each thread has separate ones.
_BUFFERS = {
    "device_memory_padding": 211_025_920,
    "host_memory_padding": 140_544_512,
    "preallocate_width_hint": 5980,
    "preallocate_height_hint": 6430,
}
_HARDWARE_SHARE = 0.65  # DALI's default; the GPU's other cores decode the rest
_FILTERS = {"bilinear": "INTERP_LINEAR", "bicubic": "INTERP_CUBIC"}


class SampleRequest(NamedTuple):
    """A DALI request for one file.

    Attributes:
        content: The file.
        box: Region of the image to decode.
        scaled: Height and width after resizing.
        corner: Top and left of the crop after resizing.
        shape: Height and width of the crop.
        flip: Whether to mirror it.
    """

    content: Content
    box: Box
    scaled: Shape
    corner: tuple[int, int]
    shape: Shape
    flip: bool


class DaliGraph:
    """A DALI pipeline for batches of limited size, processed in request order."""

    def __init__(self, batch_size: int, *, threads: int, ahead: int, device: torch.device, view: View) -> None:
        """Build the pipeline and run it on blank pictures.

        Args:
            batch_size: Maximum batch size.
            threads: Number of DALI threads.
            ahead: Maximum number of requested batches that are not taken yet.
            device: The CPU, or the GPU that decodes and holds the batches.
            view: Channels and resizing of images.

        Raises:
            DataError: If DALI cannot run.
        """
        self.most = batch_size
        self._on_gpu = device.type == "cuda"
        self._pipeline = define(batch_size, threads=threads, ahead=ahead, device=device, view=view)
        self._inputs: deque[list[np.ndarray[Any, Any]]] = deque()
        # On its first start DALI runs as many batches as its prefetch depth, whatever the input.
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, format="JPEG")
        blank = SampleRequest(file.getvalue(), Box(0, 0, 8, 8), (8, 8), (0, 0), (8, 8), flip=False)
        try:
            for _ in range(ahead):
                self._feed([blank])
            self._pipeline.schedule_run()
            for _ in range(ahead):
                self.take()
        except RuntimeError as error:
            raise DataError(
                f"DALI cannot decode on {device} ({str(error).splitlines()[0]}): use data.decode_on=cpu, or "
                "data.backend=pytorch."
            ) from error

    def submit(self, batch: Sequence[SampleRequest]) -> None:
        """Request a batch; it is processed in the background."""
        self._feed(batch)
        self._pipeline.schedule_run()

    def take(self) -> torch.Tensor:
        """Wait for the oldest batch; uint8 [N, C, H, W].

        On a GPU this does not block; the current stream waits for the batch.

        Raises:
            RuntimeError: If DALI fails. The pipeline is unusable afterwards.
        """
        # The outputs belong to torch from here on: DALI allocates new ones for later batches.
        stream = torch.cuda.current_stream() if self._on_gpu else None
        (images,) = self._pipeline.outputs(cuda_stream=stream)
        self._inputs.popleft()
        return from_dlpack(images.as_tensor())

    def _feed(self, batch: Sequence[SampleRequest]) -> None:
        files = [np.frombuffer(each.content, dtype=np.uint8) for each in batch]
        boxes = np.array([each.box for each in batch], dtype=np.int32)
        # Crop offset in DALI's form: a share of the available room.
        free = np.array([each.scaled for each in batch]) - np.array([each.shape for each in batch])
        offsets = (np.array([each.corner for each in batch]) / np.maximum(free, 1)).astype(np.float32)
        numbers = {
            "start": boxes[:, :2].copy(),
            "extent": boxes[:, 2:].copy(),
            "scaled": np.array([each.scaled for each in batch], dtype=np.float32),
            "kept": np.array([each.shape for each in batch], dtype=np.float32),
            "top": offsets[:, 0].copy(),
            "left": offsets[:, 1].copy(),
            "mirror": np.array([each.flip for each in batch], dtype=np.int32),
        }
        self._inputs.append(files)  # not copied, except to a GPU: DALI reads them in place
        self._pipeline.feed_input("files", files)
        for name, values in numbers.items():
            self._pipeline.feed_input(name, values)


def define(batch_size: int, *, threads: int, ahead: int, device: torch.device, view: View) -> Any:
    """Define DALI's pipeline for batches of at most ``batch_size`` images."""
    from nvidia.dali import fn, pipeline_def, types

    on_gpu = device.type == "cuda"
    # The GPU's JPEG units are used depending on the rest of the batch, so a deterministic run does not use them.
    share = 0.0 if torch.are_deterministic_algorithms_enabled() else _HARDWARE_SHARE
    gpu_options: dict[str, Any] = {**_BUFFERS, "hw_decoder_load": share} if on_gpu else {}

    def number(name: str, kind: Any, dimensions: int) -> Any:
        return fn.external_source(name=name, dtype=kind, ndim=dimensions)

    def graph() -> Any:
        images = fn.decoders.image_slice(
            # Kept alive until the batch is taken, since a GPU may still be reading them.
            fn.external_source(name="files", dtype=types.UINT8, ndim=1, no_copy=not on_gpu),
            device="mixed" if on_gpu else "cpu",
            start=number("start", types.INT32, 1),
            shape=number("extent", types.INT32, 1),
            axes=[0, 1],
            output_type=types.RGB,
            adjust_orientation=False,  # plain files are upright
            jpeg_fancy_upsampling=True,  # as libjpeg does
            **gpu_options,
        )
        images = fn.resize(
            images,
            size=number("scaled", types.FLOAT, 1),
            interp_type=getattr(types, _FILTERS[view.interpolation]),
            antialias=True,
        )
        if view.channels == 1:
            images = fn.color_space_conversion(images, image_type=types.RGB, output_type=types.GRAY)
        return fn.crop_mirror_normalize(
            images,
            crop=number("kept", types.FLOAT, 1),
            crop_pos_y=number("top", types.FLOAT, 0),
            crop_pos_x=number("left", types.FLOAT, 0),
            mirror=number("mirror", types.INT32, 0),
            dtype=types.UINT8,  # the prefetcher normalises, as for every back-end
            output_layout="CHW",
        )

    defined = pipeline_def(
        batch_size=batch_size,
        num_threads=threads,
        device_id=device.index if on_gpu else None,
        prefetch_queue_depth=ahead,
        seed=0,
    )
    return defined(graph)()


_READ_AT_ONCE = 8
_LONGEST_WAIT_SECONDS = 600  # for one batch's files; storage that stalls for longer is unlikely to recover

_Row = SampleRequest | torch.Tensor | BrokenSample
"""A sample: for DALI, already decoded (uint8 [C, H, W]), or broken."""


@dataclass
class _Work:
    """A slice in progress.

    Attributes:
        piece: The slice.
        draws: Random draws of its augmentation; None in evaluation.
        shape: Height and width of the model's input.
        futures: Futures of its rows while files are read.
        rows: Its rows, one per sample.
        images: Images from DALI, uint8 [N, C, H, W].
    """

    piece: SampleSlice
    draws: Draws | None
    shape: Shape
    futures: list[Future[list[_Row]]]
    rows: list[_Row] = field(default_factory=list)
    images: torch.Tensor | None = None

    @property
    def requests(self) -> list[SampleRequest]:
        """The rows for DALI."""
        return [row for row in self.rows if isinstance(row, SampleRequest)]


class DaliBackend:
    """Serves one split from image files; implements :class:`paceline.data.batch.Backend`.

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
    ) -> None:
        """Read ``source`` with ``threads`` DALI threads and as many reading threads.

        Args:
            source: The split's image files.
            view: Preprocessing; its augmentation is limited to a crop and a flip.
            threads: Number of threads of each kind.
            prefetch: Batches that DALI prefetches, and batches whose files are read ahead of those.
            decode_on: The CPU, or the GPU that decodes and holds the batches.
        """
        self._source = source
        self._view = view
        self._ahead = prefetch
        self._device = torch.device(decode_on)
        self._new_graph = partial(DaliGraph, threads=threads, ahead=prefetch, device=self._device, view=view)
        # A padded crop precedes the flip, so both are applied to the whole batch.
        self._flips_later = view.augment is not None and view.augment.crop == "pad"
        self._readers = ThreadPoolExecutor(threads, thread_name_prefix="dali-reader")
        self._last_read = -1
        self._refused: set[int] = set()  # files that are not sent to DALI again
        self._graph: DaliGraph | None = None
        self._stream: Generator[Batch, None, None] | None = None

    def batches(self, slices: Iterable[SampleSlice]) -> Iterator[Batch]:
        """Yield one uint8 batch per slice, in order; a new call ends an earlier call's stream.

        Raises:
            OneProcessError: If reading hangs, or fails for a reason other than a broken file; the message names the
                sample.
        """
        if self._stream is not None:
            self._stream.close()
        self._stream = self._serve(slices)
        return self._stream

    def reading(self) -> str:
        """Describe the file that was started last."""
        last = self._last_read
        return f"the last file started is sample {last} ({self._source.path(last)})" if last >= 0 else ""

    def close(self) -> None:
        """Stop the threads."""
        if self._stream is not None and inspect.getgeneratorstate(self._stream) != inspect.GEN_RUNNING:
            self._stream.close()
        self._stream = self._graph = None
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _serve(self, slices: Iterable[SampleSlice]) -> Generator[Batch, None, None]:
        remaining = iter(slices)
        reading: deque[_Work] = deque()
        running: deque[_Work] = deque()
        try:
            while True:
                while len(reading) + len(running) < 2 * self._ahead and (piece := next(remaining, None)) is not None:
                    reading.append(self._begin(piece))
                while reading and len(running) < self._ahead:
                    self._run(reading.popleft(), running)
                if not running:
                    return
                self._finish(running[0], running)
                yield self._batch(running.popleft())
        finally:
            for work in reading:
                for future in work.futures:
                    future.cancel()
            if running:
                self._graph = None  # discards its outstanding requests

    def _begin(self, piece: SampleSlice) -> _Work:
        """Start reading a slice's files."""
        view, ids = self._view, piece.ids.tolist()
        draws = None if view.augment is None else draw(view.augment, view.seed, piece.epoch, piece.variation_keys)
        size = view.read_size_at(piece.epoch)
        work = _Work(piece, draws, piece.shape or (size, size), [])
        for at in range(0, len(ids), _READ_AT_ONCE):
            rows = range(at, min(at + _READ_AT_ONCE, len(ids)))
            work.futures.append(self._readers.submit(lambda rows: [self._row(work, row) for row in rows], rows))
        return work

    def _run(self, work: _Work, running: deque[_Work]) -> None:
        """Wait for a slice's files and send them to DALI."""
        for future in work.futures:
            try:
                work.rows += future.result(_LONGEST_WAIT_SECONDS)
            except TimeoutError:
                raise OneProcessError(f"no batch came for {_LONGEST_WAIT_SECONDS} s: {self.reading()}.") from None
        work.futures = []
        if self._graph is not None and len(work.requests) > self._graph.most:
            for each in running:
                self._finish(each, running)
            self._graph = None
        running.append(work)
        try:
            self._submit(work)
        except RuntimeError as error:
            self._recover(running, error)

    def _submit(self, work: _Work) -> None:
        requests = work.requests
        if not requests:
            return
        if self._graph is None:
            self._graph = self._new_graph(len(requests))
        self._graph.submit(requests)

    def _finish(self, work: _Work, running: deque[_Work]) -> None:
        """Wait for DALI's part of the oldest unfinished slice."""
        while work.images is None and work.requests:
            assert self._graph is not None
            try:
                work.images = self._graph.take()
            except RuntimeError as error:
                self._recover(running, error)

    def _recover(self, running: Iterable[_Work], error: RuntimeError) -> None:
        """Read the files that DALI cannot decode, and request the others again.

        A single bad file makes DALI's pipeline fail with all pending batches, without naming the file.

        Raises:
            OneProcessError: If it can decode each of them, so the error has another cause.
        """
        self._graph = None
        unfinished = [work for work in running if work.images is None]
        if not sum(map(self._read_refused, unfinished)):
            reason = str(error).splitlines()[0]
            raise OneProcessError(f"DALI failed, though it can decode each image: {reason}") from error
        batch_size = max(len(work.requests) for work in unfinished)
        self._graph = self._new_graph(batch_size) if batch_size else None
        for work in unfinished:
            self._submit(work)

    def _read_refused(self, work: _Work) -> int:
        """Read a slice's files that DALI cannot decode; each is tested alone, so that intact files are unaffected."""
        graph = self._new_graph(1)
        refused = 0
        for row, request in enumerate(work.rows):
            if not isinstance(request, SampleRequest):
                continue
            try:
                graph.submit([request])
                graph.take()
            except RuntimeError:
                graph = self._new_graph(1)
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
            reason = f"{type(error).__name__}: {error}"
            raise OneProcessError(f"Reading sample {sample} ({self._source.path(sample)}) failed: {reason}") from error
        box, flip = self._box(work, row, size), self._flip(work, row)
        if box is not None:
            box = self._as_shrunk(box, size, work.shape[0])
            return SampleRequest(content, box, work.shape, (0, 0), work.shape, flip)
        scaled, corner = evaluation_geometry(size, work.shape, self._view.evaluation_crop)
        if is_too_large(size, scaled):
            return self._decoded(work, row)
        return SampleRequest(content, Box(0, 0, *size), scaled, corner, work.shape, flip)

    def _decoded(self, work: _Work, row: int) -> torch.Tensor | BrokenSample:
        """Read a sample without DALI, as in the other back-ends."""
        view, sample = self._view, int(work.piece.ids[row])
        try:
            picture: LazyImage | DecodedImage
            if sample in self._refused:
                picture = DecodedImage(self._source.read(sample))
            else:
                picture = LazyImage(self._source.encoded(sample), view.channels, self._source.path(sample))
            box = self._box(work, row, picture.size)
            shrink = 1
            if box is not None and view.augment is not None and view.augment.shrink_on_load and picture.shrinks:
                shrink = shrinkage(box, work.shape[0])
                box = snapped(box, shrink)
            pixels = picture.part(box, shrink)
        except BrokenImageError as error:
            return BrokenSample(sample, error.path, error.reason)
        if box is None:
            image = evaluation_image(pixels, work.shape, view.evaluation_crop, view.interpolation)
        else:
            image = resized_part(pixels, work.shape[0], view.interpolation)
        return image.flip(-1) if self._flip(work, row) else image

    def _box(self, work: _Work, row: int, size: Shape) -> Box | None:
        """Return the region of an image that is shown; None for the whole image up to rounding."""
        augment, draws = self._view.augment, work.draws
        if augment is None or draws is None or draws.attempts is None:
            return None
        return random_resized_box(draws.attempts[row], size, augment.scale, augment.ratio)

    def _as_shrunk(self, box: Box, size: Shape, target: int) -> Box:
        """Move a box's edges as the other back-ends do to decode its file at reduced size."""
        if self._view.augment is None or not self._view.augment.shrink_on_load:
            return box
        rect = snapped(box, shrinkage(box, target))
        # In a reduced picture, the last row and column may represent less than a full step.
        return Box(rect.top, rect.left, min(rect.height, size[0] - rect.top), min(rect.width, size[1] - rect.left))

    def _flip(self, work: _Work, row: int) -> bool:
        return work.draws is not None and not self._flips_later and bool(work.draws.flip[row])

    def _batch(self, work: _Work) -> Batch:
        """Combine DALI's images, separately decoded ones, and broken samples."""
        broken = tuple(row for row in work.rows if isinstance(row, BrokenSample))
        intact = np.array([not isinstance(row, BrokenSample) for row in work.rows], dtype=bool)
        ids = work.piece.ids[intact] if broken else work.piece.ids
        inputs = self._inputs(work)
        if self._flips_later and self._view.augment is not None and work.draws is not None:
            inputs = vary(inputs, self._view.augment, work.draws.select(intact))
        if work.draws is not None:
            inputs = shrunk(inputs, self._view.size_at(work.piece.epoch), self._view.interpolation)
        return Batch(inputs, torch.from_numpy(self._source.labels[ids]), ids, work.piece, broken)

    def _inputs(self, work: _Work) -> torch.Tensor:
        rows = [row for row in work.rows if not isinstance(row, BrokenSample)]
        decoded = [row for row in rows if isinstance(row, torch.Tensor)]
        if work.images is not None and not decoded:
            return work.images
        inputs = torch.empty((len(rows), self._view.channels, *work.shape), dtype=torch.uint8, device=self._device)
        is_decoded = torch.tensor([isinstance(row, torch.Tensor) for row in rows], dtype=torch.bool)
        if work.images is not None:
            inputs[self._to_device((~is_decoded).nonzero()[:, 0])] = work.images
        if decoded:
            inputs[self._to_device(is_decoded.nonzero()[:, 0])] = self._to_device(torch.stack(decoded))
        return inputs

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Move a host tensor to the batch's device; from pageable memory, the copy would block the host."""
        device = self._device
        return (tensor if device.type == "cpu" else tensor.pin_memory()).to(device, non_blocking=True)
