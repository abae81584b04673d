"""Images out of registries, by `skopeo`.

Owns: what it is called with, and what its failures mean. Credentials are in memory, for as long as it runs.
"""

from __future__ import annotations

import base64
import json
import os
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from forkyard.errors import (
    Forbidden,
    ImageBuildFailed,
    ImageNotFound,
    InvalidImage,
    InvalidRequest,
    RegistryUnreachable,
)
from forkyard.images.oci import ARCHITECTURE, OS
from forkyard.images.process import run
from forkyard.models.bases import registry_of

_TIMEOUT_S = 3600.0
_UNREACHABLE = (
    *(
        "no such host",
        "connection refused",
        "i/o timeout",
        "network is unreachable",
        "no route to host",
        "TLS handshake",
    ),
    *("server misbehaving", "connection reset", "pinging container registry", "context deadline exceeded", "EOF"),
)
_REFUSED = ("unauthorized", "authentication required", "denied", "invalid username/password")
_MISSING = ("manifest unknown", "not found", "name unknown", "NAME_UNKNOWN", "StatusCode: 404")


@dataclass(frozen=True)
class Way:
    """How a registry is reached: by what command a program is run there, and with which variables. `refused` and `failed`
    say what went wrong on it, if something did."""

    entered: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    refused: Callable[[], str | None] = lambda: None
    failed: Callable[[], str | None] = lambda: None


#: The way to a registry, for as long as it is needed. Raises what refuses it.
WayTo = Callable[[str], AbstractAsyncContextManager[Way]]


@asynccontextmanager
async def straight(_registry: str) -> AsyncIterator[Way]:
    yield Way()


async def pull(
    ref: str, to: Path, *, credentials: tuple[str, str] | None, plain_http: bool, way_to: WayTo = straight
) -> None:
    """The image as an OCI layout in the directory `to`."""
    options = ["--override-os", OS, "--override-arch", ARCHITECTURE, "--retry-times", "2"]
    if plain_http:
        options.append("--src-tls-verify=false")
    with ExitStack() as stack:
        if credentials is not None:
            options += ["--src-authfile", stack.enter_context(_auth_file(registry_of(ref), credentials))]
        else:
            options.append("--src-no-creds")
        exact = re.sub(r":[^:/@]+(?=@)", "", ref)  # of a tag beside a digest only people make something
        copy = ("skopeo", "copy", "--quiet", *options, f"docker://{exact}", f"oci:{to}:image")
        async with way_to(registry_of(ref)) as way:
            try:
                await run(*way.entered, *copy, timeout_s=_TIMEOUT_S, env=way.env)
            except ImageBuildFailed as error:
                raise _understood(ref, error, way) from None


@contextmanager
def _auth_file(registry: str, credentials: tuple[str, str]) -> Iterator[str]:
    """In memory: nothing is left of it, however this process ends."""
    secret = base64.b64encode(":".join(credentials).encode()).decode()
    fd = os.memfd_create("forkyard-registry")
    try:
        os.write(fd, json.dumps({"auths": {registry: {"auth": secret}}}).encode())
        yield f"/proc/{os.getpid()}/fd/{fd}"
    finally:
        os.close(fd)


def _understood(ref: str, error: ImageBuildFailed, way: Way) -> Exception:
    if (refused := way.refused()) is not None:
        return Forbidden(f"{ref} cannot be pulled: {refused}")
    if (failed := way.failed()) is not None:
        return RegistryUnreachable(f"the registry {registry_of(ref)} cannot be reached: {failed}")
    said = error.message.rpartition("\n")[2][-500:]
    if "invalid reference format" in said:
        return InvalidRequest(f"{ref} cannot be the name of an image: registry/name:tag, or registry/name@sha256:…")
    if "no image found in" in said and "architecture" in said:
        return InvalidImage(f"{ref} is not for {OS}/{ARCHITECTURE}")
    if any(word in said for word in _REFUSED):
        return Forbidden(
            f"the registry {registry_of(ref)} refuses {ref}; give a user and a password for it, or check the name"
        )
    if any(word in said for word in _MISSING):
        return ImageNotFound(f"there is no image {ref} in its registry")
    if any(word in said for word in _UNREACHABLE):
        return RegistryUnreachable(f"the registry {registry_of(ref)} cannot be reached: {said[-200:]}")
    return error
