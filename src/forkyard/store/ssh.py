"""Queries of SSH keys and passwords. Both go with the API key they were made with."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import sqlalchemy as sa

from forkyard.store.database import Database, record_event
from forkyard.store.records import SshKeyRecord
from forkyard.store.tables import ssh_keys, ssh_passwords

#: A session may last so long after its password has expired.
LONGEST = timedelta(days=7)


class SshQueries(Database):
    async def add_ssh_key(self, ssh_key_id: str, api_key_id: str, name: str, fingerprint: str) -> SshKeyRecord:
        """If it is there already, that one."""
        now = datetime.now(UTC)

        def work(connection: sa.Connection) -> SshKeyRecord:
            query = ssh_keys.select().where(ssh_keys.c.fingerprint == fingerprint)
            there = connection.execute(query).mappings().first()
            if there is not None:
                return _ssh_key(there)
            values = {
                "id": ssh_key_id,
                "key_id": api_key_id,
                "name": name,
                "fingerprint": fingerprint,
                "created_at": now,
            }
            connection.execute(ssh_keys.insert(), values)
            record_event(connection, now, None, "ssh_key.added", data={"ssh_key_id": ssh_key_id, "name": name})
            return SshKeyRecord(ssh_key_id, name, fingerprint, now, None)

        return await self._write(work)

    async def ssh_key(self, fingerprint: str) -> SshKeyRecord | None:
        query = ssh_keys.select().where(ssh_keys.c.fingerprint == fingerprint)
        found = await self._read(lambda connection: connection.execute(query).mappings().first())
        return None if found is None else _ssh_key(found)

    async def list_ssh_keys(self) -> list[SshKeyRecord]:
        query = ssh_keys.select().order_by(ssh_keys.c.created_at, ssh_keys.c.id)
        return await self._read(lambda connection: [_ssh_key(row) for row in connection.execute(query).mappings()])

    async def remove_ssh_key(self, ssh_key_id: str) -> bool:
        def work(connection: sa.Connection) -> bool:
            if connection.execute(ssh_keys.delete().where(ssh_keys.c.id == ssh_key_id)).rowcount != 1:
                return False
            record_event(connection, datetime.now(UTC), None, "ssh_key.removed", data={"ssh_key_id": ssh_key_id})
            return True

        return await self._write(work)

    async def touch_ssh_key(self, ssh_key_id: str) -> None:
        update = ssh_keys.update().where(ssh_keys.c.id == ssh_key_id).values(last_used_at=datetime.now(UTC))
        await self._write(lambda connection: connection.execute(update).rowcount)

    async def add_ssh_password(
        self, password_hash: str, sandbox_id: str, api_key_id: str, expires_at: datetime
    ) -> None:
        """Clears away those that have expired long ago."""
        values = {"hash": password_hash, "sandbox_id": sandbox_id, "key_id": api_key_id, "expires_at": expires_at}

        def work(connection: sa.Connection) -> None:
            connection.execute(ssh_passwords.delete().where(ssh_passwords.c.expires_at <= datetime.now(UTC) - LONGEST))
            connection.execute(ssh_passwords.insert(), values)

        await self._write(work)

    async def ssh_password(self, password_hash: str, sandbox_id: str, *, inside: bool = False) -> bool:
        """Whether it opens this sandbox now. `inside`: whether those who came in by it may stay."""
        query = sa.select(ssh_passwords.c.hash).where(
            ssh_passwords.c.hash == password_hash,
            ssh_passwords.c.sandbox_id == sandbox_id,
            ssh_passwords.c.expires_at > datetime.now(UTC) - (LONGEST if inside else timedelta()),
        )
        return await self._read(lambda connection: connection.execute(query).scalar() is not None)


def _ssh_key(row: sa.RowMapping) -> SshKeyRecord:
    return SshKeyRecord(row["id"], row["name"], row["fingerprint"], row["created_at"], row["last_used_at"])
