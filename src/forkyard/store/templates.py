"""Queries of templates: their builds, their tags, and files that clients sent for them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa

from forkyard.store.database import Database
from forkyard.store.tables import template_builds, template_files, template_tags, templates


@dataclass(frozen=True)
class TemplateRecord:
    id: str
    name: str
    public: bool
    created_at: datetime
    updated_at: datetime


@dataclass(frozen=True)
class TemplateBuildRecord:
    id: str
    template_id: str
    state: str
    size: dict[str, Any]
    tags: list[str]
    recipe: dict[str, Any] | None
    build_id: str | None
    created_at: datetime
    finished_at: datetime | None


@dataclass(frozen=True)
class TagRecord:
    template_id: str
    tag: str
    build_id: str
    created_at: datetime


class TemplateQueries(Database):
    async def add_template_build(
        self, template_id: str, name: str, build_id: str, size: dict[str, Any], tags: list[str]
    ) -> TemplateBuildRecord:
        """A build that waits to begin. `template_id` is that of a new template, if there is none of this `name`."""
        now = datetime.now(UTC)

        def work(connection: sa.Connection) -> TemplateBuildRecord:
            known = connection.execute(sa.select(templates.c.id).where(templates.c.name == name)).scalar()
            if known is None:
                row = {"id": template_id, "name": name, "public": False, "created_at": now, "updated_at": now}
                connection.execute(templates.insert(), row)
            values = {
                "id": build_id,
                "template_id": known or template_id,
                "state": "waiting",
                "size": size,
                "tags": tags,
                "created_at": now,
            }
            connection.execute(template_builds.insert(), values)
            query = template_builds.select().where(template_builds.c.id == build_id)
            return _build(connection.execute(query).mappings().one())

        return await self._write(work)

    async def template(self, given: str) -> TemplateRecord | None:
        """By id or name."""
        query = templates.select().where(sa.or_(templates.c.id == given, templates.c.name == given))
        row = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if row is None else TemplateRecord(**row)

    async def list_templates(self) -> list[TemplateRecord]:
        query = templates.select().order_by(templates.c.created_at.desc(), templates.c.id)
        rows = await self._read(lambda connection: connection.execute(query).mappings().all())
        return [TemplateRecord(**row) for row in rows]

    async def set_template_public(self, template_id: str, public: bool) -> None:
        update = templates.update().where(templates.c.id == template_id)
        values = {"public": public, "updated_at": datetime.now(UTC)}
        await self._write(lambda connection: connection.execute(update, values).rowcount)

    async def remove_template(self, template_id: str) -> bool:
        delete = templates.delete().where(templates.c.id == template_id)
        return await self._write(lambda connection: connection.execute(delete).rowcount == 1)

    # ── builds ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def template_build(self, build_id: str) -> TemplateBuildRecord | None:
        query = template_builds.select().where(template_builds.c.id == build_id)
        row = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if row is None else _build(row)

    async def list_template_builds(self, template_id: str) -> list[TemplateBuildRecord]:
        """Newest first."""
        table = template_builds.c
        query = template_builds.select().where(table.template_id == template_id)
        query = query.order_by(table.created_at.desc(), table.id)
        rows = await self._read(lambda connection: connection.execute(query).mappings().all())
        return [_build(row) for row in rows]

    async def begin_template_build(self, build_id: str, recipe: dict[str, Any], begun: str) -> bool:
        """False if it was begun before. `begun`: the build that does it."""
        table = template_builds.c
        update = (
            template_builds.update()
            .where(table.id == build_id, table.state == "waiting")
            .values(state="building", recipe=recipe, build_id=begun)
        )
        return await self._write(lambda connection: connection.execute(update).rowcount == 1)

    async def end_template_build(self, build_id: str, state: str) -> None:
        """With success it gets its tags, whoever had them."""
        now = datetime.now(UTC)
        table = template_builds.c
        update = (
            template_builds.update()
            .where(table.id == build_id, table.state == "building")
            .values(state=state, finished_at=now)
            .returning(template_builds)
        )

        def work(connection: sa.Connection) -> None:
            row = connection.execute(update).mappings().first()
            if row is not None and state == "ready":
                _put_tags(connection, row["template_id"], build_id, row["tags"], now)

        await self._write(work)

    # ── tags ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def template_tags(self, template_id: str) -> list[TagRecord]:
        query = template_tags.select().where(template_tags.c.template_id == template_id).order_by(template_tags.c.tag)
        rows = await self._read(lambda connection: connection.execute(query).mappings().all())
        return [TagRecord(**row) for row in rows]

    async def put_template_tags(self, template_id: str, build_id: str, tags: list[str]) -> None:
        now = datetime.now(UTC)
        await self._write(lambda connection: _put_tags(connection, template_id, build_id, tags, now))

    async def remove_template_tags(self, template_id: str, tags: list[str]) -> int:
        delete = template_tags.delete().where(template_tags.c.template_id == template_id, template_tags.c.tag.in_(tags))
        return await self._write(lambda connection: connection.execute(delete).rowcount)

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def template_file(self, files_hash: str) -> str | None:
        query = sa.select(template_files.c.upload).where(template_files.c.hash == files_hash)
        return await self._read(lambda connection: connection.execute(query).scalar())

    async def put_template_file(self, files_hash: str, upload: str) -> None:
        def work(connection: sa.Connection) -> None:
            connection.execute(template_files.delete().where(template_files.c.hash == files_hash))
            connection.execute(template_files.insert(), {"hash": files_hash, "upload": upload})

        await self._write(work)


def _put_tags(connection: sa.Connection, template_id: str, build_id: str, tags: list[str], now: datetime) -> None:
    table = template_tags.c
    connection.execute(template_tags.delete().where(table.template_id == template_id, table.tag.in_(tags)))
    rows = [{"template_id": template_id, "tag": tag, "build_id": build_id, "created_at": now} for tag in tags]
    if rows:
        connection.execute(template_tags.insert(), rows)
    connection.execute(templates.update().where(templates.c.id == template_id).values(updated_at=now))


def _build(row: sa.RowMapping) -> TemplateBuildRecord:
    return TemplateBuildRecord(**row)
