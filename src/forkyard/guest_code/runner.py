"""One context: requests come in on stdin, are done one after the other, and events go out on stdout."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading

from .events import Run, Wire
from .jupyter import Jupyter
from .kernel import Died, Kernel, Missing
from .piped import Bash, Node

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

KERNELS: dict[str, type[Kernel]] = {"python": Jupyter, "javascript": Node, "bash": Bash}


class Runner:
    def __init__(self, kernel: Kernel, wire: Wire) -> None:
        self._kernel = kernel
        self._wire = wire
        self._requests: queue.SimpleQueue[Run | str | None] = queue.SimpleQueue()
        self._runs: dict[str, Run] = {}

    def serve(self) -> int:
        """Until stdin ends."""
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self._kernel.start()
            self._wire.send({"type": "ready", "id": ""})
            while (request := self._requests.get()) is not None:
                if isinstance(request, Run):
                    self._run(request)
                else:
                    self._kernel.stop()
                    self._kernel.start()
                    self._wire.send({"type": "ready", "id": request})
        except Missing as missing:
            self._wire.send({"type": "failed", "id": "", "message": str(missing)})
            return 1
        finally:
            self._kernel.stop()
            self._wire.close()
        return 0

    def _run(self, run: Run) -> None:
        run.begin()
        died = False
        try:
            if run.stopped() is None:
                self._kernel.run(run)
        except Died as error:
            died = True
            run.exception("KernelDied", str(error), "")
            self._kernel.stop()
            self._kernel.start()
        self._runs.pop(run.id, None)
        run.end(died=died)

    def _listen(self) -> None:
        for line in sys.stdin.buffer:
            try:
                self._take(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                print(f"a request that is none: {error!r}", file=sys.stderr, flush=True)
        self._interrupt(None)
        self._requests.put(None)

    def _take(self, request: dict[str, Any]) -> None:
        match request["op"]:
            case "run":
                run = Run(self._wire, request)
                self._runs[run.id] = run
                self._requests.put(run)
            case "interrupt":
                self._interrupt(request["id"])
            case "restart":
                self._interrupt(None)
                self._requests.put(str(request["id"]))

    def _interrupt(self, run_id: str | None) -> None:
        """None: all of them, those too that wait for their turn."""
        for run in list(self._runs.values()):
            if run_id in (None, run.id):
                run.interrupt()


def main() -> None:
    # Nothing but events may come out of stdout, whatever a library prints.
    wire = Wire(os.dup(1))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(Runner(KERNELS[sys.argv[1]](), wire).serve())
