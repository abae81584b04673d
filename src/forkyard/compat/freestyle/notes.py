"""What Freestyle's API knows of a VM and our core does not: kept in one of its annotations. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from forkyard.lifecycle import State
from forkyard.models import SandboxInfo

KEY = "freestyle"
#: What is shown to the outside unless it says otherwise.
DEFAULT_PORT = 3000
_STATES = {
    State.CREATING: "starting",
    State.RUNNING: "running",
    State.PAUSING: "suspending",
    State.PAUSED: "suspended",
    State.RESUMING: "starting",
    State.STARTING: "starting",
    State.STOPPING: "stopped",
    State.STOPPED: "stopped",
    State.DELETING: "stopped",
    State.DELETED: "stopped",
    State.FAILED: "lost",
}


@dataclass(frozen=True)
class Note:
    workdir: str | None = None
    port: int = DEFAULT_PORT
    build_id: str | None = None
    recreate: bool = False

    @classmethod
    def of(cls, info: SandboxInfo) -> Note:
        """An empty one if it was not made through Freestyle's API, or somebody else wrote it."""
        try:
            return cls(**json.loads(info.annotations.get(KEY, "{}")))
        except (ValueError, TypeError):
            return cls()

    def annotations(self, others: dict[str, str] | None = None) -> dict[str, str]:
        return {**(others or {}), KEY: json.dumps(asdict(self))}


def state_of(info: SandboxInfo) -> str:
    return _STATES[info.state]


def instance_of(info: SandboxInfo) -> str:
    """The machine of a VM: another one after each boot and each resume from disk."""
    return f"{info.id}-{info.incarnation}"
