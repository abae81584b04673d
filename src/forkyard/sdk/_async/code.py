"""Code that is run in a sandbox, and the contexts that remember what it did."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self

from forkyard.errors import DaemonUnreachable
from forkyard.models import Page
from forkyard.models.code import CodeEnd, CodeEvent, CodeException, CodeResult, CodeRun, ContextInfo, Language
from forkyard.sdk import validation, wire
from forkyard.sdk._async import runtime
from forkyard.sdk._async.transport import AsyncTransport
from forkyard.sdk.code import CodeOutcome, Gathering, event_of

#: A context is started by the daemon, which has a deadline of its own.
START_S = 400.0


class AsyncContexts:
    """Contexts of a sandbox: variables, functions and imports that live on from run to run, and in forks."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{sandbox_id}/contexts"

    async def create(
        self,
        language: Language = "python",
        *,
        cwd: str | None = None,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> ContextInfo:
        """A new one, that can run code when this returns. `env` is of all that runs in it."""
        request = validation.context_create(language=language, cwd=cwd, user=user, env=dict(env or {}))
        answer = await self._transport.request(
            "POST", self._path, body=request.model_dump(exclude_defaults=True), timeout_s=START_S
        )
        return wire.parse(ContextInfo, answer.content)

    async def list(self) -> list[ContextInfo]:
        """Oldest first."""
        answer = await self._transport.request("GET", self._path)
        return wire.parse(Page[ContextInfo], answer.content).items

    async def get(self, context: ContextInfo | str) -> ContextInfo:
        answer = await self._transport.request("GET", self._of(context))
        return wire.parse(ContextInfo, answer.content)

    async def restart(self, context: ContextInfo | str) -> ContextInfo:
        """Let it forget everything. What runs in it is interrupted."""
        answer = await self._transport.request("POST", f"{self._of(context)}/restart", timeout_s=START_S)
        return wire.parse(ContextInfo, answer.content)

    async def interrupt(self, context: ContextInfo | str) -> None:
        """End what runs in it. It remembers all it knew."""
        await self._transport.request("POST", f"{self._of(context)}/interrupt")

    async def delete(self, context: ContextInfo | str) -> None:
        await self._transport.request("DELETE", self._of(context))

    def _of(self, context: ContextInfo | str) -> str:
        return f"{self._path}/{wire.segment(context_id(context))}"


class AsyncCodeStream:
    """What code does, as it does it. Iterate it once. Leaving the loop early interrupts the code."""

    def __init__(self, transport: AsyncTransport, sandbox_id: str, request: CodeRun) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{sandbox_id}/code"
        self._request = request
        self._flow: runtime.Flow[CodeEvent] | None = None

    async def __aiter__(self) -> AsyncIterator[CodeEvent]:
        self._flow = self._follow()
        async with aclosing(self._flow) as events:
            async for event in events:
                yield event

    async def collect(
        self,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        on_result: Callable[[CodeResult], object] | None = None,
        on_exception: Callable[[CodeException], object] | None = None,
    ) -> CodeOutcome:
        """Follow it to its end."""
        gathering = Gathering(on_stdout, on_stderr, on_result, on_exception)
        async with aclosing(self._follow()) as events:
            async for event in events:
                gathering.add(event)
                if isinstance(event, CodeEnd):
                    return gathering.outcome(event)
        raise DaemonUnreachable("The daemon closed the stream of a run before the run ended.")

    async def _follow(self) -> runtime.Flow[CodeEvent]:
        body: dict[str, Any] = self._request.model_dump(exclude_defaults=True)
        async with aclosing(self._transport.lines("POST", self._path, body=body, timeout_s=START_S)) as lines:
            async for line in lines:
                if line is not None:
                    yield event_of(line)

    async def aclose(self) -> None:
        if self._flow is not None:
            await self._flow.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def context_id(context: ContextInfo | str) -> str:
    return context if isinstance(context, str) else context.id
