"""What a machine says of itself: `/opt/forkyard/image.json`, which its agent reads for every command.

Owns: reading and changing it. The file is the guest's, and may be anything.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

from pydantic import ValidationError

from forkyard.errors import FileMissing
from forkyard.guest.base import Guest
from forkyard.models.bases import ConfigStep, ImageConfig

PATH = "/opt/forkyard/image.json"
_MAX_BYTES = 2**20


async def configure(guest: Guest, step: ConfigStep) -> None:
    config = (await read(guest)).after(step)
    await guest.write_file(PATH, _once(config.model_dump_json().encode()), mode=0o644, user="root")


async def read(guest: Guest) -> ImageConfig:
    """The base image has none, and says nothing of itself."""
    content = bytearray()
    try:
        async with guest.read_file(PATH, length=_MAX_BYTES) as chunks:
            async for chunk in chunks:
                content += chunk
        return ImageConfig.model_validate(json.loads(content))
    except (FileMissing, ValueError, ValidationError):
        return ImageConfig()


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
