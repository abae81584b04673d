"""What `forkyard doctor` says about this machine as a host."""

from __future__ import annotations

import shutil
from pathlib import Path

from forkyard.errors import HostFailure
from forkyard.models import Check
from forkyard.net.slots import Slots


async def can_make_slots(slots: Slots) -> Check:
    try:
        await slots.check()
    except HostFailure as error:
        return Check(
            name="network",
            status="failed",
            summary=error.message,
            advice="Slots need /dev/net/tun, and the Debian packages iproute2 and nftables; run the daemon as root.",
        )
    return Check(name="network", status="ok", summary="each VM gets a network namespace of its own, with no way out")


def free_space(directory: Path) -> Check:
    free_gib = shutil.disk_usage(directory).free / 2**30
    if free_gib < 5:
        return Check(
            name="disk",
            status="warning",
            summary=f"{free_gib:.1f} GiB free at {directory}",
            advice="Free some space, or set FORKYARD_STATE_DIR to a larger disk.",
        )
    return Check(name="disk", status="ok", summary=f"{free_gib:.0f} GiB free at {directory}")
