"""Bodies of E2B's control plane. What a client sends beyond these is ignored, as E2B does; what we cannot do is refused."""

from __future__ import annotations

import json
import re
from ipaddress import IPv4Address
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints, ValidationError
from starlette.requests import Request

from forkyard.compat.e2b.errors import Refused
from forkyard.models import EnvName
from forkyard.models.bases import RegistryAuth

#: Clients switch features on by it.
ENVD_VERSION = "0.6.7"
MAX_BODY_BYTES = 2**20
#: Of `network`: what an update does not replace.
OF_INGRESS = frozenset({"allowPublicTraffic", "maskRequestHost", "httpsPorts"})
MAX_TIMEOUT_S = 366 * 86400

Timeout = Annotated[int, Field(ge=0, le=MAX_TIMEOUT_S)]
Text = Annotated[str, StringConstraints(max_length=4096)]
M = TypeVar("M", bound="Body")


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class AutoResume(Body):
    enabled: bool = False


class Transform(BaseModel):
    model_config = ConfigDict(extra="forbid")

    headers: dict[str, str] = Field(default_factory=dict, max_length=64)


class Rule(BaseModel):
    """For requests to a host."""

    model_config = ConfigDict(extra="forbid")

    transform: Transform = Field(default_factory=Transform)


class Network(Body):
    allow_public: bool | None = Field(None, alias="allowPublicTraffic")
    allow_out: list[Text] = Field(default_factory=list, alias="allowOut", max_length=256)
    deny_out: list[Text] = Field(default_factory=list, alias="denyOut", max_length=256)
    rules: dict[str, list[Rule]] | None = Field(None, max_length=64)
    egress_proxy: dict[str, Any] | None = Field(None, alias="egressProxy")
    dns_servers: list[IPv4Address] | None = Field(None, alias="dnsServers", max_length=10)
    mask_request_host: str | None = Field(None, alias="maskRequestHost")
    https_ports: list[Any] | None = Field(None, alias="httpsPorts")
    #: Of an update only.
    allow_internet: bool | None = Field(None, alias="allow_internet_access")

    def told(self) -> dict[str, Any]:
        """As it was given, for whoever asks for it later."""
        return self.model_dump(
            mode="json", by_alias=True, exclude_none=True, exclude_unset=True, exclude={"allow_internet"}
        )


class VolumeMount(Body):
    name: str = Field(min_length=1, max_length=128)
    path: str = Field(min_length=2, max_length=1024)


class NewVolume(Body):
    name: str = Field(min_length=1, max_length=128)


class Ownership(Body):
    """Of a file in a volume; what is None stays as it is."""

    uid: int | None = Field(None, ge=0, le=2**31 - 1)
    gid: int | None = Field(None, ge=0, le=2**31 - 1)
    mode: int | None = Field(None, ge=0, le=0o7777)


class NewSandbox(Body):
    template: str = Field(alias="templateID", min_length=1, max_length=256)
    timeout: Timeout | None = None
    auto_pause: bool = Field(False, alias="autoPause")
    pause_memory: bool = Field(True, alias="autoPauseMemory")
    auto_resume: AutoResume | None = Field(None, alias="autoResume")
    allow_internet: bool | None = Field(None, alias="allow_internet_access")
    metadata: dict[Text, Text] | None = Field(None, max_length=256)
    env: dict[EnvName, str] | None = Field(None, alias="envVars", max_length=256)
    network: Network | None = None
    volumes: list[VolumeMount] = Field(default_factory=list, alias="volumeMounts", max_length=4)
    iam: dict[str, Any] | None = None
    mcp: dict[str, Any] | None = None


class SetTimeout(Body):
    timeout: Timeout


class Refresh(Body):
    duration: Timeout = 300


class Pause(Body):
    memory: bool = True
    strict: bool = Field(False, alias="requireHealthyGuest")


class Connect(Body):
    timeout: Timeout | None = None
    memory: bool | None = None


class Resume(Connect):
    auto_pause: bool | None = Field(None, alias="autoPause")


class Fork(Body):
    timeout: Timeout | None = None
    count: int = Field(1, ge=1, le=100)


class NewSnapshot(Body):
    memory: bool = True
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None


class Compose(Body):
    sources: list[str] = Field(alias="source_paths", min_length=1, max_length=1000)
    destination: str = Field(min_length=1)
    username: str | None = None  # else as the request says


# ── templates ────────────────────────────────────────────────────────────────────────────────────────────────────

Tag = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
Tags = Annotated[list[Tag], Field(max_length=64)]
TemplateName = Annotated[str, StringConstraints(min_length=1, max_length=384)]


class NewTemplate(Body):
    name: TemplateName | None = None
    alias: TemplateName | None = None  # before there were names
    tags: Tags = Field(default_factory=list)
    cpus: int | None = Field(None, alias="cpuCount", ge=1, le=8)
    memory_mib: int | None = Field(None, alias="memoryMB", ge=128, le=16384)
    free_mb: int | None = Field(None, alias="minFreeDiskMb", ge=0, le=1000 * 1024)


class BuildStep(Body):
    type: str = Field(max_length=64)
    args: list[str] = Field(default_factory=list, max_length=1024)
    files_hash: str | None = Field(None, alias="filesHash", max_length=128)
    force: bool = False


class Registry(Body):
    type: str = Field("registry", max_length=64)
    username: str = Field("", max_length=256)
    password: str = Field("", max_length=65536)


class BuildStart(Body):
    from_image: str | None = Field(None, alias="fromImage", min_length=1, max_length=512)
    from_template: TemplateName | None = Field(None, alias="fromTemplate")
    registry: Registry | None = Field(None, alias="fromImageRegistry")
    steps: list[BuildStep] = Field(default_factory=list, max_length=200)
    start_cmd: str | None = Field(None, alias="startCmd", min_length=1, max_length=65536)
    ready_cmd: str | None = Field(None, alias="readyCmd", min_length=1, max_length=65536)
    force: bool = False

    def credentials(self) -> RegistryAuth | None:
        if self.registry is None:
            return None
        if self.registry.type != "registry":
            raise Refused(400, f"a registry of type {self.registry.type!r} is not served here; one with a password is")
        return RegistryAuth(username=self.registry.username, password=SecretStr(self.registry.password))


class TagTemplate(Body):
    target: TemplateName
    tags: Tags = Field(min_length=1)


class UntagTemplate(Body):
    name: TemplateName
    tags: Tags = Field(min_length=1)


class TemplateUpdate(Body):
    public: bool | None = None


# ── secrets ──────────────────────────────────────────────────────────────────────────────────────────────────────

SecretValue = Annotated[str, StringConstraints(min_length=1, max_length=65536)]


class SecretUpdate(Body):
    value: SecretValue
    metadata: dict[Text, Text] | None = Field(None, max_length=64)


class NewSecret(SecretUpdate):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[^{}\x00-\x1f\x7f-\x9f/]+$")]


# ── code ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class NewContext(Body):
    language: str | None = Field(None, max_length=64)
    cwd: Text | None = None


class Execution(Body):
    code: str
    context_id: str | None = Field(None, max_length=256)
    language: str | None = Field(None, max_length=64)
    env: dict[EnvName, str] | None = Field(None, alias="env_vars", max_length=256)


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", re.ASCII)


def checked_name(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise Refused(400, "the name of a template has up to 128 letters, digits and any of . _ -")
    return name


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def number(given: str | None, name: str, least: int, most: int) -> int | None:
    """Of a query."""
    if given is None or given == "":
        return None
    if not given.isascii() or not given.isdigit() or len(given) > 15 or not least <= int(given) <= most:
        raise Refused(400, f"{name} is a number from {least} to {most}")
    return int(given)


async def read(request: Request, model: type[M], most_bytes: int = MAX_BODY_BYTES) -> M:
    """No body is an empty one: old clients send none."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > most_bytes:
            raise Refused(413, f"a body has at most {most_bytes} bytes")
    try:
        content = json.loads(body) if body.strip() else {}
    except (ValueError, RecursionError):
        raise Refused(400, "the body is not JSON") from None
    if not isinstance(content, dict):
        raise Refused(400, "the body is not a JSON object")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Refused(400, f"{where}: {first['msg']}"[:500]) from None
