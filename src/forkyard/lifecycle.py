"""States of a sandbox, the transitions between them, and the causes of its end. Pure data.

Owns: which change of state is legal. Never does: I/O; the only writer of a state is `store`, by one conditional UPDATE
that names `from`, `to` and the incarnation.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    DELETING = "deleting"
    DELETED = "deleted"
    FAILED = "failed"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.CREATING: frozenset({State.RUNNING, State.DELETING, State.FAILED}),
    State.RUNNING: frozenset({State.DELETING, State.FAILED}),
    State.DELETING: frozenset({State.DELETED}),
    State.FAILED: frozenset({State.DELETING}),
    State.DELETED: frozenset(),
}

#: The machine is gone and will not come back. A failed sandbox keeps its record until it is deleted.
ENDED = frozenset({State.DELETED, State.FAILED})


class Cause(StrEnum):
    """Why a sandbox changed its state. Every event carries one."""

    REQUESTED = "requested"
    READY = "ready"
    DELETED_BY_USER = "deleted_by_user"
    CREATE_FAILED = "create_failed"
    VM_CRASHED = "vm_crashed"
    GUEST_PANIC = "guest_panic"
    GUEST_SHUTDOWN = "guest_shutdown"
    DAEMON_RESTARTED = "daemon_restarted"
    HOST_RESTARTED = "host_restarted"


def allowed(source: State, target: State) -> bool:
    return target in TRANSITIONS[source]
