"""Python, by a Jupyter kernel: ipykernel in a process of its own, spoken to in Jupyter's messages over ZeroMQ.

The messages are made here and not by jupyter_client: importing that takes longer than all the rest.
"""

from __future__ import annotations

import json
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from .events import Run
from .kernel import TICK_S, Died, Kernel, Missing

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Message = dict[str, Any]

_DELIMITER = b"<IDS|MSG>"
_START_S = 300.0
_PORTS = {"shell": 1, "iopub": 2, "stdin": 3, "control": 4, "hb": 5}
_SET_ENV = """
import os as _os, sys as _sys
_sys._forkyard_env = {name: _os.environ.get(name) for name in %(env)r}
_os.environ.update(%(env)r)
"""
#: Leaves no name behind.
_SET_UP = """
_forkyard = {}
exec(%r, _forkyard)
exec(%r, _forkyard)
_forkyard["set_up"](_forkyard["chart"])
del _forkyard
"""
_RESET_ENV = """
import os as _os, sys as _sys
for _name, _value in _sys._forkyard_env.items():
    _os.environ.pop(_name, None) if _value is None else _os.environ.__setitem__(_name, _value)
"""


#: Without what serves people at a screen, which takes a third of the start: a debugger, and completion of names. Newer
#: kernels look for the debugger only when they run.
_LAUNCH = """
import sys
sys.modules |= {"debugpy": None, "jedi": None}
from ipykernel import kernelapp
try:
    import ipykernel.debugger
except ImportError:
    pass
del sys.modules["debugpy"], sys.modules["jedi"]
kernelapp.launch_new_instance()
"""


class Jupyter(Kernel):
    def __init__(self) -> None:
        super().__init__()
        self._folder: Path | None = None
        self._shell: Any = None
        self._iopub: Any = None

    # ── starting, stopping ───────────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        # Only the context's user can go into this folder, so the messages need no signature.
        self._folder = Path(tempfile.mkdtemp(prefix="forkyard-kernel-"))
        prefix = str(self._folder / "kernel")
        ports = {f"{name}_port": number for name, number in _PORTS.items()}
        connection = {"transport": "ipc", "ip": prefix, "key": "", "signature_scheme": "hmac-sha256", **ports}
        file = self._folder / "connection.json"
        file.write_text(json.dumps(connection))
        words = self._folder / "stderr"
        with words.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _LAUNCH, "-f", str(file), "--InteractiveShell.colors=NoColor"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                start_new_session=True,
                env={**os.environ, "JPY_PARENT_PID": str(os.getpid())},
            )
        try:
            import zmq
        except ImportError:
            raise Missing(_INSTALL) from None
        context: Any = zmq.Context.instance()
        self._shell, self._iopub = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        self._iopub.setsockopt(zmq.SUBSCRIBE, b"")
        for socket, name in ((self._shell, "shell"), (self._iopub, "iopub")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(f"ipc://{prefix}-{_PORTS[name]}")
        self._until_heard(words)
        self._silently(_SET_UP % (_source("charts.py"), _source("setup_python.py")))

    def _until_heard(self, words: Path) -> None:
        """What is published before a subscription has arrived is lost, so it is asked until an echo comes. But never twice
        at once: a question waits until the kernel is there, and each costs it time that the first run waits for."""
        deadline = time.monotonic() + _START_S
        while True:
            self._send("kernel_info_request", {})
            while not self._shell.poll(200):
                self._check_start(words, deadline)
            self._received(self._shell)
            if self._iopub.poll(200):
                return
            self._check_start(words, deadline)

    def _check_start(self, words: Path, deadline: float) -> None:
        assert self.process is not None
        if self.process.poll() is not None or time.monotonic() > deadline:
            said = words.read_text(errors="replace").strip()[-2000:]
            raise Missing(
                _INSTALL if "No module named 'ipykernel'" in said else f"the Python kernel did not start: {said}"
            )

    def stop(self) -> None:
        super().stop()
        for socket in (self._shell, self._iopub):
            if socket is not None:
                socket.close()
        self._shell = self._iopub = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    # ── running ──────────────────────────────────────────────────────────────────────────────────────────────────

    def run(self, run: Run) -> None:
        if run.env:
            self._silently(_SET_ENV % {"env": run.env})
        try:
            self._execute(run)
        finally:
            if run.env and self.process is not None and self.process.poll() is None:
                self._silently(_RESET_ENV)

    def _execute(self, run: Run) -> None:
        request = self._send("execute_request", _execute(run.code, silent=False))
        replied = idle = False
        while not (replied and idle):
            if not self._iopub.poll(int(TICK_S * 1000)) and not self._shell.poll(0):
                self.mind(run)
                continue
            while (message := self._received(self._iopub)) is not None:
                mine = message["parent_header"].get("msg_id") == request
                idle = idle or (mine and _is_idle(message))
                _tell(run, message, mine)
                if run.stopped() is not None:
                    self.mind(run)
            while (message := self._received(self._shell)) is not None:
                if message["parent_header"].get("msg_id") == request:
                    replied = True
                    for payload in message["content"].get("payload") or ():
                        if payload.get("source") == "page":  # what `?` shows
                            run.text("stdout", str(payload.get("data", {}).get("text/plain", "")) + "\n")

    def _silently(self, code: str) -> None:
        request = self._send("execute_request", _execute(code, silent=True))
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise Died("the python kernel ended")
            while self._shell.poll(int(TICK_S * 1000)):
                message = self._received(self._shell)
                if message is not None and message["parent_header"].get("msg_id") == request:
                    return
        raise Died("the python kernel does not answer")

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    # ── messages ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _send(self, kind: str, content: Message) -> str:
        identity = uuid.uuid4().hex
        header = {"msg_id": identity, "msg_type": kind, "session": "forkyard", "username": "", "version": "5.3"}
        parts = [json.dumps(part).encode() for part in (header, {}, {}, content)]
        self._shell.send_multipart([_DELIMITER, b"", *parts])
        return identity

    def _received(self, socket: Any) -> Message | None:
        if not socket.poll(0):
            return None
        parts = socket.recv_multipart()
        header, parent, _, content = map(json.loads, parts[parts.index(_DELIMITER) + 2 :][:4])
        return {"type": header["msg_type"], "parent_header": parent, "content": content}


_INSTALL = "the machine has no Jupyter kernel for Python; install python3-ipykernel, or ipykernel with pip"


def _execute(code: str, *, silent: bool) -> Message:
    return {
        "code": code,
        "silent": silent,
        "store_history": not silent,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": False,
    }


def _is_idle(message: Message) -> bool:
    return bool(message["type"] == "status" and message["content"]["execution_state"] == "idle")


def _tell(run: Run, message: Message, mine: bool) -> None:
    content = message["content"]
    match message["type"]:
        case "execute_input" if mine:
            run.started(int(content["execution_count"]))
        case "stream":  # also of a thread that an earlier run has left
            run.text(content["name"], content["text"])
        case "display_data" | "update_display_data":
            run.result(content["data"], main=False)
        case "execute_result" if mine:
            run.result(content["data"], main=True)
        case "error" if mine:
            run.exception(content["ename"], content["evalue"], "\n".join(content["traceback"]))


def _source(name: str) -> str:
    return (pkgutil.get_data(__package__, name) or b"").decode()
