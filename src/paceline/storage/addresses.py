"""Addresses of object stores, ``PROTOCOL://PLACE/PATH``, and removal of secrets from text.

An address never holds a credential: recipes, plans, events and messages show it.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, quote_plus, unquote

from paceline.errors import StorageError

# The protocol's library, and the extra that installs it.
_LIBRARIES = {
    "s3": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "http": ("aiohttp", "http"),
    "https": ("aiohttp", "http"),
    "file": ("fsspec", "http"),
}
_PROTOCOLS = (*_LIBRARIES, "hf")  # the Hugging Face hub's library comes with timm
_HIDDEN = "***"
_FORM = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_USER = re.compile(r"(://)[^\s'\"]+@")
# A password may contain spaces; a port is not a password.
_PASSWORD = re.compile(r"(://)[^\s:@/'\"]+:(?!\d+\b)[^@/'\"\n]{1,100}@")
_SIGNED_PARAMETER = re.compile(
    r"\b(sig|AccountKey|SharedAccessKey|X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token))=[^\s&;'\"]+",
    re.IGNORECASE,
)
_QUERY = re.compile(r"(://[^\s?'\"]*)\?[^\s'\"]+")
_SECRET_NAME = re.compile(r"KEY|SECRET|TOKEN|PASSWORD|CREDENTIAL|CONNECTION_STRING|SIGNATURE")
# Parts of a connection string or a signed query that are secrets.
_PART = re.compile(r"(?:key|secret|token|password|pwd|sig|signature)=([^;&]+)", re.IGNORECASE)
_PATH_NAME = re.compile(r"_(FILE|PATH)$|^GOOGLE_APPLICATION_CREDENTIALS$")
_MIN_SECRET_LENGTH = 8


@dataclass(frozen=True)
class Address:
    """A place that fsspec reaches.

    Attributes:
        protocol: A supported protocol, in lower case.
        path: What follows ``://``, without a trailing slash.
    """

    protocol: str
    path: str

    def __str__(self) -> str:
        return f"{self.protocol}://{self.path}"

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rsplit("/", 1)[-1]

    @property
    def can_write(self) -> bool:
        """Whether files can be written there."""
        return self.protocol not in ("http", "https", "hf")


def is_address(text: object) -> bool:
    """Whether a text is an address rather than a path."""
    return isinstance(text, str) and "://" in text


def parse_address(text: str, *, key: str = "the address") -> Address:
    """Parse an address.

    Args:
        text: The text to parse.
        key: Its recipe key or option, for the message.

    Raises:
        StorageError: If its protocol is unknown, it names no place, or it holds a credential, which the message does
            not repeat.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        raise StorageError(f"{key}={redact_secrets(text)} is not an address such as s3://bucket/path.")
    protocol, path = match[1].lower(), match[2].rstrip("/")
    if protocol not in _PROTOCOLS:
        raise StorageError(
            f"{key}={redact_secrets(text)} begins with {protocol}://, which is not supported; addresses begin with "
            f"{', '.join(f'{each}://' for each in _PROTOCOLS)}."
        )
    _refuse_credentials(protocol, path, key)
    if not path.strip("/") or (protocol == "file" and not path.startswith("/")):
        example = "file:///data/photos" if protocol == "file" else f"{protocol}://bucket/path"
        raise StorageError(f"{key}={text} has no path; write it as {example}.")
    if any(part in (".", "..") for part in path.split("/")):
        raise StorageError(
            f"{key}={text} holds '.' or '..' as a part of its path, which stores do not support; leave it out."
        )
    return Address(protocol, path)


def _refuse_credentials(protocol: str, path: str, key: str) -> None:
    authority = path.split("/", 1)[0]
    has_port = protocol in ("http", "https") and re.fullmatch(r"[^:@]*:\d+|\[[0-9a-fA-F:]+\](:\d+)?", authority)
    # A secret may contain slashes, so the '@' after it may lie outside the apparent authority.
    has_user = "@" in authority or (":" in authority and not has_port)
    if has_user and protocol != "file":
        raise StorageError(
            f"{key} is an address of {protocol}:// with a user or password in it (not shown here). Credentials come "
            f"from the environment only (docs/guide/object-storage.md), since recipes and records are shared: remove "
            "it, and change the password if the command line was recorded."
        )
    if "?" in path or "#" in path:
        raise StorageError(
            f"{key} is an address of {protocol}:// with a query ('?' or '#') (not shown here): such addresses usually "
            "contain a credential. Give one without, and set credentials in the environment."
        )


def check_library(address: Address) -> None:
    """Check that the protocol's library is installed.

    Raises:
        StorageError: Naming the extra that installs it.
    """
    library, extra = _LIBRARIES[address.protocol]
    for module in ("fsspec", library):
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise StorageError(
                f"{address.protocol}:// needs {module}, which is not installed ({error}): "
                f"pip install 'paceline[{extra}]'"
            ) from None


def redact_secrets(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Remove users, passwords and queries from addresses, and the environment's secrets, from a text.

    Args:
        text: The text to be shown or recorded.
        environment: Environment variables that hold secrets; this process's by default.
    """
    values = os.environ if environment is None else environment
    for secret in sorted(_secrets(values), key=len, reverse=True):
        # A short value could occur in any text by chance.
        if len(secret) >= _MIN_SECRET_LENGTH:
            text = text.replace(secret, _HIDDEN)
    text = _PASSWORD.sub(rf"\1{_HIDDEN}@", _USER.sub(rf"\1{_HIDDEN}@", text))
    return _SIGNED_PARAMETER.sub(rf"\1={_HIDDEN}", _QUERY.sub(rf"\1?{_HIDDEN}", text))


def _secrets(values: Mapping[str, str]) -> set[str]:
    """Return the environment's secrets, whole and in parts, both raw and URL-quoted."""
    secrets = set()
    for name, value in values.items():
        if _SECRET_NAME.search(name.upper()) and not _is_path(name, value):
            for secret in (value, *_PART.findall(value)):
                secrets |= {secret, quote(secret, safe=""), quote(secret), quote_plus(secret), unquote(secret)}
    return secrets


def _is_path(name: str, value: str) -> bool:
    """Whether a value is the path of a credentials file. A secret may begin with a slash too."""
    return value.startswith("/") and (_PATH_NAME.search(name.upper()) is not None or Path(value).exists())
