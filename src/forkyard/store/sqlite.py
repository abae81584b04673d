"""What is particular to SQLite: pragmas, and transactions that begin when we say so. PostgreSQL needs none of it."""

from __future__ import annotations

from typing import Any, Literal

import sqlalchemy as sa

BUSY_TIMEOUT_MS = 5000


def configure(engine: sa.Engine, begin: Literal["BEGIN", "BEGIN IMMEDIATE"]) -> None:
    """A writer begins IMMEDIATE: a read lock that is upgraded later can fail with "locked" whatever the busy
    timeout."""

    @sa.event.listens_for(engine, "connect")
    def _on_connect(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # Python's driver would begin by itself, and not at all before DDL
        cursor = connection.cursor()
        for pragma in (
            "journal_mode=WAL",
            "synchronous=FULL",  # a committed state survives a power cut, unless its transaction says that it need not
            "foreign_keys=ON",
            f"busy_timeout={BUSY_TIMEOUT_MS}",
        ):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    @sa.event.listens_for(engine, "begin")
    def _on_begin(connection: sa.Connection) -> None:
        if begin == "BEGIN IMMEDIATE":
            # NORMAL: not lost by a crash of the daemon, perhaps by a power cut; synced with the next commit that is FULL.
            wanted = "FULL" if connection.get_execution_options().get("durable", True) else "NORMAL"
            if connection.info.get("synchronous") != wanted:
                connection.exec_driver_sql(f"PRAGMA synchronous={wanted}")
                connection.info["synchronous"] = wanted
        connection.exec_driver_sql(begin)
