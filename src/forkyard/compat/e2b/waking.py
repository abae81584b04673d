"""When a sandbox that was paused wakes by itself: what is asked of it, or of one of its ports, wakes it if it was made so."""

from __future__ import annotations

from forkyard.compat.e2b.notes import Note, is_up
from forkyard.control.plane import ControlPlane
from forkyard.lifecycle import ENDED, State
from forkyard.models import SandboxInfo
from forkyard.store.records import SandboxRecord

#: One that wakes by itself is given at least this long.
AUTO_RESUME_S = 300.0
#: Its memory was dropped: only a connect boots its disk.
_WITHOUT_MEMORY = (State.STOPPED, State.STOPPING)


async def is_awake(control: ControlPlane, found: SandboxInfo | SandboxRecord) -> bool:
    """Of E2B's API: whether it runs, also because it has just been woken. Of others this is always so: whoever uses them
    wakes them."""
    note = Note.of(found)
    if note is None or is_up(found.state):
        return True
    if found.state in ENDED or found.state in _WITHOUT_MEMORY or found.state is State.DELETING:
        return False
    if not note.auto_resume or note.unresponsive:
        return False
    await control.sleep.wake(found.id, ttl_s=max(note.timeout_s, AUTO_RESUME_S))
    return True
