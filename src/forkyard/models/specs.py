"""What a machine is made of: the spec, as `forkyard.yaml` has it and as the API takes it.

Owns: the shape of a spec and what is wrong with one before anything is built. Steps are done in their order; a step is
a mapping with one key, its kind. `layer` ends a layer: what stands before it is built once and kept as a snapshot of the
running machine.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    StringConstraints,
    field_validator,
    model_serializer,
    model_validator,
)

from forkyard.models.base import Request
from forkyard.models.bases import AddStep, ConfigStep, DockerfileSource, ImageSource
from forkyard.models.texts import (
    Mode,
    Name,
    Owner,
    Package,
    Part,
    Path,
    Salt,
    ServiceName,
    Setting,
    Text,
    UnitName,
    User,
    Value,
)

MAX_STEPS = 200
MAX_FILE_BYTES = 8 * 2**20
DEFAULT_BASE = "debian"


SecretName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,255}$")]
#: What can only be the name of a hosted repository.
HOSTED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
Language = Literal["python", "javascript", "typescript", "bash"]


class Size(Part):
    vcpus: int = Field(1, ge=1, le=8)
    memory_mib: int = Field(512, ge=128, le=16384)
    disk_gib: int = Field(8, ge=4, le=1024)

    @model_serializer(mode="wrap")
    def _as_said(self, handler: SerializerFunctionWrapHandler) -> dict[str, int]:
        """What is not said stays so when it is stored and read again: a snapshot has a size of its own."""
        return {name: value for name, value in handler(self).items() if name in self.model_fields_set}


class FileStep(Part):
    """One file. In YAML, `from` names a local file instead of its content; clients put the content in."""

    content: str = Field(max_length=MAX_FILE_BYTES * 4 // 3 + 4)
    encoding: Literal["utf8", "base64"] = "utf8"
    mode: Mode | None = Field(None, description="Permission bits, such as '0755'.")
    user: Owner | None = Field(None, description="Owner. Default: the user of the step.")

    def data(self) -> bytes:
        return self.content.encode() if self.encoding == "utf8" else base64.b64decode(self.content, validate=True)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"content": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _decodable(self) -> Self:
        try:
            size_bytes = len(self.data())
        except (binascii.Error, ValueError):
            raise ValueError(f"content is not {'base64' if self.encoding == 'base64' else 'text'}") from None
        if size_bytes > MAX_FILE_BYTES:
            raise ValueError(f"{size_bytes} bytes are too many for a file of a spec; {MAX_FILE_BYTES} are the most")
        return self


class GitRepo(Part):
    """A repository to clone. In a spec it is a step, at a create it is there before the answer."""

    url: Text = Field(
        description="Where to clone from: http, https, git or ssh; or the name of a hosted repository, which inside is "
        "`http://git.forkyard.internal/NAME.git`."
    )
    path: Path = Field("/repo", description="Where to: a directory that is empty or not there.")
    rev: Text | None = Field(None, description="Branch, tag or commit. Default: the default branch.")
    depth: int | None = Field(None, ge=1, le=2**31 - 1, description="So many commits, and no more.")
    user: User | None = Field(None, description="Whose it is. Default: root; in a spec, the user of the step.")
    secret: SecretName | None = Field(
        None, description="Secret with a password or token, for http and https: one of the sandbox, or a stored one."
    )
    username: str = Field("git", pattern=r"^[\x21-\x39\x3b-\x7e]{1,128}$", description="Sent with the secret.")

    def __init__(
        self,
        url: str | None = None,
        path: str | None = None,
        rev: str | None = None,
        depth: int | None = None,
        **fields: Any,
    ) -> None:
        given = {"url": url, "path": path, "rev": rev, "depth": depth, **fields}
        super().__init__(**{name: value for name, value in given.items() if value is not None})

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        if not isinstance(given, str):
            return given
        rest, colon, path = given.rpartition(":")
        if not colon or not path.startswith("/") or path.startswith("//"):
            rest, path = given, ""
        url, _, rev = rest.partition("#")
        return {"url": url, **({"path": path} if path else {}), **({"rev": rev} if rev else {})}

    @field_validator("url")
    @classmethod
    def _no_password(cls, url: str) -> str:
        if HOSTED.fullmatch(url) and ".." not in url:
            return url
        scheme, _, rest = url.partition("://")
        if scheme not in ("http", "https", "git", "ssh", "file") or not rest or any(char.isspace() for char in url):
            raise ValueError("give a url such as https://example.com/repo.git, or the name of a hosted repository")
        try:
            _ = urlsplit(url).port
        except ValueError as error:
            raise ValueError(f"is no url: {error}") from None
        if scheme != "ssh" and "@" in rest.partition("/")[0]:
            raise ValueError("has a credential in it, which would stay in the clone; store it and name it as `secret`")
        return url

    @field_validator("path")
    @classmethod
    def _absolute(cls, path: str) -> str:
        if not path.startswith("/") or ".." in path.split("/"):
            raise ValueError("give a path from the root, such as /repo, without `..`")
        return path

    @field_validator("rev")
    @classmethod
    def _no_option(cls, rev: str | None) -> str | None:
        if rev is not None and (rev.startswith(("-", "+")) or ":" in rev or any(ord(char) <= 32 for char in rev)):
            raise ValueError("a revision does not begin with `-` or `+`, and has no spaces and no `:`")
        return rev

    @model_validator(mode="after")
    def _secret_over_http(self) -> Self:
        if self.secret is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError("a secret is for http and https")
        return self


class RunStep(Part):
    command: Text | Annotated[list[Value], Field(min_length=1, max_length=1000)] = Field(
        description="Text runs in `bash -c` (`sh` where there is no bash); a list is a program and its arguments."
    )
    timeout_s: float = Field(3600.0, gt=0, le=86400)
    user: Owner | None = None
    cwd: Path | None = None
    env: dict[Name, Setting] = Field(default_factory=dict, max_length=256, description="For this command alone.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"command": given} if isinstance(given, str | list) else given

    def shown(self) -> str:
        return self.command if isinstance(self.command, str) else " ".join(self.command)


class WaitStep(Part):
    command: Text = Field(description="Asked again and again until it exits with 0.")
    timeout_s: float = Field(120.0, gt=0, le=86400)
    interval_s: float = Field(0.5, ge=0.05, le=60)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"command": given} if isinstance(given, str) else given


Manager = Literal["uv", "pip", "npm", "pnpm", "yarn", "bun"]
#: Which program reads which lockfile.
LOCKFILES: dict[str, Manager] = {
    "uv.lock": "uv",
    "requirements.txt": "pip",
    "package-lock.json": "npm",
    "npm-shrinkwrap.json": "npm",
    "pnpm-lock.yaml": "pnpm",
    "yarn.lock": "yarn",
    "bun.lock": "bun",
    "bun.lockb": "bun",
}


class InstallStep(Part):
    """Dependencies, as a lockfile has them. Built again when the lockfile, or what stands beside it, has changed."""

    lockfile: Path = Field(description="`uv.lock`, `package-lock.json`, `requirements.txt` …")
    path: Path | None = Field(None, description="Directory in the machine. Default: the working directory.")
    manager: Manager | None = Field(None, description="Default: by the name of the lockfile.")
    files: dict[Path, FileStep] = Field(
        default_factory=dict,
        max_length=20,
        description="The lockfile and its manifest, to be written first. Without any they must be there already.",
    )

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"lockfile": given} if isinstance(given, str) else given

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.manager is None and self.lockfile.rpartition("/")[2] not in LOCKFILES:
            raise ValueError(f"{self.lockfile!r} is no lockfile I know ({', '.join(LOCKFILES)}); name its manager")
        return self

    def program(self) -> Manager:
        return self.manager or LOCKFILES[self.lockfile.rpartition("/")[2]]


def _restart(given: Any) -> Any:
    return "no" if given is False else given  # what YAML makes of `no`


_Restart = Literal["no", "on-failure", "on-abnormal", "always"]
Restart = Annotated[_Restart, BeforeValidator(_restart, json_schema_input_type=_Restart | Literal[False])]


class Service(Part):
    """A systemd unit. It runs in the machine, also after a restore: it was saved while it ran."""

    name: ServiceName
    exec: Text | None = Field(
        None, description="A shell command. Default: ENTRYPOINT and CMD of the image, as its USER, in its WORKDIR."
    )
    type: Literal["simple", "oneshot", "notify"] = Field(
        "simple",
        description="`simple` is up when started, or when `ready` says so; `oneshot` when its command is done; `notify` "
        "when it says so itself (sd_notify).",
    )
    ready: Text | None = Field(None, description="A command that exits with 0 once the service answers.")
    ready_timeout_s: float = Field(120.0, gt=0, le=86400)
    restart: Restart = "no"
    restart_s: float = Field(1.0, ge=0, le=3600, description="Pause before a restart.")
    start_limit: int | None = Field(
        None,
        ge=1,
        le=10000,
        description="So many starts within `start_limit_s`, and it has failed for good. Default: none.",
    )
    start_limit_s: float = Field(10.0, gt=0, le=86400)
    env: dict[Name, Setting] = Field(default_factory=dict, max_length=256)
    user: Owner | None = Field(None, description="Default: that of the spec at this step, else root.")
    group: Owner | None = Field(None, description="Default: that of the user.")
    workdir: Path | None = None
    after: list[UnitName] = Field(default_factory=list, max_length=64)
    requires: list[UnitName] = Field(default_factory=list, max_length=64)
    on_failure: list[UnitName] = Field(default_factory=list, max_length=64, description="Started when it fails.")
    wanted_by: list[UnitName] = Field(
        default_factory=list, max_length=64, description="What pulls it in at boot. Default: multi-user.target."
    )
    watchdog_s: float | None = Field(None, gt=0, le=86400, description="It must say so this often that it is alive.")
    remain: bool | None = Field(
        None, description="It counts as up when its command has succeeded. Default: if it is `oneshot`."
    )
    enabled: bool = Field(True, description="Started at every boot from disk.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {"name": given} if isinstance(given, str) else given

    @field_validator("workdir")
    @classmethod
    def _absolute(cls, workdir: str | None) -> str | None:
        if workdir is not None and workdir != "~" and not workdir.startswith("/"):
            raise ValueError("give a directory from the root, such as /srv/app, or `~`, the home of its user")
        return workdir

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.type == "oneshot" and self.restart == "always":
            raise ValueError("a oneshot service cannot be restarted always; use `on-failure`, or type `simple`")
        return self


def _version(given: Any) -> Any:
    if given is True:
        return "latest"
    if isinstance(given, float):
        raise ValueError(f"{given} is a number, in which 3.1 and 3.10 are the same; put the version in quotes")
    return str(given) if isinstance(given, int) and not isinstance(given, bool) else given


_Version = Annotated[str, StringConstraints(pattern=r"^(latest|[0-9]{1,4}(\.[0-9]{1,5}){0,2})$")]
#: `3.12`, `22`, `1.2.3`; or `latest`, which is the base's own if it has one.
Version = Annotated[_Version, BeforeValidator(_version, json_schema_input_type=_Version | int | Literal[True])]


class LayerStep(Part):
    discriminator: Salt = Field("", description="Another value, another layer: to build it anew.")
    skip_cache: bool = Field(False, description="Build it and all that follows even if it is there.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        return {} if given is True or given is None else given


class Step(Part):
    """One of these."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"minProperties": 1, "maxProperties": 1})

    apt: list[Package] | None = Field(None, min_length=1, max_length=500, description="Debian packages.")
    files: dict[Path, FileStep] | None = Field(None, min_length=1, max_length=1000, description="By path.")
    git: GitRepo | None = Field(None, description="Clone a repository.")
    add: AddStep | None = Field(None, description="Files of an upload.")
    run: RunStep | None = Field(None, description="A command; a failure ends the build.")
    install: InstallStep | None = Field(None, description="Dependencies of a lockfile.")
    python: Version | None = Field(None, description="Python of this version, as `python3`.")
    node: Version | None = Field(None, description="Node.js of this version, from the npm registry.")
    bun: Version | None = Field(None, description="Bun of this version, from the npm registry.")
    uv: Version | None = Field(None, description="uv of this version, from PyPI.")
    context: Language | None = Field(
        None, description="Start what runs code of this language, so that sandboxes have it running already."
    )
    env: dict[Name, Setting] | None = Field(
        None, min_length=1, max_length=256, description="For later steps, services, and every command of the sandbox."
    )
    workdir: Path | None = Field(
        None, description="Of later steps and services, and the default of commands; made if it is not there."
    )
    user: User | None = Field(
        None, description="Of later steps and services, and the default of commands; made if there is none."
    )
    service: Service | None = Field(None, description="Start a service, and wait until it is ready.")
    config: ConfigStep | None = Field(None, description="What commands of the machine run as, unless they say else.")
    wait_for: WaitStep | None = Field(None, description="Go on when this command succeeds.")
    layer: LayerStep | None = Field(None, description="End a layer.")

    @model_validator(mode="before")
    @classmethod
    def _short(cls, given: Any) -> Any:
        if given == "layer":
            return {"layer": {}}
        if isinstance(given, dict) and list(given) == ["layer"] and given["layer"] in (None, True):
            return {"layer": {}}
        return given

    @model_validator(mode="after")
    def _one(self) -> Self:
        found = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(found) != 1:
            said = "has " + " and ".join(found) if found else "is empty"
            raise ValueError(f"a step is one of {', '.join(type(self).model_fields)}; this one {said}")
        return self

    @property
    def kind(self) -> str:
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)

    def canonical(self) -> Any:
        """As it counts for a cache: with its defaults, so that saying them makes no difference."""
        value = getattr(self, self.kind)
        return value.model_dump(mode="json") if isinstance(value, Request) else _dumped(value)


def _dumped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: item.model_dump(mode="json") if isinstance(item, Request) else item for key, item in value.items()}
    return value


class Spec(Part):
    """A machine, described once."""

    name: str | None = Field(None, max_length=128, description="For people.")
    base: Text = Field(
        DEFAULT_BASE, description="What it starts from: `debian`, `python`, `node`, `bun`, or a snapshot."
    )
    image: ImageSource | None = Field(None, description="Start from an OCI image instead.")
    dockerfile: DockerfileSource | None = Field(None, description="Start from what a Dockerfile makes instead.")
    size: Size = Field(default_factory=Size)
    steps: list[Step] = Field(default_factory=list, max_length=MAX_STEPS)
    discriminator: Salt = Field("", description="Another value, other layers: to build all anew.")
    skip_cache: bool = Field(False, description="Build all layers even if they are there.")

    @model_validator(mode="after")
    def _one_base(self) -> Self:
        given = {"base": self.base != DEFAULT_BASE, "image": self.image, "dockerfile": self.dockerfile}
        named = [name for name, value in given.items() if value]
        if len(named) > 1:
            raise ValueError(f"a machine starts from one thing, and this has {' and '.join(named)}; keep one of them")
        return self

    @model_validator(mode="after")
    def _services_in_order(self) -> Self:
        services = [step.service for step in self.steps if step.service is not None]
        names = [service.name for service in services]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two services are named {name!r}; give each a name of its own")
        start_order(services)
        return self


def start_order(services: Iterable[Service]) -> list[Service]:
    """Those that others wait for first. ValueError if some wait for each other."""
    by_name = {service.name: service for service in services}
    waits_for = {
        name: {
            other for unit in (*service.after, *service.requires) if (other := unit.removesuffix(".service")) in by_name
        }
        for name, service in by_name.items()
    }
    try:
        return [by_name[name] for name in TopologicalSorter(waits_for).static_order()]
    except CycleError as error:
        circle = " → ".join(reversed(error.args[1]))
        raise ValueError(f"services wait for each other in a circle: {circle}") from None
