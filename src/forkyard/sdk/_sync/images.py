# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Images that machines are made of, and what is uploaded for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from forkyard.errors import UploadNotFound
from forkyard.models import Page
from forkyard.models.bases import ImageInfo, UploadInfo
from forkyard.models.specs import Spec as SpecModel
from forkyard.sdk import archive, wire
from forkyard.sdk._sync import runtime
from forkyard.sdk._sync.transport import Transport
from forkyard.sdk.spec import Spec, uploads_of
from forkyard.sdk.uploads import Upload, image_source

IMPORT_S = 3600.0


class Images:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def import_(self, image: str, *, username: str | None = None, password: str | None = None) -> ImageInfo:
        """An image of a registry, a local OCI layout, or a local `docker save` archive. With a `username`, the registry
        is asked with it; neither is kept."""
        source, upload = runtime.blocking(image_source, image)
        if upload is not None:
            send(self._transport, upload)
        body: dict[str, object] = {"image": source}
        if username is not None:
            body["auth"] = credentials((username, password or ""))
        answer = self._transport.request("POST", "/images", body=body, timeout_s=IMPORT_S)
        return wire.parse(ImageInfo, answer.content)

    def list(self) -> list[ImageInfo]:
        """With their sizes, and when each was last used."""
        return self._transport.items(Page[ImageInfo], "/images", {})

    def delete(self, image: str) -> None:
        """By its id, or a name it was imported under. `Conflict` while sandboxes, snapshots or layers rest on it."""
        self._transport.request("DELETE", f"/images/{wire.segment(image)}")


def credentials(registry: tuple[str, str] | tuple[str, str, str]) -> dict[str, str]:
    """User and password, and perhaps the registry they are for, as the API wants them."""
    return dict(zip(("username", "password", "registry"), registry, strict=False))


def send_ahead(transport: Transport, spec: Spec | SpecModel | Mapping[str, Any]) -> None:
    """What a spec needs and does not hold."""
    for upload in uploads_of(spec):
        send(transport, upload)


def send(transport: Transport, upload: Upload) -> UploadInfo:
    """Unless it is there already."""
    try:
        answer = transport.request("GET", f"/uploads/{wire.segment(upload.digest)}")
    except UploadNotFound:
        content = runtime.body(archive.read_chunks(upload.path))
        answer = transport.request(
            "POST", "/uploads", params={"digest": upload.digest}, content=content, timeout_s=IMPORT_S
        )
    return wire.parse(UploadInfo, answer.content)
