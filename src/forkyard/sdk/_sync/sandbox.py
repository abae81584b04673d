# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""One sandbox: its verbs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Literal, Self, overload

from forkyard.errors import from_problem
from forkyard.lifecycle import State
from forkyard.models import (
    ExecInfo,
    ForkResult,
    OnTtl,
    Page,
    Persistence,
    SandboxInfo,
    SandboxLogs,
    SandboxUsage,
    SnapshotInfo,
    UsageHistory,
    UsageSample,
)
from forkyard.models.code import CodeException, CodeResult, ContextInfo, Language
from forkyard.models.network import PreviewInfo
from forkyard.models.ssh import SshAccess
from forkyard.sdk import validation, wire
from forkyard.sdk._sync.code import CodeStream, Contexts, context_id
from forkyard.sdk._sync.egress import Egress
from forkyard.sdk._sync.execution import ExecStream
from forkyard.sdk._sync.files import Files
from forkyard.sdk._sync.forward import Forward
from forkyard.sdk._sync.process import Process
from forkyard.sdk._sync.sandbox_git import SandboxGit
from forkyard.sdk._sync.services import Services
from forkyard.sdk._sync.snapshots import Snapshot, reference
from forkyard.sdk._sync.terminal import Terminal
from forkyard.sdk._sync.transport import Transport
from forkyard.sdk.code import CodeOutcome
from forkyard.sdk.results import (
    DEFAULT_MAX_OUTPUT_BYTES,
    ExecResult,
    ForkOutcome,
    unspoiled,
)
from forkyard.sdk.validation import UNCHANGED, Unchanged


class Sandbox:
    """A machine of your own. As a context manager it is deleted at the end of the block."""

    def __init__(self, transport: Transport, info: SandboxInfo) -> None:
        self._transport = transport
        self._path = f"/sandboxes/{info.id}"
        self.info = info
        """As the daemon last reported it; `refresh()` asks again."""
        self.files = Files(transport, info.id)
        self.egress = Egress(transport, info.id)
        self.services = Services(transport, info.id)
        self.contexts = Contexts(transport, info.id)
        self.git = SandboxGit(self)

    def __repr__(self) -> str:
        name = f", name={self.info.name!r}" if self.info.name else ""
        return f"{type(self).__name__}(id={self.id!r}{name}, state={self.state.value!r})"

    @property
    def id(self) -> str:
        return self.info.id

    @property
    def name(self) -> str | None:
        return self.info.name

    @property
    def state(self) -> State:
        return self.info.state

    @property
    def parent_id(self) -> str | None:
        """The sandbox it was forked from."""
        return self.info.parent_id

    def refresh(self) -> SandboxInfo:
        """Ask the daemon how it is; also sets `info`."""
        answer = self._transport.request("GET", self._path)
        self.info = wire.parse(SandboxInfo, answer.content)
        return self.info

    def delete(self) -> None:
        """End the machine and remove all it owns. Deleting it twice is fine."""
        self._transport.request("DELETE", self._path)

    def logs(self) -> SandboxLogs:
        """Milestones of its start, and the end of its console."""
        answer = self._transport.request("GET", f"{self._path}/logs")
        return wire.parse(SandboxLogs, answer.content)

    def usage(self) -> SandboxUsage:
        """Memory and processor time it takes from the host."""
        answer = self._transport.request("GET", f"{self._path}/usage")
        return wire.parse(SandboxUsage, answer.content)

    def usage_history(self, start: datetime | None = None, end: datetime | None = None) -> list[UsageSample]:
        """What the host saw of its processor, memory and disk in the last hour, every ten seconds while it ran; oldest
        first. A time without a zone is one of this machine."""
        given = {"start": start, "end": end}
        params = {name: at.astimezone().isoformat() for name, at in given.items() if at is not None}
        answer = self._transport.request("GET", f"{self._path}/usage/history", params=params)
        return wire.parse(UsageHistory, answer.content).samples

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.delete()

    # ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────

    @overload
    def fork(
        self,
        count: int = 1,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        partial: Literal[False] = False,
    ) -> list[Sandbox]: ...

    @overload
    def fork(
        self,
        count: int = 1,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        partial: Literal[True],
    ) -> list[ForkOutcome[Sandbox]]: ...

    def fork(
        self,
        count: int = 1,
        *,
        name: str | None = None,
        labels: Mapping[str, str] | None = None,
        partial: bool = False,
    ) -> list[Sandbox] | list[ForkOutcome[Sandbox]]:
        """Running copies of this machine as it is now: memory, processes, open files, disk. It goes on meanwhile.

        A command that runs has the same exec id in each copy. `labels`: else those of the parent. If a child could not
        be made its error is raised, and `details["children"]` has the ids of those that run; with `partial` nothing is
        raised and each child's outcome is told. A fork is never sent twice.
        """
        request = validation.sandbox_fork(count=count, name=name, labels=None if labels is None else dict(labels))
        answer = self._transport.request(
            "POST", f"{self._path}/fork", body=request.model_dump(exclude_none=True), timeout_s=wire.CHANGE_S
        )
        result = wire.parse(ForkResult, answer.content)
        outcomes = [
            ForkOutcome(
                Sandbox(self._transport, child.sandbox) if child.sandbox else None,
                None if child.sandbox else from_problem(child.problem or {}),
                result.paused_ms,
            )
            for child in result.children
        ]
        if partial:
            return outcomes
        return unspoiled(outcomes, [child.sandbox.id for child in result.children if child.sandbox])

    def children(self, *, all: bool = False) -> list[Sandbox]:
        """Sandboxes that were forked from this one, newest first; `all` includes those that have ended."""
        found = self._transport.items(Page[SandboxInfo], "/sandboxes", {"all": all or None})
        return [Sandbox(self._transport, info) for info in found if info.parent_id == self.id]

    def snapshot(self, name: str | None = None) -> Snapshot:
        """Save it as it is now, to start others from or to return to. It goes on meanwhile."""
        request = validation.snapshot_create(name=name)
        answer = self._transport.request(
            "POST", f"{self._path}/snapshots", body=request.model_dump(exclude_defaults=True), timeout_s=wire.CHANGE_S
        )
        return Snapshot(self._transport, wire.parse(SnapshotInfo, answer.content))

    def rollback(self, snapshot: Snapshot | str) -> SandboxInfo:
        """Return to a snapshot of this sandbox (the object, its id or its name). What happened since is dropped."""
        return self._change("POST", "/rollback", {"snapshot": reference(snapshot)}, again=False)

    # ── states ──────────────────────────────────────────────────────────────────────────────────────────────────

    def pause(self, *, durable: bool = False) -> SandboxInfo:
        """Put it to sleep. Processes stand still, and go on at `resume`, or when it is next used. Streams stay open.

        Its memory moves to disk after a while, where it costs nothing and survives a reboot of the host; with `durable`
        it is there when this returns.
        """
        return self._change("POST", "/pause", {"durable": True} if durable else None)

    def resume(self, *, memory: bool = True) -> SandboxInfo:
        """Let it go on where it was. `memory=False` boots from its disk instead; what was in memory is dropped."""
        return self._change("POST", "/resume", {} if memory else {"memory": False})

    def stop(self) -> SandboxInfo:
        """Shut it down. Its disk stays, and `start` boots from it."""
        return self._change("POST", "/stop")

    def start(self) -> SandboxInfo:
        """Boot a stopped, or failed, sandbox from its disk."""
        return self._change("POST", "/start")

    def resize(
        self, *, vcpus: int | None = None, memory_mib: int | None = None, disk_gib: int | None = None
    ) -> SandboxInfo:
        """Of a stopped sandbox, for its next `start`; of a paused one its disk alone. A disk only grows."""
        request = validation.sandbox_resize(vcpus=vcpus, memory_mib=memory_mib, disk_gib=disk_gib)
        return self._change("POST", "/resize", request.model_dump(exclude_unset=True))

    def update(
        self,
        *,
        name: str | Unchanged | None = UNCHANGED,
        labels: Mapping[str, str] | Unchanged = UNCHANGED,
        idle_timeout_s: float | Unchanged | None = UNCHANGED,
        ttl_s: float | Unchanged | None = UNCHANGED,
        on_ttl: OnTtl | Unchanged = UNCHANGED,
        persistence: Persistence | Unchanged = UNCHANGED,
        priority: int | Unchanged = UNCHANGED,
        checkpoint_every_s: float | Unchanged | None = UNCHANGED,
        checkpoints_kept: int | Unchanged = UNCHANGED,
        network: validation.Network | Unchanged = UNCHANGED,
        identity: str | Unchanged | None = UNCHANGED,
        activity_threshold_bytes: int | Unchanged = UNCHANGED,
    ) -> SandboxInfo:
        """Change what `create` was told. What is not given stays. None is never, or none; a ttl begins now."""
        request = validation.sandbox_update(
            name=name,
            labels=labels if isinstance(labels, Unchanged) else dict(labels),
            idle_timeout_s=idle_timeout_s,
            ttl_s=ttl_s,
            on_ttl=on_ttl,
            persistence=persistence,
            priority=priority,
            checkpoint_every_s=checkpoint_every_s,
            checkpoints_kept=checkpoints_kept,
            network=network if isinstance(network, Unchanged) else validation.network_policy(network),
            identity=identity,
            activity_threshold_bytes=activity_threshold_bytes,
        )
        return self._change("PATCH", "", request.model_dump(exclude_unset=True))

    def _change(
        self, method: str, verb: str, body: dict[str, object] | None = None, *, again: bool = True
    ) -> SandboxInfo:
        """`again`: to bring about what is so already is fine."""
        answer = self._transport.request(method, self._path + verb, body=body, again=again, timeout_s=wire.CHANGE_S)
        self.info = wire.parse(SandboxInfo, answer.content)
        return self.info

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────

    def exec(
        self,
        command: str | list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: str | bytes | None = None,
        label: str | None = None,
        trace_id: str | None = None,
        max_output_bytes: int = DEFAULT_MAX_OUTPUT_BYTES,
        check: bool = False,
    ) -> ExecResult:
        """Run a command to its end. A string runs in `bash -c`, a list without a shell.

        After `timeout_s` the whole process tree is killed and `timed_out` is set. Of each stream the first
        `max_output_bytes` are kept. A non-zero exit code is data; `check=True` raises `CommandFailed` instead. Every
        connection it makes is recorded with the `trace_id`.
        """
        stream = self.exec_stream(
            command, cwd=cwd, env=env, user=user, timeout_s=timeout_s, stdin=stdin, label=label, trace_id=trace_id
        )
        result = stream.collect(max_output_bytes)
        return result.check() if check else result

    def exec_stream(
        self,
        command: str | list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: str | bytes | Iterable[bytes] | None = None,
        label: str | None = None,
        trace_id: str | None = None,
    ) -> ExecStream:
        """Run a command and iterate over its output as it comes; then the stream's `exit_code` is set.

        `stdin` may be an iterable of pieces; it is advanced while the command runs.
        """
        create = validation.exec_create(
            command=command,
            cwd=cwd,
            env=env or {},
            user=user,
            timeout_s=timeout_s,
            stdin=stdin is not None,
            label=label,
            trace_id=trace_id,
        )
        data = stdin.encode() if isinstance(stdin, str) else stdin
        return ExecStream(self._transport, self.id, create=create, stdin=data)

    def spawn(
        self,
        command: str | list[str],
        *,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        stdin: bool = False,
        pty: bool = False,
        rows: int = 24,
        cols: int = 80,
        label: str | None = None,
        trace_id: str | None = None,
    ) -> Process:
        """Start a command and leave it running. It outlives client and daemon; `process(id)` finds it again."""
        create = validation.exec_create(
            command=command,
            cwd=cwd,
            env=env or {},
            user=user,
            timeout_s=timeout_s,
            stdin=stdin,
            pty=pty,
            rows=rows,
            cols=cols,
            label=label,
            trace_id=trace_id,
        )
        answer = self._transport.request("POST", f"{self._path}/execs", body=create.model_dump(exclude_defaults=True))
        info = wire.parse(ExecInfo, answer.content)
        return Process(self._transport, self.id, info.id, info)

    def execs(self) -> list[ExecInfo]:
        """All commands of this sandbox that run, or ended not long ago."""
        answer = self._transport.request("GET", f"{self._path}/execs")
        return wire.parse(Page[ExecInfo], answer.content).items

    def process(self, exec_id: str) -> Process:
        """A command that was started before, maybe by another client."""
        return Process(self._transport, self.id, exec_id)

    # ── code ────────────────────────────────────────────────────────────────────────────────────────────────────

    def run_code(
        self,
        code: str,
        *,
        language: Language | None = None,
        context: ContextInfo | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        on_stdout: Callable[[str], object] | None = None,
        on_stderr: Callable[[str], object] | None = None,
        on_result: Callable[[CodeResult], object] | None = None,
        on_exception: Callable[[CodeException], object] | None = None,
        check: bool = False,
    ) -> CodeOutcome:
        """Run code to its end: Python, or `language` "javascript", "typescript", "bash". What it defines is there in the
        next run, and in forks.

        Without a `context` it runs in the one of its language. After `timeout_s` it is interrupted, and the context goes
        on. An exception is data, in `exception`; `check=True` raises `CodeRaised` instead. The functions `on_…` are
        called as things come.
        """
        stream = self.run_code_stream(code, language=language, context=context, env=env, timeout_s=timeout_s)
        outcome = stream.collect(on_stdout, on_stderr, on_result, on_exception)
        return outcome.check() if check else outcome

    def run_code_stream(
        self,
        code: str,
        *,
        language: Language | None = None,
        context: ContextInfo | str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> CodeStream:
        """Run code and iterate over what it does: `CodeStarted`, `CodeOutput`, `CodeResult`, `CodeException`, `CodeEnd`.

        Leaving the loop early interrupts it.
        """
        request = validation.code_run(
            code=code,
            language=language,
            context=None if context is None else context_id(context),
            env=dict(env or {}),
            timeout_s=timeout_s,
        )
        return CodeStream(self._transport, self.id, request)

    # ── previews ────────────────────────────────────────────────────────────────────────────────────────────────

    def url(self, port: int) -> str:
        """The address of a server in it: `http://3000-<id>.localhost:7070`. Opening it wakes the sandbox."""
        return (self.preview(port)).url

    def preview(self, port: int) -> PreviewInfo:
        """The address of a port, who may open it, and (if a token is asked for) its token and a one-time link."""
        answer = self._transport.request("GET", f"{self._path}/previews/{port}")
        return wire.parse(PreviewInfo, answer.content)

    def rotate_preview(self, port: int) -> PreviewInfo:
        """A new token for a port. The old one, its cookies and its links open nothing from now on."""
        answer = self._transport.request("POST", f"{self._path}/previews/{port}/rotate")
        return wire.parse(PreviewInfo, answer.content)

    # ── ways in ─────────────────────────────────────────────────────────────────────────────────────────────────

    def ssh(self, *, ttl_s: float = 86400.0) -> SshAccess:
        """A password for SSH into this sandbox, good for `ttl_s`, with the command to type."""
        request = validation.ssh_access_create(ttl_s=ttl_s)
        answer = self._transport.request("POST", f"{self._path}/ssh", body=request.model_dump(), again=True)
        return wire.parse(SshAccess, answer.content)

    def forward(self, port: int, *, local_port: int = 0, host: str = "127.0.0.1") -> Forward:
        """A local port that leads to a port of the sandbox, through the daemon. `local_port` 0 is a free one.

        As a context manager: `with sandbox.forward(5432) as forward: connect("127.0.0.1", forward.port)`.
        """
        return Forward(self._transport, self.id, port, local_port, host)

    def terminal(
        self,
        command: str | None = None,
        *,
        user: str | None = None,
        cwd: str | None = None,
        rows: int = 24,
        cols: int = 80,
        exec_id: str | None = None,
        offset: int = 0,
    ) -> Terminal:
        """A terminal: a login shell, a command, or (`exec_id`) the terminal of an exec that runs already.

        To attach again after a broken connection, give the `exec_id` and the `offset` of the terminal that broke.
        """
        params = {"command": command, "user": user, "cwd": cwd, "rows": rows, "cols": cols, "exec_id": exec_id}
        return Terminal(self._transport, self.id, params, offset)
