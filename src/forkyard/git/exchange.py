"""Git towards a remote: list, fetch, push. Never with force, and with credentials in the environment of the process
alone: not in its arguments, not in a file, not in a log.

What is fetched stands below `refs/forkyard/remotes/`, which clients do not see, until it becomes a branch or a tag.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forkyard.control.secrets import Secrets
from forkyard.errors import ForkyardError, InvalidRequest, OperationTimeout, RemoteFailed
from forkyard.git.installations import GitHubTokens
from forkyard.git.names import NO_SHA, checked_ref, is_sha
from forkyard.git.process import Done, Git
from forkyard.git.repositories import RefChange, Repo, head_of
from forkyard.git.ways import Ways
from forkyard.store.remotes import RemoteRecord, RemoteRef

LIST_S = 60.0
TRANSFER_S = 3600.0
MAX_LIST_BYTES = 32 * 2**20
MAX_REFS = 20_000
HOW = "set FORKYARD_GIT_ALLOW_PRIVATE for the daemon if that is meant"
_PUSHED_AT_ONCE = 200


@dataclass(frozen=True)
class Access:
    """The way to one remote, for one sync."""

    repo: Repo
    remote: RemoteRecord
    env: Mapping[str, str]

    @property
    def tracking(self) -> str:
        return f"refs/forkyard/remotes/{self.remote.id}/"


class Exchange:
    def __init__(self, git: Git, ways: Ways, secrets: Secrets, github: GitHubTokens) -> None:
        self._git = git
        self._ways = ways
        self._secrets = secrets
        self._github = github

    @contextlib.asynccontextmanager
    async def access(self, repo: Repo, remote: RemoteRecord) -> AsyncIterator[Access]:
        config = {"credential.helper": "", "http.followRedirects": "false"}
        password = None
        if remote.github_app is not None:
            password = await self._github.token(remote.github_app)
        elif remote.secret is not None:
            password = await self._secrets.stored(remote.secret)
        if password is not None:
            basic = base64.b64encode(f"{remote.username}:{password}".encode()).decode()
            config["http.extraHeader"] = f"Authorization: Basic {basic}"
        async with self._ways.to(remote.url, HOW) as way:
            env = self._git.env({"GIT_DIR": str(repo.path), **way.env}, {**config, **way.config})
            yield Access(repo, remote, env)

    async def listed(self, access: Access) -> tuple[dict[str, str], str | None]:
        """Its branches and tags, and its default branch."""
        done = await self._run(access, "ls-remote", "--symref", access.remote.url, timeout_s=LIST_S)
        found: dict[str, str] = {}
        head = None
        for line in done.stdout.decode("utf-8", "replace").splitlines():
            value, _, ref = line.partition("\t")
            if ref == "HEAD" and value.startswith("ref: refs/heads/"):
                head = value.removeprefix("ref: refs/heads/")
            elif ref.startswith(("refs/heads/", "refs/tags/")) and not ref.endswith("^{}") and is_sha(value):
                found[ref] = value
        if len(found) > MAX_REFS:
            raise InvalidRequest(f"the remote has {len(found)} branches and tags; {MAX_REFS} are the most")
        return found, head

    async def fetched(self, access: Access, refs: Sequence[str]) -> dict[str, str]:
        """Where these are, with all that belongs to them now here."""
        if not refs:
            return {}
        specs = "".join(f"+{ref}:{access.tracking}{ref.removeprefix('refs/')}\n" for ref in refs)
        args = ("fetch", "--quiet", "--no-tags", "--no-write-fetch-head", "--no-auto-gc", "--stdin", access.remote.url)
        # Room for one more pack, as for a push.
        room = ("prlimit", f"--fsize={max(2**20, access.repo.room_bytes)}")
        await self._run(access, *args, stdin=specs.encode(), timeout_s=TRANSFER_S, prefix=room)
        listed = await self._git.run(
            access.repo.path, "for-each-ref", "--format=%(objectname) %(refname)", access.tracking
        )
        lines = listed.stdout.decode("utf-8", "replace").splitlines()
        found = {f"refs/{ref.removeprefix(access.tracking)}": sha for sha, _, ref in (x.partition(" ") for x in lines)}
        return {ref: found[ref] for ref in refs if ref in found}

    async def contains(self, path: Path, commit: str, older: str) -> bool:
        """False also if one of them is not here."""
        done = await self._git.run(path, "merge-base", "--is-ancestor", older, commit, ok=(0, 1, 128))
        return done.code == 0

    async def moved(self, path: Path, changes: Sequence[RefChange]) -> bool:
        """All or none."""
        lines = []
        for change in changes:
            if change.new == NO_SHA:
                lines.append(f"delete {change.ref} {change.old}\n")
            else:
                lines.append(f"update {change.ref} {change.new} {change.old}\n")
        done = await self._git.run(path, "update-ref", "--stdin", stdin="".join(lines).encode(), ok=(0, 128))
        return done.code == 0

    async def pushed(self, access: Access, rows: Sequence[RemoteRef]) -> dict[str, str]:
        """Those that were refused, and why. A deletion is one of what was agreed on, not of what it may be by now."""
        refused: dict[str, str] = {}
        for start in range(0, len(rows), _PUSHED_AT_ONCE):
            some = rows[start : start + _PUSHED_AT_ONCE]
            leases = [f"--force-with-lease={row.ref}:{row.remote_sha}" for row in some if row.local_sha is None]
            specs = [f"{row.local_sha or ''}:{row.ref}" for row in some]
            done = await self._run(
                access, "push", "--porcelain", *leases, access.remote.url, *specs, ok=(0, 1), timeout_s=TRANSFER_S
            )
            told = _told(done)
            if done.code and not told:
                raise RemoteFailed(f"the remote could not be pushed to: {_clean(done.error)}")
            for row in some:
                flag, why = told.get(row.ref, ("!", "git did not say what became of it"))
                if flag == "!":
                    refused[row.ref] = why
        return refused

    async def point_head(self, repo: Repo, branch: str | None) -> None:
        """An empty repository takes over the remote's default branch."""
        if branch is None:
            return
        default = await asyncio.to_thread(head_of, repo.path)
        for name, wanted in ((default, 1), (branch, 0)):
            ref = f"refs/heads/{checked_ref(name)}"
            done = await self._git.run(repo.path, "show-ref", "--verify", "--quiet", ref, ok=(0, 1))
            if done.code != wanted:
                return
        await self._git.run(repo.path, "symbolic-ref", "HEAD", f"refs/heads/{branch}")

    async def forget(self, path: Path, remote_id: str) -> None:
        listed = await self._git.run(
            path, "for-each-ref", "--format=delete %(refname)", f"refs/forkyard/remotes/{remote_id}/"
        )
        await self._git.run(path, "update-ref", "--stdin", stdin=listed.stdout)

    async def _run(
        self,
        access: Access,
        *args: str,
        timeout_s: float,
        stdin: bytes | None = None,
        ok: tuple[int, ...] = (0,),
        prefix: tuple[str, ...] = (),
    ) -> Done:
        try:
            return await self._git.run(
                access.repo.path,
                *args,
                stdin=stdin,
                ok=ok,
                timeout_s=timeout_s,
                env=access.env,
                prefix=prefix,
                max_bytes=MAX_LIST_BYTES,
            )
        except OperationTimeout:
            raise
        except ForkyardError as error:
            if access.remote.github_app is not None:
                self._github.forget(access.remote.github_app)
            why = _clean(error.message)
            if "could not read Username" in why or "Authentication failed" in why:
                why = "it wants a credential, or refuses this one; check the secret of the remote"
            raise RemoteFailed(f"{_clean(access.remote.url)}: {why}") from None


def _told(done: Done) -> dict[str, tuple[str, str]]:
    """`FLAG\\tFROM:TO\\tSUMMARY` for each ref."""
    found = {}
    for line in done.stdout.decode("utf-8", "replace").splitlines():
        flag, _, rest = line.partition("\t")
        refs, _, summary = rest.partition("\t")
        if len(flag) == 1 and summary:
            found[refs.rpartition(":")[2]] = (flag, summary[:500])
    return found


def _clean(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//", text)
