"""Sandboxes as E2B's clients read them, and what they say of them in queries. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import parse_qsl, unquote

from pydantic import TypeAdapter, ValidationError

from forkyard.compat.e2b import models
from forkyard.compat.e2b.errors import Refused
from forkyard.compat.e2b.notes import Note, is_up
from forkyard.lifecycle import State
from forkyard.models import SandboxInfo, UsageSample
from forkyard.models.labels import OURS
from forkyard.models.volumes import MountPath, VolumeName

CLIENT_ID = "forkyard"
_MIB = 2**20
_LABEL = re.compile(r"[A-Za-z0-9_./-]{1,64}", re.ASCII)


def listed(info: SandboxInfo) -> dict[str, Any]:
    return {
        "templateID": template_of(info),
        "sandboxID": info.id,
        "clientID": CLIENT_ID,
        "envdVersion": models.ENVD_VERSION,
        "startedAt": time_of(info.created_at),
        "endAt": time_of(_end_of(info)),
        "cpuCount": info.shape.vcpus,
        "memoryMB": info.shape.memory_mib,
        "diskSizeMB": info.shape.disk_gib * 1024,
        "state": "running" if is_up(info.state) else "paused",
        "metadata": metadata_of(info),
        "volumeMounts": [{"name": one.name, "path": one.path} for one in info.volumes],
        **_noted(info),
    }


def _noted(info: SandboxInfo) -> dict[str, Any]:
    note = Note.of(info)
    if note is None:
        return {}
    unresponsive = note.unresponsive and info.state is State.PAUSED
    return {
        **({} if note.alias is None else {"alias": note.alias}),
        **({"envdUnresponsiveAtPause": True} if unresponsive else {}),
    }


def _end_of(info: SandboxInfo) -> datetime:
    if info.expires_at is not None:
        return info.expires_at
    # A date is wanted of everything. What has no end runs for long.
    return info.updated_at if not is_up(info.state) else info.created_at + timedelta(days=365)


def metric(info: SandboxInfo, found: UsageSample) -> dict[str, Any]:
    """As the host sees it: caches of the guest are memory that it uses."""
    return {
        "timestamp": time_of(found.at),
        "timestampUnix": int(found.at.timestamp()),
        "cpuCount": info.shape.vcpus,
        "cpuUsedPct": found.cpu_percent,
        "memUsed": int(found.memory_mib * _MIB),
        "memTotal": info.shape.memory_mib * _MIB,
        "memCache": 0,
        "diskUsed": int(found.disk_mib * _MIB),
        "diskTotal": info.shape.disk_gib * 1024 * _MIB,
    }


def template_of(info: SandboxInfo) -> str:
    note = Note.of(info)
    return note.template if note is not None else info.snapshot_id or "base"


def metadata_of(info: SandboxInfo) -> dict[str, str]:
    note = Note.of(info)
    return dict(info.labels) if note is None else note.metadata


def mounts(asked: list[models.VolumeMount]) -> dict[str, Any]:
    """Read-write, as theirs are; here that is one sandbox at a time."""
    try:
        return {
            "volumes": TypeAdapter(dict[MountPath, VolumeName]).validate_python({one.path: one.name for one in asked})
        }
    except ValidationError:
        raise Refused(400, "volumeMounts have the name of a volume and an absolute path each") from None


def is_label(name: str, value: str) -> bool:
    return _LABEL.fullmatch(name) is not None and not name.startswith(OURS) and len(value) <= 256


def time_of(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ── queries ──────────────────────────────────────────────────────────────────────────────────────────────────────


def states(given: list[str]) -> set[str]:
    states = {one for text in given for one in text.split(",") if one}
    if states - {"running", "paused"}:
        raise Refused(400, "state is running, paused, or both with a comma")
    return states or {"running", "paused"}


def metadata(given: str | None) -> dict[str, str]:
    """`k=v&k=v`, each quoted once more."""
    return {unquote(name): unquote(value) for name, value in parse_qsl(given or "", keep_blank_values=True)}


def instant(given: str | None) -> datetime | None:
    if not given:
        return None
    try:
        at = datetime.fromisoformat(given.replace(" ", "+"))
        return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise Refused(400, f"startedAfter is a time such as 2030-01-31T12:00:00Z, not {given[:40]!r}") from None
