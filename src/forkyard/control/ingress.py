"""Bytes between sandboxes and those who come to them: previews, SSH, forwarded ports.

Owns: the count of each sandbox since somebody last took it. What a sandbox asks for by itself is counted by its door.
"""

from __future__ import annotations

from forkyard.net.base import Traffic


class Ingress:
    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}

    def passed(self, sandbox_id: str, *, bytes_in: int = 0, bytes_out: int = 0) -> None:
        """`in`: into the sandbox."""
        before_in, before_out = self._counts.get(sandbox_id, (0, 0))
        self._counts[sandbox_id] = (before_in + bytes_in, before_out + bytes_out)

    def take(self) -> dict[str, Traffic]:
        counts, self._counts = self._counts, {}
        return {
            sandbox_id: Traffic(ingress_bytes_in=bytes_in, ingress_bytes_out=bytes_out)
            for sandbox_id, (bytes_in, bytes_out) in counts.items()
        }
