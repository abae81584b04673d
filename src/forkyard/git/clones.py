"""Clones in sandboxes: made ready on this host, and put into the guest as a finished `.git`.

Owns: where the objects come from (a hosted repository, a mirror of one elsewhere), that a fetch goes only where the policy
of the sandbox lets it, and that no credential is left in the clone. The guest itself only checks the files out, so what is
in a repository is never unpacked here. What the policy meters, records or replays is cloned in the guest, through its
door. Never does: machines (`control`).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import re
import secrets as random
import shlex
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlsplit

import structlog

from forkyard.control.commands import run
from forkyard.control.identities import Principal
from forkyard.control.inside import GIT_HOST
from forkyard.control.plane import ControlPlane
from forkyard.errors import (
    FileConflict,
    Forbidden,
    ForkyardError,
    GitFailed,
    HostFailure,
    InvalidRequest,
    RemoteDenied,
    RemoteFailed,
    RemoteMissing,
    RevisionNotFound,
)
from forkyard.git.mirrors import Mirrors
from forkyard.git.process import Git, ended
from forkyard.git.repositories import Repositories
from forkyard.guest.base import ExecSpec, Guest
from forkyard.models.specs import HOSTED, GitRepo
from forkyard.net.errands import Errand
from forkyard.net.outside import Outside
from forkyard.net.policy import Gate
from forkyard.store.records import SandboxRecord

log = structlog.get_logger(__name__)

LIST_S = 60.0
CLONE_S = 3600.0
_CHUNK_BYTES = 2**18
_NO_SUCH_COMMAND = 127  # of a shell
_GUEST_ENV = {"GIT_TERMINAL_PROMPT": "0", "GIT_SSH_COMMAND": "ssh -oBatchMode=yes", "LC_ALL": "C.UTF-8"}

#: Puts what was made ready into the guest.
Put = Callable[[Guest], Awaitable[None]]


@dataclass(frozen=True)
class _Ready:
    """A clone without its files. `git` None: the guest clones it."""

    repo: GitRepo
    url: str
    git: Path | None = None
    files: bool = False
    """There is a commit to check out."""


@dataclass(frozen=True)
class _Source:
    """Where a clone is made from, and what it will call its origin."""

    place: str
    url: str
    refs: frozenset[str]
    env: Mapping[str, str]


class Clones:
    def __init__(
        self,
        control: ControlPlane,
        repositories: Repositories,
        outside: Outside,
        root: Path,
        *,
        hosted_at: Callable[[], str],
        mirrors_bytes: int,
        ca: Path | None = None,
    ) -> None:
        """`hosted_at`: where git clients find hosted repositories from outside."""
        self._control = control
        self._repositories = repositories
        self._git: Git = repositories.git
        self._outside = outside
        self._scratch = root / "clones"
        self._mirrors = Mirrors(self._git, root / "mirrors", mirrors_bytes)
        self._hosted_at = hosted_at
        self._ca = ca

    async def start(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)
        await asyncio.to_thread(self._scratch.mkdir, mode=0o700, parents=True)
        await self._mirrors.start()

    # ── for a new sandbox ────────────────────────────────────────────────────────────────────────────────────────

    @contextlib.asynccontextmanager
    async def making(
        self, record: SandboxRecord, repos: Sequence[GitRepo], *, files: bool = True
    ) -> AsyncIterator[Put]:
        """They are made ready beside whatever the caller does meanwhile. `files`: and checked out."""
        tasks = [asyncio.create_task(self._ready(record, repo), name=f"clone {repo.url}") for repo in repos]

        async def put(guest: Guest) -> None:
            for task in tasks:
                ready = await task
                await self._put(guest, ready if files else replace(ready, files=False))

        try:
            yield put
        finally:
            for task in tasks:
                task.cancel()
            for made in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(made, _Ready):
                    await self._forget(made)

    async def _forget(self, ready: _Ready) -> None:
        if ready.git is not None:
            await asyncio.to_thread(shutil.rmtree, ready.git.parent, ignore_errors=True)

    # ── on this host ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _ready(self, record: SandboxRecord, repo: GitRepo) -> _Ready:
        name = self.hosted_name(repo.url)
        if name is not None:
            return await self._hosted(record, repo, name)
        gate = Gate(record.id, record.network.egress, self._outside.presets)
        egress = record.network.egress
        metered = any(vars(gate.allowance).values()) or egress.replay is not None or egress.record is not None
        if metered or not repo.url.startswith(("http://", "https://")):
            if repo.secret is not None and repo.secret not in record.secrets:
                raise InvalidRequest(
                    f"under this network policy {repo.url} is cloned inside; give {repo.secret!r} as a secret of the "
                    "sandbox, for that host",
                    field="git.secret",
                )
            return _Ready(repo, repo.url)
        return await self._fetched(record, repo, gate)

    def hosted_name(self, url: str) -> str | None:
        """The name or id, if it is a repository of ours, whichever way it is written."""
        if HOSTED.fullmatch(url):
            return url
        place = _place(url)
        if place is None:
            return None
        path = urlsplit(url).path.strip("/")
        if place[1] == GIT_HOST or (path.startswith("git/") and place == _place(self._hosted_at())):
            return path.removeprefix("git/").removesuffix(".git")
        return None

    async def _hosted(self, record: SandboxRecord, wanted: GitRepo, name: str) -> _Ready:
        repo = await self._repositories.get(name)
        if record.identity_id is not None:  # else it is the caller's, who may everything
            who = Principal("identity", record.identity_id, record.identity_id, sandbox_id=record.id)
            public = repo.record.visibility == "public"
            await self._control.identities.authorize_repo(who, "read", repo.id, public=public)
        listed = await self._git.run(repo.path, "for-each-ref", "--format=%(refname)", "refs/heads", "refs/tags")
        source = _Source(
            # Not a plain path: then what no branch and no tag leads to would be in it.
            f"file://{repo.path}",
            inner_url(repo.id),
            frozenset(listed.stdout.decode("utf-8", "replace").splitlines()),
            self._git.env({"GIT_ALLOW_PROTOCOL": "file"}),
        )
        # An error names it as people do.
        return await self._cloned(source, wanted.model_copy(update={"url": repo.record.name}))

    async def _fetched(self, record: SandboxRecord, repo: GitRepo, gate: Gate) -> _Ready:
        password = await self._password(record, repo)
        credential = "" if password is None else f"{repo.username}:{self._control.secrets.digest(password)}"
        errand = Errand(self._outside, gate, "git", self._control.egress.take)
        async with errand.proxy() as proxy:
            env = self._git.env({"GIT_ALLOW_PROTOCOL": "http:https"}, self._config(repo, password, proxy))
            try:
                head, refs = await self._listed(repo.url, env)
                source = _Source(repo.url, repo.url, refs, env)
                if repo.depth is not None:  # it is little, and a mirror would be all
                    made = await self._cloned(source, repo)
                else:
                    async with self._mirrors.fresh(repo.url, credential, env, head, repo.rev) as mirror:
                        made = await self._cloned_near(mirror, source, repo)
            except HostFailure as error:
                if errand.denied is not None:
                    raise Forbidden(f"{repo.url} cannot be cloned: {errand.denied}", url=repo.url) from None
                raise told(repo.url, errand.failed or error.message) from None
        if repo.secret in record.secrets:
            assert made.git is not None
            await self._helped(made.git, repo)
        return made

    async def _cloned_near(self, mirror: Path | None, source: _Source, repo: GitRepo) -> _Ready:
        if mirror is not None:
            local = self._git.env({"GIT_ALLOW_PROTOCOL": "file"})
            try:
                return await self._cloned(replace(source, place=str(mirror), env=local), repo)
            except HostFailure as error:
                log.warning("a mirror is damaged, and made anew", url=source.url, error=error.message)
                await asyncio.to_thread(shutil.rmtree, mirror, ignore_errors=True)
        return await self._cloned(source, repo)

    def _config(self, repo: GitRepo, password: str | None, proxy: str) -> dict[str, str]:
        """Of this host's git. The credential is in the environment of the process, and nowhere else."""
        config = {"credential.helper": "", "http.proxy": proxy, "fetch.fsckObjects": "false"}
        if self._ca is not None:
            config["http.sslCAInfo"] = str(self._ca)
        if password is not None:
            config |= shown(repo.url, repo.username, password)
        return config

    async def _password(self, record: SandboxRecord, repo: GitRepo) -> str | None:
        if repo.secret is None:
            return None
        own = record.secrets.get(repo.secret)
        if own is not None:
            return await self._control.secrets.value(repo.secret, own)
        return await self._control.secrets.named(repo.secret, "git.secret")

    async def _listed(self, url: str, env: Mapping[str, str]) -> tuple[str | None, frozenset[str]]:
        """Its default branch, its branches and tags. The first word with that host: most of what can be wrong is found
        out here."""
        done = await self._git.run(self._scratch, "ls-remote", "--symref", url, env=env, timeout_s=LIST_S)
        head, found = None, set()
        for line in done.stdout.decode("utf-8", "replace").splitlines():
            value, _, ref = line.partition("\t")
            if ref == "HEAD" and value.startswith("ref: refs/heads/"):
                head = value.removeprefix("ref: refs/heads/")
            found.add(ref)
        return head, frozenset(found)

    async def _cloned(self, source: _Source, repo: GitRepo) -> _Ready:
        """A `.git` in a place of its own, with HEAD where it should be."""
        git = self._scratch / random.token_hex(8) / ".git"
        places = (f"refs/heads/{repo.rev}", f"refs/tags/{repo.rev}", repo.rev or "")
        ref = next((ref for ref in places if ref.startswith("refs/") and ref in source.refs), None)
        options = [] if ref is None else [f"--branch={ref.removeprefix('refs/heads/').removeprefix('refs/tags/')}"]
        options += [f"--depth={repo.depth}"] if repo.depth is not None else []
        try:
            args = ("clone", "--quiet", "--no-checkout", "--template=", *options, "--", source.place, str(git.parent))
            await self._git.run(self._scratch, *args, env=source.env, timeout_s=CLONE_S)
            if repo.rev is not None and ref is None:
                await self._detached(git, source, repo, repo.rev)
            await self._git.run(git, "config", "remote.origin.url", source.url)
            head = await self._git.run(git, "rev-parse", "--verify", "--quiet", "HEAD^{commit}", ok=(0, 1, 128))
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, git.parent, ignore_errors=True)
            raise
        return _Ready(repo, source.url, git, files=head.code == 0)

    async def _detached(self, git: Path, source: _Source, repo: GitRepo, rev: str) -> None:
        shallow = "" if repo.depth is None else "; with `depth` a commit is named by all its digits"
        missing = RevisionNotFound(f"{repo.url} has no branch, tag or commit {rev!r}{shallow}", rev=rev, url=repo.url)
        if repo.depth is not None:
            args = ("fetch", "--quiet", f"--depth={repo.depth}", "--no-auto-gc", "--", source.place, rev)
            env = {**source.env, "GIT_DIR": str(git)}
            if (await self._git.run(git, *args, env=env, ok=(0, 1, 128), timeout_s=CLONE_S)).code:
                raise missing
            rev = "FETCH_HEAD"
        done = await self._git.run(git, "rev-parse", "--verify", "--quiet", f"{rev}^{{commit}}", ok=(0, 1, 128))
        if done.code:
            raise missing
        await self._git.run(git, "update-ref", "--no-deref", "HEAD", done.stdout.decode().strip())
        await asyncio.to_thread((git / "FETCH_HEAD").unlink, missing_ok=True)

    async def _helped(self, git: Path, repo: GitRepo) -> None:
        """In there the variable holds a placeholder, which the door exchanges: so the clone can fetch and push."""
        await self._git.run(git, "config", f"credential.{_origin(repo.url)}.helper", _helper(repo))

    # ── in the guest ─────────────────────────────────────────────────────────────────────────────────────────────

    async def _put(self, guest: Guest, ready: _Ready) -> None:
        repo = ready.repo
        path, user = shlex.quote(repo.path), repo.user or "root"
        room = f'install -d -o {shlex.quote(user)} -- {path} || exit 1; [ -z "$(ls -A -- {path})" ] || exit 9'
        made = await run(guest, ExecSpec(room, cwd="/", timeout_s=LIST_S, label="clone"))
        if made.exit_code == 9:
            raise FileConflict(f"{repo.path} is not empty; clone to another path", path=repo.path)
        if not made.ok:
            raise GitFailed(f"{repo.path} cannot be made: {made.tail.strip() or made.why(LIST_S)}")
        script = _script(repo)
        if ready.git is not None:
            async with contextlib.aclosing(_archived(ready.git)) as chunks:
                await guest.upload_tar(repo.path, chunks, user=user)
            if not ready.files:
                return
            script = f"cd {path} && git reset -q --hard"
        spec = ExecSpec(script, cwd="/", env=_GUEST_ENV, user=user, timeout_s=CLONE_S, label=f"clone {repo.url}")
        done = await run(guest, spec)
        if done.exit_code == _NO_SUCH_COMMAND:
            raise GitFailed(
                f"{repo.url} cannot be checked out: this machine has no git; install it in a spec first (`apt: [git]`, and "
                "then a step `git`), or use an image that has it"
            )
        if not done.ok and ready.git is None:
            raise told(repo.url, done.tail.strip() or done.why(CLONE_S))
        if not done.ok:
            raise GitFailed(f"the files of {repo.url} cannot be written: {done.tail.strip() or done.why(CLONE_S)}")


def _script(repo: GitRepo) -> str:
    url, path = shlex.quote(repo.url), shlex.quote(repo.path)
    depth = f"--depth {repo.depth}" if repo.depth else ""
    git = "git" if repo.secret is None else f"git -c credential.{_origin(repo.url)}.helper={shlex.quote(_helper(repo))}"
    if repo.rev is None:
        return f"{git} clone -q {depth} -- {url} {path}"
    rev = shlex.quote(repo.rev)
    if repo.depth is None:
        return f"{git} clone -q -- {url} {path} && git -C {path} checkout -q {rev} --"
    return (  # a commit has no name to clone by
        f"{git} clone -q {depth} --branch {rev} -- {url} {path} 2>/dev/null || {{ git init -q -- {path} && "
        f"cd {path} && git remote add origin {url} && {git} fetch -q {depth} origin {rev} && git checkout -q FETCH_HEAD; }}"
    )


def _helper(repo: GitRepo) -> str:
    return f'!f() {{ echo username={shlex.quote(repo.username)}; echo "password=${repo.secret}"; }}; f'


def _place(url: str) -> tuple[str, str | None, int | None] | None:
    """Of a url, if it is one; this host is the same by all its names."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    return parts.scheme, "localhost" if host in ("127.0.0.1", "::1") else host, port


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


async def _archived(git: Path) -> AsyncGenerator[bytes]:
    tar = await asyncio.create_subprocess_exec(
        *("tar", "--create", "--file=-", "--owner=0", "--group=0", "--directory", str(git.parent), ".git"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        assert tar.stdout is not None
        while chunk := await tar.stdout.read(_CHUNK_BYTES):
            yield chunk
        # 1: a file had changed. The packs are links to those of a mirror, and another link is a change; what is in one
        # never changes.
        if await tar.wait() not in (0, 1):
            raise HostFailure(f"tar failed with {tar.returncode} for a clone")
    finally:
        await ended(tar)


def inner_url(repo_id: str) -> str:
    """Of a hosted repository, inside. By its id, for it may get another name."""
    return f"http://{GIT_HOST}/{repo_id}.git"


def shown(url: str, username: str, password: str) -> dict[str, str]:
    """A credential, as configuration of git. It is shown there only: not to where a redirect leads."""
    basic = base64.b64encode(f"{username}:{password}".encode()).decode()
    return {f"http.{_origin(url)}/.extraHeader": f"Authorization: Basic {basic}"}


HOW_TO_SHOW = "store a token with `forkyard secrets set` and name it as `secret`"


def told(url: str, said: str, how: str = HOW_TO_SHOW) -> ForkyardError:
    """What git said of a host elsewhere, as an error of ours. `how`: a credential is given."""
    url = re.sub(r"//[^/@\s]*@", "//", url)
    said = re.sub(r"//[^/@\s]*@", "//", said)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    why = next((line for line in lines if "fatal:" in line), lines[-1] if lines else "")
    why = why.rpartition("fatal: ")[2][:500]
    if re.search(r"could not read (Username|Password)|Authentication failed|error: 40[13]|Permission denied", said):
        return RemoteDenied(
            f"{url} wants a credential, or refuses this one, or is not there at all: {why}; {how}",
            url=url,
        )
    if re.search(
        r"repository '.*' not found|does not appear to be a git repository|error: 404|not valid: is this", said
    ):
        return RemoteMissing(f"there is no repository at {url}: {why}", url=url)
    if re.search(r"not our ref|find remote ref|pathspec|Remote branch .* not found|unadvertised object", said):
        return RevisionNotFound(f"{url}: {why}", url=url)
    return RemoteFailed(f"{url} cannot be cloned: {why}", url=url)
