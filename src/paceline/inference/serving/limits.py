"""What does the service take at most, and what does it say to whoever asks for more?"""

from __future__ import annotations

from dataclasses import dataclass

_HEAD_SECONDS = 10.0
_BODIES_AT_ONCE = 8
_BODIES_BYTES = 64 * 2**20
_DECODED_BYTES = 2**30
_DECODING_BYTES = 16


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where the service stops.

    Attributes:
        request_bytes: Of one request's body, whether or not it says beforehand how long it is.
        images: Of one request.
        pixels: Of one image, before it is decoded.
        request_seconds: From a request's head to its answer, the upload included.
        queue_images: Images that wait for the network; beyond it, requests are asked to come back.
        connections: Open at once.
        batch_images: Answered at once.
        batch_wait_seconds: How long the first image of a batch waits for others.
    """

    request_bytes: int = 32 * 2**20
    images: int = 16
    pixels: int = 50_000_000
    request_seconds: float = 30.0
    queue_images: int = 256
    connections: int = 512
    batch_images: int = 32
    batch_wait_seconds: float = 0.005

    @property
    def head_seconds(self) -> float:
        """Longest that a request's head may take, and that the rest of a body is read that nobody wants any more."""
        return min(_HEAD_SECONDS, self.request_seconds)

    @property
    def bodies_bytes(self) -> int:
        """Of all bodies that are in memory at once."""
        return max(_BODIES_AT_ONCE * self.request_bytes, _BODIES_BYTES)

    @property
    def decoded_bytes(self) -> int:
        """Of all pictures that are being decoded, or wait for the network, at once; others wait for their turn."""
        return max(_DECODED_BYTES, self.decoding_bytes(self.pixels))

    def decoding_bytes(self, pixels: int) -> int:
        """Most that a picture of so many pixels takes while it is decoded, its copies in other modes included."""
        return _DECODING_BYTES * pixels


class RefusedError(Exception):
    """A request that is not answered.

    Args:
        status: HTTP's number.
        reason: One word for it, in the metrics.
        sentence: What was found, which rule it breaks, what to change.
    """

    def __init__(self, status: int, reason: str, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.reason = reason
        self.sentence = sentence

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        if self.status == 503:
            return {"Retry-After": "1"}
        # What is left of such a body is not waited for.
        return {"Connection": "close"} if self.status in (403, 408, 413) else {}
