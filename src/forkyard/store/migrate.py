"""Brings a database to the newest shape. Blocking; `Store.open` calls it in a thread, before any connection is used."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError

from forkyard.errors import HostFailure
from forkyard.store import sqlite


def migrate(database: Path) -> None:
    config = Config()
    config.set_main_option("script_location", str(files("forkyard.store.migrations")).replace("%", "%%"))
    engine = sa.create_engine(f"sqlite:///{database}")
    sqlite.configure(engine, "BEGIN IMMEDIATE")
    try:
        with engine.begin() as connection:
            if _is_current(config, connection):
                return
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except CommandError as error:
        raise HostFailure(
            f"the database {database} cannot be migrated: {error}; it was probably written by a newer Forkyard, "
            "so run that version, or set FORKYARD_STATE_DIR to another directory"
        ) from error
    except sa.exc.SQLAlchemyError as error:
        raise HostFailure(f"the database {database} cannot be opened: {error}") from error
    finally:
        engine.dispose()


def _is_current(config: Config, connection: sa.Connection) -> bool:
    """Spares the usual start the half second that loading alembic's environment takes."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return False
    heads = set(ScriptDirectory.from_config(config).get_heads())
    return set(connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalars()) == heads
