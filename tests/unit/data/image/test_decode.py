"""Every kind of image file becomes the pixels a person would see, or a named reason why not."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from paceline.data.image import decode as decode_module
from paceline.data.image.decode import BrokenImageError, decode
from paceline.data.image.file_checks import head_fault
from paceline.data.image.pillow_pixels import pixels_of
from paceline_data.inspect.look import cause

RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def png(image: Image.Image, **options: object) -> bytes:
    return encoded(image, "PNG", **options)


def encoded(image: Image.Image, file_format: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()


def quadrants(size: int = 16) -> Image.Image:
    """Red, green / blue, white: no turn or mirror image of it looks the same."""
    half = size // 2
    image = Image.new("RGB", (size, size * 2), "white")
    image.paste(RED, (0, 0, half, size))
    image.paste(GREEN, (half, 0, size, size))
    image.paste(BLUE, (0, size, half, size * 2))
    return image


def test_colour_and_greyscale() -> None:
    image = quadrants()
    assert np.array_equal(decode(png(image), 3), np.asarray(image))
    grey = decode(png(image), 1)
    assert grey.shape == (32, 16, 1)
    assert np.array_equal(grey[..., 0], np.asarray(image.convert("L")))
    assert grey[0, 0, 0] == 76  # ITU-R 601: 0.299 of red


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_exif_orientation_is_applied(orientation: int, file_format: str) -> None:
    upright = quadrants()
    # Stored so that a viewer that follows the tag shows it upright: the inverse of the turn it stands for.
    stored = {
        1: lambda image: image,
        2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
        3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
        4: lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
        5: lambda image: image.transpose(Image.Transpose.TRANSPOSE),
        6: lambda image: image.transpose(Image.Transpose.ROTATE_90),
        7: lambda image: image.transpose(Image.Transpose.TRANSVERSE),
        8: lambda image: image.transpose(Image.Transpose.ROTATE_270),
    }[orientation](upright)
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"quality": 95} if file_format in ("JPEG", "WEBP") else {}
    pixels = decode(encoded(stored, file_format, exif=exif, **options), 3).astype(int)
    assert pixels.shape == (32, 16, 3)
    for (row, column), colour in {(8, 4): RED, (8, 12): GREEN, (24, 4): BLUE, (24, 12): (255,) * 3}.items():
        assert np.abs(pixels[row, column] - colour).max() < 30


@pytest.mark.needs("pillow_heif")
def test_heic_stands_upright_as_its_jpeg_does() -> None:
    import pillow_heif

    pillow_heif.register_heif_opener()
    pixels = np.zeros((64, 96, 3), dtype=np.uint8)
    pixels[:16], pixels[:, :20, 0] = 255, 200
    turned = Image.Exif()
    turned[0x112] = 6
    jpeg, heic = io.BytesIO(), io.BytesIO()
    Image.fromarray(pixels).save(jpeg, "JPEG", quality=95, exif=turned)
    Image.open(jpeg).save(heic, "HEIF", quality=95)
    expected, found = (decode(file.getvalue(), 3).astype(int) for file in (jpeg, heic))
    assert found.shape == (96, 64, 3)
    assert abs(found - expected).mean() < 2


def test_damaged_exif_does_not_lose_the_picture() -> None:
    data = encoded(quadrants(), "JPEG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff", quality=95)
    assert decode(data, 3).shape == (32, 16, 3)


def test_transparency_is_laid_over_white() -> None:
    image = Image.new("RGBA", (2, 1), (255, 0, 0, 255))
    image.putpixel((1, 0), (0, 0, 0, 0))
    assert decode(png(image), 3).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    assert decode(png(Image.new("LA", (1, 1), (0, 127))), 1).tolist() == [[[128]]]


def test_palette_with_transparency() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.putpixel((1, 0), 1)
    assert decode(png(image), 3).tolist() == [[[255, 0, 0], [0, 0, 255]]]
    assert decode(png(image, transparency=1), 3).tolist() == [[[255, 0, 0], [255, 255, 255]]]
    # One alpha per entry: Pillow warns of converting this straight to RGB.
    assert decode(png(image, transparency=b"\xff\x00"), 3).tolist() == [[[255, 0, 0], [255, 255, 255]]]


def test_cmyk() -> None:
    image = Image.new("CMYK", (8, 8), (0, 255, 255, 0))
    assert np.abs(decode(encoded(image, "JPEG", quality=95), 3).astype(int) - RED).max() < 5


@pytest.mark.parametrize("file_format", ["PNG", "TIFF"])
def test_sixteen_bits_are_scaled_not_clipped(file_format: str) -> None:
    values = np.array([[0, 255, 256, 32768, 65535]], dtype=np.uint16)
    data = encoded(Image.fromarray(values), file_format)
    assert decode(data, 1)[..., 0].tolist() == [[0, 0, 1, 128, 255]]
    assert decode(data, 3).shape == (1, 5, 3)


def test_black_and_white() -> None:
    assert decode(png(Image.new("1", (2, 2), 1)), 1).tolist() == [[[255], [255]], [[255], [255]]]


@pytest.mark.parametrize("file_format", ["GIF", "WEBP", "PNG", "TIFF"])
def test_first_frame_of_an_animation(file_format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, GREEN)]
    options = {"lossless": True} if file_format == "WEBP" else {}
    data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:], **options)
    assert (decode(data, 3) == RED).all()


@pytest.mark.parametrize("file_format", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.6])
def test_truncated_files_are_broken(tmp_path: Path, file_format: str, share: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = encoded(Image.fromarray(noise), file_format)
    path = tmp_path / "image"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(BrokenImageError) as caught:
        decode(path, 3)
    assert caught.value.path == str(path)
    assert caught.value.reason
    assert str(caught.value) == f"{path}: {caught.value.reason}"


def test_missing_folder_and_text_are_broken(tmp_path: Path) -> None:
    with pytest.raises(BrokenImageError, match="no such file"):
        decode(tmp_path / "nothing.png", 3)
    with pytest.raises(BrokenImageError, match="directory"):
        decode(tmp_path, 3)
    with pytest.raises(BrokenImageError, match="not an image"):
        decode(b"<html>404</html>", 3)


def raw_png(width: int, height: int, depth: int, colour: int, rows: bytes, transparent: bytes = b"") -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    header += chunk(b"tRNS", transparent) if transparent else b""
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def raw_tiff(width: int, bits: int, sample_format: int, photometric: int, pixels: bytes, order: str = "<") -> bytes:
    """One row of grey pixels."""
    tags = [(256, width), (257, 1), (258, bits), (259, 1), (262, photometric), (273, 8 + 2 + 12 * 10 + 4)]
    tags += [(277, 1), (278, 1), (279, len(pixels)), (339, sample_format)]
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags)
    head = struct.pack(f"{order}2sHIH", b"II" if order == "<" else b"MM", 42, 8, len(tags))
    return head + entries + bytes(4) + pixels


@pytest.mark.parametrize(
    ("depth", "colour", "row", "transparent", "shown"),
    [
        (1, 0, b"\x40", ">H 0", [255, 255]),
        (2, 0, b"\x10", ">H 1", [0, 255]),
        (4, 0, b"\x12", ">H 2", [17, 255]),
        (8, 0, b"\x01\x80", ">H 1", [255, 128]),
        (16, 0, struct.pack(">2H", 0, 1000), ">H 0", [255, 3]),
        (16, 0, struct.pack(">2H", 1000, 1001), ">H 1001", [3, 255]),  # all 16 bits count
        (16, 2, struct.pack(">6H", 1000, 1000, 1000, 1000, 1000, 1001), ">3H 1000 1000 1001", [3, 255]),
        (16, 2, struct.pack(">6H", 0, 0, 0, 256, 256, 256), ">3H 256 256 256", [0, 255]),
        (16, 4, struct.pack(">4H", 0, 0, 1000, 65535), "", [255, 3]),
        (16, 6, struct.pack(">8H", 0, 0, 0, 0, 1000, 1000, 1000, 65535), "", [255, 3]),
    ],
)
def test_what_is_transparent_is_white_at_any_depth(
    depth: int, colour: int, row: bytes, transparent: str, shown: list[int]
) -> None:
    form, *numbers = transparent.split() or ["0s", ""]
    told = struct.pack(form, *map(int, numbers)) if transparent else b""
    data = raw_png(2, 1, depth, colour, b"\0" + row, told)
    assert decode(data, 1)[0, :, 0].tolist() == shown
    assert decode(data, 3)[0].tolist() == [[each] * 3 for each in shown]


@pytest.mark.parametrize("largest", [1, 100, 255, 256, 1000, 4095, 65535])
@pytest.mark.parametrize("kind", ["P2", "P3", "P5", "P6"])
def test_what_a_pnm_says_is_white_is_white(tmp_path: Path, largest: int, kind: str) -> None:
    values = [0, largest // 2, largest]
    colours = np.repeat(values, 3 if kind in ("P3", "P6") else 1)
    if kind in ("P2", "P3"):
        pixels = " ".join(map(str, colours)).encode()
    else:
        pixels = colours.astype(">u2" if largest > 255 else np.uint8).tobytes()
    path = tmp_path / "x.ppm"
    path.write_bytes(f"{kind}\n3 1\n{largest}\n".encode() + pixels)
    for channels in (1, 3):
        shown = decode(path, channels)
        assert np.abs(shown[0, :, 0] - np.array(values) * 255 / largest).max() <= 1
        assert (shown == shown[..., :1]).all()
    assert decode_module.image_header(path) == ((1, 3), kind in ("P2", "P5"))


def test_an_image_of_pillows_is_shown_as_its_file_is() -> None:
    """As a data set of torchvision's may hand it out."""
    for image in (
        Image.fromarray(np.array([[1000, 40000]], dtype=np.uint16)),
        Image.new("RGBA", (2, 1), (0, 0, 0, 0)),
        Image.new("LA", (2, 1), (10, 255)),
        quadrants(),
    ):
        for channels in (1, 3):
            assert np.array_equal(pixels_of(image, channels), decode(png(image), channels))
    with pytest.raises(ValueError, match="no fixed range"):
        pixels_of(Image.new("F", (2, 1)), 3)


def test_grey_tiffs_fill_their_range() -> None:
    for order in "<>":
        assert decode(raw_tiff(2, 16, 1, 1, struct.pack(f"{order}2H", 500, 40000), order), 1).tolist() == [[[1], [156]]]
    assert decode(raw_tiff(2, 16, 1, 0, struct.pack("<2H", 500, 40000)), 1).tolist() == [[[254], [99]]]  # white is 0
    assert decode(raw_tiff(2, 8, 1, 0, b"\x01\x80"), 1).tolist() == [[[254], [127]]]
    assert decode(raw_tiff(2, 12, 1, 1, b"\x80\x0f\xff"), 1).tolist() == [[[128], [255]]]


@pytest.mark.parametrize(("bits", "form"), [(8, "2b"), (16, "2h"), (32, "2i")])
@pytest.mark.parametrize("order", ["<", ">"])
def test_signed_tiffs_are_refused_as_such(bits: int, form: str, order: str) -> None:
    data = raw_tiff(2, bits, 2, 1, struct.pack(order + form, 50, -4), order)
    with pytest.raises(BrokenImageError, match=f"signed numbers of {bits} bits"):
        decode(data, 1)


def planar_tiff(planes: np.ndarray, photometric: int, order: str, *, packed: bool = False) -> bytes:
    """A TIFF whose channels [C, H, W], uint8 or uint16, follow one another."""
    channels, height, width = planes.shape
    strips = [plane.astype(f"{order}u{planes.itemsize}").tobytes() for plane in planes]
    strips = [zlib.compress(each) for each in strips] if packed else strips
    starts = np.cumsum([8, *map(len, strips)]).tolist()
    tags = {256: [width], 257: [height], 258: [planes.itemsize * 8] * channels, 259: [8 if packed else 1]}
    tags |= {262: [photometric], 273: starts[:-1], 277: [channels], 278: [height]}
    tags |= {279: list(map(len, strips)), 284: [2]}
    entries, longer, end = b"", b"", starts[-1] + 2 + 12 * len(tags) + 4
    for tag, values in tags.items():
        entries += struct.pack(f"{order}HHI", tag, 4, len(values))
        entries += struct.pack(f"{order}I", values[0] if len(values) == 1 else end + len(longer))
        longer += struct.pack(f"{order}{len(values)}I", *values) if len(values) > 1 else b""
    head = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, starts[-1])
    return head + b"".join(strips) + struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + longer


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("channels", "photometric"), [(3, 2), (4, 5), (1, 1), (1, 0), (2, 1)])
@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("order", ["<", ">"])
def test_channels_one_after_another_are_read_right_or_refused(
    order: str, bits: int, channels: int, photometric: int, packed: bool
) -> None:
    shown = np.arange(2 * 3 * 5, dtype=np.uint8).reshape(2, 3, 5) * 8
    colours = np.stack([shown[0], 255 - shown[0], shown[1]])[: 3 if channels > 2 else 1]
    planes = np.concatenate([colours, np.zeros_like(colours[: channels - len(colours)])])
    planes = planes if photometric in (1, 2) else np.concatenate([255 - colours, planes[len(colours) :]])
    data = planar_tiff(planes.astype(f"u{bits // 8}") * (257 if bits == 16 else 1), photometric, order, packed=packed)
    try:
        pixels = decode(data, 3)
    except BrokenImageError as error:
        assert "is not supported: convert it" in str(error)  # noqa: PT017 (or read right)
        assert channels in (1, 2) or not packed
    else:
        assert channels != 2
        assert np.array_equal(pixels, np.broadcast_to(colours.transpose(1, 2, 0), pixels.shape))


def as_process(marker: int, bits: int = 8, channels: int = 3) -> bytes:
    """The header of a JPEG of another process, bit depth or number of channels."""
    content = bytearray(encoded(quadrants(), "JPEG"))
    frame = content.index(b"\xff\xc0")
    content[frame + 1], content[frame + 4], content[frame + 9] = marker, bits, channels
    return bytes(content)


UNSUPPORTED = [
    (as_process(0xC1, bits=12), "a JPEG of 12 bits"),
    (as_process(0xC3), "a lossless JPEG of 8 bits"),
    (as_process(0xC5), "a hierarchical JPEG"),
    (as_process(0xCA), "an arithmetic-coded JPEG"),
    (as_process(0xF7), "a JPEG-LS image"),
    (as_process(0xC0, channels=2), "a JPEG of 8 bits, 2 channel(s)"),
    (raw_tiff(2, 64, 3, 1, struct.pack("<2d", 0.5, 1)), "a TIFF of 1 channel(s) of 64-bit floating-point numbers"),
    (raw_tiff(2, 64, 1, 1, bytes(16), ">"), "a TIFF of 1 channel(s) of 64 bits"),
    (raw_tiff(2, 8, 1, 1, b"12").replace(struct.pack("<HHII", 259, 4, 1, 1), struct.pack("<HHII", 259, 4, 1, 50002)),
     "a TIFF of compression 50002"),
    (encoded(quadrants(), "BMP")[:30] + b"\4" + encoded(quadrants(), "BMP")[31:], "Unsupported BMP compression"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "named"), UNSUPPORTED)
def test_what_is_not_supported_is_named_and_not_called_damaged(content: bytes, named: str, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(content)
    with pytest.raises(BrokenImageError) as caught:
        decode(tmp_path / "a.jpg", 3)
    assert named in caught.value.reason
    assert "is not supported: convert it" in caught.value.reason
    assert cause(content, caught.value.reason)[0] == "unsupported"
    early = "arithmetic" not in named  # most libraries decode it
    assert not early or named in head_fault(str(tmp_path / "a.jpg"))


def test_what_is_damaged_is_not_called_unsupported() -> None:
    tiff, jpeg = raw_tiff(2, 8, 1, 1, b"12"), encoded(quadrants(), "JPEG")
    for content in (tiff[:40], jpeg[:200], jpeg[:20], raw_png(9, 9, 8, 0, b"\0")):
        with pytest.raises(BrokenImageError) as caught:
            decode(content, 3)
        assert cause(content, caught.value.reason)[0] in ("truncated", "corrupt")


def bomb(width: int, height: int) -> bytes:
    return raw_png(width, height, 8, 0, bytes(1000))


@pytest.mark.parametrize("side", [10_000, 60_000])
def test_decompression_bombs_are_broken(side: int) -> None:
    with pytest.raises(BrokenImageError, match="pixels"):
        decode(bomb(side, side), 3)


def test_numbers_without_a_range_are_refused() -> None:
    data = encoded(Image.fromarray(np.ones((2, 2), dtype=np.float32)), "TIFF")
    with pytest.raises(BrokenImageError, match="no fixed range"):
        decode(data, 1)


def tiled(width: int, height: int) -> bytes:
    """A grey TIFF of 10x10 pixels in one deflated tile of that size, of which nothing follows."""
    tags = [(256, 10), (257, 10), (258, 8), (259, 8), (262, 1), (277, 1), (322, width), (323, height)]
    tags += [(324, 8 + 2 + 12 * 10 + 4), (325, 1_000)]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    packed = zlib.compress(bytes(min(width * height, 1 << 16)), 9)
    return struct.pack("<2sHIH", b"II", 42, 8, len(tags)) + entries + bytes(4) + packed.ljust(1_000, b"\0")


def test_tiles_are_held_to_the_limit_too() -> None:
    assert decode(tiled(256, 256), 1).shape == (10, 10, 1)
    with pytest.raises(BrokenImageError, match="tiles of 16384x65536 pixels; at most"):
        decode(tiled(16384, 65536), 1)


def test_pillows_warnings_stay_inside() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([255, 0, 0, 0, 0, 255])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        decode(png(image, transparency=b"\xff\x00"), 3)
        with pytest.raises(BrokenImageError):
            decode(bomb(10_000, 10_000), 3)
    assert seen == []


def test_header(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(png(Image.new("L", (5, 7))))
    assert decode_module.image_header(path) == ((7, 5), True)
    path.write_bytes(b"nothing")
    assert decode_module.image_header(path) is None


def test_a_program_is_never_run() -> None:
    """Pillow would have Ghostscript run an EPS file."""
    content = io.BytesIO()
    Image.new("L", (4, 4)).save(content, "EPS")
    with pytest.raises(BrokenImageError, match="is a program, and is never run"):
        decode(content.getvalue(), 3)
