"""The tables, as they are after the newest migration (a test compares the two).

Owns: names, types, indexes. Never does: queries (`sql.py`). Only types and constraints that PostgreSQL has too.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa


class UtcDateTime(sa.TypeDecorator[datetime]):
    """SQLite keeps no time zone: everything is UTC on the way in and says so on the way out."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Any) -> datetime | None:  # noqa: ARG002
        return None if value is None else value.astimezone(UTC)

    def process_result_value(self, value: datetime | None, dialect: Any) -> datetime | None:  # noqa: ARG002
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

sandboxes = sa.Table(
    "sandboxes",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.Text),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("cause", sa.String(32), nullable=False),
    sa.Column("cause_detail", sa.Text),
    sa.Column("incarnation", sa.Integer, nullable=False),
    sa.Column("vcpus", sa.Integer, nullable=False),
    sa.Column("memory_mib", sa.Integer, nullable=False),
    sa.Column("disk_gib", sa.Integer, nullable=False),
    sa.Column("labels", sa.JSON, nullable=False),
    sa.Column("env", sa.JSON, nullable=False),
    sa.Column("template", sa.Text),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("updated_at", UtcDateTime, nullable=False),
    sa.Column("ended_at", UtcDateTime),
    sa.Column("key_id", sa.String(32)),
    sa.Column("parent_id", sa.String(32)),
    sa.Column("snapshot_id", sa.String(32)),  # may be gone: what was made from it does not need it
    sa.Column("persistence", sa.String(16)),
    sa.Column("priority", sa.Integer),
    sa.Column("idle_timeout_s", sa.Float),
    sa.Column("ttl_s", sa.Float),
    sa.Column("checkpoint_every_s", sa.Float),
    sa.Column("checkpoints_kept", sa.Integer),
    sa.Column("expires_at", UtcDateTime),
    sa.Column("last_active_at", UtcDateTime),
    sa.Index(None, "created_at", "id"),  # the order of lists
    sa.Index(None, "state"),
    sa.Index(None, "key_id", "created_at"),  # creates of the last minute
)

snapshots = sa.Table(
    "snapshots",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.Text, unique=True),
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id"), nullable=False),
    sa.Column("automatic", sa.Boolean, nullable=False),
    sa.Column("ready", sa.Boolean, nullable=False),  # not: being made or removed; a start of the daemon clears it away
    sa.Column("vcpus", sa.Integer, nullable=False),
    sa.Column("memory_mib", sa.Integer, nullable=False),
    sa.Column("disk_gib", sa.Integer, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("paused_ms", sa.Float, nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Index(None, "created_at", "id"),
    sa.Index(None, "sandbox_id"),
)

events = sa.Table(
    "events",
    metadata,
    sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True, autoincrement=True),
    sa.Column("at", UtcDateTime, nullable=False),
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id")),
    sa.Column("kind", sa.String(64), nullable=False),
    sa.Column("cause", sa.String(32)),
    sa.Column("detail", sa.Text),
    sa.Column("data", sa.JSON, nullable=False),
    sa.Index(None, "sandbox_id", "id"),
    sqlite_autoincrement=True,  # an id is never used twice: readers resume after the last one they saw
)

keys = sa.Table(
    "keys",
    metadata,
    sa.Column("id", sa.String(32), primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("hash", sa.String(64), nullable=False, unique=True),
    sa.Column("prefix", sa.String(16), nullable=False),
    sa.Column("created_at", UtcDateTime, nullable=False),
    sa.Column("last_used_at", UtcDateTime),
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("api_key_id", sa.String(32), primary_key=True),
    sa.Column("key", sa.String(255), primary_key=True),
    sa.Column("request_hash", sa.String(64), nullable=False),
    sa.Column("sandbox_id", sa.String(32), sa.ForeignKey("sandboxes.id"), nullable=False),
    sa.Column("expires_at", UtcDateTime, nullable=False),
    sa.Index(None, "sandbox_id"),
    sa.Index(None, "expires_at"),
)
