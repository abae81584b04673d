"""Services of a sandbox: systemd units."""

from __future__ import annotations

from typing import Any

from forkyard.models import Page
from forkyard.models.builds import ServiceInfo, ServiceLogs
from forkyard.sdk import validation, wire
from forkyard.sdk._async.transport import AsyncTransport


class AsyncServices:
    """What runs in a sandbox by itself. Services go on in forks and in what is made from snapshots."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{sandbox_id}/services"

    async def list(self) -> list[ServiceInfo]:
        answer = await self._transport.request("GET", self._path)
        return wire.parse(Page[ServiceInfo], answer.content).items

    async def get(self, name: str) -> ServiceInfo:
        answer = await self._transport.request("GET", f"{self._path}/{wire.segment(name)}")
        return wire.parse(ServiceInfo, answer.content)

    async def add(self, name: str, exec: str | None = None, *, wait: bool = True, **options: Any) -> ServiceInfo:
        """Start a service, and return when it is ready. One of the same name is replaced. Without `exec` it is what
        the image of the sandbox says: its ENTRYPOINT and CMD. Options as in a spec: `ready`,
        `ready_timeout_s`, `type`, `restart`, `env`, `user`, `workdir`, `after`, `requires`, `watchdog_s` …
        `ServiceNotReady` has its state and the end of its journal."""
        request = validation.service_create(name=name, exec=exec, wait=wait, **options)
        answer = await self._transport.request(
            "POST",
            self._path,
            body=request.model_dump(mode="json", exclude_defaults=True),
            timeout_s=wire.ANSWER_S + request.ready_timeout_s,
        )
        return wire.parse(ServiceInfo, answer.content)

    async def remove(self, name: str) -> None:
        """Stop it and remove it."""
        await self._transport.request("DELETE", f"{self._path}/{wire.segment(name)}")

    async def start(self, name: str) -> ServiceInfo:
        return await self._turn(name, "start")

    async def stop(self, name: str) -> ServiceInfo:
        return await self._turn(name, "stop")

    async def restart(self, name: str) -> ServiceInfo:
        return await self._turn(name, "restart")

    async def logs(self, name: str, *, lines: int = 100) -> str:
        """The end of its journal."""
        answer = await self._transport.request(
            "GET", f"{self._path}/{wire.segment(name)}/logs", params={"lines": lines}
        )
        return wire.parse(ServiceLogs, answer.content).log

    async def _turn(self, name: str, verb: str) -> ServiceInfo:
        path = f"{self._path}/{wire.segment(name)}/{verb}"
        answer = await self._transport.request("POST", path, timeout_s=wire.CHANGE_S)
        return wire.parse(ServiceInfo, answer.content)
