"""Whether a dev server answers on its port, and what is said of one that does not."""

from __future__ import annotations

from typing import Any

from forkyard.control.commands import run
from forkyard.errors import ForkyardError, ServiceNotReady
from forkyard.guest.base import ExecSpec, Guest
from forkyard.models.dev_servers import DevServerCreate

LOOK_S = 10.0
SHOWN_LINES = 15
_SHOWN_CHARS = 1500
_SHOWN_PORTS = 20
_LISTENS = "0A"


def asked(port: int) -> str:
    """Any answer will do: that of a server whose first page is broken is to be seen too. Before it listens it is asked
    without starting a program, for that is when it needs the processor itself."""
    return f"(exec 3<>/dev/tcp/127.0.0.1/{port}) && curl -s -o /dev/null --max-time 20 http://127.0.0.1:{port}/"


async def explained(error: ServiceNotReady, guest: Guest, request: DevServerCreate) -> ServiceNotReady:
    """The same, with the end of what the server printed, and, if it runs, where."""
    unit: dict[str, Any] = error.details.get("unit") or {}
    what = error.message
    if unit.get("active") == "active":
        what = _silent(request, await _ports(guest))
    said = ended(str(unit.get("log", "")))
    return ServiceNotReady(f"{what}\n{said}" if said else what, **error.details)


def _silent(request: DevServerCreate, ports: list[int]) -> str:
    late = f"within {request.ready_timeout_s:g} s"
    if request.port in ports:
        return f"the server listens on port {request.port} and did not answer HTTP there {late}"
    if ports:
        some = ", ".join(map(str, ports[:_SHOWN_PORTS]))
        return f"nothing answered on port {request.port} {late}; the machine listens on {some}: give `port`"
    return f"nothing listened on port {request.port} {late}; give `port` if it is another, or `ready_timeout_s`"


async def _ports(guest: Guest) -> list[int]:
    try:
        spec = ExecSpec("cat /proc/net/tcp /proc/net/tcp6", cwd="/", timeout_s=LOOK_S, label="ports")
        return listening((await run(guest, spec, keep_bytes=2**18)).tail)
    except ForkyardError:
        return []


def listening(table: str) -> list[int]:
    """The ports in the kernel's tables of sockets."""
    found = set()
    for columns in map(str.split, table.splitlines()):
        if len(columns) > 3 and columns[3] == _LISTENS:
            digits = columns[1].rpartition(":")[2]
            if len(digits) == 4 and all(digit in "0123456789ABCDEF" for digit in digits):
                found.add(int(digits, 16))
    return sorted(found)


def ended(text: str) -> str:
    """The last lines of what a program printed."""
    return "\n".join(text.strip().splitlines()[-SHOWN_LINES:])[-_SHOWN_CHARS:]
