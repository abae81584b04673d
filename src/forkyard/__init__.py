"""Self-hosted Linux machines for coding agents.

This is the whole public surface; everything below it is private. Names are imported when they are first used, so that
`import forkyard` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_MODULES = {
    "forkyard.sdk._sync.client": ("Forkyard",),
    "forkyard.sdk._sync.sandbox": ("Sandbox",),
    "forkyard.sdk._sync.snapshots": ("Snapshot",),
    "forkyard.sdk._sync.process": ("Process",),
    "forkyard.sdk._sync.execution": ("ExecStream",),
    "forkyard.sdk._sync.files": ("Files", "Watch"),
    "forkyard.sdk._sync.egress": ("Egress",),
    "forkyard.sdk._sync.git": ("Repo",),
    "forkyard.sdk._sync.terminal": ("Terminal",),
    "forkyard.sdk._sync.forward": ("Forward",),
    "forkyard.sdk._async.client": ("AsyncForkyard",),
    "forkyard.sdk._async.sandbox": ("AsyncSandbox",),
    "forkyard.sdk._async.snapshots": ("AsyncSnapshot",),
    "forkyard.sdk._async.process": ("AsyncProcess",),
    "forkyard.sdk._async.execution": ("AsyncExecStream",),
    "forkyard.sdk._async.files": ("AsyncFiles", "AsyncWatch"),
    "forkyard.sdk._async.egress": ("AsyncEgress",),
    "forkyard.sdk._async.git": ("AsyncRepo",),
    "forkyard.sdk._async.terminal": ("AsyncTerminal",),
    "forkyard.sdk._async.forward": ("AsyncForward",),
    "forkyard.sdk.results": ("CommandFailed", "ExecResult", "ForkOutcome", "OutputChunk"),
    "forkyard.lifecycle": ("Cause", "State"),
    "forkyard.models": (
        "Check",
        "EventInfo",
        "ExecInfo",
        "FileInfo",
        "Health",
        "KeyCreated",
        "KeyInfo",
        "Milestone",
        "SandboxInfo",
        "SandboxLogs",
        "SandboxUsage",
        "Shape",
        "SnapshotInfo",
        "WatchEvent",
    ),
    "forkyard.models.git": (
        "BranchInfo",
        "CommitInfo",
        "Comparison",
        "ContentInfo",
        "FileChange",
        "MergeResult",
        "Person",
        "RepoInfo",
        "RepoToken",
        "TagInfo",
    ),
    "forkyard.models.identities": ("AuditEntry", "IdentityInfo", "TokenCreated", "TokenInfo"),
    "forkyard.models.network": (
        "DomainInfo",
        "EgressPolicy",
        "EgressRecord",
        "EgressRule",
        "EgressTotals",
        "IngressPolicy",
        "NetworkPolicy",
        "PreviewInfo",
        "Secret",
        "SecretInfo",
    ),
    "forkyard.models.ssh": ("SshAccess", "SshDoor", "SshKeyInfo"),
    "forkyard.errors": (
        "BadAnswer",
        "CommandNotFound",
        "Conflict",
        "DaemonUnreachable",
        "DomainNotFound",
        "DomainUnverified",
        "ExecNotFound",
        "FileConflict",
        "FileMissing",
        "Forbidden",
        "ForkyardError",
        "GuestDiskFull",
        "GuestFailure",
        "GuestPermissionDenied",
        "GuestUnreachable",
        "HostFailure",
        "IdempotencyConflict",
        "ImageBuildFailed",
        "InternalError",
        "InvalidPath",
        "InvalidRequest",
        "InvalidShape",
        "MergeConflict",
        "NoCapacity",
        "NotFound",
        "OperationTimeout",
        "PortClosed",
        "QuotaExceeded",
        "RefConflict",
        "RepoFull",
        "RepoNotFound",
        "RevisionNotFound",
        "SandboxEnded",
        "SandboxNotFound",
        "SnapshotCorrupt",
        "SnapshotFailed",
        "SnapshotNotFound",
        "StateConflict",
        "TemplateBuildFailed",
        "Unauthenticated",
        "VmCrashed",
        "VmStartFailed",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "AsyncEgress",
    "AsyncExecStream",
    "AsyncFiles",
    "AsyncForkyard",
    "AsyncForward",
    "AsyncProcess",
    "AsyncRepo",
    "AsyncSandbox",
    "AsyncSnapshot",
    "AsyncTerminal",
    "AsyncWatch",
    "AuditEntry",
    "BadAnswer",
    "BranchInfo",
    "Cause",
    "Check",
    "CommandFailed",
    "CommandNotFound",
    "CommitInfo",
    "Comparison",
    "Conflict",
    "ContentInfo",
    "DaemonUnreachable",
    "DomainInfo",
    "DomainNotFound",
    "DomainUnverified",
    "Egress",
    "EgressPolicy",
    "EgressRecord",
    "EgressRule",
    "EgressTotals",
    "EventInfo",
    "ExecInfo",
    "ExecNotFound",
    "ExecResult",
    "ExecStream",
    "FileChange",
    "FileConflict",
    "FileInfo",
    "FileMissing",
    "Files",
    "Forbidden",
    "ForkOutcome",
    "Forkyard",
    "ForkyardError",
    "Forward",
    "GuestDiskFull",
    "GuestFailure",
    "GuestPermissionDenied",
    "GuestUnreachable",
    "Health",
    "HostFailure",
    "IdempotencyConflict",
    "IdentityInfo",
    "ImageBuildFailed",
    "IngressPolicy",
    "InternalError",
    "InvalidPath",
    "InvalidRequest",
    "InvalidShape",
    "KeyCreated",
    "KeyInfo",
    "MergeConflict",
    "MergeResult",
    "Milestone",
    "NetworkPolicy",
    "NoCapacity",
    "NotFound",
    "OperationTimeout",
    "OutputChunk",
    "Person",
    "PortClosed",
    "PreviewInfo",
    "Process",
    "QuotaExceeded",
    "RefConflict",
    "Repo",
    "RepoFull",
    "RepoInfo",
    "RepoNotFound",
    "RepoToken",
    "RevisionNotFound",
    "Sandbox",
    "SandboxEnded",
    "SandboxInfo",
    "SandboxLogs",
    "SandboxNotFound",
    "SandboxUsage",
    "Secret",
    "SecretInfo",
    "Shape",
    "Snapshot",
    "SnapshotCorrupt",
    "SnapshotFailed",
    "SnapshotInfo",
    "SnapshotNotFound",
    "SshAccess",
    "SshDoor",
    "SshKeyInfo",
    "State",
    "StateConflict",
    "TagInfo",
    "TemplateBuildFailed",
    "Terminal",
    "TokenCreated",
    "TokenInfo",
    "Unauthenticated",
    "VmCrashed",
    "VmStartFailed",
    "Watch",
    "WatchEvent",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("forkyard")
    if name not in _HOME:
        raise AttributeError(f"module 'forkyard' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)


if TYPE_CHECKING:
    from forkyard.errors import (
        BadAnswer,
        CommandNotFound,
        Conflict,
        DaemonUnreachable,
        DomainNotFound,
        DomainUnverified,
        ExecNotFound,
        FileConflict,
        FileMissing,
        Forbidden,
        ForkyardError,
        GuestDiskFull,
        GuestFailure,
        GuestPermissionDenied,
        GuestUnreachable,
        HostFailure,
        IdempotencyConflict,
        ImageBuildFailed,
        InternalError,
        InvalidPath,
        InvalidRequest,
        InvalidShape,
        MergeConflict,
        NoCapacity,
        NotFound,
        OperationTimeout,
        PortClosed,
        QuotaExceeded,
        RefConflict,
        RepoFull,
        RepoNotFound,
        RevisionNotFound,
        SandboxEnded,
        SandboxNotFound,
        SnapshotCorrupt,
        SnapshotFailed,
        SnapshotNotFound,
        StateConflict,
        TemplateBuildFailed,
        Unauthenticated,
        VmCrashed,
        VmStartFailed,
    )
    from forkyard.lifecycle import Cause, State
    from forkyard.models import (
        Check,
        EventInfo,
        ExecInfo,
        FileInfo,
        Health,
        KeyCreated,
        KeyInfo,
        Milestone,
        SandboxInfo,
        SandboxLogs,
        SandboxUsage,
        Shape,
        SnapshotInfo,
        WatchEvent,
    )
    from forkyard.models.git import (
        BranchInfo,
        CommitInfo,
        Comparison,
        ContentInfo,
        FileChange,
        MergeResult,
        Person,
        RepoInfo,
        RepoToken,
        TagInfo,
    )
    from forkyard.models.identities import AuditEntry, IdentityInfo, TokenCreated, TokenInfo
    from forkyard.models.network import (
        DomainInfo,
        EgressPolicy,
        EgressRecord,
        EgressRule,
        EgressTotals,
        IngressPolicy,
        NetworkPolicy,
        PreviewInfo,
        Secret,
        SecretInfo,
    )
    from forkyard.models.ssh import SshAccess, SshDoor, SshKeyInfo
    from forkyard.sdk._async.client import AsyncForkyard
    from forkyard.sdk._async.egress import AsyncEgress
    from forkyard.sdk._async.execution import AsyncExecStream
    from forkyard.sdk._async.files import AsyncFiles, AsyncWatch
    from forkyard.sdk._async.forward import AsyncForward
    from forkyard.sdk._async.git import AsyncRepo
    from forkyard.sdk._async.process import AsyncProcess
    from forkyard.sdk._async.sandbox import AsyncSandbox
    from forkyard.sdk._async.snapshots import AsyncSnapshot
    from forkyard.sdk._async.terminal import AsyncTerminal
    from forkyard.sdk._sync.client import Forkyard
    from forkyard.sdk._sync.egress import Egress
    from forkyard.sdk._sync.execution import ExecStream
    from forkyard.sdk._sync.files import Files, Watch
    from forkyard.sdk._sync.forward import Forward
    from forkyard.sdk._sync.git import Repo
    from forkyard.sdk._sync.process import Process
    from forkyard.sdk._sync.sandbox import Sandbox
    from forkyard.sdk._sync.snapshots import Snapshot
    from forkyard.sdk._sync.terminal import Terminal
    from forkyard.sdk.results import CommandFailed, ExecResult, ForkOutcome, OutputChunk

    __version__: str
