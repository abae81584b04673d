"""Every operation of PROTOCOL.md: checks its arguments and hands over to who does the work.

A handler returns the result, or None when the stream will be answered by its task.
"""

from __future__ import annotations

import os

from . import accounts, files, frames, volumes
from .accounts import full_path
from .arguments import command, flag, integer, integers, optional_integer, optional_seconds, optional_text, text, texts
from .attachment import Attachment
from .execs import Execs, ExecSpec
from .failures import Failure, from_os_error
from .identity import Identity
from .loop import Loop
from .pipes import StdinTask
from .session import Stream, Task, to_json
from .sockets import Sockets
from .spawn import plain_words
from .transfers import ReadTask, TarReadTask, TarWriteTask, WriteTask

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from .session import Handler

    Arguments = dict[str, Any]
    Result = dict[str, Any] | None

_MAX_DEPTH = 256
_BASH, _SH = "/bin/bash", "/bin/sh"


class Operations:
    def __init__(self, loop: Loop, execs: Execs, identity: Identity, sockets: Sockets) -> None:
        self._loop = loop
        self._execs = execs
        self._identity = identity
        self._sockets = sockets
        self._flushes: list[volumes.Flush] = []

    def handlers(self) -> dict[str, Handler]:
        return {name.removeprefix("op_"): getattr(self, name) for name in dir(self) if name.startswith("op_")}

    def op_ping(self, _stream: Stream, _args: Arguments) -> Result:
        return {}

    def op_identity(self, _stream: Stream, args: Arguments) -> Result:
        try:
            entropy = bytes.fromhex(text(args, "entropy"))
        except ValueError:
            raise Failure("invalid_request", "`entropy` must be hexadecimal") from None
        self._identity.adopt(text(args, "hostname"), entropy, integer(args, "time_ns"), texts(args, "env"))
        return self._forget_past(args)

    def op_adopted(self, _stream: Stream, args: Arguments) -> Result:
        """From the front, which has done the first part of `identity`."""
        self._identity.adopted(text(args, "hostname"), texts(args, "env"))
        return self._forget_past(args)

    def _forget_past(self, args: Arguments) -> Result:
        if flag(args, "new"):
            self._execs.forget_ended()
        return {}

    # ── processes ────────────────────────────────────────────────────────────────────────────────────────────────

    def op_exec(self, stream: Stream, args: Arguments) -> Result:
        spec = self._exec_spec(args)
        attach = flag(args, "attach")
        created = self._execs.create(optional_text(args, "id"), spec)

        def started(failure: Failure | None) -> None:
            if failure is not None:
                stream.fail(failure)
            elif attach:
                stream.answer(created.record())
                stream.schedule()
            else:
                stream.end(created.record())

        try:
            created.start(started)
        except BaseException:
            self._execs.forget(created)
            raise
        if attach:
            # At once, so that nothing can be dropped between start and attachment.
            Attachment(stream, created)
        return None

    def _exec_spec(self, args: Arguments) -> ExecSpec:
        spec = ExecSpec()
        spec.command = command(args)
        usual = self._identity.env.get("FORKYARD_USER") or accounts.image().user
        spec.account = accounts.find(optional_text(args, "user") or usual)
        spec.pty = flag(args, "pty")
        spec.env = accounts.environment(spec.account)
        if spec.pty:
            spec.env["TERM"] = "xterm-256color"
        spec.env |= self._identity.env | texts(args, "env")
        spec.cwd = self._cwd(optional_text(args, "cwd"), spec.account)
        if isinstance(spec.command, str):
            spec.plain = plain_words(spec.command, spec.env)
            spec.argv = _shell_argv(spec.command, spec.plain)
        else:
            spec.argv = _login_argv(spec.command)
            spec.plain = None
        spec.timeout_s = optional_seconds(args, "timeout_s")
        spec.stdin = flag(args, "stdin")
        spec.rows = integer(args, "rows", 24, least=1, most=65535)
        spec.cols = integer(args, "cols", 80, least=1, most=65535)
        spec.label = optional_text(args, "label")
        if spec.label is not None:
            spec.label = spec.label[:256]
        spec.trace_id = optional_text(args, "trace_id")
        if spec.trace_id is not None:
            spec.trace_id = spec.trace_id[:256]
        return spec

    def _cwd(self, asked: str | None, account: accounts.Account) -> str:
        if asked is not None:
            return full_path(asked, account.name)
        usual = self._identity.env.get("FORKYARD_WORKDIR")
        if usual is not None and os.path.isdir(usual):
            return usual
        return accounts.image().workdir or account.home

    def op_attach(self, stream: Stream, args: Arguments) -> Result:
        found = self._execs.get(text(args, "id"))
        offsets = [integer(args, name, 0) for name in ("stdout_offset", "stderr_offset")]
        for offset, total in zip(offsets, found.output.totals, strict=True):
            if offset > total:
                raise Failure("invalid_request", f"offset {offset} is beyond the {total} bytes written so far")
        Attachment(stream, found, stdout_offset=offsets[0], stderr_offset=offsets[1])
        stream.answer(found.record())
        stream.schedule()
        return None

    def op_execs(self, stream: Stream, _args: Arguments) -> Result:
        stream.task = _Lines(stream, [to_json(item.record()) + b"\n" for item in self._execs.all()])
        stream.answer({})
        stream.schedule()
        return None

    def op_exec_info(self, _stream: Stream, args: Arguments) -> Result:
        return self._execs.get(text(args, "id")).record()

    def op_stdin(self, stream: Stream, args: Arguments) -> Result:
        stream.task = StdinTask(stream, self._execs.get(text(args, "id")), close=flag(args, "close"))
        return None

    def op_signal(self, _stream: Stream, args: Arguments) -> Result:
        number = integer(args, "signal", least=1, most=64)
        self._execs.get(text(args, "id")).signal(number, tree=flag(args, "tree", default=True))
        return {}

    def op_resize(self, _stream: Stream, args: Arguments) -> Result:
        rows, cols = (integer(args, name, least=1, most=65535) for name in ("rows", "cols"))
        self._execs.get(text(args, "id")).resize(rows, cols)
        return {}

    # ── sockets ──────────────────────────────────────────────────────────────────────────────────────────────────

    def op_socket_owner(self, _stream: Stream, args: Arguments) -> Result:
        ports = [integer(args, name, least=1, most=65535) for name in ("source_port", "port")]
        return {"owner": self._sockets.owner(text(args, "protocol"), text(args, "address"), *ports)}

    def op_connections(self, stream: Stream, _args: Arguments) -> Result:
        stream.task = _Lines(stream, [to_json({"name": name}) + b"\n" for name in self._sockets.connections()])
        stream.answer({})
        stream.schedule()
        return None

    def op_disconnect(self, _stream: Stream, args: Arguments) -> Result:
        names = args.get("names")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise Failure("invalid_request", "`names` must be a list of strings")
        return {"ended": self._sockets.disconnect(names)}

    # ── volumes ──────────────────────────────────────────────────────────────────────────────────────────────────

    def op_mount(self, _stream: Stream, args: Arguments) -> Result:
        slot = integer(args, "slot", most=0x17)
        volumes.mount(slot, full_path(text(args, "path")), read_only=flag(args, "read_only"))
        return {}

    def op_unmount(self, _stream: Stream, args: Arguments) -> Result:
        volumes.unmount(integer(args, "slot", most=0x17))
        return {}

    def op_flush(self, stream: Stream, args: Arguments) -> Result:
        def done(failure: Failure | None) -> None:
            if failure is None:
                stream.end({})
            else:
                stream.fail(failure)

        slots, frozen_s = integers(args, "slots", most=0x17), optional_seconds(args, "frozen_s") or 0.0
        self._flushes = [one for one in self._flushes if not one.over]
        self._flushes.append(volumes.Flush(self._loop, slots, frozen_s, done))
        return None

    def op_thaw(self, stream: Stream, _args: Arguments) -> Result:
        waiting = [one for one in self._flushes if not one.over]
        left = len(waiting)

        def thawed() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                stream.end({})

        for one in waiting:
            one.thaw(thawed)
        return None if waiting else {}

    # ── files ────────────────────────────────────────────────────────────────────────────────────────────────────

    def op_read(self, stream: Stream, args: Arguments) -> Result:
        task = ReadTask(stream, _path(args), integer(args, "offset", 0), optional_integer(args, "length"))
        stream.task = task
        stream.answer(task.record)
        stream.schedule()
        return None

    def op_write(self, stream: Stream, args: Arguments) -> Result:
        user = optional_text(args, "user")
        stream.task = WriteTask(
            stream,
            full_path(text(args, "path"), user),
            mode=optional_integer(args, "mode", most=0o7777),
            account=accounts.find(user) if user is not None else None,
            append=flag(args, "append"),
            parents=flag(args, "parents", default=True),
            attributes=texts(args, "attributes"),
        )
        return None

    def op_stat(self, _stream: Stream, args: Arguments) -> Result:
        path = _path(args)
        try:
            return files.record(path)
        except OSError as error:
            raise from_os_error(error, path) from None

    def op_exists(self, _stream: Stream, args: Arguments) -> Result:
        return {"exists": os.path.lexists(_path(args))}

    def op_list(self, stream: Stream, args: Arguments) -> Result:
        stream.task = files.ListTask(stream, _path(args), integer(args, "depth", 1, least=1, most=_MAX_DEPTH))
        stream.answer({})
        stream.schedule()
        return None

    def op_mkdir(self, _stream: Stream, args: Arguments) -> Result:
        user = optional_text(args, "user")
        files.make_directory(
            full_path(text(args, "path"), user),
            integer(args, "mode", 0o755, most=0o7777),
            parents=flag(args, "parents", default=True),
            account=accounts.find(user) if user is not None else None,
        )
        return {}

    def op_remove(self, stream: Stream, args: Arguments) -> Result:
        return files.remove(stream, self._loop, _path(args), recursive=flag(args, "recursive"))

    def op_move(self, stream: Stream, args: Arguments) -> Result:
        source, destination = (full_path(text(args, name)) for name in ("source", "destination"))
        return files.move(stream, self._loop, source, destination, overwrite=flag(args, "overwrite", default=True))

    def op_chmod(self, _stream: Stream, args: Arguments) -> Result:
        files.change_mode(_path(args), integer(args, "mode", most=0o7777))
        return {}

    def op_watch(self, stream: Stream, args: Arguments) -> Result:
        from .watching import WatchTask  # ctypes is only needed here

        stream.task = WatchTask(stream, self._loop, _path(args), recursive=flag(args, "recursive"))
        stream.answer({})
        return None

    def op_tar_read(self, stream: Stream, args: Arguments) -> Result:
        stream.task = TarReadTask(stream, self._loop, _path(args), flag(args, "attributes"))
        stream.answer({})
        stream.schedule()
        return None

    def op_tar_write(self, stream: Stream, args: Arguments) -> Result:
        user = optional_text(args, "user")
        stream.task = TarWriteTask(stream, self._loop, full_path(text(args, "path"), user), user, flag(args, "owners"))
        return None


def _shell_argv(command: str, plain: list[str] | None) -> list[str]:
    for shell in (_BASH, _SH):
        if os.path.exists(shell):
            return [shell, "-c", command]
    if plain is None:
        raise Failure(
            "command_not_found", "there is no shell in this machine; give the command as a program and its arguments"
        )
    return plain


def _login_argv(command: list[str]) -> list[str]:
    """A login shell is one of the machine: not every image has bash."""
    if command[0] == _BASH and "-l" in command[1:3] and not os.path.exists(_BASH) and os.path.exists(_SH):
        return [_SH, *command[1:]]
    return command


class _Lines(Task):
    """Lines that are there already."""

    def __init__(self, stream: Stream, lines: list[bytes]) -> None:
        self._stream = stream
        self._lines = lines[::-1]

    def pump(self) -> bool:
        if not self._lines:
            self._stream.end({})
            return False
        if self._stream.room() < len(self._lines[-1]):
            return False
        self._stream.send(frames.LINES, self._lines.pop())
        return True


def _path(args: Arguments) -> str:
    return full_path(text(args, "path"))
