"""What may leave a sandbox, what may enter it, and what is known of it afterwards."""

from __future__ import annotations

import ipaddress
import re
from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, StringConstraints, field_validator, model_validator
from pydantic_core import PydanticCustomError

from forkyard.errors import InvalidRequest
from forkyard.models.base import Answer, Request

Preset = Literal["coding", "research", "evaluation", "autonomous", "open", "none"]
Access = Literal["public", "token", "off"]
MAX_RULES = 256
MAX_HEADERS = 64
#: In the value of an `EgressHeader`.
SECRET_IN_TEXT = re.compile(r"\$\{secrets\.([^{}]{1,256})\}")
_FRAMING = frozenset(
    {
        *("host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer", "expect"),
        *("keep-alive", "proxy-connection", "proxy-authorization", "accept-encoding"),
    }
)
Port = Annotated[int, Field(ge=1, le=65535)]
_PATTERN = (
    r"^(\*|(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*)$"
)


def _name_alone(text: str) -> str:
    """People paste what they have: an address of the web, a name with a port."""
    if re.fullmatch(_PATTERN, text):
        return text
    host = re.split(r"[/?#:]", text.partition("://")[2] or text)[0].rpartition("@")[2].rstrip(".")
    if re.fullmatch(_PATTERN, host):
        why = f"give the name alone: {host}; a scheme, a port, a path or a last dot is no part of it"
    else:
        why = (
            "a domain is letters, digits, - and _ between dots (others in their xn-- form): example.com, *.example.com"
        )
    raise PydanticCustomError("domain", "{why}", {"why": why})


#: `example.com`, or `*.example.com` for all names below it (not itself); `*` is every name.
DomainPattern = Annotated[
    str,
    StringConstraints(to_lower=True, strip_whitespace=True, max_length=253),
    AfterValidator(_name_alone),
    Field(json_schema_extra={"pattern": _PATTERN}),
]
RecordingName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class EgressRule(Request):
    """Names a domain or a network, not both; with neither it means every destination."""

    action: Literal["allow", "deny"] = "allow"
    domain: DomainPattern | None = None
    cidr: str | None = Field(None, description="`203.0.113.0/24`, or one address. The only way to private networks.")
    ports: list[Port] = Field(default_factory=list, max_length=64, description="Empty: all ports.")

    @field_validator("cidr")
    @classmethod
    def _network(cls, value: str | None) -> str | None:
        return None if value is None else str(ipaddress.ip_network(value, strict=False))

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        if self.domain is not None and self.cidr is not None:
            raise ValueError("a rule names a domain or a cidr, not both")
        return self

    def in_vain(self) -> tuple[str, str] | None:
        """Of a rule that can never be met: the field, and what to do instead. Asked of what is new: a policy that is in
        force already must always be readable."""
        if self.domain is not None and self.domain.rpartition(".")[2].isdigit():
            why = f"{self.domain} is an address, or nothing, and `domain` is for names"
            return "domain", f"{why}; give addresses by `cidr` (at the command line: --cidr, --allow-cidr)"
        if self.cidr is not None and ":" in self.cidr and self.action == "allow":
            return "cidr", f"{self.cidr} is IPv6, which sandboxes do not have; allow the name, or its IPv4 addresses"
        return None


class EgressHeader(Request):
    """What the door puts into every HTTPS request to a host, in place of what the sandbox sent under this name."""

    domain: DomainPattern
    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")
    value: str = Field(
        min_length=1,
        max_length=8192,
        description="`${secrets.NAME}` is the stored secret of this name, which never enters the sandbox; the rest is kept, "
        "and shown, as it is.",
    )

    @model_validator(mode="after")
    def _harmless(self) -> Self:
        if self.name.lower() in _FRAMING:
            raise ValueError(f"{self.name} says how a request is sent, and is not to be changed")
        if not self.value.isprintable() or self.value != self.value.strip():
            raise ValueError("the value of a header has no control characters, and no space at its ends")
        return self

    @property
    def secret_names(self) -> list[str]:
        return SECRET_IN_TEXT.findall(self.value)


class EgressPolicy(Request):
    """What may leave. The first rule that matches decides; after them those of the preset; what none allows is denied."""

    preset: Preset = Field(
        "coding",
        description="`coding`: git hosts and the package registries of this host. `research`: everything public, "
        "rate-limited. `evaluation`: nothing but what is replayed. `autonomous`: everything public, nothing enters. "
        "`open`: everything public. `none`: nothing.",
    )
    rules: list[EgressRule] = Field(default_factory=list, max_length=MAX_RULES)
    bytes_per_s: int | None = Field(None, ge=1024, description="Both ways together.")
    connections_per_minute: int | None = Field(None, ge=1)
    byte_budget: int | None = Field(None, ge=0, description="Both ways together, over the life of the sandbox.")
    headers: list[EgressHeader] = Field(default_factory=list, max_length=MAX_HEADERS)
    record: RecordingName | None = Field(None, description="Store HTTP and HTTPS exchanges under this name.")
    replay: RecordingName | None = Field(None, description="Answer from this recording, and refuse the rest.")

    @model_validator(mode="after")
    def _record_or_replay(self) -> Self:
        if self.record is not None and self.replay is not None:
            raise ValueError("record and replay exclude each other")
        return self

    def check_rules(self) -> None:
        """Of a policy that is new."""
        for number, rule in enumerate(self.rules):
            if (found := rule.in_vain()) is not None:
                field = f"network.egress.rules.{number}.{found[0]}"
                raise InvalidRequest(f"{field}: {found[1]}", field=field)


class IngressPolicy(Request):
    """Who may open the preview of a port."""

    access: Access | None = Field(
        None, description="Of ports not named below. Default: `public`; under the preset `autonomous`, `off`."
    )
    ports: dict[Port, Access] = Field(default_factory=dict, max_length=256)


class NetworkPolicy(Request):
    egress: EgressPolicy = Field(default_factory=EgressPolicy)
    ingress: IngressPolicy = Field(default_factory=IngressPolicy)

    def access(self, port: int) -> Access:
        default: Access = "off" if self.egress.preset == "autonomous" else "public"
        return self.ingress.ports.get(port, self.ingress.access or default)


class Secret(Request):
    """A value that never enters the guest."""

    hosts: list[DomainPattern] = Field(min_length=1, max_length=32, description="Where it may go, and nowhere else.")
    header: str = Field("Authorization", pattern=r"^[A-Za-z0-9-]{1,64}$")
    format: str = Field("Bearer {}", max_length=256, description="`{}` is the value; `{basic}` is base64 of it.")
    value: str | None = Field(
        None, min_length=1, max_length=65536, repr=False, description="Default: the stored secret of this name."
    )


class SecretInfo(Answer):
    """A stored secret; its value is never shown."""

    name: str
    version: int = Field(1, description="How often it was set.")
    metadata: dict[str, str] = Field(default_factory=dict)
    created_at: datetime
    updated_at: datetime


class SecretPut(Request):
    value: str = Field(min_length=1, max_length=65536, repr=False)


Verdict = Literal["allowed", "denied", "failed"]


class EgressRecord(Answer):
    """One connection, one DNS query, or one HTTP request where the door sees it: over plain HTTP, and where it looks
    into TLS."""

    id: int = 0
    at: datetime
    sandbox_id: str
    kind: Literal["tcp", "dns", "http"]
    exec_id: str | None = Field(None, description="The exec that made it; null: a process that no exec started.")
    process: str | None = Field(None, description="Name and pid, such as `curl (412)`.")
    trace_id: str | None = None
    name: str | None = Field(None, description="By DNS answer, SNI or Host.")
    address: str | None = None
    port: int | None = None
    bytes_out: int = 0
    bytes_in: int = 0
    duration_ms: float = 0.0
    verdict: Verdict
    reason: str | None = Field(None, description="Why it was denied or failed, and how to allow it.")
    method: str | None = Field(None, description="Of an HTTP request.")
    path: str | None = Field(None, description="Of an HTTP request; never with its query.")
    status: int | None = Field(
        None,
        description="What an HTTP request was answered with; null: nothing, or it was not to be told from other answers.",
    )


class EgressTotals(Answer):
    connections: int = 0
    denied: int = 0
    bytes_out: int = 0
    bytes_in: int = 0


class RecordingInfo(Answer):
    """HTTP exchanges stored under a name."""

    name: str
    exchanges: int
    size_bytes: int
    updated_at: datetime


class RecordedExchange(Answer):
    at: datetime
    method: str
    url: str
    status: int
    size_bytes: int = Field(description="Of the body of the answer.")


class PreviewInfo(Answer):
    url: str
    access: Access
    token: str | None = Field(None, description="Of an `access` by token: send it as X-Forkyard-Preview-Token.")
    link: str | None = Field(None, description="Of an `access` by token: opens it once, in a browser.")


class DomainCreate(Request):
    domain: DomainPattern
    sandbox_id: str | None = Field(
        None, description="With `port`; without both it can be verified first, and mapped later."
    )
    port: Port | None = None

    @model_validator(mode="after")
    def _both(self) -> Self:
        if (self.sandbox_id is None) != (self.port is None):
            raise ValueError("sandbox_id and port go together")
        return self


class DomainMap(Request):
    sandbox_id: str
    port: Port


class DomainInfo(Answer):
    domain: str
    sandbox_id: str | None = Field(None, description="Null: it is mapped to nothing.")
    port: int | None = None
    verified: bool
    record_name: str = Field(description="Name of the TXT record that proves whose domain it is.")
    record_value: str
    created_at: datetime
