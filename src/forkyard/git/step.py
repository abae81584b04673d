"""How one ref stands on two sides, and what brings it into step. Pure.

Where both sides last agreed tells who has changed it: a branch that is on one side only is new there if they never
agreed on it, and deleted on the other side if they did.
"""

from __future__ import annotations

from typing import Literal

Move = Literal["none", "pull", "push", "compare", "diverged"]


def wanted(local: str | None, remote: str | None, agreed: str | None, *, tag: bool) -> Move:
    """`compare`: both have changed it, and whether one contains the other decides. A tag that is elsewhere on each side
    is never moved: that would take force."""
    if local == remote:
        return "none"
    if local is not None and remote is not None:
        if tag:
            return "diverged"
        if remote == agreed:
            return "push"
        return "pull" if local == agreed else "compare"
    if remote == agreed:
        return "push"
    return "pull" if local == agreed else "diverged"
