"""Bodies of E2B's control plane. What a client sends beyond these is ignored, as E2B does; what we cannot do is refused."""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError
from starlette.requests import Request

from forkyard.compat.e2b.errors import Refused
from forkyard.models import EnvName

MAX_BODY_BYTES = 2**20
MAX_TIMEOUT_S = 366 * 86400

Timeout = Annotated[int, Field(ge=0, le=MAX_TIMEOUT_S)]
Text = Annotated[str, StringConstraints(max_length=4096)]
M = TypeVar("M", bound="Body")


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore")


class AutoResume(Body):
    enabled: bool = False


class Network(Body):
    allow_public: bool | None = Field(None, alias="allowPublicTraffic")
    allow_out: list[Text] = Field(default_factory=list, alias="allowOut", max_length=256)
    deny_out: list[Text] = Field(default_factory=list, alias="denyOut", max_length=256)
    rules: dict[str, Any] | None = None
    egress_proxy: dict[str, Any] | None = Field(None, alias="egressProxy")
    dns_servers: list[Any] | None = Field(None, alias="dnsServers")
    mask_request_host: str | None = Field(None, alias="maskRequestHost")
    #: Of an update only.
    allow_internet: bool | None = Field(None, alias="allow_internet_access")


class NewSandbox(Body):
    template: str = Field(alias="templateID", min_length=1, max_length=256)
    timeout: Timeout | None = None
    auto_pause: bool = Field(False, alias="autoPause")
    auto_resume: AutoResume | None = Field(None, alias="autoResume")
    allow_internet: bool | None = Field(None, alias="allow_internet_access")
    metadata: dict[Text, Text] | None = Field(None, max_length=256)
    env: dict[EnvName, str] | None = Field(None, alias="envVars", max_length=256)
    network: Network | None = None
    volumes: list[Any] | None = Field(None, alias="volumeMounts")
    iam: dict[str, Any] | None = None


class SetTimeout(Body):
    timeout: Timeout


class Refresh(Body):
    duration: Timeout = 300


class Pause(Body):
    memory: bool = True


class Connect(Body):
    timeout: Timeout | None = None
    memory: bool | None = None


class Resume(Connect):
    auto_pause: bool | None = Field(None, alias="autoPause")


class Fork(Body):
    timeout: Timeout | None = None
    count: int = Field(1, ge=1, le=100)


class NewSnapshot(Body):
    name: Annotated[str, StringConstraints(min_length=1, max_length=256)] | None = None


async def read(request: Request, model: type[M]) -> M:
    """No body is an empty one: old clients send none."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, f"a body has at most {MAX_BODY_BYTES} bytes")
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
