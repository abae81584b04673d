"""Metadata of files: headers of an upload, kept as extended attributes `user.e2b.<key>`. Pure."""

from __future__ import annotations

import re

from starlette.requests import Request

from forkyard.compat.e2b.errors import Refused
from forkyard.models import FileInfo

_HEADER = "x-metadata-"
_PREFIX = "e2b."
_KEY = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}", re.ASCII)
MAX_KEYS = 32
MAX_VALUE_CHARS = 1024


def of_headers(request: Request) -> dict[str, str]:
    found = {name[len(_HEADER) :]: value for name, value in request.headers.items() if name.startswith(_HEADER)}
    if len(found) > MAX_KEYS:
        raise Refused(400, f"a file has at most {MAX_KEYS} keys of metadata")
    for key, value in found.items():
        if _KEY.fullmatch(key) is None or len(value) > MAX_VALUE_CHARS or not value.isprintable():
            raise Refused(400, f"metadata {key[:40]!r} has a key or a value that cannot be kept")
    return {_PREFIX + key: value for key, value in found.items()}


def told(info: FileInfo) -> dict[str, dict[str, str]]:
    """What an entry says of it: nothing, if it has none."""
    found = {key[len(_PREFIX) :]: value for key, value in info.attributes.items() if key.startswith(_PREFIX)}
    return {"metadata": found} if found else {}
