"""File contents and directories as streams: read, write, tar in both directions."""

from __future__ import annotations

import os
import stat

from . import accounts, files, frames, runtime
from .failures import Failure, from_os_error, from_program
from .loop import IN, Loop
from .pipes import Feeder, Inlet
from .programs import Program
from .session import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .session import Stream


#: What is there stays as it is, but for files that are in the archive too.
_ATTRIBUTES = ["--xattrs", "--xattrs-include=*"]
_AS_GIVEN = ["--same-owner", "--numeric-owner", "--no-overwrite-dir", "--keep-directory-symlink", *_ATTRIBUTES]


class ReadTask(Task):
    def __init__(self, stream: Stream, path: str, offset: int, length: int | None) -> None:
        self._stream = stream
        self._left = length
        self._fd = -1
        try:
            # Not blocking: opening a FIFO would wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise from_os_error(error, path) from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
                raise Failure("file_conflict", f"{path}: is {kind}")
            if offset:
                os.lseek(fd, offset, os.SEEK_SET)
            self.record = files.record(path, status)
        except BaseException:
            os.close(fd)
            raise
        self._fd = fd

    def pump(self) -> bool:
        room = self._stream.room()
        if room <= 0:
            return False
        wanted = room if self._left is None else min(room, self._left)
        try:
            data = os.read(self._fd, wanted)
        except BlockingIOError:
            data = b""  # a file of /proc that would wait for news
        if not data:
            self._stream.end({})
            return False
        if self._left is not None:
            self._left -= len(data)
        self._stream.send(frames.BYTES, data)
        return self._stream.room() > 0

    def close(self) -> None:
        os.close(self._fd)


class WriteTask(Task):
    """Into a temporary file beside the target, renamed at the end; or, to append, in place."""

    def __init__(
        self,
        stream: Stream,
        path: str,
        *,
        mode: int | None,
        account: accounts.Account | None,
        append: bool,
        parents: bool,
        attributes: dict[str, str],
    ) -> None:
        self._stream = stream
        self._mode = mode
        self._attributes = attributes
        self._account = account
        self._path = os.path.realpath(path) if os.path.islink(path) else path
        self._temporary: str | None = None
        try:
            if parents:
                files.make_parents(self._path, account)
            self._existing = self._look()
            if append:
                self._fd = os.open(
                    self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644
                )
            else:
                self._temporary = f"{os.path.dirname(self._path)}/.forkyard-{os.urandom(6).hex()}.tmp"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
                self._fd = os.open(self._temporary, flags, 0o600)
        except OSError as error:
            raise from_os_error(error, self._path) from None

    def _look(self) -> os.stat_result | None:
        try:
            status = os.stat(self._path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            kind = "a directory" if stat.S_ISDIR(status.st_mode) else "not a regular file"
            raise Failure("file_conflict", f"{self._path}: is {kind}")
        return status

    def receive(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            raise from_os_error(error, self._path) from None
        self._stream.grant(len(data))

    def finish(self) -> None:
        try:
            self._set_owner_and_mode()
            files.set_attributes(self._fd, self._attributes)
            if self._temporary is not None:
                os.rename(self._temporary, self._path)
                self._temporary = None
            self._stream.end(files.record(self._path))
        except OSError as error:
            raise from_os_error(error, self._path) from None

    def _set_owner_and_mode(self) -> None:
        existing = self._existing
        if self._account is not None:
            os.fchown(self._fd, self._account.uid, self._account.gid)
        elif existing is not None and self._temporary is not None:
            os.fchown(self._fd, existing.st_uid, existing.st_gid)
        if self._mode is not None:
            os.fchmod(self._fd, self._mode)
        elif self._temporary is not None:
            # After the owner: changing that clears the set-user-id bit.
            os.fchmod(self._fd, 0o644 if existing is None else stat.S_IMODE(existing.st_mode))

    def close(self) -> None:
        os.close(self._fd)
        if self._temporary is not None:
            try:
                os.unlink(self._temporary)
            except OSError:
                pass


class TarReadTask(Task):
    def __init__(self, stream: Stream, loop: Loop, path: str, attributes: bool) -> None:
        self._stream = stream
        self._loop = loop
        try:
            is_directory = stat.S_ISDIR(os.stat(path).st_mode)
        except OSError as error:
            raise from_os_error(error, path) from None
        directory, name = (path, ".") if is_directory else os.path.split(path)
        self._fd, theirs = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._fd, False)
        self._watched = False
        self._status: tuple[int, str] | None = None
        self._drained = False
        argv = [*runtime.program("tar"), "--create", "--file=-", *(_ATTRIBUTES if attributes else [])]
        argv += ["--directory", directory, "--", name]
        try:
            self._program = Program(loop, argv, self._exited, stdout=theirs)
        except BaseException:
            os.close(self._fd)
            raise
        finally:
            os.close(theirs)

    def pump(self) -> bool:
        room = self._stream.room()
        if room <= 0 or self._drained:
            return False
        try:
            data = os.read(self._fd, room)
        except BlockingIOError:
            if not self._watched:
                self._watched = True
                self._loop.watch(self._fd, IN, self._readable)
            return False
        if data:
            self._stream.send(frames.BYTES, data)
            return self._stream.room() > 0
        self._drained = True
        self._end_if_done()
        return False

    def _readable(self, _events: int) -> None:
        self._loop.unwatch(self._fd)
        self._watched = False
        self._stream.schedule()

    def _exited(self, status: int, stderr: str) -> None:
        self._status = status, stderr
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._status is None or not self._drained:
            return
        status, stderr = self._status
        if status in (0, 1):  # 1: a file changed while it was read, and is in the archive as it was
            self._stream.end({})
        else:
            self._stream.fail(from_program("tar", status, stderr))

    def close(self) -> None:
        if self._watched:
            self._loop.unwatch(self._fd)
        os.close(self._fd)
        self._program.stop()


class TarWriteTask(Feeder):
    """GNU tar extracts: it strips leading `/`, refuses `..`, and creates symlinks that lead out of the archive last, so
    that no member can be written through one. Run as the user, it cannot do what the user cannot."""

    def __init__(self, stream: Stream, loop: Loop, path: str, user: str | None, owners: bool) -> None:
        super().__init__(stream)
        account = accounts.find(user or "root")
        try:
            files.make_parents(f"{path}/.", account)
        except OSError as error:
            raise from_os_error(error, path) from None
        theirs, ours = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(ours, False)
        self._inlet = Inlet(loop, ours)
        argv = [*runtime.program("tar"), "--extract", "--file=-", "--directory", path]
        argv += _AS_GIVEN if owners else ["--no-same-owner"]
        try:
            self._program = Program(loop, argv, self._exited, account=account, stdin=theirs)
        except BaseException:
            self._inlet.close()
            raise
        finally:
            os.close(theirs)

    def receive(self, data: bytes) -> None:
        if self._inlet.closed:
            # tar has seen the end of the archive, or failed; its exit tells which.
            self.stream.grant(len(data))
        else:
            self._inlet.write(data, self)

    def finish(self) -> None:
        self._inlet.finish()

    def _exited(self, status: int, stderr: str) -> None:
        if status == 0:
            self._inlet.close()
            self.stream.end({})
        else:
            failure = from_program("tar", status, stderr)
            known = failure.code in ("guest_disk_full", "guest_permission_denied", "file_conflict")
            self.stream.fail(failure if known else Failure("invalid_request", failure.message))

    def close(self) -> None:
        self._inlet.close()
        self._program.stop()
