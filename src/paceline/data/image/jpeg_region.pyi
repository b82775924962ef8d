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
