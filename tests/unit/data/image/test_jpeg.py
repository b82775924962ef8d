"""A part of a JPEG file is decoded to the bits of that part of Pillow's picture, or Pillow is asked."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import interpolate

from paceline.data.image import decode as jpeg
from paceline.data.image.decode import BrokenImageError, LazyImage, decode
from paceline.data.image.transforms import Box

jpeg_region = pytest.importorskip("paceline.data.image.jpeg_region", reason="needs the compiled decoder")

KINDS: list[dict[str, Any]] = [
    {"subsampling": subsampling, "progressive": progressive, "restart_marker_blocks": restarts}
    for subsampling in (0, 1, 2)
    for progressive in (False, True)
    for restarts in (0, 3)
]
SIZES = [(1, 1), (7, 9), (16, 16), (17, 33), (64, 48), (95, 131)]
KIND_NAMES = [
    f"{('444', '422', '420')[kind['subsampling']]}{'-progressive' * kind['progressive']}"
    f"{'-restarts' * bool(kind['restart_marker_blocks'])}"
    for kind in KINDS
]


def picture(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Colour edges at every scale: what a wrong neighbour in the interpolation of colour would show in."""
    generator = np.random.default_rng(seed + height * 1000 + width)
    coarse = generator.integers(0, 256, (height // 6 + 2, width // 6 + 2, 3), dtype=np.uint8)
    large = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.NEAREST)).astype(int)
    noisy = large + generator.integers(-20, 21, large.shape)
    return Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).convert(mode)


def encoded(image: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **{"quality": 90, **options})
    return buffer.getvalue()


def by_pillow(content: bytes, mode: str, shrink: int = 1) -> np.ndarray:
    with Image.open(io.BytesIO(content)) as image:
        if shrink > 1:
            image.draft(None, (image.width // shrink, image.height // shrink))
        pixels = np.asarray(image.convert(mode))
    return pixels if pixels.ndim == 3 else pixels[:, :, None]


def boxes(height: int, width: int, count: int, seed: int = 0) -> Iterator[Box]:
    """All of it, its corners, and rectangles anywhere."""
    yield Box(0, 0, height, width)
    yield Box(height - 1, width - 1, 1, 1)
    yield Box(0, width // 2, height, width - width // 2)
    chance = random.Random(seed)
    for _ in range(count):
        top, left = chance.randrange(height), chance.randrange(width)
        yield Box(top, left, chance.randint(1, height - top), chance.randint(1, width - left))


def part(content: bytes, box: Box, channels: int = 3, shrink: int = 1) -> np.ndarray | None:
    return jpeg.read_part(content, channels, box, shrink)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
def test_parts_have_the_bits_of_the_whole(kind: dict[str, Any], size: tuple[int, int]) -> None:
    content = encoded(picture(*size), **kind)
    assert jpeg.head_of(content) == (*size, 1)
    colour, grey = by_pillow(content, "RGB"), by_pillow(content, "L")
    for box in boxes(*size, count=40):
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        assert np.array_equal(part(content, box), colour[rows, columns]), box
        assert np.array_equal(part(content, box, channels=1), grey[rows, columns]), box


@pytest.mark.parametrize("sampling", [0x11, 0x22])
@pytest.mark.parametrize("progressive", [False, True])
def test_parts_of_grey_pictures(progressive: bool, sampling: int) -> None:
    content = bytearray(encoded(picture(95, 131, "L"), progressive=progressive))
    frame = content.index(b"\xff\xc2" if progressive else b"\xff\xc0")
    content[frame + 11] = sampling  # of one component it means nothing, and some cameras write 2x2
    colour, grey = by_pillow(bytes(content), "RGB"), by_pillow(bytes(content), "L")
    for box in boxes(95, 131, count=60):
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        assert np.array_equal(part(content, box), colour[rows, columns]), box
        assert np.array_equal(part(content, box, channels=1), grey[rows, columns]), box


@pytest.mark.parametrize("shrink", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS[::2], ids=KIND_NAMES[::2])
def test_smaller_pictures_are_the_same_for_all_decoders(kind: dict[str, Any], shrink: int) -> None:
    content = encoded(picture(157, 211), **kind)
    whole = by_pillow(content, "RGB", shrink)
    height, width = whole.shape[:2]
    assert (height, width) == (-(-157 // shrink), -(-211 // shrink))
    for box in boxes(height, width, count=40):
        rows, columns = slice(box.top, box.top + box.height), slice(box.left, box.left + box.width)
        assert np.array_equal(part(content, box, shrink=shrink), whole[rows, columns]), box


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_parts_of_turned_pictures(orientation: int, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = encoded(picture(61, 90, mode), exif=exif, xmp=b'<x tiff:Orientation="3"/>')  # EXIF is heard first
    read = LazyImage(content, 3)
    assert read._is_plain
    height, width = read.size
    assert (height, width) == ((61, 90) if orientation < 5 else (90, 61))
    chosen = list(boxes(height, width, count=30))
    parts = [read.part(box) for box in chosen]
    monkeypatch.setattr(jpeg, "_REGION", None)
    whole = decode(content, 3)
    assert whole.shape == (height, width, 3)
    for box, ours in zip(chosen, parts, strict=True):
        assert np.array_equal(ours, whole[box.top : box.top + box.height, box.left : box.left + box.width]), box


def odd_files() -> dict[str, bytes]:
    """Files that are plain in all but one thing."""
    plain = encoded(picture(64, 48))
    scan = plain.index(b"\xff\xda")
    turned = Image.Exif()
    turned[0x0112] = 6
    nowhere = Image.Exif()
    nowhere[0x0112] = 9
    files = {
        "cmyk": encoded(picture(64, 48).convert("CMYK")),
        "turned": encoded(picture(64, 48), exif=turned),
        "turned in no way there is": encoded(picture(64, 48), exif=nowhere),
        "turned by XMP": encoded(picture(64, 48), xmp=b'<x tiff:Orientation="6"/>'),
        "damaged EXIF": encoded(picture(64, 48), exif=b"Exif\0\0MM\0*\xff\xff\xff\xff"),
        "short ICC profile": plain[:2] + b"\xff\xe2\x00\x0eICC_PROFILE\0" + plain[2:],
        "no end": plain[:-2],
        "half": plain[: len(plain) // 2],
        "all but the last rows": plain[:-40],
        "head only": plain[:scan],
        "rubbish in the scan": plain[: scan + 400] + bytes(100) + plain[scan + 500 :],
        "a marker in the scan": plain[: len(plain) - 60] + b"\xff\xc4\x00\x05abc" + plain[-60:],
        "another frame in the scan": plain[:-60] + plain[plain.index(b"\xff\xc0") :][:19] + plain[-60:],
        "rubbish between segments": plain[:20] + b"\x01\x02" + plain[20:],
        "a lossless frame": plain.replace(b"\xff\xc0", b"\xff\xc3", 1),
        "no rows": plain.replace(b"\xff\xc0\x00\x11\x08\x00\x40", b"\xff\xc0\x00\x11\x08\x00\x00", 1),
        "too many rows": plain.replace(b"\xff\xc0\x00\x11\x08\x00\x40", b"\xff\xc0\x00\x11\x08\xff\xff", 1),
        "4:4:0": plain.replace(b"\x01\x22\x00\x02\x11", b"\x01\x12\x00\x02\x11", 1),
        "an unfinished progressive": _unfinished(encoded(picture(64, 48), progressive=True)),
    }
    assert all(content != plain for content in files.values())
    return files


def _unfinished(content: bytes) -> bytes:
    """Without its last scan, but with its end."""
    return content[: content.rindex(b"\xff\xda")] + b"\xff\xd9"


@pytest.mark.parametrize("name", odd_files())
@pytest.mark.parametrize("box", [Box(0, 0, 64, 48), Box(0, 0, 9, 9), Box(20, 20, 20, 20)], ids=str)
def test_pillow_judges_what_is_odd(name: str, box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    content = odd_files()[name]

    def outcome() -> object:
        try:
            return LazyImage(content, 3, name).part(box).tolist()
        except BrokenImageError as error:
            return error.reason

    ours = outcome()
    monkeypatch.setattr(jpeg, "_REGION", None)
    assert ours == outcome()


@pytest.fixture
def by_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the compiled decoder, but with simplejpeg."""
    if jpeg.simplejpeg is None:  # an extra
        pytest.skip("needs simplejpeg")
    monkeypatch.setattr(jpeg, "_REGION", None)


@pytest.mark.parametrize("shrink", [1, 2, 4, 8])
@pytest.mark.parametrize("kind", KINDS, ids=KIND_NAMES)
@pytest.mark.usefixtures("by_simplejpeg")
def test_simplejpeg_has_the_same_bits(kind: dict[str, Any], shrink: int) -> None:
    for size in ((157, 211), (64, 48), (9, 17)):
        content = encoded(picture(*size), **kind)
        box = Box(0, 0, *(-(-side // shrink) * shrink for side in size))
        assert np.array_equal(LazyImage(content, 3).part(box, shrink), by_pillow(content, "RGB", shrink))
        assert jpeg.read_whole(content, size, shrink) is not None


@pytest.mark.usefixtures("by_simplejpeg")
def test_simplejpeg_and_pillow_judge_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    plain = [encoded(picture(40, 56), **kind) for kind in KINDS] + [encoded(picture(40, 56, "L"))]
    files = [mutated(chance.choice(plain), chance) for _ in range(800)]

    def outcome(content: bytes) -> object:
        try:
            return LazyImage(content, 3).part().tobytes()
        except BrokenImageError as error:
            return error.reason

    ours = [outcome(content) for content in files]
    monkeypatch.setattr(jpeg, "simplejpeg", None)
    assert ours == [outcome(content) for content in files]


def mutated(content: bytes, chance: random.Random) -> bytes:
    """Cut, overwritten, with bits turned, bytes taken out or markers put in."""
    damaged = bytearray(content)
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(damaged))
        match chance.randrange(6):
            case 0:
                damaged[at] ^= 1 << chance.randrange(8)
            case 1:
                damaged[at] = chance.randrange(256)
            case 2:
                del damaged[at : at + chance.choice((1, 2, 30))]
            case 3:
                damaged[at:at] = bytes((0xFF, chance.randrange(256)))
            case 4:
                damaged[at : at + 8] = chance.randbytes(8)
            case _:
                damaged = damaged[: max(at, 1)] + (b"\xff\xd9" if chance.random() < 0.5 else b"")
        if not damaged:
            break
    return bytes(damaged)


def _fuzz(rounds: int, seed: int) -> tuple[int, int]:
    """Damage files and read parts; return how many were decoded here and how many went to Pillow."""
    chance = random.Random(seed)
    plain = [encoded(picture(40, 56), **kind) for kind in KINDS] + [encoded(picture(40, 56, "L"))]
    here = elsewhere = 0
    for _ in range(rounds):
        content = mutated(chance.choice(plain), chance)
        size = (jpeg.head_of(content) or (2**20, 2**20))[:2]
        if size[0] * size[1] > 2**20:
            elsewhere += 1
            continue
        box = _any(size, chance)
        pixels = part(content, box)
        if pixels is None:
            elsewhere += 1
            continue
        here += 1
        # What is decoded here, Pillow must not call broken, and must see alike.
        whole = by_pillow(content, "RGB")
        assert np.array_equal(pixels, whole[box.top : box.top + box.height, box.left : box.left + box.width])
    return here, elsewhere


def _any(size: tuple[int, int], chance: random.Random) -> Box:
    top, left = chance.randrange(size[0]), chance.randrange(size[1])
    return Box(top, left, chance.randint(1, size[0] - top), chance.randint(1, size[1] - left))


def test_damaged_files_neither_crash_nor_change() -> None:
    here, elsewhere = _fuzz(1500, seed=0)
    assert here > 100
    assert elsewhere > 300


def test_many_damaged_files_neither_crash_nor_change() -> None:
    for seed in range(1, 21):
        _fuzz(2500, seed)


def test_threads_share_nothing() -> None:
    contents = [encoded(picture(95, 131, seed=seed), **KINDS[seed % len(KINDS)]) for seed in range(24)]
    expected = [by_pillow(content, "RGB") for content in contents]
    box = Box(10, 20, 60, 70)
    with ThreadPoolExecutor(4) as pool:
        for _ in range(10):
            for pixels, whole in zip(pool.map(lambda each: part(each, box), contents), expected, strict=True):
                assert np.array_equal(pixels, whole[10:70, 20:90])


def test_every_kind_of_buffer_is_read() -> None:
    content = encoded(picture(20, 30))
    for each in (content, bytearray(content), memoryview(content), memoryview(b"xx" + content)[2:]):
        assert jpeg.head_of(each) == (20, 30, 1)
        assert np.array_equal(part(each, Box(0, 0, 20, 30)), by_pillow(content, "RGB"))
        assert np.array_equal(decode(each, 3), by_pillow(content, "RGB"))


def test_what_cannot_be_is_refused() -> None:
    content = encoded(picture(20, 30))
    out = np.empty((20, 30, 3), np.uint8)
    for arguments in ((0, 0, 20, 31), (0, 0, 0, 30), (70000, 0, 20, 30), (0, 0, 20, 30, 3), (0, 0, 20, 30, 0)):
        with pytest.raises(ValueError, match="out of range"):
            jpeg_region.read_region(content, out, *arguments)
    assert not jpeg_region.read_region(content, out, 1, 0, 20, 30)  # beyond the picture
    assert not jpeg_region.read_region(content, out, 0, 65490, 20, 30)
    with pytest.raises((TypeError, BufferError)):
        jpeg_region.read_region(content, bytes(1800), 0, 0, 20, 30)


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"\xff\xd8", b"\xff\xd8\xff\xda", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xc0\x00\x11"]
)
def test_what_is_no_jpeg_has_no_size(content: bytes) -> None:
    assert jpeg.head_of(content) is None


def test_the_decoder_says_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jpeg.describe_decoder().startswith("compiled, with libjpeg-turbo ")
    monkeypatch.setattr(jpeg, "_REGION", None)
    assert "; the compiled decoder is not available (" in jpeg.describe_decoder()
    monkeypatch.setattr(jpeg, "simplejpeg", None)
    assert jpeg.describe_decoder().startswith("Pillow; ")


def resized_by_torch(pixels: np.ndarray, size: tuple[int, int], mode: str) -> np.ndarray:
    batch = torch.from_numpy(pixels.copy())[None].permute(0, 3, 1, 2)
    return interpolate(batch, size=size, mode=mode, antialias=True)[0].permute(1, 2, 0).numpy()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_small_images_are_resized_as_by_torch(mode: str, channels: int) -> None:
    chance = random.Random(channels)
    for seed in range(400):
        height, width, rows, columns = (chance.randint(1, 90) for _ in range(4))
        if chance.random() < 0.2:
            rows = height
        if chance.random() < 0.2:
            columns = width
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
        ours = np.empty((rows, columns, channels), np.uint8)
        assert jpeg_region.resize(pixels, height, width, channels, ours, rows, columns, mode == "bicubic")
        assert np.array_equal(ours, resized_by_torch(pixels, (rows, columns), mode)), (height, width, rows, columns)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("flip", [False, True])
def test_decoded_and_resized_in_one(mode: str, flip: bool) -> None:
    content = encoded(picture(95, 131))
    whole, halved = by_pillow(content, "RGB"), by_pillow(content, "RGB", shrink=2)
    for box in boxes(95, 131, count=30):
        part = whole[box.top : box.top + box.height, box.left : box.left + box.width]
        expected = resized_by_torch(part, (24, 32), mode)
        ours = jpeg.read_resized(content, 3, box, 1, (24, 32), bicubic=mode == "bicubic", flip=flip)
        assert np.array_equal(ours, expected[:, ::-1] if flip else expected)
    expected = resized_by_torch(halved[3:43, 5:65], (24, 32), mode)
    ours = jpeg.read_resized(content, 3, Box(3, 5, 40, 60), 2, (24, 32), bicubic=mode == "bicubic", flip=False)
    assert np.array_equal(ours, expected)
    assert jpeg.read_resized(content[:-2], 3, Box(0, 0, 9, 9), 1, (8, 8), bicubic=False, flip=flip) is None


def test_another_torch_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert jpeg.resizes(32, 32)
    assert not jpeg.resizes(224, 224)
    jpeg._resizes_as_torch.cache_clear()

    def one_more(*arguments: Any, **options: Any) -> torch.Tensor:
        return interpolate(*arguments, **options) ^ 1

    monkeypatch.setattr("torch.nn.functional.interpolate", one_more)
    assert not jpeg.resizes(32, 32)
    jpeg._resizes_as_torch.cache_clear()
