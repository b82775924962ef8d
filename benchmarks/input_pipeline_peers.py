"""Other people's loaders, each as its own documentation builds it: file, random resized crop, flip; for
``input_pipeline.py``.

Run in an environment that has them (``--peers PYTHON``); each is imported where it is used, and one that is not there
is left out, and named.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline_harness import Contender, Setting, main


def _from_loader(loader: Any) -> Iterator[int]:
    while True:
        for batch in loader:
            yield len(batch[0])


def _torch_loader(dataset: Any, setting: Setting) -> Any:
    import torch
    from torch.utils.data import DataLoader

    torch.set_num_threads(1)
    return DataLoader(
        dataset,
        batch_size=setting.batch,
        shuffle=True,
        num_workers=setting.workers,
        persistent_workers=setting.workers > 0,
        drop_last=True,
    )


def torchvision_pillow(setting: Setting) -> Iterator[int]:
    """ImageFolder as it comes: Pillow decodes and resizes; uint8 batches."""
    from torchvision import datasets, transforms

    steps = [transforms.RandomResizedCrop(setting.size), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    return _from_loader(_torch_loader(datasets.ImageFolder(setting.folder, transforms.Compose(steps)), setting))


def _v2(setting: Setting) -> Any:
    from torchvision.transforms import v2

    return v2.Compose([v2.RandomResizedCrop(setting.size, antialias=True), v2.RandomHorizontalFlip()])


def torchvision_io(setting: Setting) -> Iterator[int]:
    """torchvision's own decoder and its v2 transforms on tensors."""
    from torchvision import datasets
    from torchvision.io import ImageReadMode, decode_image, read_file

    def load(path: str) -> Any:
        return decode_image(read_file(path), ImageReadMode.RGB)

    return _from_loader(_torch_loader(datasets.ImageFolder(setting.folder, _v2(setting), loader=load), setting))


def simplejpeg_v2(setting: Setting) -> Iterator[int]:
    """simplejpeg's decoder and torchvision's v2 transforms on tensors."""
    import simplejpeg
    import torch
    from torchvision import datasets

    def load(path: str) -> Any:
        return torch.from_numpy(simplejpeg.decode_jpeg(Path(path).read_bytes())).permute(2, 0, 1)

    return _from_loader(_torch_loader(datasets.ImageFolder(setting.folder, _v2(setting), loader=load), setting))


def timm_loader(setting: Setting) -> Iterator[int]:
    """timm's loader; its batches are normalised floats."""
    import torch
    from timm.data import create_dataset, create_loader

    torch.set_num_threads(1)
    dataset = create_dataset("", root=setting.folder)
    loader = create_loader(
        dataset,
        input_size=(3, setting.size, setting.size),
        batch_size=setting.batch,
        is_training=True,
        use_prefetcher=False,
        num_workers=setting.workers,
        color_jitter=None,
        auto_augment=None,
        interpolation="bilinear",
        persistent_workers=setting.workers > 0,
    )
    return _from_loader(loader)


def dali_cpu(setting: Setting) -> Iterator[int]:
    """DALI on the CPU: only the crop is decoded; uint8 batches."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=setting.batch, num_threads=max(setting.workers, 1), device_id=None, seed=1)
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=setting.folder, random_shuffle=True)
        images = fn.decoders.image_random_crop(files, random_area=(0.08, 1.0), random_aspect_ratio=(3 / 4, 4 / 3))
        images = fn.resize(images, size=(setting.size, setting.size), interp_type=types.INTERP_TRIANGULAR)
        return fn.flip(images, horizontal=fn.random.coin_flip()), labels

    built = pipeline()
    built.build()
    while True:
        images, _ = built.run()
        yield len(images)


def ffcv_originals(setting: Setting) -> Iterator[int]:
    """FFCV on a file of its own that holds the same JPEG files, byte for byte."""
    import numpy as np
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.fields.rgb_image import IMAGE_MODES
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor
    from ffcv.writer import DatasetWriter
    from PIL import Image

    paths = sorted(Path(setting.folder).glob("*/*"))

    class Originals:
        def __len__(self) -> int:
            return len(paths)

        def __getitem__(self, index: int) -> tuple[Path, int]:
            return paths[index], 0

    def store(_: Any, destination: Any, path: Path, malloc: Any) -> None:
        with Image.open(path) as image:
            destination["width"], destination["height"] = image.size
        content = np.frombuffer(path.read_bytes(), dtype=np.uint8)
        destination["mode"] = IMAGE_MODES["jpg"]
        destination["data_ptr"], storage = malloc(content.nbytes)
        storage[:] = content

    RGBImageField.encode = store
    file = Path(setting.files) / "originals.beton"
    if not file.exists():
        writer = DatasetWriter(str(file) + ".part", {"image": RGBImageField(), "label": IntField()}, num_workers=1)
        writer.from_indexed_dataset(Originals())
        os.replace(str(file) + ".part", file)
    shape = (setting.size, setting.size)
    loader = Loader(
        str(file),
        batch_size=setting.batch,
        num_workers=max(setting.workers, 1),
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [RandomResizedCropRGBImageDecoder(shape), RandomHorizontalFlip(), ToTensor()],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    return (len(batch[0]) for _ in itertools.count() for batch in loader)


CONTENDERS: dict[str, Contender] = {
    "torchvision + Pillow": torchvision_pillow,
    "timm (float)": timm_loader,
    "torchvision.io + v2": torchvision_io,
    "simplejpeg + v2": simplejpeg_v2,
    "DALI-CPU, decoding crops": dali_cpu,
    "FFCV, original JPEGs": ffcv_originals,
}


if __name__ == "__main__":
    main(CONTENDERS)
