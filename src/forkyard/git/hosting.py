"""Git hosting in one piece: what the API is given, as `control.plane` is for sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from forkyard.control.identities import Identities, Principal
from forkyard.control.plane import ControlPlane
from forkyard.git.archives import Archive
from forkyard.git.automation import Automation, Outward
from forkyard.git.clones import Clones
from forkyard.git.commits import Commits
from forkyard.git.content import Content
from forkyard.git.downloads import Downloads
from forkyard.git.history import History
from forkyard.git.imports import Imports
from forkyard.git.lfs import Lfs
from forkyard.git.merging import Merging
from forkyard.git.mirrors import BUDGET_BYTES
from forkyard.git.process import Git
from forkyard.git.refs import Refs
from forkyard.git.repositories import Repo, Repositories, head_of
from forkyard.git.review import Reviews
from forkyard.git.search import Search
from forkyard.git.transfer import Transfer
from forkyard.git.upkeep import Upkeep
from forkyard.git.ways import Ways
from forkyard.models.git import ArchiveSource, FilesSource, Permission, RepoCreate, RepoInfo, RepoToken, Visibility
from forkyard.net.outside import Outside
from forkyard.net.resolver import HostResolver
from forkyard.store.sql import Store

QUOTA_BYTES = 10 * 2**30


class GitHosting:
    def __init__(
        self,
        store: Store,
        identities: Identities,
        root: Path,
        *,
        control: ControlPlane,
        quota_bytes: int = QUOTA_BYTES,
        url: str = "",
        outward: Outward | None = None,
        outside: Outside | None = None,
        mirrors_bytes: int = BUDGET_BYTES,
    ) -> None:
        self.identities = identities
        #: Where git clients find the daemon, if a request does not say: `http://127.0.0.1:7070`.
        self.url = url
        self.repositories = Repositories(store, Git(root), root, quota_bytes=quota_bytes)
        self.refs = Refs(self.repositories)
        self.content = Content(self.repositories)
        self.history = History(self.repositories)
        self.commits = Commits(self.repositories, self.refs)
        self.merging = Merging(self.repositories, self.refs)
        self.search = Search(self.repositories, self.content)
        self.transfer = Transfer(self.repositories)
        self.lfs = Lfs(self.repositories, store)
        self.upkeep = Upkeep(self.repositories, self.lfs)
        outward, outside = outward or Outward(), outside or Outside(HostResolver())
        ways = Ways(outside, allow_private=outward.allow_private, ca=outward.extra_ca_file)
        self.automation = Automation(control, self.repositories, self.refs, ways, root, outward)
        self.triggers = self.automation.triggers
        self.sync = self.automation.sync
        self.reviews = Reviews(control, self, outward)
        self.clones = Clones(
            control,
            self.repositories,
            outside,
            root,
            hosted_at=lambda: self.url,
            mirrors_bytes=mirrors_bytes,
            ca=outward.extra_ca_file,
        )
        control.sandboxes.clones = self.clones.making
        downloads = Downloads(outside.resolver, allow_private=outward.allow_private, ca=outward.extra_ca_file)
        self._imports = Imports(self.repositories.git, self.refs, ways, downloads)
        self.quota_bytes = quota_bytes
        self._upkeep: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.repositories.start()
        await self.clones.start()
        await self.reviews.start()
        await self.automation.start()
        assert self.automation.actions is not None
        self.automation.actions.by_type["review"] = self.reviews.perform
        self._upkeep = asyncio.create_task(self.upkeep.run(), name="upkeep of repositories")

    async def stop(self) -> None:
        await self.reviews.stop()
        await self.automation.stop()
        if self._upkeep is not None:
            self._upkeep.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._upkeep

    # ── repositories ─────────────────────────────────────────────────────────────────────────────────────────────

    async def create(
        self, request: RepoCreate, by: Principal, *, repo_id: str | None = None, password: str | None = None
    ) -> Repo:
        """`password`: for a git source that has none in its url."""
        quota_bytes = None if request.quota_mib is None else request.quota_mib * 2**20
        most_bytes = quota_bytes or self.quota_bytes
        source = request.source

        async def fill(path: Path) -> None:
            if isinstance(source, FilesSource):
                await self._imports.files(path, request.default_branch, source, by)
            elif isinstance(source, ArchiveSource):
                await self._imports.download(path, request.default_branch, source, by, most_bytes)
            elif source is not None:
                await self._imports.clone(path, source, by, most_bytes, password)

        return await self.repositories.create(
            request.name,
            description=request.description,
            visibility=request.visibility,
            default_branch=request.default_branch,
            quota_bytes=quota_bytes,
            fill=fill if source is not None else None,
            repo_id=repo_id,
        )

    async def copy(self, source: Repo, name: str | None, *, repo_id: str | None = None) -> Repo:
        """A new one with the branches and tags of another, at the same default branch."""

        async def fill(path: Path) -> None:
            await self._imports.copy(path, source.path, self.quota_bytes)

        default = await self.repositories.default_branch(source)
        return await self.repositories.create(name, default_branch=default, fill=fill, repo_id=repo_id)

    async def create_from_archive(
        self,
        name: str | None,
        archive: Archive,
        by: Principal,
        *,
        visibility: Visibility,
        default_branch: str,
        quota_bytes: int | None,
    ) -> Repo:
        async def fill(path: Path) -> None:
            await self._imports.archive(path, default_branch, archive, by, quota_bytes or self.quota_bytes)

        return await self.repositories.create(
            name, visibility=visibility, default_branch=default_branch, quota_bytes=quota_bytes, fill=fill
        )

    async def delete(self, repo: Repo) -> None:
        await self.repositories.delete(repo)
        await self.identities.remove_managed(f"repo:{repo.id}:")

    async def token(self, repo: Repo, permission: Permission, expires_in_s: float | None, url: str) -> RepoToken:
        """For whoever needs this repository and nothing else."""
        identity_id = await self.only(repo, permission)
        made = await self.identities.create_token(identity_id, expires_in_s=expires_in_s)
        scheme, _, rest = self.clone_url(repo, url).partition("://")
        return RepoToken(
            token=made.token,
            token_id=made.id,
            identity_id=identity_id,
            permission=permission,
            clone_url=f"{scheme}://forkyard:{made.token}@{rest}",
            expires_at=made.expires_at,
        )

    async def only(self, repo: Repo, permission: Permission) -> str:
        """The identity that may do this with this repository, and nothing else."""
        identity = await self.identities.ensure_managed(
            f"repo:{repo.id}:{permission}", f"{permission} access to {repo.record.name}"
        )
        await self.identities.grant_repo(identity.id, repo.id, permission, by="forkyard")
        return identity.id

    def clone_url(self, repo: Repo, url: str) -> str:
        return f"{url or self.url}/git/{repo.record.name}.git"

    async def info(self, repo: Repo, url: str) -> RepoInfo:
        record = repo.record
        return RepoInfo(
            id=record.id,
            name=record.name,
            description=record.description,
            visibility=record.visibility,
            default_branch=await asyncio.to_thread(head_of, repo.path),
            clone_url=self.clone_url(repo, url),
            size_bytes=record.size_bytes,
            quota_bytes=record.quota_bytes,
            created_at=record.created_at,
            updated_at=record.updated_at,
            pushed_at=record.pushed_at,
        )
