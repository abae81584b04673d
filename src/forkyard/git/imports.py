"""What a new repository begins with: files, an archive, or another repository. Given a directory nobody sees yet."""

from __future__ import annotations

import asyncio
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from forkyard.control.identities import Principal
from forkyard.errors import HostFailure, InvalidRequest, OperationTimeout
from forkyard.git.archives import BROKEN, Archive, imported
from forkyard.git.clones import HOW_TO_SHOW, shown, told
from forkyard.git.commits import apply
from forkyard.git.downloads import Downloads
from forkyard.git.names import checked_path, checked_ref, checked_revision
from forkyard.git.objects import PackWriter, commit_data
from forkyard.git.process import Git
from forkyard.git.refs import Refs, signed
from forkyard.git.trees import first_commit, new_tree
from forkyard.git.ways import Ways
from forkyard.models.git import ArchiveSource, FilesSource, GitSource

FETCH_S = 3600.0
USERNAME = "git"
HOW_IN_URL = "put one into the url (`https://NAME:TOKEN@…`), where it is not kept"
HOW = "import it with allow_private (`--allow-private`) if that is meant, or set FORKYARD_GIT_ALLOW_PRIVATE for all"
_SCP_LIKE = re.compile(r"^[A-Za-z0-9_.-]+@[A-Za-z0-9.-]+:[^:]+$")


class Imports:
    def __init__(self, git: Git, refs: Refs, ways: Ways, downloads: Downloads) -> None:
        self._git = git
        self._refs = refs
        self._ways = ways
        self._downloads = downloads

    async def files(self, path: Path, branch: str, source: FilesSource, by: Principal) -> None:
        with tempfile.TemporaryFile(dir=path) as file:
            pack = PackWriter(file)

            def work() -> str:
                edit = new_tree()
                apply(edit, pack, source.files)
                return first_commit(edit, pack, signed(source.author, by), source.message)

            sha = await asyncio.to_thread(work)
            await self._keep(path, file, pack, branch, sha)

    async def archive(self, path: Path, branch: str, archive: Archive, by: Principal, most_bytes: int) -> None:
        with tempfile.TemporaryFile(dir=path) as file:
            pack = PackWriter(file)
            try:
                sha = await asyncio.to_thread(imported, archive, pack, by, most_bytes)
            except BROKEN as error:
                raise InvalidRequest(f"this is no whole {archive.kind} archive: {error}") from error
            await self._keep(path, file, pack, branch, sha)

    async def _keep(self, path: Path, file: IO[bytes], pack: PackWriter, branch: str, sha: str) -> None:
        await self._refs.keep(path, file, pack)
        await self._git.run(path, "update-ref", f"refs/heads/{checked_ref(branch)}", sha)

    async def download(self, path: Path, branch: str, source: ArchiveSource, by: Principal, most_bytes: int) -> None:
        with tempfile.TemporaryFile(dir=path) as file:
            await self._downloads.fetch(source.url, file, most_bytes, HOW, allow_private=source.allow_private)
            archive = Archive(
                file, source.format, source.strip, source.message, source.author, _directory(source.directory)
            )
            await self.archive(path, branch, archive, by, most_bytes)

    # ── from elsewhere ───────────────────────────────────────────────────────────────────────────────────────────

    async def clone(
        self, path: Path, source: GitSource, by: Principal, most_bytes: int, password: str | None = None
    ) -> None:
        """`password`: for a url over http that has none in it."""
        url = checked_url(source.url)
        credential = {} if password is None else shown(url, USERNAME, password)
        how = HOW_IN_URL if password is None else HOW_TO_SHOW
        if source.rev is not None:
            checked_revision(source.rev)
        async with self._ways.to(url, HOW, allow_private=source.allow_private) as way:
            env = self._git.env(
                {"GIT_DIR": str(path), **way.env}, {"credential.helper": "", **way.config, **credential}
            )
            if source.history:
                await self._fetch(path, most_bytes, env, how, url, "--tags", url, "+refs/heads/*:refs/heads/*")
                await self._point_head(path, url, source.rev, env)
            else:
                await self._fetch(path, most_bytes, env, how, url, "--depth=1", "--no-tags", url, source.rev or "HEAD")
                await self._flatten(path, source, by)

    async def _flatten(self, path: Path, source: GitSource, by: Principal) -> None:
        """What was fetched, as one new commit."""
        tree = await self._tree(path, _directory(source.directory))
        author = signed(source.author, by)
        with tempfile.TemporaryFile(dir=path) as file:
            pack = PackWriter(file)
            sha = pack.add("commit", commit_data(tree, [], author, author, source.message))
            await self._refs.keep(path, file, pack)
        await self._git.run(path, "update-ref", "HEAD", sha)
        for left in ("FETCH_HEAD", "shallow"):
            (path / left).unlink(missing_ok=True)
        # The commit that was fetched is of no use to anybody.
        await self._git.run(path, "repack", "-a", "-d", "-q", timeout_s=FETCH_S)
        await self._git.run(path, "prune", "--expire=now", timeout_s=FETCH_S)

    async def _tree(self, path: Path, directory: str | None) -> str:
        """Of what was fetched, or of a directory in it."""
        if directory is None:
            return (await self._git.run(path, "rev-parse", "--verify", "FETCH_HEAD^{tree}")).stdout.decode().strip()
        args = ("ls-tree", "-d", "-z", "--full-tree", "FETCH_HEAD", "--", f":(literal){directory}")
        found = (await self._git.run(path, *args)).stdout.split()
        if not found:
            raise InvalidRequest(f"the repository has no directory {directory!r}", field="directory")
        return found[2].decode()

    async def copy(self, path: Path, source: Path, most_bytes: int) -> None:
        """Of a repository of this host."""
        refs = ("+refs/heads/*:refs/heads/*", "+refs/tags/*:refs/tags/*")
        await self._git.run(
            path,
            *("fetch", "--quiet", "--no-write-fetch-head", str(source), *refs),
            timeout_s=FETCH_S,
            env=self._git.env({"GIT_DIR": str(path), "GIT_ALLOW_PROTOCOL": "file"}),
            prefix=("prlimit", f"--fsize={most_bytes}"),
        )

    async def _fetch(self, path: Path, most_bytes: int, env: Mapping[str, str], how: str, url: str, *args: str) -> None:
        try:
            await self._git.run(
                path,
                *("fetch", "--quiet", "--no-write-commit-graph", *args),
                timeout_s=FETCH_S,
                env=env,
                prefix=("prlimit", f"--fsize={most_bytes}"),
            )
        except HostFailure as error:
            if re.search(r"index-pack|fsck|bad object", error.message):  # too large, or broken
                message = re.sub(r"//[^/@\s]*@", "//", error.message)
                raise InvalidRequest(f"the repository could not be fetched: {message}", field="url") from error
            raise told(url, error.message, how) from None
        except OperationTimeout:
            raise OperationTimeout(f"the repository could not be fetched within {FETCH_S:.0f} s") from None

    async def _point_head(self, path: Path, url: str, rev: str | None, env: Mapping[str, str]) -> None:
        """To `rev` if it is a branch, else to the remote's own default."""
        branch = rev
        if branch is None:
            done = await self._git.run(path, "ls-remote", "--symref", url, "HEAD", env=env, timeout_s=120)
            found = re.match(rb"ref: refs/heads/(\S+)\tHEAD", done.stdout)
            branch = found[1].decode("utf-8", "replace") if found else None
        if branch is not None:
            ref = f"refs/heads/{checked_ref(branch)}"
            known = await self._git.run(path, "show-ref", "--verify", "--quiet", ref, ok=(0, 1))
            if known.code and rev is not None:
                raise InvalidRequest(f"the remote has no branch {rev!r}; for another revision, set history to false")
            await self._git.run(path, "symbolic-ref", "HEAD", ref)
        (path / "FETCH_HEAD").unlink(missing_ok=True)


def checked_url(url: str) -> str:
    """Nothing that would read this machine's own files or run a program."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InvalidRequest(f"this is no url: {error}", field="url") from None
    fine = parts.scheme in ("http", "https", "git", "ssh") and bool(parts.hostname)
    hostile = url.startswith("-") or any(char.isspace() or ord(char) < 32 for char in url)
    if hostile or (parts.hostname or "").startswith("-") or not (fine or _SCP_LIKE.match(url)):
        raise InvalidRequest("the url must be http, https, git or ssh, such as https://example.com/a.git", field="url")
    return url


def _directory(given: str | None) -> str | None:
    """As git writes it; None: all of it."""
    name = (given or "").strip("/").removeprefix("./")
    return checked_path(name) if name not in ("", ".") else None
