"""What becomes of a sandbox whose daemon was restarted: a table. Pure.

Owns: for every state the record can be in and everything the host can have found, where the sandbox goes. Never does:
anything about it (`reconciler`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from forkyard.hosts.base import Incarnation, Recovered
from forkyard.lifecycle import Cause, State


class Found(StrEnum):
    """What the host has of a machine."""

    RUNNING = "running"
    PAUSED = "paused"
    STOPPED = "stopped"  # only its disk
    DEAD = "dead"  # ended by itself; its disk is there
    NOTHING = "nothing"


@dataclass(frozen=True)
class Verdict:
    """Where it goes: through `via` if the table of states has no direct way. `state` None: it stays where it is."""

    state: State | None
    cause: Cause = Cause.DAEMON_RESTARTED
    detail: str | None = None
    via: State | None = None


_STAYS = Verdict(None)
_MEANWHILE = "the daemon was restarted meanwhile"
_DISK = "its disk is kept: start it"

#: States in which a successor of the machine may have come to life without the record knowing it.
SUCCEEDED = frozenset({State.RESUMING, State.STARTING})


def find(incarnation: Incarnation, found: Recovered) -> Found:
    if incarnation in found.adopted:
        return Found.RUNNING
    if incarnation in found.paused:
        return Found.PAUSED
    if incarnation in found.stopped:
        return Found.STOPPED
    return Found.DEAD if incarnation in found.dead else Found.NOTHING


def decide(state: State, found: Found, *, rebooted: bool) -> Verdict:
    """Not for CREATING, DELETING, DELETED: of these nothing is kept, whatever was found."""
    match state, found:
        case (State.FAILED, _) | (State.RUNNING, Found.RUNNING) | (State.PAUSED, Found.PAUSED):
            return _STAYS
        case State.STOPPED, Found.STOPPED | Found.DEAD:
            return _STAYS
        case State.RUNNING, Found.PAUSED:
            return Verdict(State.PAUSED, detail=f"{_MEANWHILE}; it is woken when it is used", via=State.PAUSING)
        case State.PAUSING, Found.RUNNING:
            return Verdict(State.RUNNING, Cause.PAUSE_FAILED, f"{_MEANWHILE}; it runs on")
        case State.STOPPING, Found.RUNNING:
            return Verdict(State.RUNNING, Cause.STOP_FAILED, f"{_MEANWHILE}; it runs on")
        case State.PAUSED, Found.RUNNING:
            return Verdict(State.RUNNING, detail="it was found running", via=State.RESUMING)
        case State.STOPPED, Found.RUNNING:
            return Verdict(State.RUNNING, detail="it was found running", via=State.STARTING)
        case State.RESUMING | State.STARTING, Found.RUNNING:
            return Verdict(State.RUNNING, detail=f"{_MEANWHILE}; it runs")
        case State.PAUSING | State.STOPPING, Found.PAUSED:
            return Verdict(State.PAUSED, detail=f"{_MEANWHILE}; it is paused")
        case State.RESUMING, Found.PAUSED:
            return Verdict(State.PAUSED, Cause.RESUME_FAILED, f"{_MEANWHILE}; it is paused: resume it")
        case State.STOPPED, Found.PAUSED:
            return Verdict(State.PAUSED, detail="it was found paused", via=State.RESUMING)
        case State.STARTING, Found.PAUSED | Found.STOPPED | Found.DEAD:
            return Verdict(State.STOPPED, Cause.START_FAILED, f"{_MEANWHILE}; {_DISK}")
        case State.STOPPING, Found.STOPPED | Found.DEAD:
            return Verdict(State.STOPPED, Cause.STOPPED_BY_USER)
        case _, Found.STOPPED:
            cause = Cause.HOST_RESTARTED if rebooted else Cause.DAEMON_RESTARTED
            why = "the host was restarted" if rebooted else _MEANWHILE
            return Verdict(State.STOPPED, cause, f"{why}, and what was in its memory is lost; {_DISK}")
        case _, Found.DEAD if rebooted:
            return Verdict(State.FAILED, Cause.HOST_RESTARTED, f"the host was restarted; {_DISK}")
        case _, Found.DEAD:
            detail = f"the machine ended while no daemon was running; `forkyard logs` shows its console; {_DISK}"
            return Verdict(State.FAILED, Cause.VM_CRASHED, detail)
        case _:
            if rebooted:
                return Verdict(
                    State.FAILED, Cause.HOST_RESTARTED, "the host was restarted, and nothing of the machine is left"
                )
            return Verdict(State.FAILED, Cause.DAEMON_RESTARTED, "nothing of its machine was found on this host")
