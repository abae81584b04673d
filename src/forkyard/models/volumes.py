"""Wire types of volumes."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints

from forkyard.models.base import Answer, Request
from forkyard.models.labels import OURS

#: `rw`: what is written is the volume's, by one sandbox at a time. `ro`: nothing is written. `cow`: a copy of its own.
VolumeMode = Literal["rw", "ro", "cow"]
VolumeName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
CacheKind = Literal["npm", "pip"]
#: Of a machine that reads or writes files of a volume for somebody.
FILES_LABEL = f"{OURS}volume"
#: Of one sandbox, caches included.
MAX_VOLUMES = 4
MAX_VOLUME_MIB = 64 * 1024
MountPath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f\x7f]+$", max_length=1024)]


class Volume(Request):
    """A volume as a sandbox is to have it."""

    name: VolumeName
    mode: VolumeMode = Field(
        "rw",
        description="`rw`: what is written is the volume's; one sandbox at a time. `ro`: read only, by many. `cow`: each "
        "has a copy of its own, at once; `commit` makes it a new version.",
    )
    version: int | None = Field(None, ge=1, description="Default: the newest. Only with `ro` and `cow`.")

    def __init__(self, *name: str, **fields: Any) -> None:
        """`Volume("datasets", mode="cow")`."""
        super().__init__(**(dict(zip(("name",), name, strict=True)) if name else {}), **fields)


def _named(given: object) -> object:
    return Volume(given) if isinstance(given, str) else given


#: A name alone will do. (Not a union: an error says what is wrong, and not that it is no name either.)
VolumeMount = Annotated[Volume, BeforeValidator(_named, json_schema_input_type=VolumeName | Volume)]


class VolumeCreate(Request):
    name: VolumeName
    size_mib: int = Field(
        1024, ge=16, le=MAX_VOLUME_MIB, description="What fits into it, the file system's own included."
    )


class VolumeVersionInfo(Answer):
    version: int
    kept: bool = Field(description="It stays until it is deleted; else it goes when there is a newer one.")
    source: str | None = Field(None, description="The sandbox that wrote it.")
    created_at: datetime


class VolumeInfo(Answer):
    id: str
    name: str
    size_mib: int
    version: int = Field(description="The newest.")
    stored_bytes: int = Field(description="What its versions occupy on disk.")
    writer: str | None = Field(None, description="The sandbox that has it read-write.")
    used_by: list[str] = Field(default_factory=list, description="Sandboxes that have it in any mode.")
    created_at: datetime


class SandboxVolume(Answer):
    """A volume that a sandbox has."""

    volume_id: str
    name: str
    path: str
    mode: VolumeMode
    version: int | None = Field(None, description="If it was asked for; else the newest when the sandbox was made.")


class VolumeCommit(Request):
    sandbox_id: str = Field(description="Whose copy is to be the new version.")
    path: str | None = Field(None, description="Where it has it; may be left out if it has it once.")
    force: bool = Field(False, description="Also if the volume has a newer version than the copy was made of.")


def copies(volumes: Iterable[SandboxVolume]) -> tuple[SandboxVolume, ...]:
    """What a machine that was made from another has of that one's: what it writes is its own."""
    return tuple(one if one.mode == "ro" else one.model_copy(update={"mode": "cow"}) for one in volumes)
