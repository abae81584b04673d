"""The daemon itself: health and doctor."""

from __future__ import annotations

import os

from fastapi import APIRouter, Request, Response

from forkyard.api.answers import answer
from forkyard.api.inputs import BoundedRoute, Control
from forkyard.models import Check, Health, Shutdown
from forkyard.telemetry.metrics import CONTENT_TYPE

router = APIRouter(tags=["system"], route_class=BoundedRoute)


@router.get("/health", response_model=Health, summary="Is the daemon up?", openapi_extra={"security": []})
async def health(request: Request, control: Control) -> Response:
    """Needs no API key."""
    ready = control.ready.is_set()
    return answer(
        Health(
            status="ok" if ready else "starting",
            version=request.app.version,
            accel=control.host.accel,
            sandboxes_running=await control.sandboxes.count_running(),
            pid=os.getpid(),
        )
    )


async def metrics(request: Request, control: Control) -> Response:
    """For Prometheus. At `/metrics`, not below the prefix; with an API key, as all else."""
    return Response(
        await control.metrics_text(request.app.version), media_type=CONTENT_TYPE, headers={"cache-control": "no-store"}
    )


@router.get("/doctor", response_model=list[Check], summary="What this host can do, in plain words")
async def doctor(control: Control) -> Response:
    return answer(await control.host.checks())


@router.post("/shutdown", status_code=202, response_class=Response, summary="Stop the daemon")
async def shutdown(control: Control, body: Shutdown) -> Response:
    """Sandboxes go on running, and the next daemon takes them over, unless `destroy` asks to delete them all."""
    control.request_stop(destroy=body.destroy)
    return Response(status_code=202)
