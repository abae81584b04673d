"""Users of the guest, the environment their processes start with, and how a path is read.

What is looked up is kept until the files behind it change.
"""

from __future__ import annotations

import os
import time

from .failures import Failure

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    T = TypeVar("T")

_MAX_PATH_BYTES = 4095
_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Account:
    __slots__ = ("gid", "groups", "home", "name", "shell", "uid")

    def __init__(self, name: str, uid: int, gid: int, home: str, shell: str, groups: list[int]) -> None:
        self.name = name
        self.uid = uid
        self.gid = gid
        self.home = home
        self.shell = shell
        self.groups = groups


class _Cached:
    """Answers that hold until one of `files` changes."""

    def __init__(self, *files: str, check_every_s: float = 0) -> None:
        self._files = files
        self._check_every_s = check_every_s
        self._checked_at = -1.0
        self._version: list[int] = []
        self._answers: dict[object, object] = {}

    def get(self, key: object, make: Callable[[], T]) -> T:
        now = time.monotonic()
        if now - self._checked_at >= self._check_every_s:
            self._checked_at = now
            version = [_changed_at(file) for file in self._files]
            if version != self._version:
                self._version = version
                self._answers.clear()
        if key not in self._answers:
            self._answers[key] = make()
        return self._answers[key]  # type: ignore[return-value]


def _changed_at(file: str) -> int:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0


_users = _Cached("/etc/passwd", "/etc/group")
_names = _Cached("/etc/passwd", "/etc/group", check_every_s=1)  # asked twice for every file of a listing
_environment = _Cached("/etc/environment")
_IMAGE = "/opt/forkyard/image.json"
_image = _Cached(_IMAGE)


class Image:
    """What the image of this machine says of itself: for commands that do not say else."""

    __slots__ = ("env", "user", "workdir")

    def __init__(self, user: str, workdir: str | None, env: dict[str, str]) -> None:
        self.user = user
        self.workdir = workdir
        self.env = env


def image() -> Image:
    return _image.get("", _read_image)


def _read_image() -> Image:
    import json

    try:
        with open(_IMAGE, encoding="utf-8") as file:
            found = json.loads(file.read(1 << 20))
        user, workdir, env = str(found.get("user") or "root"), found.get("workdir"), found.get("env") or {}
        if workdir is not None and not (isinstance(workdir, str) and os.path.isdir(workdir)):
            workdir = None
        return Image(user, workdir, {str(name): str(value) for name, value in env.items()})
    except (OSError, ValueError, AttributeError):
        return Image("root", None, {})


def find(name: str) -> Account:
    return _users.get(name, lambda: _find(name))


def _find(name: str) -> Account:
    import pwd

    user, _, group = name.partition(":")
    try:
        entry = pwd.getpwuid(int(user)) if user.isdecimal() else pwd.getpwnam(user)
    except (KeyError, ValueError, OverflowError):
        if user.isdecimal():  # images name users that no table has
            uid = _number(user)
            gid = _gid(group) if group else uid
            return Account(user, uid, gid, "/", "/bin/sh", [gid])
        if user == "root":  # an image need not have a table at all
            return Account("root", 0, 0, "/root" if os.path.isdir("/root") else "/", "/bin/sh", [0])
        raise Failure("command_not_found", f"there is no user {user!r}") from None
    if group:
        gid = _gid(group)
        groups = [gid]
    else:
        gid = entry.pw_gid
        groups = os.getgrouplist(entry.pw_name, gid)
    return Account(entry.pw_name, entry.pw_uid, gid, entry.pw_dir or "/", entry.pw_shell or "/bin/sh", groups)


def _gid(group: str) -> int:
    import grp

    if group.isdecimal():
        return _number(group)
    try:
        return grp.getgrnam(group).gr_gid
    except (KeyError, ValueError):
        raise Failure("command_not_found", f"there is no group {group!r}") from None


def _number(text: str) -> int:
    number = int(text)
    if number >= 2**32 - 1:
        raise Failure("command_not_found", f"{text} is no user or group")
    return number


def user_name(uid: int) -> str:
    return _names.get(("user", uid), lambda: _name_of("pwd", uid))


def group_name(gid: int) -> str:
    return _names.get(("group", gid), lambda: _name_of("grp", gid))


def _name_of(database: str, number: int) -> str:
    import grp
    import pwd

    try:
        return pwd.getpwuid(number).pw_name if database == "pwd" else grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)


def environment(account: Account) -> dict[str, str]:
    return {
        "PATH": _DEFAULT_PATH,
        "LANG": "C.UTF-8",
        **_environment.get("", _read_environment),
        "HOME": account.home,
        "USER": account.name,
        "LOGNAME": account.name,
        "SHELL": account.shell,
        **image().env,
    }


def _read_environment() -> dict[str, str]:
    """/etc/environment as pam_env reads it: NAME=value, value perhaps in quotes."""
    found = {}
    try:
        with open("/etc/environment", encoding="utf-8", errors="surrogateescape") as file:
            lines = file.read(65536).splitlines()
    except OSError:
        return {}
    for line in lines:
        name, equals, value = line.strip().removeprefix("export ").partition("=")
        if equals and name and not name.startswith("#"):
            value = value.strip()
            if len(value) >= 2 and value[0] in "\"'" and value[-1] == value[0]:
                value = value[1:-1]
            found[name.strip()] = value
    return found


def full_path(path: str, user: str | None = None) -> str:
    """Absolute; relative ones start at the home of `user`, or of root."""
    try:
        size = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise Failure("invalid_path", f"{path!r} cannot be a file name") from None
    if not path or "\0" in path or size > _MAX_PATH_BYTES:
        raise Failure(
            "invalid_path", f"a path has 1 to {_MAX_PATH_BYTES} bytes, none of them NUL; this is {path!r:.80}"
        )
    if path == "~" or path.startswith("~/"):
        path = path[2:] or "."
    if not path.startswith("/"):
        path = f"{find(user or 'root').home}/{path}"
    if ".." in path.split("/"):
        # Only the kernel knows where `..` leads after a symlink.
        parent, name = os.path.split(path.rstrip("/"))
        return os.path.realpath(path) if name == ".." else f"{os.path.realpath(parent).rstrip('/')}/{name}"
    return os.path.normpath(path)
