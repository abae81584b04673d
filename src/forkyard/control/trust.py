"""Which guests trust our certificate authority.

Owns: the two files in a guest that say so. A sandbox whose network looks into TLS (secrets, record, replay) is given
the certificate; one whose network does not has it taken away. Works through the files of the guest alone, so that it
needs no program in it; what it finds there is the guest's and may be anything.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from forkyard.errors import FileMissing, GuestFailure
from forkyard.guest.base import Guest

#: `update-ca-certificates` finds it here, so it stays when the bundle is made anew.
CERTIFICATE = "/usr/local/share/ca-certificates/forkyard.crt"
BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
_MAX_BUNDLE_BYTES = 8 * 2**20
_VARIABLES = (
    *("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT", "CARGO_HTTP_CAINFO"),
    "NODE_EXTRA_CA_CERTS",
)


def environment() -> dict[str, str]:
    """For programs that bring a bundle of their own, or look for none."""
    return dict.fromkeys(_VARIABLES, BUNDLE)


async def trust(guest: Guest, pem: str) -> None:
    ours = pem.encode("ascii")
    await guest.write_file(CERTIFICATE, _once(ours), mode=0o644)
    bundle = await _read(guest, BUNDLE)
    if ours not in bundle:
        gap = b"" if not bundle or bundle.endswith(b"\n") else b"\n"
        await guest.write_file(BUNDLE, _once(bundle + gap + ours), mode=0o644)


async def distrust(guest: Guest, pem: str) -> None:
    ours = pem.encode("ascii")
    bundle = await _read(guest, BUNDLE)
    if ours in bundle:
        await guest.write_file(BUNDLE, _once(bundle.replace(ours, b"")), mode=0o644)
    if await guest.exists(CERTIFICATE):
        await guest.remove(CERTIFICATE)


async def _read(guest: Guest, path: str) -> bytes:
    content = bytearray()
    try:
        async with guest.read_file(path, length=_MAX_BUNDLE_BYTES) as chunks:
            async for chunk in chunks:
                content += chunk
    except FileMissing:
        return b""
    if len(content) >= _MAX_BUNDLE_BYTES:
        raise GuestFailure(f"{path} in the sandbox is larger than {_MAX_BUNDLE_BYTES} bytes; it is left alone")
    return bytes(content)


async def _once(content: bytes) -> AsyncIterator[bytes]:
    yield content
