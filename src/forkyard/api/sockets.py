"""What every conversation over a WebSocket needs: how it ends, and two directions at once.

Text frames are JSON documents with a `type`. Whatever fails is said in the last one, `{"type":"error","problem":…}`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from forkyard.api.problem import known
from forkyard.api.streams import line


@contextlib.asynccontextmanager
async def conversation(socket: WebSocket) -> AsyncIterator[None]:
    """Accepted, and closed at the end; a client that goes away ends it too."""
    await socket.accept()
    try:
        yield
        if socket.application_state is WebSocketState.CONNECTED:
            await socket.close()
    except WebSocketDisconnect:
        return
    except Exception as raised:
        error = known(raised)
        if socket.application_state is WebSocketState.CONNECTED:
            await say(socket, {"type": "error", "problem": error.to_problem()})
            await socket.close(1011, error.code)


async def say(socket: WebSocket, content: dict[str, Any]) -> None:
    await socket.send_text(line(content).decode("ascii").rstrip())


async def until_one_ends(*directions: Coroutine[Any, Any, None]) -> None:
    """Run all; when the first has ended, in whatever way, so do the others."""
    tasks = [asyncio.create_task(direction) for direction in directions]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
