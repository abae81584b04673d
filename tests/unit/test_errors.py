"""The error tree: codes are stable and unique, and every error survives the way to a client and back."""

from __future__ import annotations

import json

import pytest

from forkyard import errors
from forkyard.errors import BY_CODE, ForkyardError, SandboxEnded, from_problem


def _all(cls: type[ForkyardError]) -> list[type[ForkyardError]]:
    """The classes of the tree's own module: what a client raises about itself never crosses the wire."""
    found = [cls, *(found for sub in cls.__subclasses__() for found in _all(sub))]
    return [one for one in found if one.__module__ == errors.__name__]


def test_no_two_errors_share_a_code() -> None:
    classes = _all(ForkyardError)
    assert len(BY_CODE) == len(classes)


@pytest.mark.parametrize("cls", _all(ForkyardError), ids=lambda cls: cls.code)
def test_an_error_is_rebuilt_from_its_problem(cls: type[ForkyardError]) -> None:
    sent = cls("what happened", path="/a", count=3)
    rebuilt = from_problem(json.loads(json.dumps(sent.to_problem())))
    assert type(rebuilt) is cls
    assert rebuilt.message == "what happened"
    assert rebuilt.details == {"path": "/a", "count": 3}


@pytest.mark.parametrize("cls", _all(ForkyardError), ids=lambda cls: cls.code)
def test_an_error_without_a_message_says_what_its_class_means(cls: type[ForkyardError]) -> None:
    assert cls.__doc__ is not None
    assert cls().message == cls.__doc__.strip()


def test_an_unknown_code_of_a_newer_daemon_becomes_the_root_class() -> None:
    rebuilt = from_problem({"code": "from_the_future", "detail": "new trouble"})
    assert type(rebuilt) is ForkyardError
    assert rebuilt.message == "new trouble"


@pytest.mark.parametrize("problem", [{}, {"details": None}, {"details": [1]}, {"details": {"message": "x"}}])
def test_a_malformed_problem_still_becomes_an_error(problem: dict[str, object]) -> None:
    assert isinstance(from_problem(problem), ForkyardError)


def test_the_tree_in_the_docstring_names_every_class() -> None:
    assert errors.__doc__ is not None
    for cls in _all(ForkyardError):
        assert cls.__name__ in errors.__doc__


def test_details_are_part_of_the_problem() -> None:
    assert SandboxEnded("gone", cause="vm_crashed").to_problem()["details"] == {"cause": "vm_crashed"}
