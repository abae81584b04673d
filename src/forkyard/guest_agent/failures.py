"""Failures as the host hears them: a `code` of forkyard/errors.py and a sentence.

Owns: the one table from errno to code.
"""

from __future__ import annotations

import errno
import os

_CODES = {
    errno.ENOENT: "file_missing",
    errno.EACCES: "guest_permission_denied",
    errno.EPERM: "guest_permission_denied",
    errno.EROFS: "guest_permission_denied",
    errno.ENOSPC: "guest_disk_full",
    errno.EDQUOT: "guest_disk_full",
    errno.EISDIR: "file_conflict",
    errno.ENOTDIR: "file_conflict",
    errno.EEXIST: "file_conflict",
    errno.ENOTEMPTY: "file_conflict",
    errno.EBUSY: "file_conflict",
    errno.ETXTBSY: "file_conflict",
    errno.ENAMETOOLONG: "invalid_path",
    errno.ELOOP: "invalid_path",
    errno.EINVAL: "invalid_path",
    errno.EAGAIN: "no_capacity",
    errno.ENOMEM: "no_capacity",
    errno.EMFILE: "no_capacity",
    errno.ENFILE: "no_capacity",
}


class Failure(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        # A message quotes paths and program output; neither may grow past what one frame holds.
        self.message = message if len(message) <= 2000 else message[:2000] + "…"


def from_os_error(error: OSError, subject: str) -> Failure:
    """`subject` is the path or the act that failed."""
    return Failure(_CODES.get(error.errno or 0, "guest_failure"), f"{subject}: {error.strerror or error}")


def from_program(name: str, status: int, stderr: str) -> Failure:
    """The failure of a helper program, from what it printed (run with LC_ALL=C)."""
    text = stderr.strip() or f"{name} ended with status {status}"
    if "Wrote only" in text:  # tar, whose last write was cut short, does not say more
        return Failure("guest_disk_full", text)
    for number, code in _CODES.items():
        if os.strerror(number) in text:
            return Failure(code, text)
    return Failure("guest_failure", text)
