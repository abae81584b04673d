"""Parts of the E2B facade that are functions of what they are given."""

from __future__ import annotations

from forkyard.compat.e2b.models import BuildStart
from forkyard.compat.e2b.recipes import recipe_of
from forkyard.compat.e2b.volume_files import entries
from forkyard.models.specs import Size


def _told(*fields: str) -> bytes:
    return "".join(f"{field}\0" for field in fields).encode()


def test_what_find_says_of_a_volume_is_told_as_clients_read_it() -> None:
    times = ("0.5000000000", "1000000000.0000000000", "1000000001.0000000000")
    said = _told("b", "b", "d", "4096", "755", "0", "0", *times, "")
    said += _told("a\nb", "b/a\nb", "f", "5", "644", "1000", "1000", *times, "")
    said += _told("l", "b/l", "l", "4", "777", "0", "0", *times, "a.txt")
    said += _told("p", "b/p", "p", "0", "644", "0", "0", *times, "")
    found = entries(said, "/sub")
    assert [one["path"] for one in found] == ["/sub/b", "/sub/b/a\nb", "/sub/b/l", "/sub/b/p"]
    assert [one["type"] for one in found] == ["directory", "file", "symlink", "unknown"]
    assert [one.get("target") for one in found] == [None, None, "a.txt", None]
    assert (found[1]["size"], found[1]["mode"], found[1]["uid"], found[1]["gid"]) == (5, 0o644, 1000, 1000)
    assert (found[0]["atime"], found[0]["mtime"]) == ("1970-01-01T00:00:00.500Z", "2001-09-09T01:46:40.000Z")
    root = entries(_told("volume", "", "d", "4096", "755", "0", "0", *times, ""), "")
    assert [(one["path"], one["name"]) for one in root] == [("/", "/")]
    assert entries(b"", "") == []


def test_a_start_command_is_a_service_that_takes_the_place_of_that_of_the_base() -> None:
    start = BuildStart.model_validate({"startCmd": "serve 'it' && true", "readyCmd": "check"})
    settings = {"snapshot": None, "default_user": "user", "default_home": "/home/user"}
    first = recipe_of(start, Size(), {}, base=None, **settings)
    (service,) = [step.service for step in first.spec.steps if step.service is not None]
    assert (service.user, service.workdir, service.ready) == ("user", "/home/user", "check")
    assert service.exec.startswith("/bin/bash -l -c 'serve ")
    kept = recipe_of(BuildStart(), Size(), {}, base=first, **settings)
    assert [step.service for step in kept.spec.steps if step.service is not None] == [service]
    other = BuildStart.model_validate({"startCmd": "other"})
    changed = recipe_of(other, Size(), {}, base=first, **settings)
    assert len([step for step in changed.spec.steps if step.service is not None]) == 1
