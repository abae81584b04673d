"""What may be a ref, a revision and a path. Pure; the same rules as git's own, and a little stricter.

Paths: what git would refuse to check out anywhere is refused (`..`, `.git` in any spelling that a file system of a Mac
or of Windows takes for it, backslashes, NUL).
"""

from __future__ import annotations

import re

from forkyard.errors import InvalidPath, InvalidRequest

MAX_REF_BYTES = 240
MAX_PATH_BYTES = 4096
MAX_NAME_BYTES = 255
NO_SHA = "0" * 40

_SHA = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"([^~^]+)(?:[~^][0-9]{0,6})*")
_REF_EVIL = re.compile(r"[\x00-\x20\x7f~^:?*\[\\]|\.\.|@\{|//|^/|/$|\.$|(?:^|/)\.|\.lock(?:/|$)|^-")
#: Code points that HFS+ ignores in names, so that `.g\u200cit` is `.git` there.
_HFS_IGNORED = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
_NTFS_DOTGIT = re.compile(r"^(?:\.git|git~[0-9]+)[ .]*(?::.*)?$", re.IGNORECASE)
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


def is_sha(text: str) -> bool:
    return _SHA.fullmatch(text) is not None


def checked_sha(text: str) -> str:
    if not is_sha(text):
        raise InvalidRequest(f"{text!r} is no id of a commit", field="sha")
    return text


def checked_ref(name: str, kind: str = "branch") -> str:
    """The part after `refs/heads/` or `refs/tags/`."""
    if (
        not name
        or name in ("@", "HEAD")
        or _REF_EVIL.search(name)
        or not _encodable(name)
        or len(name.encode()) > MAX_REF_BYTES
        or name.startswith("refs/")
        or is_sha(name)
    ):
        raise InvalidRequest(f"{name!r} cannot be the name of a {kind}; see git-check-ref-format(1)", field=kind)
    return name


def checked_revision(rev: str) -> str:
    """A branch, a tag, a commit (also abbreviated) or HEAD, with `~n` and `^n`. Never an option, a range or a path."""
    found = _REVISION.fullmatch(rev)
    if (
        found is None
        or len(rev) > MAX_REF_BYTES + 10
        or not _encodable(rev)
        or found[1] == "@"
        or _REF_EVIL.search(found[1])
    ):
        raise InvalidRequest(f"{rev!r} is no revision; give a branch, a tag or a commit", field="rev")
    return rev


def has_steps(rev: str) -> bool:
    """`main~2` and not `main`."""
    return "~" in rev or "^" in rev


def checked_path(path: str) -> str:
    """A file's path inside a repository, as git keeps it: no leading slash."""
    if not _encodable(path):
        raise InvalidPath(f"path {path!r} is no UTF-8", path=repr(path))
    if len(path.encode()) > MAX_PATH_BYTES:
        raise InvalidPath(f"a path of {len(path.encode())} bytes is too long; {MAX_PATH_BYTES} are the most")
    for part in path.split("/"):
        why = _bad_name(part)
        if why is not None:
            raise InvalidPath(f"path {path!r} cannot be in a repository: {why}", path=path)
    return path


def _bad_name(name: str) -> str | None:
    if not name:
        return "a part of it is empty (it must not begin or end with a slash)"
    if name in (".", ".."):
        return f"{name!r} leads elsewhere"
    if "\\" in name:
        return "it has a backslash, which is a slash on Windows"
    if _CONTROL.search(name):
        return "it has a control character"
    if len(name.encode()) > MAX_NAME_BYTES:
        return f"a part of it is longer than {MAX_NAME_BYTES} bytes"
    plain = _HFS_IGNORED.sub("", name)
    if plain.casefold() == ".git" or _NTFS_DOTGIT.match(plain):
        return f"{name!r} is git's own directory on some systems"
    return None


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
