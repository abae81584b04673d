# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""Git: the daemon's repositories, with a clone (`repo.token().clone_url`) and without."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal

from forkyard.models import Page
from forkyard.models.git import (
    BlobInfo,
    BranchInfo,
    CommitInfo,
    CommitMatches,
    Comparison,
    ContentInfo,
    ContentMatches,
    DiffMatches,
    FileChange,
    MergeResult,
    PathMatches,
    Permission,
    Person,
    RepoInfo,
    RepoToken,
    TagInfo,
    TreeInfo,
    Visibility,
)
from forkyard.sdk import wire
from forkyard.sdk._sync import runtime
from forkyard.sdk._sync.git_triggers import Remotes, Triggers
from forkyard.sdk._sync.transport import Transport

Files = Mapping[str, str | bytes | None]
"""Path to content; None deletes."""


class Git:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def create(
        self,
        name: str | None = None,
        *,
        description: str | None = None,
        visibility: Visibility = "private",
        default_branch: str = "main",
        quota_mib: int | None = None,
        files: Files | None = None,
        message: str | None = None,
        author: Person | None = None,
        url: str | None = None,
        rev: str | None = None,
        history: bool = True,
        format: Literal["git", "tar", "zip"] = "git",
        directory: str | None = None,
        allow_private: bool = False,
    ) -> Repo:
        """A new repository: empty, with `files` (path to content), or with what is at `url` (http, https, git or ssh).

        Of `url` everything is taken, or with `history=False` the files of `rev` alone, as one new commit. With `format`
        it is the address of an archive. Of an archive, or without history, `directory` takes what is below it alone. It
        must be public, or `allow_private` be given.
        """
        source: dict[str, object] | None = None
        if files is not None:
            source = {"type": "files", "files": _changes(files)}
        elif url is not None:
            source = {"type": "git", "url": url, "rev": rev, "history": history, "allow_private": allow_private}
            if format != "git":
                source = {"type": "archive", "url": url, "format": format, "allow_private": allow_private}
            source["directory"] = directory
        if source is not None:
            source |= {key: value for key, value in (("message", message), ("author", _person(author))) if value}
        body = {
            "name": name,
            "description": description,
            "visibility": visibility,
            "default_branch": default_branch,
            "quota_mib": quota_mib,
            "source": source,
        }
        answer = self._transport.request("POST", "/git/repos", body=body, timeout_s=wire.CREATE_S)
        return Repo(self._transport, wire.parse(RepoInfo, answer.content))

    def create_from_archive(
        self,
        archive: bytes | Iterable[bytes],
        name: str | None = None,
        *,
        format: Literal["tar", "zip"] = "tar",
        visibility: Visibility = "private",
        default_branch: str = "main",
        quota_mib: int | None = None,
        strip: int = 0,
        message: str = "Import",
    ) -> Repo:
        """A new repository with what is in a tar (also compressed) or zip archive, less the first `strip` parts of
        each path."""
        params = {
            "format": format,
            "name": name,
            "visibility": visibility,
            "default_branch": default_branch,
            "quota_mib": quota_mib,
            "strip": strip,
            "message": message,
        }
        content = archive if isinstance(archive, bytes) else runtime.body(archive)
        answer = self._transport.request(
            "POST", "/git/repos/archive", params=params, content=content, timeout_s=wire.CREATE_S
        )
        return Repo(self._transport, wire.parse(RepoInfo, answer.content))

    def list(self, *, search: str | None = None, limit: int | None = None) -> list[Repo]:
        """Newest first; with `search`, those with this in their name."""
        found = self._transport.items(Page[RepoInfo], "/git/repos", {"search": search}, limit)
        return [Repo(self._transport, info) for info in found]

    def repo(self, repo: str) -> Repo:
        """By its id or its name."""
        answer = self._transport.request("GET", f"/git/repos/{wire.segment(repo)}")
        return Repo(self._transport, wire.parse(RepoInfo, answer.content))

    def delete(self, repo: str) -> None:
        """By its id or its name. For ever."""
        self._transport.request("DELETE", f"/git/repos/{wire.segment(repo)}")


class Repo:
    """A repository. `info` is what it was when it was last asked for."""

    def __init__(self, transport: Transport, info: RepoInfo) -> None:
        self._transport = transport
        self.info = info
        self._path = f"/git/repos/{wire.segment(info.id)}"
        self.triggers = Triggers(transport, self._path)
        self.remotes = Remotes(transport, self._path)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(name={self.name!r}, id={self.id!r})"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def clone_url(self) -> str:
        """Without a credential; `token` gives one with."""
        return self.info.clone_url

    def refresh(self) -> RepoInfo:
        answer = self._transport.request("GET", self._path)
        self.info = wire.parse(RepoInfo, answer.content)
        return self.info

    def update(
        self,
        *,
        name: str | None = None,
        description: str | None = None,
        visibility: Visibility | None = None,
        default_branch: str | None = None,
        quota_mib: int | None = None,
    ) -> RepoInfo:
        """Change what is given. Its id stays."""
        given = {
            "name": name,
            "description": description,
            "visibility": visibility,
            "default_branch": default_branch,
            "quota_mib": quota_mib,
        }
        body = {key: value for key, value in given.items() if value is not None}
        answer = self._transport.request("PATCH", self._path, body=body, again=True)
        self.info = wire.parse(RepoInfo, answer.content)
        return self.info

    def delete(self) -> None:
        """For ever, with its large files and tokens."""
        self._transport.request("DELETE", self._path)

    def token(self, permission: Permission = "write", *, expires_in_s: float | None = 86400.0) -> RepoToken:
        """A token for this repository alone, and a URL with it that git can clone from at once."""
        body = {"permission": permission, "expires_in_s": expires_in_s}
        answer = self._transport.request("POST", f"{self._path}/tokens", body=body)
        return wire.parse(RepoToken, answer.content)

    # ── refs ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def branches(self) -> list[BranchInfo]:
        answer = self._transport.request("GET", f"{self._path}/branches")
        return wire.parse(Page[BranchInfo], answer.content).items

    def branch(self, name: str) -> BranchInfo:
        answer = self._transport.request("GET", f"{self._path}/branches/{wire.segment(name)}")
        return wire.parse(BranchInfo, answer.content)

    def create_branch(self, name: str, rev: str | None = None) -> BranchInfo:
        """At `rev`, or where the default branch is."""
        answer = self._transport.request("POST", f"{self._path}/branches", body={"name": name, "rev": rev})
        return wire.parse(BranchInfo, answer.content)

    def move_branch(self, name: str, rev: str, *, expected_sha: str | None = None, force: bool = False) -> BranchInfo:
        """Point it at `rev`; with `expected_sha` only if it is there now, with `force` also if commits are lost."""
        body = {"rev": rev, "expected_sha": expected_sha, "force": force}
        answer = self._transport.request("PUT", f"{self._path}/branches/{wire.segment(name)}", body=body)
        return wire.parse(BranchInfo, answer.content)

    def delete_branch(self, name: str) -> None:
        self._transport.request("DELETE", f"{self._path}/branches/{wire.segment(name)}")

    def tags(self) -> list[TagInfo]:
        answer = self._transport.request("GET", f"{self._path}/tags")
        return wire.parse(Page[TagInfo], answer.content).items

    def tag(self, name: str) -> TagInfo:
        answer = self._transport.request("GET", f"{self._path}/tags/{wire.segment(name)}")
        return wire.parse(TagInfo, answer.content)

    def create_tag(
        self, name: str, rev: str | None = None, *, message: str | None = None, tagger: Person | None = None
    ) -> TagInfo:
        """With a `message` it is an annotated one."""
        body = {"name": name, "rev": rev, "message": message, "tagger": _person(tagger)}
        answer = self._transport.request("POST", f"{self._path}/tags", body=body)
        return wire.parse(TagInfo, answer.content)

    def delete_tag(self, name: str) -> None:
        self._transport.request("DELETE", f"{self._path}/tags/{wire.segment(name)}")

    # ── contents ─────────────────────────────────────────────────────────────────────────────────────────────────

    def contents(self, path: str = "", rev: str | None = None) -> ContentInfo:
        """A file with its bytes (base64), or a directory with its entries."""
        answer = self._transport.request("GET", f"{self._path}/contents", params={"path": path, "rev": rev})
        return wire.parse(ContentInfo, answer.content)

    def read(self, path: str, rev: str | None = None) -> bytes:
        """The bytes of a file."""
        answer = self._transport.request("GET", f"{self._path}/raw", params={"path": path, "rev": rev})
        return answer.content

    def read_text(self, path: str, rev: str | None = None, *, encoding: str = "utf-8") -> str:
        return (self.read(path, rev)).decode(encoding)

    def tree(self, rev: str | None = None, *, recursive: bool = False) -> TreeInfo:
        params = {"rev": rev, "recursive": recursive}
        answer = self._transport.request("GET", f"{self._path}/tree", params=params)
        return wire.parse(TreeInfo, answer.content)

    def blob(self, sha: str) -> BlobInfo:
        answer = self._transport.request("GET", f"{self._path}/blobs/{wire.segment(sha)}")
        return wire.parse(BlobInfo, answer.content)

    def archive(
        self, rev: str | None = None, *, format: Literal["tar", "tar.gz", "zip"] = "tar.gz", path: str | None = None
    ) -> runtime.Flow[bytes]:
        """The files of a revision as an archive, piece by piece."""
        params = {"rev": rev, "format": format, "path": path}
        with self._transport.stream("GET", f"{self._path}/archive", params=params) as chunks:
            for chunk in chunks:
                yield chunk

    # ── commits ──────────────────────────────────────────────────────────────────────────────────────────────────

    def commit(
        self,
        message: str,
        files: Files | None = None,
        *,
        changes: Sequence[FileChange] = (),
        branch: str | None = None,
        start: str | None = None,
        expected_sha: str | None = None,
        author: Person | None = None,
        committer: Person | None = None,
        allow_empty: bool = False,
    ) -> CommitInfo:
        """Many changes in one commit, all or none. `files` is path to content (None deletes); `changes` can also
        rename and set modes. With `expected_sha` only if the branch is there: else `RefConflict`."""
        body = {
            "message": message,
            "files": _changes(files or {}) + [change.model_dump(exclude_defaults=True) for change in changes],
            "branch": branch,
            "start": start,
            "expected_sha": expected_sha,
            "author": _person(author),
            "committer": _person(committer),
            "allow_empty": allow_empty,
        }
        answer = self._transport.request("POST", f"{self._path}/commits", body=body)
        return wire.parse(CommitInfo, answer.content)

    def commits(
        self,
        rev: str | None = None,
        *,
        path: str | None = None,
        author: str | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        order: Literal["desc", "asc"] = "desc",
        limit: int | None = 50,
    ) -> list[CommitInfo]:
        """The log from `rev` on; of one path, author or time."""
        params = {
            "rev": rev,
            "path": path,
            "author": author,
            "since": None if since is None else since.isoformat(),
            "until": None if until is None else until.isoformat(),
            "order": order,
        }
        return self._transport.items(Page[CommitInfo], f"{self._path}/commits", params, limit)

    def get_commit(self, rev: str) -> CommitInfo:
        answer = self._transport.request("GET", f"{self._path}/commits/{wire.segment(rev)}")
        return wire.parse(CommitInfo, answer.content)

    def compare(self, base: str, head: str, *, patch: bool = True) -> Comparison:
        """How far apart they are, and what `head` changed since they parted."""
        params = {"base": base, "head": head, "patch": patch}
        answer = self._transport.request("GET", f"{self._path}/compare", params=params)
        return wire.parse(Comparison, answer.content)

    def merge(
        self,
        source: str,
        *,
        into: str | None = None,
        message: str | None = None,
        expected_sha: str | None = None,
        fast_forward: Literal["auto", "never", "only"] = "auto",
        squash: bool = False,
        author: Person | None = None,
    ) -> MergeResult:
        """`MergeConflict` names the paths in `details["paths"]`; then nothing has changed."""
        body = {
            "source": source,
            "into": into,
            "message": message,
            "expected_sha": expected_sha,
            "fast_forward": fast_forward,
            "squash": squash,
            "author": _person(author),
        }
        answer = self._transport.request("POST", f"{self._path}/merge", body=body)
        return wire.parse(MergeResult, answer.content)

    def cherry_pick(
        self,
        commits: Sequence[str],
        *,
        branch: str | None = None,
        expected_sha: str | None = None,
        committer: Person | None = None,
    ) -> MergeResult:
        """All of them or none."""
        body = {
            "commits": list(commits),
            "branch": branch,
            "expected_sha": expected_sha,
            "committer": _person(committer),
        }
        answer = self._transport.request("POST", f"{self._path}/cherry-pick", body=body)
        return wire.parse(MergeResult, answer.content)

    # ── search ───────────────────────────────────────────────────────────────────────────────────────────────────

    def search(
        self,
        query: str,
        *,
        rev: str | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        regex: bool = False,
        case_sensitive: bool = True,
        whole_word: bool = False,
        context: int = 0,
        limit: int = 100,
    ) -> ContentMatches:
        """In files. `include` and `exclude` are globs such as `src/**/*.py`."""
        params = {
            "query": query,
            "rev": rev,
            "include": list(include) or None,
            "exclude": list(exclude) or None,
            "regex": regex,
            "case_sensitive": case_sensitive,
            "whole_word": whole_word,
            "context": context,
            "limit": limit,
        }
        answer = self._transport.request("GET", f"{self._path}/search", params=params)
        return wire.parse(ContentMatches, answer.content)

    def search_files(
        self,
        query: str,
        *,
        rev: str | None = None,
        glob: bool = False,
        regex: bool = False,
        case_sensitive: bool = False,
        limit: int = 100,
    ) -> PathMatches:
        """Among file names."""
        params = {
            "query": query,
            "rev": rev,
            "glob": glob,
            "regex": regex,
            "case_sensitive": case_sensitive,
            "limit": limit,
        }
        answer = self._transport.request("GET", f"{self._path}/search/files", params=params)
        return wire.parse(PathMatches, answer.content)

    def search_commits(
        self,
        query: str,
        *,
        rev: str | None = None,
        path: str | None = None,
        regex: bool = False,
        case_sensitive: bool = False,
        whole_word: bool = False,
        limit: int = 100,
    ) -> CommitMatches:
        """In commit messages."""
        params = {
            "query": query,
            "rev": rev,
            "path": path,
            "regex": regex,
            "case_sensitive": case_sensitive,
            "whole_word": whole_word,
            "limit": limit,
        }
        answer = self._transport.request("GET", f"{self._path}/search/commits", params=params)
        return wire.parse(CommitMatches, answer.content)

    def search_diffs(
        self,
        query: str,
        *,
        rev: str | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        regex: bool = False,
        case_sensitive: bool = True,
        whole_word: bool = False,
        limit: int = 50,
    ) -> DiffMatches:
        """In the lines that commits added or removed."""
        params = {
            "query": query,
            "rev": rev,
            "include": list(include) or None,
            "exclude": list(exclude) or None,
            "regex": regex,
            "case_sensitive": case_sensitive,
            "whole_word": whole_word,
            "limit": limit,
        }
        answer = self._transport.request("GET", f"{self._path}/search/diffs", params=params)
        return wire.parse(DiffMatches, answer.content)


def _changes(files: Files) -> list[dict[str, object]]:
    changes: list[dict[str, object]] = []
    for path, content in files.items():
        if content is None:
            changes.append({"path": path, "delete": True})
        elif isinstance(content, str):
            changes.append({"path": path, "content": content})
        else:
            changes.append({"path": path, "content": base64.b64encode(content).decode(), "encoding": "base64"})
    return changes


def _person(person: Person | None) -> dict[str, object] | None:
    return None if person is None else person.model_dump(mode="json")
