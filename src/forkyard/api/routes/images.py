"""Images that machines are made of, and uploads: contexts of Dockerfiles, archives of images."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request, Response

from forkyard.api.answers import answer
from forkyard.api.inputs import BoundedRoute, raw_body, upload
from forkyard.api.problem import documented
from forkyard.api.routes.builds import Workshop
from forkyard.errors import (
    Conflict,
    HostFailure,
    ImageBuildFailed,
    ImageNotFound,
    InvalidImage,
    NoCapacity,
    OperationTimeout,
    RegistryUnreachable,
    RemoteFailed,
    UploadNotFound,
)
from forkyard.models import Page
from forkyard.models.bases import ImageImport, ImageInfo, UploadInfo
from forkyard.models.texts import Digest

router = APIRouter(tags=["images"], route_class=BoundedRoute)
#: Bodies as large as they like.
streams = APIRouter(tags=["images"])


@streams.post(
    "/uploads",
    status_code=201,
    response_model=UploadInfo,
    summary="Upload a context or an archive",
    openapi_extra=raw_body("A tar archive."),
    responses=documented(NoCapacity, OperationTimeout, HostFailure),
)
async def upload_(
    request: Request,
    builds: Workshop,
    digest: Annotated[Digest | None, Query(description="It must be this, or it is not kept.")] = None,
) -> Response:
    """Kept for some days after its last use, by the hash of its content, which is its id."""
    return answer(await builds.uploads.receive(upload(request), digest), 201)


@router.get(
    "/uploads/{digest}",
    response_model=UploadInfo,
    summary="Ask whether something was uploaded",
    responses=documented(UploadNotFound, HostFailure),
)
async def uploaded(digest: Annotated[Digest, Path()], builds: Workshop) -> Response:
    return answer(await asyncio.to_thread(builds.uploads.info, digest))


@router.post(
    "/images",
    status_code=201,
    response_model=ImageInfo,
    summary="Import an image",
    responses=documented(
        InvalidImage, UploadNotFound, ImageNotFound, RegistryUnreachable, RemoteFailed, ImageBuildFailed, HostFailure
    ),
)
async def import_(builds: Workshop, body: ImageImport) -> Response:
    """Answers when it is there. A name in a registry is asked for anew."""
    builds.bases.check(body.image)
    return answer(await builds.bases.imported(body.image, body.auth), 201)


@router.get("/images", response_model=Page[ImageInfo], summary="List images", responses=documented(HostFailure))
async def list_(builds: Workshop) -> Response:
    return answer(Page[ImageInfo](items=await builds.bases.images()))


@router.delete(
    "/images/{image:path}",
    status_code=204,
    summary="Remove an image",
    responses=documented(ImageNotFound, Conflict, HostFailure),
)
async def delete(
    image: Annotated[str, Path(description="Its id, or a name it was imported under.")], builds: Workshop
) -> Response:
    """And the templates made of it. A conflict while sandboxes, snapshots or layers rest on it."""
    await builds.bases.delete(image)
    return Response(status_code=204)
