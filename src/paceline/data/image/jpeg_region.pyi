LIBRARY: str

def header(content: bytes | bytearray | memoryview, /) -> tuple[int, int, int] | None: ...
def read_region(
    content: bytes | bytearray | memoryview,
    out: object,
    top: int,
    left: int,
    height: int,
    width: int,
    denominator: int = 1,
    /,
) -> bool: ...
def read_resized(
    content: bytes | bytearray | memoryview,
    out: object,
    top: int,
    left: int,
    height: int,
    width: int,
    denominator: int,
    out_height: int,
    out_width: int,
    bicubic: bool,
    flip: bool,
    /,
) -> bool: ...
def resize(
    pixels: object,
    height: int,
    width: int,
    channels: int,
    out: object,
    out_height: int,
    out_width: int,
    bicubic: bool,
    /,
) -> bool: ...
