"""Dev servers: a repository, installed and served in a sandbox, kept at the head of its branch."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Body, Depends, Query, Request, Response

from forkyard.api.access import By
from forkyard.api.answers import answer, done
from forkyard.api.inputs import SpecRoute, checked_env
from forkyard.api.problem import documented
from forkyard.dev.servers import DevServers
from forkyard.errors import (
    Conflict,
    DevServerFailed,
    DevServerNotFound,
    HostFailure,
    NoCapacity,
    OperationTimeout,
    RemoteDenied,
    RemoteFailed,
    RepoNotFound,
    RevisionNotFound,
    ServiceNotReady,
    StateConflict,
)
from forkyard.models import Page
from forkyard.models.dev_servers import DevServerCreate, DevServerInfo, DevServerLogs

router = APIRouter(prefix="/dev-servers", tags=["dev servers"], route_class=SpecRoute)

_EXAMPLE: dict[str, Any] = {"repo": "app", "port": 3000}


async def _servers_of(request: Request) -> DevServers:
    found: DevServers | None = request.app.state.dev_servers
    if found is None:
        raise HostFailure("this daemon has no dev servers")
    return found


Servers = Annotated[DevServers, Depends(_servers_of)]


@router.post(
    "",
    status_code=201,
    response_model=DevServerInfo,
    summary="Serve a repository",
    responses=documented(
        RepoNotFound,
        RevisionNotFound,
        RemoteFailed,
        RemoteDenied,
        Conflict,
        DevServerFailed,
        ServiceNotReady,
        NoCapacity,
        OperationTimeout,
        HostFailure,
    ),
)
async def create(body: Annotated[DevServerCreate, Body(examples=[_EXAMPLE])], servers: Servers, by: By) -> Response:
    """Clones it, finds out how it is installed and started, and answers when the server does. If that fails, nothing is
    left of it."""
    checked_env(body.env)
    checked_env(body.sandbox.env)
    return answer(await servers.create(body, by), 201)


@router.get("", response_model=Page[DevServerInfo], summary="List dev servers, newest first")
async def list_(servers: Servers) -> Response:
    return answer(Page[DevServerInfo](items=await servers.list(), next_cursor=None))


@router.get(
    "/{server}", response_model=DevServerInfo, summary="Get a dev server", responses=documented(DevServerNotFound)
)
async def get(server: str, servers: Servers) -> Response:
    """By its id or name. Does not wake it."""
    return answer(await servers.get(server))


@router.post(
    "/{server}/reload",
    response_model=DevServerInfo,
    summary="Bring a dev server to the head of its branch",
    responses=documented(DevServerNotFound, DevServerFailed, ServiceNotReady, StateConflict, OperationTimeout),
)
async def reload(server: str, servers: Servers) -> Response:
    """As a push does; and it is restarted in any case."""
    return answer(await servers.reload(server))


@router.get(
    "/{server}/logs",
    response_model=DevServerLogs,
    summary="The end of what a dev server has printed",
    responses=documented(DevServerNotFound),
)
async def logs(server: str, servers: Servers, lines: Annotated[int, Query(ge=1, le=10_000)] = 100) -> Response:
    return answer(DevServerLogs(log=await servers.logs(server, lines)))


@router.delete(
    "/{server}",
    status_code=204,
    summary="Delete a dev server",
    responses=documented(DevServerNotFound, HostFailure, OperationTimeout),
)
async def delete(server: str, servers: Servers) -> Response:
    """With its sandbox. The repository stays."""
    await servers.delete(server)
    return done()
