"""The event loop: epoll, timers, and nothing else. A handler that fails is logged and never ends the loop."""

from __future__ import annotations

import heapq
import os
import select
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

IN, OUT, HUP, ERR, EDGE = select.EPOLLIN, select.EPOLLOUT, select.EPOLLHUP, select.EPOLLERR, select.EPOLLET


class Timer:
    __slots__ = ("action", "at")

    def __init__(self, at: float, action: Callable[[], object]) -> None:
        self.at = at
        self.action: Callable[[], object] | None = action

    def cancel(self) -> None:
        self.action = None

    def __lt__(self, other: Timer) -> bool:
        return self.at < other.at


class Loop:
    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._handlers: dict[int, Callable[[int], object]] = {}
        self._timers: list[Timer] = []
        self._soon: list[Callable[[], object]] = []
        #: Called when the events of a turn are dealt with: what they want to send leaves in as few writes as possible.
        self.after_turn: Callable[[], object] | None = None

    def watch(self, fd: int, events: int, handler: Callable[[int], object]) -> None:
        self._epoll.register(fd, events)
        self._handlers[fd] = handler

    def watching(self, fd: int) -> bool:
        return fd in self._handlers

    def unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def later(self, delay_s: float, action: Callable[[], object]) -> Timer:
        timer = Timer(time.monotonic() + delay_s, action)
        heapq.heappush(self._timers, timer)
        return timer

    def now(self) -> float:
        return time.monotonic()

    def soon(self, action: Callable[[], object]) -> None:
        """In the next turn: after what was sent has left, before any event is looked at."""
        self._soon.append(action)

    def run(self) -> None:
        while True:
            self.turn()

    def turn(self) -> None:
        self._finish_turn()  # answers leave before what can wait is begun
        soon, self._soon = self._soon, []
        for action in soon:
            self._guard(action)
        timers = self._timers
        while timers and (timers[0].action is None or timers[0].at <= time.monotonic()):
            due = heapq.heappop(timers).action
            if due is not None:
                self._guard(due)
        self._finish_turn()
        wait_s = -1.0
        if self._soon:
            wait_s = 0.0
        elif timers:
            wait_s = max(0.0, timers[0].at - time.monotonic())
        for fd, events in self._epoll.poll(wait_s):
            handler = self._handlers.get(fd)
            if handler is None:
                continue  # an earlier handler of this turn closed it
            try:
                handler(events)
            except Exception as error:
                log_exception(f"handler of fd {fd}", error)
                # An event nobody handled would come back at once, forever.
                self.unwatch(fd)

    def _finish_turn(self) -> None:
        if self.after_turn is not None:
            self._guard(self.after_turn)

    def _guard(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            log_exception("action", error)


_log_budget = [20.0, 0.0]  # lines that may be written now, time of the last refill


def log(message: str) -> None:
    """To the journal, at most two lines a second in the long run: a misbehaving host must not fill the guest's disk."""
    now = time.monotonic()
    _log_budget[0] = min(20.0, _log_budget[0] + 2 * (now - _log_budget[1]))
    _log_budget[1] = now
    if _log_budget[0] >= 1:
        _log_budget[0] -= 1
        try:
            os.write(2, f"forkyard-agent: {message}\n".encode("utf-8", "backslashreplace"))
        except OSError:
            pass


def log_exception(where: str, error: BaseException) -> None:
    place = ""
    trace = error.__traceback__
    while trace is not None:
        place = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    log(f"{where}: {type(error).__name__} at {place}: {error}")
