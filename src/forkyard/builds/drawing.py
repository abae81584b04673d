"""From a spec to the layers of its stages: bases found, Dockerfiles read, what COPY would find looked at.

Owns: the order in which stages rest on each other. Never builds: that is `builds` and `workshop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forkyard.builds.bases import Base, Bases, Tell, bound, nobody
from forkyard.builds.copying import Archive
from forkyard.builds.dockerfile.instructions import CopyStep
from forkyard.builds.dockerfile.stages import Dockerfile, Stage
from forkyard.builds.layers import Context, Layer, Start, layers_of, shape_of
from forkyard.builds.uploads import Uploads
from forkyard.control.plane import ControlPlane
from forkyard.errors import InvalidDockerfile, InvalidRequest, InvalidShape
from forkyard.models import SnapshotInfo
from forkyard.models.bases import ImageConfig, RegistryAuth
from forkyard.models.specs import Size, Spec, Step

_DIGESTS_KEPT = 1000
_NOWHERE = Start("", "")


@dataclass(frozen=True)
class Drawn:
    """A stage: its layers, and the stage whose last layer the first of them rests on."""

    number: int
    layers: list[Layer]
    parent: int | None = None
    snapshot_id: str | None = None  # instead: what the first of them rests on


class Drawing:
    def __init__(self, control: ControlPlane, bases: Bases, uploads: Uploads) -> None:
        self._host = control.host
        self._snapshots, self._sandboxes = control.snapshots, control.sandboxes
        self._bases = bases
        self._uploads = uploads
        self._digests: dict[tuple[str, tuple[str, ...]], str] = {}

    async def check(self, spec: Spec, auth: RegistryAuth | None = None) -> None:
        """What can be said at once."""
        if spec.dockerfile is not None:
            await asyncio.to_thread(Dockerfile.read, spec.dockerfile)
        elif spec.image is not None:
            self._bases.check(spec.image)
        elif not is_snapshot(spec.base):
            self._bases.local(spec.base)
        contexts = [spec.dockerfile.context] if spec.dockerfile is not None else []
        for step in spec.steps:
            if step.add is not None and step.add.context is None:
                raise InvalidRequest("`add` needs a context: something that was uploaded", field="body.spec.steps")
            contexts += [step.add.context] if step.add is not None else []
        for context in contexts:
            if context is not None:
                self._uploads.find(context)
        await self._bound(spec, auth)

    async def _bound(self, spec: Spec, auth: RegistryAuth | None) -> RegistryAuth | None:
        """The password is for one registry, and images name others: also in variables."""
        if auth is None or auth.registry is not None:
            return auth
        names = [spec.image.ref] if spec.image is not None and spec.image.ref is not None else []

        async def noted(name: str) -> ImageConfig:
            names.append(name)
            return ImageConfig()

        if spec.dockerfile is not None:
            try:
                await (await asyncio.to_thread(Dockerfile.read, spec.dockerfile)).stages(noted)
            except InvalidDockerfile as error:
                raise InvalidRequest(
                    "say which registry the password is for: name it as `registry` beside it. Before its images are there, "
                    f"this Dockerfile does not tell: {error.message}",
                    field="body.registry",
                ) from None
        return bound(auth, names)

    async def draw(
        self, spec: Spec, auth: RegistryAuth | None = None, tell: Tell = nobody, *, allow_secrets: bool = False
    ) -> list[Drawn]:
        """All stages that are needed, each after those it needs, the wanted one last."""
        start = replace(_NOWHERE, allow_secrets=allow_secrets)
        own = list(enumerate(spec.steps))
        if is_snapshot(spec.base):
            found = await self._snapshots.get(spec.base)
            spec = spec.model_copy(update={"size": _size_of(spec, found)})
            context = Context.left(await self._sandboxes.said_by_spec(found.sandbox_id))
            start = replace(start, base=spec.base, template=found.id, context=context)
            return [Drawn(0, layers_of(spec, start, own), snapshot_id=found.id)]
        auth = await self._bound(spec, auth)
        if spec.dockerfile is None:
            base = await self._bases.image(spec.image, auth, tell) if spec.image else self._bases.local(spec.base)
            context = Context() if base.image is None else Context.of(base.config)
            return [Drawn(0, await self._layers(spec, base, replace(start, context=context), own))]
        named: dict[str, Base] = {}

        async def config_of(name: str) -> ImageConfig:
            named[name] = await self._bases.named(name, auth, tell)
            return named[name].config

        stages = await (await asyncio.to_thread(Dockerfile.read, spec.dockerfile)).stages(config_of)
        drawn: dict[int, Drawn] = {}
        for stage in stages:
            # The steps of the spec follow those of its Dockerfile, with numbers that no line has.
            more = [(-1 - number, step) for number, step in own] if stage is stages[-1] else []
            steps = [*await self._looked_at(stage, drawn), *more]
            index = sum(len(one.layers) for one in drawn.values())
            start = replace(start, context=Context.of(stage.before), index=index)
            if isinstance(stage.base, int):
                parent = drawn[stage.base].layers[-1]
                start = replace(start, base="stage", template=parent.key, image=parent.image, parent=parent)
                start = replace(start, context=_reached(drawn[stage.base]))
                drawn[stage.number] = Drawn(stage.number, layers_of(spec, start, steps), stage.base)
            else:
                base = named.get(stage.base) or await self._bases.named(stage.base, auth, tell)
                drawn[stage.number] = Drawn(stage.number, await self._layers(spec, base, start, steps))
        return list(drawn.values())

    async def _layers(self, spec: Spec, base: Base, start: Start, steps: Sequence[tuple[int, Step]]) -> list[Layer]:
        template = await self._host.prepare(shape_of(spec), base.image)
        start = replace(start, base=base.name, template=template, image=base.image, parent=None)
        return layers_of(spec, start, steps)

    async def _looked_at(self, stage: Stage, drawn: dict[int, Drawn]) -> list[tuple[int, Step]]:
        """COPY with what it would find: other files, another layer."""
        steps: list[tuple[int, Step]] = []
        for line, step in stage.steps:
            copy = step.add
            if isinstance(copy, CopyStep):
                if copy.stage is not None:
                    content = drawn[copy.stage].layers[-1].key
                else:
                    assert copy.context is not None
                    content = await self._digest(copy.context, copy.sources, line)
                # The context as a whole does not count: only what is taken from it.
                step = Step.model_construct(add=copy.model_copy(update={"content": content}))
            steps.append((line, step))
        return steps

    async def _digest(self, context: str, sources: Sequence[str], line: int) -> str:
        key = (context, tuple(sources))
        if key not in self._digests:
            path = self._uploads.find(context)

            def look() -> str:
                with Archive(path) as archive:
                    return archive.digest(sources)

            try:
                found = await asyncio.to_thread(look)
            except InvalidRequest as error:
                raise type(error)(f"Dockerfile line {line}: {error.message}", line=line) from None
            if len(self._digests) >= _DIGESTS_KEPT:
                self._digests.clear()
            self._digests[key] = found
        return self._digests[key]


def _size_of(spec: Spec, snapshot: SnapshotInfo) -> Size:
    """A machine in memory is as large as it is."""
    has = Size(**snapshot.shape.model_dump())
    for name in spec.size.model_fields_set:
        if (wanted := getattr(spec.size, name)) != getattr(has, name):
            raise InvalidShape(
                f"snapshot {spec.base} has {name} {getattr(has, name)}, and what starts from it cannot have {wanted}; leave "
                f"{name} out, and resize the sandbox once it is stopped",
                field=f"body.spec.size.{name}",
            )
    return has


def is_snapshot(base: str) -> bool:
    return base.startswith("sc-")


def _reached(stage: Drawn) -> Context:
    """What the steps of a stage have set for those of the next."""
    context = stage.layers[-1].context
    for _, step in stage.layers[-1].steps:
        context = context.after(step)
    return context
