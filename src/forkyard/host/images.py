"""Images on this host: those of others that were imported, beside the base image.

Owns: what a name of an image means to a machine that is made here, and that one is deleted only if nothing rests on it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from forkyard.errors import ImageBuildFailed, ImageNotFound
from forkyard.host.cache import Cache, used_now
from forkyard.images import BaseImage, ForeignImages
from forkyard.images.build import PATH
from forkyard.models.bases import ImageConfig, ImageInfo

log = structlog.get_logger(__name__)


def log_progress(step: str, fraction: float | None = None) -> None:
    log.info(step, done=None if fraction is None else f"{fraction:.0%}")


class HostImages:
    def __init__(self, foreign: ForeignImages, cache: Cache) -> None:
        self._foreign = foreign
        self._cache = cache

    async def start(self) -> None:
        try:
            await asyncio.to_thread(self._foreign.clean)
        except (ImageBuildFailed, OSError) as error:  # no reason not to start
            log.warning("what imports have left could not be removed", error=str(error))

    def given(self, image_id: str | None) -> BaseImage | None:
        """What a machine is to be made of; None: the base image."""
        if image_id is None:
            return None
        found = self._foreign.image(image_id)
        if found is None:
            raise ImageNotFound(f"there is no image {image_id}, or no more; import it again")
        used_now(found.dir)
        return found

    def base_config(self) -> ImageConfig:
        return ImageConfig(env={"PATH": PATH})

    async def find(self, name: str) -> ImageInfo | None:
        return await self._foreign.find(name)

    async def all(self) -> list[ImageInfo]:
        return await self._foreign.all()

    async def delete(self, image_id: str) -> None:
        image = self._foreign.image(image_id)
        if image is not None:
            await asyncio.to_thread(self._cache.remove_image, image.dir)

    async def import_(
        self,
        name: str,
        *,
        archive: Path | None = None,
        credentials: tuple[str, str] | None = None,
        tell: Callable[[str], None] | None = None,
    ) -> ImageInfo:
        def progress(step: str, fraction: float | None = None) -> None:
            log_progress(step, fraction)
            if tell is not None and fraction is None:
                tell(step)

        return await self._foreign.import_(name, progress, archive=archive, credentials=credentials)
