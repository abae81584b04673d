"""Puts the API together. No global state: every app is made for one control plane."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from fastapi import APIRouter, Depends, FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.responses import RedirectResponse
from starlette.routing import Route

import forkyard
from forkyard.api import problem
from forkyard.api.access import authorize
from forkyard.api.auth import JWKS, PREFIX, Gate
from forkyard.api.git_http import GitHttp
from forkyard.api.problem import documented
from forkyard.api.routes import (
    builds as builds_routes,
)
from forkyard.api.routes import (
    code,
    domains,
    egress,
    events,
    execs,
    files,
    git,
    git_content,
    git_remotes,
    git_triggers,
    identities,
    images,
    keys,
    previews,
    recordings,
    reviews,
    sandboxes,
    secrets,
    services,
    snapshots,
    ssh,
    system,
    terminal,
    verbs,
    volumes,
)
from forkyard.api.routes import (
    dev_servers as dev_servers_routes,
)
from forkyard.api.routes import (
    runs as runs_routes,
)
from forkyard.builds.builds import Builds
from forkyard.builds.runs import Runs
from forkyard.builds.schedules import Schedules
from forkyard.control.plane import ControlPlane
from forkyard.dev.servers import DevServers
from forkyard.errors import Forbidden, InternalError, InvalidRequest, Unauthenticated
from forkyard.git.hosting import GitHosting

_TAGS = [
    {"name": "sandboxes", "description": "Machines: restored from memory, yours until deleted."},
    {"name": "snapshots", "description": "Memory, devices and disk of a sandbox at one instant."},
    {
        "name": "execs",
        "description": "Commands in a sandbox. A terminal is a WebSocket at `/sandboxes/{id}/terminal`.\n\n"
        + str(terminal.__doc__),
    },
    {"name": "builds", "description": str(builds_routes.__doc__)},
    {"name": "code", "description": str(code.__doc__)},
    {"name": "services", "description": str(services.__doc__)},
    {"name": "images", "description": str(images.__doc__)},
    {"name": "dev servers", "description": str(dev_servers_routes.__doc__)},
    {"name": "runs", "description": str(runs_routes.__doc__)},
    {"name": "files", "description": str(files.__doc__)},
    {"name": "volumes", "description": str(volumes.__doc__)},
    {"name": "events", "description": "Every change of a sandbox's state, with its cause."},
    {"name": "previews", "description": "Ports of sandboxes, opened in a browser; and domains for them."},
    {"name": "network", "description": "What left a sandbox, what may, and secrets that never enter one."},
    {"name": "git", "description": "Repositories, with a clone and without."},
    {"name": "identities", "description": str(identities.__doc__)},
    {"name": "keys", "description": "API keys."},
    {"name": "ssh", "description": str(ssh.__doc__)},
    {"name": "system", "description": "The daemon itself."},
]


def create_app(
    control: ControlPlane,
    *,
    allowed_hosts: Collection[str] = (),
    hosting: GitHosting | None = None,
    builds: Builds | None = None,
    dev_servers: DevServers | None = None,
    runs: Runs | None = None,
    schedules: Schedules | None = None,
) -> FastAPI:
    """`allowed_hosts`: names the daemon is reached by, besides localhost and addresses. `hosting`: else no git.
    `builds`: else no specs. `dev_servers`, `runs`, `schedules`: else none."""
    app = FastAPI(
        title="Forkyard",
        version=forkyard.__version__,
        description="Linux machines for coding agents.",
        openapi_url=f"{PREFIX}/openapi.json",
        docs_url=f"{PREFIX}/docs",
        redoc_url=None,
        openapi_tags=_TAGS,
        redirect_slashes=False,
        dependencies=[Depends(authorize)],
    )
    app.state.control = control
    app.state.git = hosting
    app.state.builds = builds
    app.state.dev_servers = dev_servers
    app.state.runs = runs
    app.state.schedules = schedules
    api = APIRouter(prefix=PREFIX, responses=documented(Unauthenticated, Forbidden, InvalidRequest, InternalError))
    for router in (
        system.router,
        sandboxes.router,
        verbs.router,
        snapshots.router,
        builds_routes.router,
        images.streams,
        images.router,
        services.router,
        code.router,
        dev_servers_routes.router,
        runs_routes.router,
        execs.router,
        terminal.router,
        files.streams,
        files.router,
        events.router,
        keys.router,
        git.streams,
        git.router,
        git_content.router,
        reviews.router,
        git_triggers.router,
        git_remotes.router,
        git_remotes.hooks,
        identities.router,
        previews.router,
        domains.router,
        egress.router,
        secrets.router,
        volumes.streams,
        volumes.router,
        recordings.router,
        ssh.router,
    ):
        api.include_router(router)
    app.include_router(api)
    app.add_api_route("/metrics", system.metrics, include_in_schema=False)
    app.add_api_route(JWKS, git_triggers.jwks, include_in_schema=False)
    if hosting is not None:
        app.router.routes.append(Route("/git/{rest:path}", GitHttp(hosting)))
    app.add_api_route("/", lambda: RedirectResponse(f"{PREFIX}/docs"), include_in_schema=False)
    app.add_middleware(Gate, control=control, allowed_hosts=allowed_hosts)
    problem.install(app)  # last, and so outermost: what the gate refuses is answered there too
    app.openapi = lambda: _openapi(app)  # type: ignore[method-assign]
    return app


def _openapi(app: FastAPI) -> dict[str, Any]:
    if app.openapi_schema is None:
        schema = get_openapi(
            title=app.title,
            version=app.version,
            description=app.description,
            routes=app.routes,
            tags=app.openapi_tags,
        )
        components = schema.setdefault("components", {})
        components.setdefault("schemas", {})["Problem"] = problem.Problem.model_json_schema()
        components["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
        }
        schema["security"] = [{"bearer": []}, {"key": []}]
        app.openapi_schema = schema
    return app.openapi_schema
