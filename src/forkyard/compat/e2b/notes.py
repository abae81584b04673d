"""What E2B's API knows of a sandbox and our core does not: kept in one of its annotations. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from forkyard.lifecycle import State
from forkyard.models import SandboxInfo
from forkyard.store.records import SandboxRecord, SnapshotRecord

KEY = "e2b"
_UP = frozenset({State.CREATING, State.RUNNING, State.RESUMING, State.STARTING})


@dataclass(frozen=True)
class Note:
    template: str  # its id, however it was asked for
    alias: str | None = None  # its name
    metadata: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 300.0
    auto_resume: bool = False
    allow_internet: bool | None = None
    network: dict[str, Any] | None = None
    unresponsive: bool = False  # nobody answered in it when it was paused
    user: str | None = None  # of its template: what commands run as, and where
    workdir: str | None = None

    @classmethod
    def of(cls, info: SandboxInfo | SandboxRecord | SnapshotRecord) -> Note | None:
        """None: it was not made through E2B's API. Snapshots have that of their sandbox."""
        text = info.annotations.get(KEY)
        if text is None:
            return None
        try:
            noted = json.loads(text)
            return cls(**{name: noted[name] for name in _NAMES & noted.keys()})
        except (ValueError, TypeError, AttributeError):  # somebody else wrote it
            return None

    def annotations(self, others: dict[str, str] | None = None) -> dict[str, str]:
        return {**(others or {}), KEY: json.dumps(asdict(self))}


_NAMES = frozenset(one.name for one in fields(Note))


def is_up(state: State) -> bool:
    return state in _UP
