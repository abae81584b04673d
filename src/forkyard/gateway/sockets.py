"""WebSockets through to a server in a sandbox.

Both ends speak for themselves: pings are answered on each side, and a message is passed on when it is whole. A socket
that is only open lets its sandbox sleep; a message wakes it. If the machine was replaced meanwhile (rollback, a resume
from disk) the socket is closed with 1012, and the client connects anew.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, cast

from starlette.types import Message, Receive, Scope, Send
from websockets.asyncio.client import ClientConnection, connect
from websockets.datastructures import Headers as SocketHeaders
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Origin, Subprotocol

from forkyard.control.previews import Previews
from forkyard.errors import BadAnswer, ForkyardError
from forkyard.gateway.headers import Visit, cookie_for_client, for_client, for_guest
from forkyard.gateway.holding import TRY_LATER, WHY, Hold, Room
from forkyard.gateway.proxy import listening
from forkyard.gateway.upstream import Headers
from forkyard.store.records import SandboxRecord

#: Of one message, in either direction.
MAX_MESSAGE_BYTES = 64 * 2**20
#: Among the extensions of a scope: what the socket holds of what its client sends.
HOLD = "forkyard.hold"
HANDSHAKE_S = 30.0
RESTARTED = 1012
_NO_CODE = 1005
_ABNORMAL = 1006


class GuestSocket(ClientConnection):
    def __init__(self, *args: Any, hold: Hold, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.hold = hold

    def data_received(self, data: bytes) -> None:
        if self.hold.came(len(data)):
            super().data_received(data)
        else:
            self.transport.abort()


class SocketRelay:
    def __init__(self, previews: Previews) -> None:
        self._previews = previews

    async def serve(self, visit: Visit, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises what can be told to the client, as long as the handshake is not done."""
        theirs: Hold = scope["extensions"][HOLD]
        theirs.belongs_to(visit.target.sandbox_id)
        with self._previews.using(visit.target.sandbox_id):
            record = await self._previews.awake(visit.target.sandbox_id)
            try:
                guest = await self._opened(visit, record, scope["subprotocols"], theirs.room)
            except InvalidStatus as refusal:
                await _refused(visit, refusal, send)
                return
        try:
            await receive()  # websocket.connect
            cookies = [
                (b"set-cookie", cookie_for_client(visit, value.encode("latin-1")))
                for value in _all(guest, "Set-Cookie")
            ]
            await send({"type": "websocket.accept", "subprotocol": guest.subprotocol, "headers": cookies})
            await self._relay(visit, record, guest, receive, send)
        finally:
            guest.hold.close()
            if guest.close_code is None:
                guest.transport.abort()

    async def _opened(self, visit: Visit, record: SandboxRecord, subprotocols: list[str], room: Room) -> GuestSocket:
        sock = await listening(self._previews, record, visit.target.port)
        headers = for_guest(visit, websocket=True)
        origin = visit.header(b"origin")
        try:
            opened = await connect(
                "ws://" + (visit.host + visit.request_target).decode("latin-1"),
                sock=sock,
                origin=None if origin is None else Origin(origin.decode("latin-1")),
                subprotocols=[Subprotocol(name) for name in subprotocols] or None,
                additional_headers=SocketHeaders(
                    (name.decode("latin-1"), value.decode("latin-1")) for name, value in headers if name != b"origin"
                ),
                user_agent_header=None,
                compression=None,
                open_timeout=HANDSHAKE_S,
                ping_interval=None,  # a sandbox that sleeps answers no ping, and is fine
                close_timeout=2,
                max_size=MAX_MESSAGE_BYTES,
                max_queue=(0, 0),  # one is read while nobody waits to send it on, and no second
                create_connection=cast(Any, partial(GuestSocket, hold=Hold(room, record.id))),
            )
            return cast(GuestSocket, opened)
        except InvalidStatus:
            raise
        except (InvalidHandshake, ValueError, OSError, TimeoutError, EOFError) as error:
            sock.close()
            if isinstance(error.__cause__, InvalidStatus):  # a redirect
                raise error.__cause__ from None
            raise BadAnswer(
                f"the server on port {visit.target.port} of sandbox {record.id} did not open the WebSocket: {error}"
            ) from error

    async def _relay(
        self, visit: Visit, record: SandboxRecord, guest: GuestSocket, receive: Receive, send: Send
    ) -> None:
        outward = asyncio.create_task(self._outward(visit, guest, send))
        try:
            await self._inward(visit, record, guest, receive, send)
        finally:
            outward.cancel()
            await asyncio.wait([outward])

    async def _inward(
        self, visit: Visit, record: SandboxRecord, guest: ClientConnection, receive: Receive, send: Send
    ) -> None:
        """Until either end is closed: the one of the client is reported also when we close it."""
        while True:
            message = await receive()
            if message["type"] == "websocket.disconnect":
                await guest.close(*_closing(message.get("code"), message.get("reason")))
                return
            data: str | bytes = message["bytes"] if message.get("text") is None else message["text"]
            try:
                with self._previews.using(visit.target.sandbox_id):
                    now = await self._previews.awake(visit.target.sandbox_id)
                    if now.incarnation != record.incarnation:
                        await _close(send, RESTARTED, "the machine was replaced")
                        return
                    await guest.send(data)
                    self._previews.passed(visit.target.sandbox_id, bytes_in=_size(data))
            except ConnectionClosed:
                continue  # the other direction closes
            except ForkyardError as error:
                await _close(send, RESTARTED, error.code)
                return

    async def _outward(self, visit: Visit, guest: GuestSocket, send: Send) -> None:
        try:
            while True:
                guest.hold.passed()
                data = await guest.recv()
                guest.hold.taken()
                self._previews.passed(visit.target.sandbox_id, bytes_out=_size(data))
                kind = "text" if isinstance(data, str) else "bytes"
                await send({"type": "websocket.send", kind: data})
        except ConnectionClosed as closed:
            if guest.hold.refused:
                await _close(send, TRY_LATER, WHY)
            elif closed.rcvd is None:
                await _close(send, RESTARTED, "the server in the sandbox went away")
            else:
                await _close(send, *_closing(closed.rcvd.code, closed.rcvd.reason))


def _size(message: str | bytes) -> int:
    return len(message.encode("utf-8", "surrogatepass") if isinstance(message, str) else message)


def _closing(code: int | None, reason: str | None) -> tuple[int, str]:
    """Codes that stand for "none was sent" cannot be sent."""
    if code is None or code == _NO_CODE:
        return 1000, ""
    if code == _ABNORMAL:
        return 1001, ""
    return code, reason or ""


async def _close(send: Send, code: int, reason: str) -> None:
    await send({"type": "websocket.close", "code": code, "reason": reason})


async def _refused(visit: Visit, refusal: InvalidStatus, send: Send) -> None:
    response = refusal.response
    headers: Headers = [
        (name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in response.headers.raw_items()
    ]
    body = bytes(response.body or b"")
    kept = [header for header in for_client(visit, response.status_code, headers) if header[0] != b"content-length"]
    kept.append((b"content-length", str(len(body)).encode()))
    start: Message = {"type": "websocket.http.response.start", "status": response.status_code, "headers": kept}
    await send(start)
    await send({"type": "websocket.http.response.body", "body": body})


def _all(guest: ClientConnection, name: str) -> list[Any]:
    return [] if guest.response is None else list(guest.response.headers.get_all(name))
