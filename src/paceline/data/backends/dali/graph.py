"""What is DALI told to do with a batch of image files? To decode, crop, resize and mirror each as it is asked.

The graph has no random operator: boxes, sizes and flips come from outside, beside the files.
"""

from __future__ import annotations

import importlib
import io
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.utils.dlpack import from_dlpack

from paceline.data.image.augmentation import Box
from paceline.data.image.source import Content
from paceline.data.image.transforms import Shape
from paceline.errors import DataError

# Buffers that take the largest image of ImageNet, so that none is made anew while training (NVIDIA
# DeepLearningExamples, ConvNets, dataloaders.py; DALI's guide to the hardware decoder). Each thread has its own.
_BUFFERS = {
    "device_memory_padding": 211_025_920,
    "host_memory_padding": 140_544_512,
    "preallocate_width_hint": 5980,
    "preallocate_height_hint": 6430,
}
_HARDWARE_SHARE = 0.65  # DALI's own; the GPU's other cores decode the rest
_FILTERS = {"bilinear": "INTERP_LINEAR", "bicubic": "INTERP_CUBIC"}


def why_unavailable() -> str:
    """Why DALI cannot be used here, in Python's own words; empty if it can."""
    try:
        importlib.import_module("nvidia.dali.fn")
    except (ImportError, OSError) as error:  # not installed, or a library that it needs is missing
        return str(error)
    return ""


def how_to_install() -> str:
    """The command that installs the DALI which fits torch's CUDA."""
    cuda = torch.version.cuda or "13"
    return "pip install 'paceline[dali]'" if int(cuda.partition(".")[0]) >= 13 else "pip install nvidia-dali-cuda120"


class Asked(NamedTuple):
    """What DALI is asked to make of one file.

    Attributes:
        content: The file.
        box: The part of the image to decode.
        scaled: Height and width that it is resized to.
        corner: Top and left of what is kept of that.
        shape: Height and width of what is kept.
        flip: Whether that is mirrored.
    """

    content: Content
    box: Box
    scaled: Shape
    corner: tuple[int, int]
    shape: Shape
    flip: bool


@dataclass(frozen=True, kw_only=True)
class GraphSettings:
    """What does not change from batch to batch.

    Attributes:
        threads: DALI's threads.
        ahead: Batches that may be asked for and not yet taken.
        device: The CPU, or the GPU that decodes and on which batches stay.
        channels: 1 or 3.
        interpolation: As in :class:`paceline.data.image.transforms.View`.
    """

    threads: int
    ahead: int
    device: torch.device
    channels: int
    interpolation: str


class Graph:
    """Batches of at most so many images, taken in the order in which they were asked for."""

    def __init__(self, most: int, settings: GraphSettings) -> None:
        """Build the graph, and run it on blank pictures.

        Raises:
            DataError: If DALI cannot run at all.
        """
        self.most = most
        self._on_gpu = settings.device.type == "cuda"
        self._pipeline = define(most, settings)
        self._held: deque[list[np.ndarray[Any, Any]]] = deque()
        try:
            self._warm_up(settings.ahead)
        except RuntimeError as error:
            raise DataError(
                f"DALI cannot decode on {settings.device} ({str(error).splitlines()[0]}): use data.decode_on=cpu, or "
                "data.backend=pytorch."
            ) from error

    def ask(self, batch: Sequence[Asked]) -> None:
        """Begin a batch; it is worked on beside this thread."""
        self._feed(batch)
        self._pipeline.schedule_run()

    def take(self) -> torch.Tensor:
        """Wait for the oldest batch; uint8 [N, C, H, W].

        On a GPU it is not waited for, but bound to the current stream.

        Raises:
            RuntimeError: If DALI could not make it. The graph cannot be used any more.
        """
        # Outputs are torch's from here on: DALI allocates others for the batches to come.
        stream = torch.cuda.current_stream() if self._on_gpu else None
        (images,) = self._pipeline.outputs(cuda_stream=stream)
        self._held.popleft()
        return from_dlpack(images.as_tensor())

    def _warm_up(self, batches: int) -> None:
        # DALI runs as many batches as it works on ahead when it is first started, whatever it has been given by then.
        blank = Asked(_blank_jpeg(), Box(0, 0, 8, 8), (8, 8), (0, 0), (8, 8), flip=False)
        for _ in range(batches):
            self._feed([blank])
        self._pipeline.schedule_run()
        for _ in range(batches):
            self.take()

    def _feed(self, batch: Sequence[Asked]) -> None:
        files = [np.frombuffer(each.content, dtype=np.uint8) for each in batch]
        boxes = np.array([each.box for each in batch], dtype=np.int32)
        numbers = {
            "start": boxes[:, :2].copy(),
            "extent": boxes[:, 2:].copy(),
            "scaled": np.array([each.scaled for each in batch], dtype=np.float32),
            "kept": np.array([each.shape for each in batch], dtype=np.float32),
            "top": np.array([_place(each, 0) for each in batch], dtype=np.float32),
            "left": np.array([_place(each, 1) for each in batch], dtype=np.float32),
            "mirror": np.array([each.flip for each in batch], dtype=np.int32),
        }
        self._held.append(files)  # not copied, unless for a GPU: DALI reads them here
        self._pipeline.feed_input("files", files)
        for name, values in numbers.items():
            self._pipeline.feed_input(name, values)


def define(most: int, settings: GraphSettings) -> Any:
    """DALI's pipeline for batches of at most ``most`` images."""
    from nvidia.dali import fn, pipeline_def, types

    on_gpu = settings.device.type == "cuda"

    def number(name: str, kind: Any, dimensions: int) -> Any:
        return fn.external_source(name=name, dtype=kind, ndim=dimensions)

    def graph() -> Any:
        images = fn.decoders.image_slice(
            # Kept here until the batch is taken; a GPU may still be reading them then.
            fn.external_source(name="files", dtype=types.UINT8, ndim=1, no_copy=not on_gpu),
            device="mixed" if on_gpu else "cpu",
            start=number("start", types.INT32, 1),
            shape=number("extent", types.INT32, 1),
            axes=[0, 1],
            output_type=types.RGB,
            adjust_orientation=False,  # plain files are upright
            jpeg_fancy_upsampling=True,  # as libjpeg does
            **_decoder_on_gpu() if on_gpu else {},
        )
        images = fn.resize(
            images,
            size=number("scaled", types.FLOAT, 1),
            interp_type=getattr(types, _FILTERS[settings.interpolation]),
            antialias=True,
        )
        if settings.channels == 1:
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
        batch_size=most,
        num_threads=settings.threads,
        device_id=settings.device.index if on_gpu else None,
        prefetch_queue_depth=settings.ahead,
        seed=0,
    )
    return defined(graph)()


def _decoder_on_gpu() -> dict[str, Any]:
    # Which image goes to the GPU's JPEG units depends on its company: a deterministic run leaves them alone.
    share = 0.0 if torch.are_deterministic_algorithms_enabled() else _HARDWARE_SHARE
    return {**_BUFFERS, "hw_decoder_load": share}


def _place(asked: Asked, axis: int) -> float:
    """Where the part that is kept begins, as DALI wants it: a share of the room that there is."""
    room = asked.scaled[axis] - asked.shape[axis]
    return asked.corner[axis] / room if room else 0.0


def _blank_jpeg() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, format="JPEG")
    return file.getvalue()
