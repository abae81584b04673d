"""Builds: specs become layers, each a snapshot of a machine that runs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from forkyard.errors import BuildFailed
from forkyard.models import Page
from forkyard.models.builds import (
    BuildEnd,
    BuildInfo,
    BuildOutput,
    BuildPhase,
    BuildPlan,
    LayerInfo,
    Pruned,
    build_event,
)
from forkyard.models.network import Secret
from forkyard.models.specs import Spec as SpecModel
from forkyard.sdk import validation, wire
from forkyard.sdk._async import runtime
from forkyard.sdk._async.images import credentials, send_ahead
from forkyard.sdk._async.transport import AsyncTransport
from forkyard.sdk.spec import Spec, checked


class AsyncBuild:
    """A build. It goes on whether anybody follows it or not."""

    def __init__(self, transport: AsyncTransport, info: BuildInfo) -> None:
        self._transport = transport
        self._path = f"/builds/{wire.segment(info.id)}"
        self.info = info
        """As the daemon last reported it; `refresh()` asks again."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(id={self.id!r}, state={self.info.state!r})"

    @property
    def id(self) -> str:
        return self.info.id

    async def refresh(self) -> BuildInfo:
        answer = await self._transport.request("GET", self._path)
        self.info = wire.parse(BuildInfo, answer.content)
        return self.info

    async def logs(self, *, follow: bool = False, after: int = 0) -> runtime.Flow[BuildPhase | BuildOutput | BuildEnd]:
        """What it does and prints, line by line; with `follow`, until it ends, over restarts of the daemon."""
        stream = self._transport.follow(
            f"{self._path}/logs", build_event, lambda event: event.n, after=after or None, follow=follow
        )
        async with aclosing(stream) as events:
            async for event in events:
                yield event
                if isinstance(event, BuildEnd):
                    return

    async def wait(self) -> BuildInfo:
        """Until it has succeeded. `BuildFailed` has the step, its exit code, the end of its log, the states of services
        and the id of a snapshot to look around in."""
        async with aclosing(self.logs(follow=True)) as events:
            async for _ in events:
                pass
        info = await self.refresh()
        if info.state == "succeeded":
            return info
        message = info.failure.message if info.failure else f"it was {info.state}"
        details = info.failure.model_dump(exclude={"message"}) if info.failure else {}
        raise BuildFailed(f"build {info.id} failed: {message}", build_id=info.id, **details)

    async def delete(self) -> None:
        """End it if it runs, and forget it. Layers stay in the cache; its debug snapshot does not."""
        await self._transport.request("DELETE", self._path)


class AsyncBuilds:
    def __init__(self, transport: AsyncTransport) -> None:
        self._transport = transport

    async def create(
        self,
        spec: Spec | SpecModel | Mapping[str, Any],
        *,
        skip_cache: bool = False,
        network: validation.Network | None = None,
        identity: str | None = None,
        registry: tuple[str, str] | tuple[str, str, str] | None = None,
        secrets: Mapping[str, Secret | Mapping[str, Any]] | None = None,
        allow_secrets: bool = False,
    ) -> AsyncBuild:
        """Begin a build. `network`: what it may reach; sandboxes made of it have their own. With an `identity`, hosted
        repositories that it may read can be cloned. `registry`: user and password for images of a private registry,
        and its name as third if images of others are needed too. `secrets`: stored ones it may use, as sandboxes do. A
        layer that holds the value of a stored secret is refused, unless `allow_secrets`."""
        await send_ahead(self._transport, spec)
        body = self._body(spec, skip_cache)
        if registry is not None:
            body["registry"] = credentials(registry)
        if network is not None:
            body["network"] = validation.network_policy(network).model_dump(mode="json")
        if identity is not None:
            body["identity"] = identity
        if secrets:
            body["secrets"] = {
                name: validation.secret(value).model_dump(mode="json") for name, value in secrets.items()
            }
        if allow_secrets:
            body["allow_secrets"] = True
        answer = await self._transport.request("POST", "/builds", body=body)
        return AsyncBuild(self._transport, wire.parse(BuildInfo, answer.content))

    async def explain(
        self,
        spec: Spec | SpecModel | Mapping[str, Any],
        *,
        skip_cache: bool = False,
        registry: tuple[str, str] | tuple[str, str, str] | None = None,
        allow_secrets: bool = False,
    ) -> list[LayerInfo]:
        """Which layers are in the cache, and why the others are not. Builds nothing, but imports the images it needs."""
        await send_ahead(self._transport, spec)
        body = self._body(spec, skip_cache)
        if registry is not None:
            body["registry"] = credentials(registry)
        if allow_secrets:
            body["allow_secrets"] = True
        answer = await self._transport.request(
            "POST", "/builds/explain", body=body, again=True, timeout_s=wire.CREATE_S
        )
        return wire.parse(BuildPlan, answer.content).layers

    async def get(self, build_id: str) -> AsyncBuild:
        answer = await self._transport.request("GET", f"/builds/{wire.segment(build_id)}")
        return AsyncBuild(self._transport, wire.parse(BuildInfo, answer.content))

    async def list(self, *, limit: int | None = None) -> list[AsyncBuild]:
        """Newest first."""
        found = await self._transport.items(Page[BuildInfo], "/builds", {}, limit)
        return [AsyncBuild(self._transport, info) for info in found]

    async def delete(self, build_id: str) -> None:
        await self._transport.request("DELETE", f"/builds/{wire.segment(build_id)}")

    async def prune(self) -> Pruned:
        """Remove all layers that no build works on. Sandboxes made from them go on."""
        answer = await self._transport.request("POST", "/builds/prune", timeout_s=wire.CHANGE_S)
        return wire.parse(Pruned, answer.content)

    def _body(self, spec: Spec | SpecModel | Mapping[str, Any], skip_cache: bool) -> dict[str, Any]:
        body: dict[str, Any] = {"spec": checked(spec).model_dump(mode="json", exclude_defaults=True)}
        return {**body, "skip_cache": True} if skip_cache else body
