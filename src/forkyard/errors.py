"""The one exception tree.

Owns: every error that leaves a Forkyard module, its stable `code`, its HTTP `status`, and whether trying again can
help. Never does: I/O, formatting for a particular edge. `api/` turns an error into `application/problem+json`; the SDK
rebuilds the same class from the `code`.

    ForkyardError
    ├── InvalidRequest            the caller asked for something impossible
    │   ├── InvalidShape
    │   ├── InvalidSetting        of the daemon, in its environment
    │   ├── InvalidDockerfile     its line is in the message
    │   ├── InvalidImage          cut off, for another machine, or it reaches out of its root
    │   └── InvalidPath
    ├── Unauthenticated
    ├── Forbidden
    ├── NotFound
    │   ├── SandboxNotFound
    │   ├── SnapshotNotFound
    │   ├── ExecNotFound
    │   ├── RepoNotFound
    │   ├── RevisionNotFound
    │   ├── DomainNotFound
    │   ├── BuildNotFound
    │   ├── ImageNotFound
    │   ├── UploadNotFound
    │   ├── TemplateNotFound
    │   ├── ServiceNotFound
    │   ├── ContextNotFound
    │   ├── VolumeNotFound
    │   ├── DevServerNotFound
    │   └── FileMissing
    ├── Conflict
    │   ├── StateConflict         the sandbox is in a state that does not allow this
    │   ├── IdempotencyConflict
    │   ├── RefConflict           the branch or tag is not where the caller thinks
    │   ├── MergeConflict
    │   ├── DomainUnverified      its TXT record is not there
    │   ├── VolumeInUse           somebody writes to it, or has it mounted
    │   ├── VolumeChanged         it has a newer version than the one these changes were made to
    │   └── FileConflict          exists already, is a directory, is not empty …
    ├── SandboxEnded              it existed and is gone; `cause` says why
    ├── GuestFailure              the machine inside answered with a failure
    │   ├── GuestPermissionDenied
    │   ├── GuestDiskFull
    │   ├── CommandNotFound
    │   ├── GitFailed             git in there did not do it; its words are in the message
    │   ├── BuildFailed           a step of a spec failed
    │   ├── DevServerFailed       it could not be installed, or brought to a new commit
    │   ├── ServiceNotReady       a unit did not come up in time
    │   ├── LanguageMissing       the machine has not what runs it
    │   ├── ContextEnded          the process that ran code is gone
    │   ├── PortClosed            nothing listens on that port
    │   ├── BadAnswer             what listens there does not speak HTTP
    │   └── GuestUnreachable      the agent does not answer
    ├── NoCapacity                no room now; `retry_after_s` says when to ask again
    │   ├── SandboxBusy           as many are talking with it as may at once
    │   └── QuotaExceeded
    ├── RepoFull                  the repository has used up its quota
    ├── RemoteFailed              a git host elsewhere did not do its part
    │   ├── RemoteMissing         it has no such repository
    │   ├── RemoteDenied          it wants a credential, or refuses this one
    │   └── RegistryUnreachable
    ├── OperationTimeout
    ├── HostFailure               this machine could not do its part
    │   ├── ImageBuildFailed
    │   ├── TemplateBuildFailed
    │   ├── SnapshotFailed        it could not be written; the sandbox goes on
    │   ├── SnapshotCorrupt       it is not what was written; the disk can still be booted
    │   ├── VmStartFailed
    │   └── VmCrashed
    ├── DaemonUnreachable         raised by clients only
    └── InternalError
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar


class ForkyardError(Exception):
    """Something went wrong in Forkyard."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(self, message: str | None = None, **details: Any) -> None:
        self.message = message or inspect.cleandoc(type(self).__doc__ or self.code)
        self.details = details
        super().__init__(self.message)

    def to_problem(self) -> dict[str, Any]:
        """The body of an `application/problem+json` answer (RFC 9457)."""
        return {
            "type": f"urn:forkyard:error:{self.code}",
            "title": inspect.cleandoc(type(self).__doc__ or self.code).splitlines()[0],
            "status": self.status,
            "detail": self.message,
            "code": self.code,
            "retryable": self.retryable,
            "details": self.details,
        }


class InvalidRequest(ForkyardError):
    """The request is not valid."""

    code = "invalid_request"
    status = 422


class InvalidShape(InvalidRequest):
    """No sandbox can have this shape."""

    code = "invalid_shape"


class InvalidSetting(InvalidRequest):
    """A setting in the environment is not valid."""

    code = "invalid_setting"


class InvalidDockerfile(InvalidRequest):
    """This Dockerfile cannot be built."""

    code = "invalid_dockerfile"


class InvalidImage(InvalidRequest):
    """This is not an image a machine can be made of."""

    code = "invalid_image"


class InvalidPath(InvalidRequest):
    """This is not a path a guest file can have."""

    code = "invalid_path"


class Unauthenticated(ForkyardError):
    """The API key is missing or unknown. Set FORKYARD_API_KEY, or pass api_key=."""

    code = "unauthenticated"
    status = 401


class Forbidden(ForkyardError):
    """This API key may not do that."""

    code = "forbidden"
    status = 403


class NotFound(ForkyardError):
    """There is no such thing."""

    code = "not_found"
    status = 404


class SandboxNotFound(NotFound):
    """There is no sandbox with this id."""

    code = "sandbox_not_found"


class SnapshotNotFound(NotFound):
    """There is no snapshot with this id or name."""

    code = "snapshot_not_found"


class BuildNotFound(NotFound):
    """There is no build with this id."""

    code = "build_not_found"


class ImageNotFound(NotFound):
    """There is no such image."""

    code = "image_not_found"


class UploadNotFound(NotFound):
    """There is no such upload; send it again."""

    code = "upload_not_found"


class TemplateNotFound(NotFound):
    """There is no template of this name, or none with this tag."""

    code = "template_not_found"


class ServiceNotFound(NotFound):
    """The sandbox has no service of this name."""

    code = "service_not_found"


class ContextNotFound(NotFound):
    """There is no such context in this sandbox."""

    code = "context_not_found"


class VolumeNotFound(NotFound):
    """There is no volume with this name, or no such version of it."""

    code = "volume_not_found"


class DevServerNotFound(NotFound):
    """There is no dev server with this id or name."""

    code = "dev_server_not_found"


class ExecNotFound(NotFound):
    """This sandbox has no exec with this id."""

    code = "exec_not_found"


class DomainNotFound(NotFound):
    """No such domain was added."""

    code = "domain_not_found"


class FileMissing(NotFound):
    """There is no such file or directory in the sandbox."""

    code = "file_missing"


class RepoNotFound(NotFound):
    """There is no repository with this id or name."""

    code = "repo_not_found"


class RevisionNotFound(NotFound):
    """The repository has no such branch, tag, commit or path."""

    code = "revision_not_found"


class Conflict(ForkyardError):
    """The request does not fit the present state."""

    code = "conflict"
    status = 409


class StateConflict(Conflict):
    """The sandbox is in a state that does not allow this."""

    code = "state_conflict"


class IdempotencyConflict(Conflict):
    """This Idempotency-Key was used before with a different request."""

    code = "idempotency_conflict"


class DomainUnverified(Conflict):
    """Nobody has shown yet whose domain this is: its TXT record is missing."""

    code = "domain_unverified"


class VolumeInUse(Conflict):
    """A sandbox has this volume; `sandbox_id` says which."""

    code = "volume_in_use"


class VolumeChanged(Conflict):
    """The volume has a newer version than the one these changes were made to."""

    code = "volume_changed"


class FileConflict(Conflict):
    """What is at that path does not allow this."""

    code = "file_conflict"


class RefConflict(Conflict):
    """The branch or tag is not where it was expected to be."""

    code = "ref_conflict"


class MergeConflict(Conflict):
    """Both sides changed the same places. Nothing was merged."""

    code = "merge_conflict"


class SandboxEnded(ForkyardError):
    """This sandbox has ended."""

    code = "sandbox_ended"
    status = 410


class GuestFailure(ForkyardError):
    """The machine could not do what was asked."""

    code = "guest_failure"
    status = 400


class GuestPermissionDenied(GuestFailure):
    """The user inside the sandbox may not do that."""

    code = "guest_permission_denied"
    status = 403


class GuestDiskFull(GuestFailure):
    """The sandbox's disk is full."""

    code = "guest_disk_full"
    status = 507


class CommandNotFound(GuestFailure):
    """The sandbox has no such program, user or working directory."""

    code = "command_not_found"


class GitFailed(GuestFailure):
    """Git in the sandbox could not do what was asked."""

    code = "git_failed"


class BuildFailed(GuestFailure):
    """A step of the spec failed. `forkyard builds logs` shows what it printed."""

    code = "build_failed"
    status = 422


class DevServerFailed(GuestFailure):
    """The dev server could not be installed, started or reloaded."""

    code = "dev_server_failed"
    status = 422


class ServiceNotReady(GuestFailure):
    """The service did not become ready."""

    code = "service_not_ready"
    status = 422


class LanguageMissing(GuestFailure):
    """The machine has not what is needed to run this language."""

    code = "language_missing"
    status = 422


class ContextEnded(GuestFailure):
    """The process that remembers a context ended. Run again: a new one is made."""

    code = "context_ended"


class PortClosed(GuestFailure):
    """Nothing listens on this port of the sandbox."""

    code = "port_closed"
    status = 502
    retryable = True


class BadAnswer(GuestFailure):
    """What listens on this port of the sandbox did not answer as an HTTP server does."""

    code = "bad_answer"
    status = 502


class GuestUnreachable(GuestFailure):
    """The agent inside the sandbox does not answer."""

    code = "guest_unreachable"
    status = 503
    retryable = True


class NoCapacity(ForkyardError):
    """This host has no room for another sandbox now."""

    code = "no_capacity"
    status = 503
    retryable = True


class SandboxBusy(NoCapacity):
    """So many requests to this sandbox are under way that no more can be taken."""

    code = "sandbox_busy"


class QuotaExceeded(NoCapacity):
    """This API key has used up its quota."""

    code = "quota_exceeded"
    status = 429


class RepoFull(ForkyardError):
    """The repository has used up its quota."""

    code = "repo_full"
    status = 413


class RemoteFailed(ForkyardError):
    """A git host elsewhere could not be reached, or refused."""

    code = "remote_failed"
    status = 502
    retryable = True


class RemoteMissing(RemoteFailed):
    """There is no repository at this url."""

    code = "remote_missing"
    status = 422
    retryable = False


class RemoteDenied(RemoteFailed):
    """The git host wants a credential, or refuses this one."""

    code = "remote_denied"
    status = 422
    retryable = False


class RegistryUnreachable(RemoteFailed):
    """The registry cannot be reached."""

    code = "registry_unreachable"


class OperationTimeout(ForkyardError):
    """The operation did not finish in time."""

    code = "timeout"
    status = 504
    retryable = True


class HostFailure(ForkyardError):
    """The host could not do its part."""

    code = "host_failure"
    status = 500


class ImageBuildFailed(HostFailure):
    """The base image could not be built."""

    code = "image_build_failed"


class TemplateBuildFailed(HostFailure):
    """The template could not be built."""

    code = "template_build_failed"


class SnapshotFailed(HostFailure):
    """The snapshot could not be written. The sandbox goes on as before."""

    code = "snapshot_failed"


class SnapshotCorrupt(HostFailure):
    """The saved memory is damaged. Boot from the disk instead: resume(memory=False)."""

    code = "snapshot_corrupt"


class VmStartFailed(HostFailure):
    """The virtual machine did not start."""

    code = "vm_start_failed"
    retryable = True


class VmCrashed(HostFailure):
    """The virtual machine ended by itself."""

    code = "vm_crashed"


class DaemonUnreachable(ForkyardError):
    """No Forkyard daemon answers. Start one with `forkyard up`, or set FORKYARD_URL."""

    code = "daemon_unreachable"
    status = 503
    retryable = True


class InternalError(ForkyardError):
    """An unexpected error in the daemon. Its log has the details."""

    code = "internal"
    status = 500


def _tree(cls: type[ForkyardError]) -> dict[str, type[ForkyardError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found.update(_tree(sub))
    return found


BY_CODE: dict[str, type[ForkyardError]] = _tree(ForkyardError)


def from_problem(problem: dict[str, Any]) -> ForkyardError:
    """Rebuild the error a daemon reported. An unknown code (a newer daemon) becomes the root class."""
    cls = BY_CODE.get(str(problem.get("code")), ForkyardError)
    details = problem.get("details")
    return cls(
        str(problem.get("detail") or problem.get("title") or ""),
        **{str(k): v for k, v in (details if isinstance(details, dict) else {}).items() if k != "message"},
    )
