"""Languages whose worker is a program at the end of pipes: what it prints comes on stdout and stderr, and how a run ended on
a third pipe."""

from __future__ import annotations

import codecs
import json
import os
import pkgutil
import selectors
import shlex
import subprocess

from .events import Run
from .kernel import TICK_S, Died, Kernel, program

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

_READ_BYTES = 64 << 10
_MESSAGE_BYTES = 32 << 20
_NAMES = {1: "stdout", 2: "stderr"}


class Piped(Kernel):
    #: Whether the worker is asked on its stdin. If not, the code finds nothing there that it could take away or close.
    by_stdin = True

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        self._requests = self._answers = -1
        self._answer = b""
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._selector: selectors.DefaultSelector | None = None

    def argv(self, requests: int, answers: int) -> list[str]:
        """`requests`: where the worker is asked; `answers`: where it says how a run ended."""
        raise NotImplementedError

    def start(self) -> None:
        requests, self._requests = os.pipe()
        self._answers, answers = os.pipe()
        try:
            self.process = subprocess.Popen(
                self.argv(requests, answers),
                stdin=requests if self.by_stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=(answers,) if self.by_stdin else (requests, answers),
                start_new_session=True,
            )
        finally:
            os.close(requests)
            os.close(answers)
        assert self.process.stdout is not None and self.process.stderr is not None
        new = codecs.getincrementaldecoder("utf-8")
        self._decoders = {1: new("replace"), 2: new("replace")}
        self._answer = b""
        self._selector = selectors.DefaultSelector()
        for number, descriptor in (
            (1, self.process.stdout.fileno()),
            (2, self.process.stderr.fileno()),
            (3, self._answers),
        ):
            os.set_blocking(descriptor, False)
            self._selector.register(descriptor, selectors.EVENT_READ, number)

    def stop(self) -> None:
        super().stop()
        if self._selector is not None:
            self._selector.close()
            self._selector = None
            os.close(self._requests)
            os.close(self._answers)

    def ask(self, request: bytes) -> None:
        try:
            while request:
                request = request[os.write(self._requests, request) :]
        except BrokenPipeError:
            raise Died("the worker has ended") from None

    def answers(self, run: Run | None, end: bytes) -> Iterator[bytes]:
        """What the worker says, as it says it; what it prints meanwhile is told. Without a `run` it is dropped."""
        while True:
            while end in self._answer:
                said, _, self._answer = self._answer.partition(end)
                self._drain(run)
                yield said
            if len(self._answer) > _MESSAGE_BYTES:
                raise Died("the worker says too much at once")
            if not self._drain(run, TICK_S) and run is not None:
                self.mind(run)
            elif self.process is None or self.process.poll() is not None:
                if run is not None:
                    self._drain(run)
                    self.mind(run)
                raise Died("the worker has ended")

    def _drain(self, run: Run | None, wait_s: float = 0.0) -> bool:
        """Read what is there, what was printed first. True if there was anything."""
        assert self._selector is not None
        found = False
        while ready := self._selector.select(0.0 if found else wait_s):
            for key, _ in sorted(ready, key=lambda item: int(item[0].data)):
                data = os.read(key.fd, _READ_BYTES)
                if not data:
                    self._selector.unregister(key.fd)
                    continue
                if key.data == 3:
                    self._answer += data
                elif run is not None:
                    run.text(_NAMES[key.data], self._decoders[key.data].decode(data))
            if run is not None and run.stopped() is not None:
                self.mind(run)  # what prints without end must not keep us from noticing
            found = True
            if self._answer:
                break
        return found


class Bash(Piped):
    """An interactive shell without a terminal: an interrupt takes it back to its prompt, and its variables are kept."""

    def argv(self, _requests: int, answers: int) -> list[str]:
        # What `set -x` shows is for the code alone: what is not is said while it is off. After a quote that was not closed
        # the shell takes no `{` for what it is until another line has come, be it an empty one.
        keep = "case $- in *x*) __fyx='set -x;' ;; *) __fyx= ;; esac; set +x"
        self._say = f"\n{{ printf '%s\\0' \"$?\" >&{answers}; {keep}; }} 2>/dev/null\n"
        return [program("bash"), "--norc", "--noprofile", "--noediting", "-i"]

    def start(self) -> None:
        super().start()
        # No prompts, no history, no job control; and what it said so far is not for the user.
        self.ask(("PS1= PS2=; set +mH; unset HISTFILE\n" + self._say).encode())
        next(self.answers(None, b"\0"))

    def run(self, run: Run) -> None:
        self._count += 1
        run.started(self._count)
        before = "".join(f"__fy_{name}=${{{name}-}} __fyset_{name}=${{{name}+x}}; " for name in run.env)
        given = "".join(f"export {name}={shlex.quote(value)}; " for name, value in run.env.items())
        code = f'{before}{given}\neval "$__fyx" {shlex.quote(run.code)} </dev/null\n' + self._say
        after = "".join(
            f'[ "$__fyset_{name}" ] && {name}=$__fy_{name} || unset {name}; unset __fy_{name} __fyset_{name}; '
            for name in run.env
        )
        self.ask((code + after + "\n").encode("utf-8", "surrogateescape"))
        status = next(self.answers(run, b"\0")).decode("ascii", "replace")
        if status != "0":
            run.exception("ExitStatus", status, "")


class Node(Piped):
    """JavaScript and TypeScript; `worker.js` is its other half."""

    by_stdin = False

    def argv(self, requests: int, answers: int) -> list[str]:
        worker = (pkgutil.get_data(__package__, "worker.js") or b"").decode()
        # Inside the block its names are its own: the scope around it is where code is evaluated.
        inside = f'"use strict";\n{{\n{worker}}}\n'
        return [program("node"), "--no-warnings", "-e", inside, str(requests), str(answers)]

    def start(self) -> None:
        super().start()
        next(self.answers(None, b"\n"))

    def run(self, run: Run) -> None:
        self._count += 1
        run.started(self._count)
        self.ask(json.dumps({"code": run.code, "language": run.language, "env": run.env}).encode() + b"\n")
        for line in self.answers(run, b"\n"):
            answer = json.loads(line)
            match answer["type"]:
                case "result":
                    run.result(answer["bundle"], main=answer["main"])
                case "exception":
                    run.exception(answer["name"], answer["value"], answer["traceback"])
                case "done":
                    return
