"""Cursors of lists that are newest first: where the page before ended."""

from __future__ import annotations

import base64
import binascii
import contextlib
from datetime import UTC, datetime, timedelta

from forkyard.errors import InvalidRequest
from forkyard.store.records import Place, SandboxRecord, SnapshotRecord

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def cursor_after(record: SandboxRecord | SnapshotRecord | Place) -> str:
    at_us = (record.created_at - _EPOCH) // _MICROSECOND
    return base64.urlsafe_b64encode(f"{at_us}:{record.id}".encode()).decode().rstrip("=")


def place_of(cursor: str | None) -> Place | None:
    if cursor is None:
        return None
    with contextlib.suppress(ValueError, binascii.Error, OverflowError):
        at_us, last_id = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode().split(":")
        return Place(_EPOCH + _MICROSECOND * int(at_us), last_id)
    raise InvalidRequest(f"{cursor!r} is no cursor; use `next_cursor` of the page before, or none", field="cursor")
