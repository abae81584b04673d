"""States of a sandbox, the transitions between them, and the causes of its end. Pure data.

Owns: which change of state is legal. Never does: I/O; the only writer of a state is `store`, by one conditional UPDATE
that names `from`, `to` and the incarnation.
"""

from __future__ import annotations

from enum import StrEnum


class State(StrEnum):
    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    STOPPING = "stopping"
    STOPPED = "stopped"
    STARTING = "starting"
    DELETING = "deleting"
    DELETED = "deleted"
    FAILED = "failed"


TRANSITIONS: dict[State, frozenset[State]] = {
    State.CREATING: frozenset({State.RUNNING, State.DELETING, State.FAILED}),
    State.RUNNING: frozenset(
        {State.PAUSING, State.STOPPING, State.RESUMING, State.DELETING, State.FAILED, State.STOPPED}
    ),
    # A pause that fails leaves the sandbox running: nothing is lost.
    State.PAUSING: frozenset({State.PAUSED, State.RUNNING, State.DELETING, State.FAILED, State.STOPPED}),
    State.PAUSED: frozenset(
        {State.RESUMING, State.STARTING, State.STOPPING, State.STOPPED, State.DELETING, State.FAILED}
    ),
    # A resume that fails leaves it paused: its snapshot and its disk are still there.
    State.RESUMING: frozenset({State.RUNNING, State.PAUSED, State.STOPPED, State.DELETING, State.FAILED}),
    State.STOPPING: frozenset({State.STOPPED, State.RUNNING, State.PAUSED, State.DELETING, State.FAILED}),
    State.STOPPED: frozenset({State.STARTING, State.RESUMING, State.DELETING, State.FAILED}),
    State.STARTING: frozenset({State.RUNNING, State.STOPPED, State.DELETING, State.FAILED}),
    # The disk of a failed sandbox is kept until it is deleted, so it may be started again.
    State.FAILED: frozenset({State.STARTING, State.RESUMING, State.DELETING}),
    State.DELETING: frozenset({State.DELETED}),
    State.DELETED: frozenset(),
}

#: The machine is gone. A failed one keeps its disk until it is deleted, and only a start brings it back.
ENDED = frozenset({State.DELETED, State.FAILED})

#: There is a machine with processors and memory, or there is about to be one: what admission counts.
LIVE = frozenset({State.CREATING, State.RUNNING, State.PAUSING, State.RESUMING, State.STOPPING, State.STARTING})


class Cause(StrEnum):
    """Why a sandbox changed its state. Every event carries one."""

    REQUESTED = "requested"
    READY = "ready"
    FORKED = "forked"
    PAUSED_BY_USER = "paused_by_user"
    IDLE = "idle"
    RESUMED_BY_USER = "resumed_by_user"
    WOKEN = "woken"
    STOPPED_BY_USER = "stopped_by_user"
    STARTED_BY_USER = "started_by_user"
    ROLLED_BACK = "rolled_back"
    PAUSE_FAILED = "pause_failed"
    RESUME_FAILED = "resume_failed"
    START_FAILED = "start_failed"
    STOP_FAILED = "stop_failed"
    DELETED_BY_USER = "deleted_by_user"
    TASK_OVER = "task_over"
    TTL = "ttl"
    EVICTED = "evicted"
    EPHEMERAL = "ephemeral"
    CREATE_FAILED = "create_failed"
    VM_CRASHED = "vm_crashed"
    GUEST_PANIC = "guest_panic"
    GUEST_OUT_OF_MEMORY = "guest_out_of_memory"
    GUEST_SHUTDOWN = "guest_shutdown"
    DAEMON_RESTARTED = "daemon_restarted"
    HOST_RESTARTED = "host_restarted"


def allowed(source: State, target: State) -> bool:
    return target in TRANSITIONS[source]
