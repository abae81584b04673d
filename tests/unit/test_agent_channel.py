"""What the agent writes to its front: whole frames, whoever comes and goes."""

from __future__ import annotations

import socket
import struct

from forkyard.guest import frames as host
from forkyard.guest_agent import frames
from forkyard.guest_agent.channel import Channel
from forkyard.guest_agent.loop import Loop
from forkyard.guest_agent.session import Session

LARGE = frames.MAX_BODY


def kinds(data: bytes) -> list[int]:
    """As the front reads them: one behind the other, each to its end."""
    found = []
    while data:
        magic, kind, _, _, length = struct.unpack_from(">2sBBII", data)
        assert magic == b"FY" and len(data) >= length + frames.OVERHEAD, f"torn after {found}"
        found.append(kind)
        data = data[length + frames.OVERHEAD :]
    return found


def test_a_frame_that_was_begun_is_ended_before_another_host_is_answered() -> None:
    front, end = socket.socketpair()
    with front, end:
        for one in (front, end):
            one.setblocking(False)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
        loop = Loop()
        channel = Channel(
            *(loop, lambda: end.fileno(), lambda channel, hello: Session(channel, hello, {})),
            on_open=lambda: None,
            behind_front=True,
        )
        channel.open()
        got = b""

        def turns() -> bytes:
            for _ in range(3):
                loop.later(0.001, lambda: None)  # no turn waits for long
                loop.turn()
            try:
                return front.recv(1 << 20)
            except BlockingIOError:
                return b""

        front.send(host.encode_hello(7, b"a" * 16, b'{"window":0}'))
        got += turns()
        channel.send(frames.RESPONSE, 0, 1, bytes(LARGE))
        channel.flush()
        front.send(host.encode_hello(8, b"b" * 16, b'{"window":0}'))  # the first host has left
        for _ in range(200):
            got += turns()
        assert kinds(got) == [frames.HELLO_ACK, frames.HELLO_ACK, frames.RESPONSE, frames.HELLO_ACK]
