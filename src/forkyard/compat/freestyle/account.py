"""Who asks, and what was logged."""

from __future__ import annotations

from starlette.responses import Response

from forkyard.compat.freestyle.calls import Call, done

#: There is one account: this daemon.
ACCOUNT = "forkyard"


class Account:
    async def whoami(self, call: Call) -> Response:
        identity = None if call.who.admin else call.who.id
        return done({"accountId": ACCOUNT, "identityId": identity})
