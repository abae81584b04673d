"""What a spec starts from, found: the base image of this host, an image that was imported, or one that is imported now.

Owns: what names mean. A name that was imported before is not asked for again; importing it anew is a request of its own.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

from forkyard.builds.dockerfile.stages import SCRATCH
from forkyard.builds.uploads import Uploads
from forkyard.control.plane import ControlPlane
from forkyard.errors import ImageNotFound, InvalidRequest, RegistryUnreachable
from forkyard.models.bases import ImageConfig, ImageInfo, ImageSource, RegistryAuth, registry_of

log = structlog.get_logger(__name__)

#: Names of what the base image of this host is as well.
LOCAL = ("debian", "python", "node", "bun")
#: A registry that could not be reached is not asked again for so long, if there is another way.
UNREACHABLE_S = 300.0
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_PART}(?:/{_PART})*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?(?:@[a-z0-9]+:[0-9a-f]{{32,}})?"
)
_ID = re.compile(r"img-[0-9a-f]{16}")
_ARCHIVES = (".tar", ".tgz", ".tar.gz", ".tar.xz", ".tar.bz2", ".tar.zst")

#: Hears what is done, in words for people.
Tell = Callable[[str], None]


def nobody(_text: str) -> None:
    """Nobody listens."""


@dataclass(frozen=True)
class Base:
    name: str
    image: str | None  # None: the base image
    config: ImageConfig


class Bases:
    def __init__(self, control: ControlPlane, uploads: Uploads) -> None:
        self._images = control.host.images
        self._uploads = uploads
        self._unreachable: dict[str, float] = {}

    def local(self, name: str) -> Base:
        if name not in LOCAL:
            raise InvalidRequest(
                f"there is no base {name!r}; there is {', '.join(LOCAL)}, and the id of any snapshot; an image of a registry "
                "is named with from_image, or `image`",
                field="body.spec.base",
            )
        return Base(name, None, self._images.base_config())

    def check(self, source: ImageSource) -> None:
        if source.upload is not None:
            self._uploads.find(source.upload)
        elif source.ref is not None:
            _check(source.ref)

    async def image(self, source: ImageSource, auth: RegistryAuth | None = None, tell: Tell = nobody) -> Base:
        """`tell` hears what is done for it, and what is taken in its place."""
        found = await self._images.find(source.name)
        if found is None:
            family = family_of(source.name)
            if family == source.name:
                tell(f"{source.name} is the base image of this host; {source.name}:latest would be the registry's")
                return self.local(family)
            if family is not None and self._given_up(family):
                tell(f"{source.name} is the base image of this host, for no registry could be reached")
                return self.local(family)
            try:
                found = await self.imported(source, auth, tell)
            except RegistryUnreachable as error:
                if family is None:
                    raise
                log.warning("no registry; the base image is used", image=source.name, error=error.message)
                tell(f"{source.name} is the base image of this host: {error.message}")
                self._unreachable[family] = time.monotonic()
                return self.local(family)
        return Base(source.name, found.id, found.config)

    def _given_up(self, family: str) -> bool:
        return time.monotonic() - self._unreachable.get(family, -UNREACHABLE_S) < UNREACHABLE_S

    async def imported(
        self, source: ImageSource, auth: RegistryAuth | None = None, tell: Tell | None = None
    ) -> ImageInfo:
        """Anew, whether it was before or not."""
        if source.ref is not None:
            _check(source.ref)
        if _ID.fullmatch(source.name):
            raise ImageNotFound(
                f"no registry is asked for {source.ref}, which is the id of an image that was imported; `forkyard images ls` "
                "lists those there are"
            )
        archive = None if source.upload is None else self._uploads.find(source.upload)
        told = auth is not None and auth.is_for(source.name)
        credentials = (auth.username, auth.password.get_secret_value()) if auth is not None and told else None
        return await self._images.import_(source.name, archive=archive, credentials=credentials, tell=tell)

    async def images(self) -> list[ImageInfo]:
        return await self._images.all()

    async def delete(self, name: str) -> None:
        """By its id, or a name it was imported under."""
        found = await self._images.find(name)
        if found is None:
            raise ImageNotFound(f"there is no image {name!r}; `forkyard images ls` lists those there are")
        await self._images.delete(found.id)

    async def named(self, name: str, auth: RegistryAuth | None = None, tell: Tell = nobody) -> Base:
        """As FROM of a Dockerfile names it."""
        if name == SCRATCH:
            scratch = await self._images.find(SCRATCH) or await self._images.import_(SCRATCH)
            return Base(SCRATCH, scratch.id, scratch.config)
        try:
            source = ImageSource(ref=name)
        except ValueError:
            raise InvalidRequest(f"{name!r} cannot be the name of an image", field="body.spec.dockerfile") from None
        return await self.image(source, auth, tell)


def bound(auth: RegistryAuth, names: Iterable[str]) -> RegistryAuth | None:
    """For one registry, whatever else is asked for the images of these names; None if no registry is."""
    if auth.registry is not None:
        return auth
    asked = sorted(
        {registry_of(name) for name in names if name != SCRATCH and name not in LOCAL and not _ID.fullmatch(name)}
    )
    if len(asked) > 1:
        raise InvalidRequest(
            f"the images of this spec are in {', '.join(asked)}; say which of them may have the password: name it as "
            "`registry` beside it",
            field="body.registry",
        )
    return auth.model_copy(update={"registry": asked[0]}) if asked else None


def _check(ref: str) -> None:
    """What a registry would be asked for in vain."""
    if "://" in ref:
        raise InvalidRequest(f"{ref}: leave out {ref.partition('://')[0]}://; an image is named registry/name:tag")
    if ref.endswith(_ARCHIVES) and ":" not in ref and registry_of(ref) != ref.partition("/")[0]:
        raise InvalidRequest(
            f"{ref} is named like an archive, and there is no such file; give the path of one that is there, or name an "
            "image of a registry as registry/name:tag"
        )
    if _REFERENCE.fullmatch(ref) is None:
        why = "; it is written in small letters" if _REFERENCE.fullmatch(ref.lower()) else ""
        raise InvalidRequest(f"{ref} cannot be the name of an image{why}: registry/name:tag, or registry/name@sha256:…")


def family_of(name: str) -> str | None:
    """`python` for `python:3.12-slim` and its longer names; None if the base image is nothing like it."""
    short = name.removeprefix("docker.io/").removeprefix("library/").partition("@")[0].partition(":")[0]
    short = short.removeprefix("oven/")
    return short if short in LOCAL else None
