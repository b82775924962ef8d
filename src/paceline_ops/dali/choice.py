"""The back-end that ``data.backend=dali`` names: what a recipe may ask of it, and how it opens a split."""

from __future__ import annotations

import importlib

import torch

from paceline.data.image.datasets import ImageDataset
from paceline.data.image.pipeline import share_of_cores
from paceline.data.image.source import SampleSource, encoded_source
from paceline.data.image.transforms import View, variations
from paceline.errors import RecipeError
from paceline.host.world import World
from paceline.recipe.data import Data
from paceline_ops.dali.backend import DaliBackend

_MAX_THREADS_WITH_GPU = 4  # threads: the GPU does most of the work, and each thread has buffers on it


def import_problem() -> str:
    """Return Python's error if DALI is unavailable; empty if it is available."""
    try:
        importlib.import_module("nvidia.dali.fn")
    except (ImportError, OSError) as error:  # not installed, or a required library is missing
        return str(error)
    return ""


def how_to_install() -> str:
    """Return the command that installs the DALI package for torch's CUDA version."""
    cuda = torch.version.cuda or "13"
    return "pip install 'paceline[dali]'" if int(cuda.partition(".")[0]) >= 13 else "pip install nvidia-dali-cuda120"


class Dali:
    """Opens the DALI back-end; implements :class:`paceline.data.image.pipeline.ImageBackend`."""

    def why_unavailable(self) -> str:
        """Return Python's error and the command that installs DALI; empty if it is available."""
        reason = import_problem()
        return f"{reason}: {how_to_install()}" if reason else ""

    def check(self, data: Data, dataset: ImageDataset) -> None:
        """Refuse settings and data sets that DALI does not support, or a machine without it.

        Raises:
            RecipeError: Naming them.
        """
        if names := variations(data.augment):
            keys = ", ".join(f"data.augment.{name}" for name in names)
            raise RecipeError(
                f"data.backend is dali, which varies images by a crop and a flip only, and the recipe asks for {keys}: "
                "use data.backend=pytorch, or leave that out."
            )
        if any(encoded_source(source) is None for source in (dataset.train, dataset.validation)):
            raise RecipeError(
                f"data.backend is dali, which decodes image files, and data.dataset={data.dataset} has none: use "
                "another data.backend; your own data set needs a source with a method encoded(sample) that returns the "
                "file."
            )
        if reason := import_problem():
            raise RecipeError(
                f"data.backend is dali, but DALI cannot be used here ({reason}): run {how_to_install()}, or "
                "use data.backend=pytorch."
            )
        if data.decode_on == "gpu" and data.augment.crop == "pad":
            raise RecipeError(
                "data.decode_on=gpu, but data.augment.crop=pad shifts images on the CPU: use data.decode_on=cpu, or "
                "data.augment.crop=random_resized."
            )
        if data.decode_on == "gpu" and not torch.cuda.is_available():
            raise RecipeError(
                "data.decode_on=gpu, but no CUDA device is visible: use data.decode_on=cpu, or leave it out."
            )

    def workers(self, data: Data, world: World) -> tuple[int, str]:
        """Return DALI's threads per rank, with the reason.

        Raises:
            RecipeError: If the recipe sets 0.
        """
        if data.workers == 0:
            raise RecipeError(
                "data.workers=0, but the dali back-end decodes in its own threads: give at least 1, or leave it out."
            )
        if data.workers != "auto":
            return data.workers, "as the recipe says"
        if not _may_decode_on_gpu(data) or not torch.cuda.is_available():
            return share_of_cores(world)
        limit = f", and no more than {_MAX_THREADS_WITH_GPU}, as the GPU does most of the work"
        return share_of_cores(world, _MAX_THREADS_WITH_GPU, limit)

    def open(self, source: SampleSource, view: View, data: Data, *, workers: int, device: torch.device) -> DaliBackend:
        """Open one split; ``device`` is the model's.

        Raises:
            RecipeError: If the recipe asks for a GPU, and the model is on another device.
        """
        on_gpu = device.type == "cuda"
        if data.decode_on == "gpu" and not on_gpu:
            raise RecipeError(
                f"data.decode_on=gpu, but the model is on the {device.type}: use data.decode_on=cpu, or "
                "parallel.device=cuda."
            )
        files = encoded_source(source)
        assert files is not None
        return DaliBackend(
            files,
            view,
            threads=workers,
            prefetch=data.prefetch,
            decode_on=device if on_gpu and _may_decode_on_gpu(data) else "cpu",
        )


def _may_decode_on_gpu(data: Data) -> bool:
    return data.decode_on != "cpu" and data.augment.crop != "pad"  # padded crops run on the CPU
