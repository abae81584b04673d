"""Git in a sandbox: `sandbox.git`. Runs the guest's own git, without a shell, and gives back values."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from forkyard.errors import GitFailed, InvalidRequest
from forkyard.models.git import Person
from forkyard.sdk import worktree
from forkyard.sdk.results import ExecResult
from forkyard.sdk.worktree import (
    PullResult,
    PushedRef,
    WorktreeBranch,
    WorktreeCommit,
    WorktreeDiff,
    WorktreeStatus,
)

if TYPE_CHECKING:
    from forkyard.sdk._async.sandbox import AsyncSandbox

#: Where the daemon's own repositories are, inside. Who may use which: the sandbox's identity.
INSIDE_URL = "http://git.forkyard.internal"
_ENV = {"GIT_TERMINAL_PROMPT": "0", "GIT_LITERAL_PATHSPECS": "1", "GIT_PAGER": "cat", "LC_ALL": "C.UTF-8"}
_TAIL_BYTES = 4000


class AsyncSandboxGit:
    """`path` is that of a working tree in the sandbox. What git refuses is `GitFailed`, with what it said.

    Everything runs as `user`, in whose home relative paths begin.
    """

    def __init__(self, sandbox: AsyncSandbox, user: str = "root") -> None:
        self._sandbox = sandbox
        self._user = user

    def as_user(self, user: str) -> AsyncSandboxGit:
        """The same, as another Linux user."""
        return AsyncSandboxGit(self._sandbox, user)

    async def clone(
        self,
        repo: str,
        path: str | None = None,
        *,
        branch: str | None = None,
        depth: int | None = None,
        timeout_s: float | None = 600.0,
    ) -> str:
        """Clone a URL, or a repository of this daemon by its name. Returns the path of the working tree."""
        url = repo if "/" in repo or ":" in repo else f"{INSIDE_URL}/{repo.removesuffix('.git')}.git"
        target = path or repo.rstrip("/").removesuffix(".git").replace(":", "/").rpartition("/")[2]
        options = ["--quiet"]
        if branch is not None:
            options += ["--branch", _name(branch)]
        if depth is not None:
            options += ["--depth", str(depth)]
        await self._run("clone", *options, "--", url, target, timeout_s=timeout_s)
        return _line(await self._at(target, "rev-parse", "--show-toplevel"))

    async def status(self, path: str) -> WorktreeStatus:
        """Every file that is not as in the last commit; also untracked ones, each by itself."""
        done = await self._at(path, "status", "--porcelain=v2", "--branch", "-z", "--untracked-files=all")
        return worktree.status(done.stdout_bytes)

    async def add(self, path: str, files: Sequence[str] | None = None) -> None:
        """Stage these files (deletions too), or everything. They are names, not patterns."""
        if files is None:
            await self._at(path, "add", "--all")
        elif files:
            await self._at(path, "add", "--all", *_FROM_STDIN, stdin=_paths(files))

    async def commit(
        self,
        path: str,
        message: str,
        *,
        author: Person | None = None,
        all: bool = False,
        allow_empty: bool = False,
    ) -> WorktreeCommit:
        """Commit what is staged; with `all` also changes of files git knows. `author` is also the committer; without
        one, git's configuration says who it is."""
        options = ["--quiet", "--cleanup=verbatim", "--file=-"]
        options += ["--all"] if all else []
        options += ["--allow-empty"] if allow_empty else []
        await self._at(path, "commit", *options, stdin=message.encode(), env=_author(author))
        return (await self.log(path, limit=1))[0]

    async def push(
        self,
        path: str,
        remote: str = "origin",
        branch: str | None = None,
        *,
        set_upstream: bool = True,
        force: bool = False,
        timeout_s: float | None = 600.0,
    ) -> list[PushedRef]:
        """Push the branch that is checked out, or `branch`. `force` overwrites only what was last fetched. What the other
        side rejects is `GitFailed`; its `details["refs"]` say why."""
        options = ["--porcelain"]
        options += ["--set-upstream"] if set_upstream else []
        options += ["--force-with-lease"] if force else []
        done = await self._at(
            path, "push", *options, "--", remote, _name(branch or "HEAD"), timeout_s=timeout_s, check=False
        )
        refs = worktree.pushed(done.stdout_bytes)
        if not done.ok:
            raise _failed("push", done, refs=[vars(ref) for ref in refs])
        return refs

    async def pull(
        self,
        path: str,
        remote: str | None = None,
        branch: str | None = None,
        *,
        how: Literal["ff-only", "merge", "rebase"] = "ff-only",
        author: Person | None = None,
        timeout_s: float | None = 600.0,
    ) -> PullResult:
        """Of a conflict, `GitFailed` has the paths in `details["conflicts"]`; the merge waits for you in there."""
        if branch is not None and remote is None:
            raise InvalidRequest("a branch to pull needs the remote it is of", field="remote")
        option = {"ff-only": "--ff-only", "merge": "--no-rebase", "rebase": "--rebase"}[how]
        where = [] if remote is None else ["--", remote, *([] if branch is None else [_name(branch)])]
        before = await self._at(path, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
        done = await self._at(
            path, "pull", "--quiet", option, *where, env=_author(author), timeout_s=timeout_s, check=False
        )
        if not done.ok:
            unmerged = await self._at(path, "diff", "--name-only", "--diff-filter=U", "-z", check=False)
            raise _failed("pull", done, conflicts=[name for name in unmerged.stdout.split("\0") if name])
        after = await self._at(path, "rev-parse", "--verify", "HEAD")
        return PullResult(_line(before) or None, _line(after))

    async def branches(self, path: str) -> list[WorktreeBranch]:
        done = await self._at(path, "for-each-ref", worktree.BRANCH_FORMAT, "refs/heads")
        return worktree.branches(done.stdout_bytes)

    async def branch(self, path: str, name: str, rev: str = "HEAD") -> None:
        """Make a branch, and stay where you are."""
        await self._at(path, "branch", "--no-track", _name(name), _name(rev))

    async def checkout(self, path: str, rev: str, *, create: bool = False, force: bool = False) -> None:
        """A branch, tag or commit; with `create` a new branch from here. `force` drops changes that are in the way."""
        options = ["--quiet"]
        options += ["--force"] if force else []
        options += ["-b"] if create else []
        await self._at(path, "checkout", *options, _name(rev), "--")

    async def diff(
        self,
        path: str,
        base: str | None = None,
        head: str | None = None,
        *,
        staged: bool = False,
        files: Sequence[str] = (),
        patch: bool = True,
    ) -> WorktreeDiff:
        """What is not staged; or `staged`: what is; or since `base`; or from `base` to `head`."""
        if head is not None and base is None:
            raise InvalidRequest("a diff with a head needs a base", field="base")
        revs = [_name(rev) for rev in (base, head) if rev is not None]
        options = ["--no-ext-diff", "--no-textconv", "--find-renames", *(["--cached"] if staged else [])]
        rest = [*revs, "--", *files]
        listed = await self._at(path, "diff", *options, "-z", "--raw", "--numstat", *rest)
        text = (await self._at(path, "diff", *options, "--patch", "--no-color", *rest)).stdout if patch else ""
        return WorktreeDiff(worktree.changed_files(listed.stdout_bytes), text)

    async def log(
        self, path: str, rev: str = "HEAD", *, limit: int = 50, files: Sequence[str] = ()
    ) -> list[WorktreeCommit]:
        """Newest first."""
        done = await self._at(
            path, "log", "-z", worktree.LOG_FORMAT, f"--max-count={int(limit)}", _name(rev), "--", *files
        )
        return worktree.log(done.stdout_bytes)

    async def _at(
        self,
        path: str,
        *args: str,
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = 120.0,
        check: bool = True,
    ) -> ExecResult:
        return await self._run("-C", path, *args, stdin=stdin, env=env, timeout_s=timeout_s, check=check)

    async def _run(
        self,
        *args: str,
        stdin: bytes | None = None,
        env: dict[str, str] | None = None,
        timeout_s: float | None = 120.0,
        check: bool = True,
    ) -> ExecResult:
        done = await self._sandbox.exec(
            ["git", "-c", "core.quotePath=false", *args],
            env={**_ENV, **(env or {})},
            user=self._user,
            timeout_s=timeout_s,
            stdin=stdin,
        )
        if check and (not done.ok or done.truncated):
            raise _failed(args[2] if args[0] == "-C" else args[0], done)
        return done


_FROM_STDIN = ("--pathspec-from-file=-", "--pathspec-file-nul")


def _failed(verb: str, done: ExecResult, **details: object) -> GitFailed:
    said = (done.stderr_bytes or done.stdout_bytes)[-_TAIL_BYTES:].decode("utf-8", "replace").strip()
    if done.timed_out:
        how = "ran into its timeout"
    elif done.ok:
        how = "printed more than can be taken in"
    else:
        how = f"ended with exit code {done.exit_code}" if done.signal is None else f"was ended by signal {done.signal}"
    return GitFailed(
        f"git {verb} {how}" + (f":\n{said}" if said else "."),
        exit_code=done.exit_code,
        timed_out=done.timed_out,
        stderr=said,
        **details,
    )


def _name(name: str) -> str:
    """A branch or revision. Git has none that begins with a dash, and would take it for an option."""
    if not name or name.startswith("-") or "\0" in name:
        raise InvalidRequest(f"{name!r} is no branch, tag or commit", field="rev")
    return name


def _paths(files: Sequence[str]) -> bytes:
    for path in files:
        if not path or "\0" in path:
            raise InvalidRequest(f"{path!r} is no path", field="files")
    return b"".join(os.fsencode(path) + b"\0" for path in files)


def _author(author: Person | None) -> dict[str, str]:
    if author is None:
        return {}
    env = {
        "GIT_AUTHOR_NAME": author.name,
        "GIT_AUTHOR_EMAIL": author.email,
        "GIT_COMMITTER_NAME": author.name,
        "GIT_COMMITTER_EMAIL": author.email,
    }
    return env if author.date is None else {**env, "GIT_AUTHOR_DATE": author.date.isoformat()}


def _line(done: ExecResult) -> str:
    return done.stdout.removesuffix("\n")
