"""What a machine can start from, besides the base image: OCI images and Dockerfiles; and uploads they are made of."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import Field, SecretStr, StringConstraints, model_validator

from forkyard.models.base import Answer, Request
from forkyard.models.texts import Digest, Mode, Name, Owner, Part, Path, Setting, Text, Value

MAX_DOCKERFILE_CHARS = 512 * 1024
#: `registry.example:5000/name:tag`, `name@sha256:…`, or the id of an image that was imported.
Reference = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@-]*$", min_length=1, max_length=512)]
RegistryName = Annotated[
    str, StringConstraints(pattern=r"^[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:[0-9]{1,5})?$", max_length=263)
]
Port = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,5}(-[0-9]{1,5})?(/(tcp|udp|sctp))?$")]


class ImageSource(Part):
    """Text is short for `ref`."""

    ref: Reference | None = Field(None, description="In a registry, or the id of an image that was imported.")
    upload: Digest | None = Field(None, description="An OCI layout or a `docker save` archive, uploaded before.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"ref": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.ref is None) == (self.upload is None):
            raise ValueError("give a `ref` or an `upload`")
        return self

    @property
    def name(self) -> str:
        return self.ref or self.upload or ""


class DockerfileSource(Part):
    """Text is short for `text`. Every RUN, COPY and ADD is a layer that is kept."""

    text: str = Field(min_length=1, max_length=MAX_DOCKERFILE_CHARS)
    context: Digest | None = Field(None, description="A tar archive, uploaded before: what COPY and ADD find.")
    args: dict[Name, Setting] = Field(default_factory=dict, max_length=256, description="Values for its ARGs.")
    target: Text | None = Field(None, description="The stage that is wanted. Default: the last.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"text": given} if isinstance(given, str) else given


class AddStep(Part):
    """Files out of an upload, as COPY of a Dockerfile does it: of a directory its contents, wildcards in names."""

    context: Digest | None = Field(None, description="A tar archive, uploaded before.")
    sources: list[Path] = Field(min_length=1, max_length=1000, description="Paths in the archive; `.` is all of it.")
    to: Path = Field(description="A path that ends with `/` is a directory.")
    owner: Owner | None = Field(None, description="`user`, `user:group`, by name or number. Default: root.")
    mode: Mode | None = Field(None, description="Permission bits, such as '0755'. Default: as in the archive.")
    extract: bool = Field(False, description="Unpack files that are tar archives.")


class ConfigStep(Part):
    """What commands of the machine run as, unless they say else; and what an image says of itself."""

    user: Owner | None = None
    workdir: Path | None = None
    entrypoint: list[Value] | None = Field(None, max_length=1000)
    cmd: list[Value] | None = Field(None, max_length=1000)
    labels: dict[str, str] = Field(default_factory=dict, max_length=1000)
    expose: list[Port] = Field(default_factory=list, max_length=1000)
    volumes: list[Path] = Field(default_factory=list, max_length=1000)
    stop_signal: str | None = Field(None, max_length=32)


def registry_of(ref: str) -> str:
    """Where a reference leads, as Docker reads it."""
    first = ref.partition("/")[0]
    named = "/" in ref and ("." in first or ":" in first or first == "localhost")
    return first if named else "docker.io"


class RegistryAuth(Request):
    """Used for this one request; never written down."""

    username: str = Field(max_length=256)
    password: SecretStr = Field(max_length=65536)
    registry: RegistryName | None = Field(
        None,
        description="The only one that is told them, as references name it: `registry.example:5000`. Default: the one that "
        "all images of the request are in.",
    )

    def is_for(self, ref: str) -> bool:
        return self.registry is None or self.registry.lower() == registry_of(ref).lower()


class ImageConfig(Answer):
    """What an image says of itself. Variables, user and working directory are those of commands in its machines."""

    env: dict[str, str] = Field(default_factory=dict)
    user: str = "root"
    workdir: str = "/"
    entrypoint: list[str] = Field(default_factory=list)
    cmd: list[str] = Field(default_factory=list)
    labels: dict[str, str] = Field(default_factory=dict)
    expose: list[str] = Field(default_factory=list)

    @property
    def program(self) -> list[str]:
        """What a container of it would run; empty if it does not say."""
        return [*self.entrypoint, *self.cmd]

    def after(self, step: ConfigStep) -> ImageConfig:
        replaced = ("user", "workdir", "entrypoint", "cmd")
        changed = {name: value for name in replaced if (value := getattr(step, name)) is not None}
        labels = {**self.labels, **step.labels}
        expose = list(dict.fromkeys([*self.expose, *step.expose]))
        return self.model_copy(update={**changed, "labels": labels, "expose": expose})


class ImageInfo(Answer):
    id: str
    names: list[str] = Field(description="References and uploads it was imported from.")
    config: ImageConfig
    systemd: bool = Field(description="Whether it has an init of its own. Without one there are no services.")
    size_bytes: int
    created_at: datetime
    used_at: datetime = Field(description="When a machine was last made of it, or it was imported.")


class ImageImport(Request):
    image: ImageSource
    auth: RegistryAuth | None = Field(None, description="For a private registry.")


class UploadInfo(Answer):
    id: str = Field(description="Its content's hash.")
    size_bytes: int
