"""E2B's token for the ports of a sandbox that are not open to everybody (`allowPublicTraffic: false`): one for all of them."""

from __future__ import annotations

import hmac

from starlette.types import Scope

from forkyard.control.plane import ControlPlane
from forkyard.control.previews import TOKEN_HEADER
from forkyard.errors import ForkyardError
from forkyard.models import SandboxInfo

HEADER = "e2b-traffic-access-token"


class Traffic:
    def __init__(self, control: ControlPlane) -> None:
        self._control = control

    def token(self, sandbox_id: str) -> str:
        return self._control.secrets.digest(f"e2b traffic of {sandbox_id}")

    def told(self, info: SandboxInfo) -> dict[str, str]:
        return {"trafficAccessToken": self.token(info.id)} if info.network.ingress.access == "token" else {}

    def opens(self, sandbox_id: str, given: str) -> bool:
        return hmac.compare_digest(given.encode("utf-8", "replace"), self.token(sandbox_id).encode())

    async def exchanged(self, scope: Scope, sandbox_id: str, port: int) -> Scope:
        """A request to a port with the token of that port instead, which the gateway knows. The server in the sandbox sees
        neither."""
        given = next(value for name, value in scope["headers"] if name == HEADER.encode())
        headers = [pair for pair in scope["headers"] if pair[0] != HEADER.encode()]
        if self.opens(sandbox_id, given.decode("latin-1")):
            try:
                token = (await self._control.previews.info(sandbox_id, port)).token
            except ForkyardError:  # the gateway says why
                token = None
            headers += [] if token is None else [(TOKEN_HEADER, token.encode())]
        return {**scope, "headers": headers}
