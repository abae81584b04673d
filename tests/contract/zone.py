"""A name server on loopback that knows some TXT records, and that the others do not exist."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

import dns.flags
import dns.message
import dns.rcode
import dns.rrset


class Zone(contextlib.AbstractContextManager["Zone"]):
    def __init__(self, directory: Path | None = None) -> None:
        """Its records are a file each below `directory`, if one is given: other programs may write there."""
        self.records: dict[str, list[str]] = {}
        self._directory = directory

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.server_address
        return str(host), int(port)

    def __enter__(self) -> Self:
        self._server = socketserver.UDPServer(("127.0.0.1", 0), _handler(self._find))
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _find(self, name: str) -> list[str] | None:
        if self._directory is None:
            return self.records.get(name)
        path = self._directory / name.replace("/", "_")
        return path.read_text().splitlines() if path.is_file() else None


def _handler(find: Callable[[str], list[str] | None]) -> type[socketserver.BaseRequestHandler]:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            data, socket = self.request
            query = dns.message.from_wire(data)
            answer = dns.message.make_response(query)
            answer.flags |= dns.flags.RA
            name = query.question[0].name
            found = find(name.to_text(omit_final_dot=True))
            if found is None:
                answer.set_rcode(dns.rcode.NXDOMAIN)
            else:
                answer.answer.append(dns.rrset.from_text(name, 60, "IN", "TXT", *(f'"{text}"' for text in found)))
            socket.sendto(answer.to_wire(), self.client_address)

    return Handler
