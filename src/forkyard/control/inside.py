"""What sandboxes reach of this daemon: `git.forkyard.internal`, for those that have an identity.

Owns: the service that a door is told of, and who a request of a door is. The door says which sandbox it is of and shows a
word that no guest ever sees; what the guest itself claims to be is not asked. Never does: HTTP (`api.inside`).
"""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Mapping

from forkyard.control.ground import Ground
from forkyard.control.identities import Identities, Principal
from forkyard.errors import Forbidden, NotFound
from forkyard.net.base import INTERNAL_DOMAIN, SANDBOX_HEADER, Service
from forkyard.store.records import SandboxRecord

GIT_HOST = f"git.{INTERNAL_DOMAIN}"
DOOR_HEADER = "X-Forkyard-Door"


class Inside:
    def __init__(self, ground: Ground, identities: Identities) -> None:
        self._ground = ground
        self._identities = identities
        self._word = secrets.token_urlsafe(32)
        #: Where this daemon listens for doors, on 127.0.0.1. None: nowhere.
        self.port: int | None = None

    async def services(self, record: SandboxRecord) -> Mapping[str, Service]:
        """The same under every policy: who gives a sandbox an identity means it to be used."""
        if self.port is None or record.identity_id is None:
            return {}
        return {GIT_HOST: Service("127.0.0.1", self.port, {DOOR_HEADER: self._word})}

    async def who(self, headers: Mapping[str, str]) -> Principal:
        """Refusals are final: a git client that was asked for a password would ask its user."""
        if not hmac.compare_digest(headers.get(DOOR_HEADER, "").encode(), self._word.encode()):
            raise Forbidden("this address is for sandboxes; use the one that `forkyard git show` tells")
        record = await self._ground.record(headers.get(SANDBOX_HEADER, ""))
        if record.identity_id is None:
            raise Forbidden(f"sandbox {record.id} has no identity, and so no repositories")
        try:
            identity = await self._identities.get(record.identity_id)
        except NotFound:
            raise Forbidden(f"the identity of sandbox {record.id} is not there any more") from None
        return Principal("identity", identity.id, identity.name, sandbox_id=record.id)
