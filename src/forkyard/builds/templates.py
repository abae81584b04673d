"""Templates: specs that were built under a name, with tags that say which of them is meant.

Owns: names, tags, and which build is behind them. What is built is the cache's to keep: a sandbox of a template whose
layers were evicted builds them again. Never does: the building itself.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from forkyard.builds.builds import Builds
from forkyard.control.ground import new_id
from forkyard.errors import BuildNotFound, StateConflict, TemplateNotFound, UploadNotFound
from forkyard.models.builds import BuildCreate, BuildInfo
from forkyard.models.specs import Size, Spec, Step
from forkyard.store.sql import Store
from forkyard.store.templates import TagRecord, TemplateBuildRecord, TemplateRecord

DEFAULT_TAG = "default"


@dataclass(frozen=True)
class Recipe:
    """What a template is made of, and what commands in its machines run as, unless they say else."""

    spec: Spec
    user: str
    workdir: str
    #: For each step of the spec, which of the client's it belongs to.
    labels: list[str] = field(default_factory=list)

    def dumped(self) -> dict[str, Any]:
        return {**asdict(self), "spec": self.spec.model_dump(mode="json", exclude_unset=True)}

    @property
    def kept(self) -> Recipe:
        """As machines are made of it: what was to be built anew has been."""
        steps = [
            step if step.layer is None else Step(layer=step.layer.model_copy(update={"skip_cache": False}))
            for step in self.spec.steps
        ]
        return replace(self, spec=self.spec.model_copy(update={"skip_cache": False, "steps": steps}))

    @classmethod
    def loaded(cls, dumped: dict[str, Any]) -> Recipe:
        return cls(**{**dumped, "spec": Spec.model_validate(dumped["spec"])})


class Templates:
    def __init__(self, store: Store, builds: Builds) -> None:
        self._store = store
        self.builds = builds

    async def request(self, name: str, tags: list[str], size: Size) -> TemplateBuildRecord:
        """A build of this template that waits to begin."""
        return await self._store.add_template_build(
            "tpl" + new_id()[:17], name, str(uuid.uuid4()), size.model_dump(), tags or [DEFAULT_TAG]
        )

    async def begin(self, template_id: str, build_id: str, recipe: Recipe, request: BuildCreate, key_id: str) -> None:
        record = await self.build(template_id, build_id)
        if record.state != "waiting":
            raise StateConflict(f"build {build_id} was begun before; request another one")
        begun = await self.builds.create(request, key_id=key_id)
        if not await self._store.begin_template_build(build_id, recipe.kept.dumped(), begun.id):
            await self.builds.delete(begun.id)
            raise StateConflict(f"build {build_id} was begun before; request another one")

    async def build(self, template_id: str, build_id: str) -> TemplateBuildRecord:
        """As it is now."""
        record = await self._store.template_build(build_id)
        template = await self._store.template(template_id)
        if record is None or template is None or record.template_id != template.id:
            raise BuildNotFound(f"template {template_id!r} has no build {build_id!r}")
        return await self._settled(record)

    async def doing(self, record: TemplateBuildRecord) -> BuildInfo | None:
        """The build that is or was behind it. None: it has not begun, or is forgotten."""
        if record.build_id is None:
            return None
        try:
            return await self.builds.get(record.build_id)
        except BuildNotFound:
            return None

    async def _settled(self, record: TemplateBuildRecord) -> TemplateBuildRecord:
        """Nobody waits for the end of a build here, so whoever looks next writes it down."""
        if record.state != "building":
            return record
        doing = await self.doing(record)
        if doing is not None and doing.state == "running":
            return record
        state = "ready" if doing is not None and doing.state == "succeeded" else "error"
        await self._store.end_template_build(record.id, state)
        return replace(record, state=state)

    # ── by name ──────────────────────────────────────────────────────────────────────────────────────────────────

    async def template(self, given: str) -> TemplateRecord:
        """By id, or `name`, `name:tag`, `team/name:tag`."""
        found = await self._store.template(given.rpartition("/")[2].partition(":")[0])
        if found is None:
            raise TemplateNotFound(f"there is no template {given[:128]!r}")
        return found

    async def built(self, template_id: str) -> list[TemplateBuildRecord]:
        """Newest first."""
        return [await self._settled(record) for record in await self._store.list_template_builds(template_id)]

    async def recipe(self, given: str) -> tuple[TemplateRecord, Recipe]:
        """Of the build that this name and its tag mean."""
        template, record = await self.tagged(given)
        assert record.recipe is not None
        return template, Recipe.loaded(record.recipe)

    async def tagged(self, given: str) -> tuple[TemplateRecord, TemplateBuildRecord]:
        template = await self.template(given)
        tag = given.rpartition("/")[2].partition(":")[2] or DEFAULT_TAG
        await self.built(template.id)
        for one in await self._store.template_tags(template.id):
            record = await self._store.template_build(one.build_id) if one.tag == tag else None
            if record is not None:
                return template, record
        raise TemplateNotFound(f"template {template.name!r} has no build with the tag {tag!r}")

    async def all(self) -> list[TemplateRecord]:
        return await self._store.list_templates()

    async def set_public(self, given: str, public: bool) -> TemplateRecord:
        template = await self.template(given)
        await self._store.set_template_public(template.id, public)
        return template

    async def delete(self, given: str) -> None:
        """Sandboxes made from it stay."""
        template = await self.template(given)
        for record in await self._store.list_template_builds(template.id):
            doing = await self.doing(record)
            if doing is not None and doing.state == "running":
                await self.builds.delete(doing.id)
        await self._store.remove_template(template.id)

    # ── tags ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def tags(self, given: str) -> list[TagRecord]:
        template = await self.template(given)
        await self.built(template.id)
        return await self._store.template_tags(template.id)

    async def tag(self, given: str, tags: list[str]) -> TemplateBuildRecord:
        template, record = await self.tagged(given)
        await self._store.put_template_tags(template.id, record.id, tags)
        return record

    async def untag(self, given: str, tags: list[str]) -> None:
        template = await self.template(given)
        if await self._store.remove_template_tags(template.id, tags) == 0:
            raise TemplateNotFound(f"template {template.name!r} has none of the tags {', '.join(tags)[:200]}")

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    async def upload_of(self, files_hash: str) -> str | None:
        """The upload that has the files a client knows by this hash. None: they are to be sent."""
        upload = await self._store.template_file(files_hash)
        if upload is None:
            return None
        try:
            return self.builds.uploads.info(upload).id
        except UploadNotFound:
            return None

    async def receive(self, files_hash: str, chunks: AsyncIterable[bytes]) -> None:
        received = await self.builds.uploads.receive(chunks)
        await self._store.put_template_file(files_hash, received.id)
