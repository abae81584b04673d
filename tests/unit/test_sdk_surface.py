"""`import forkyard`: light, complete, and the same for sync and async."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import forkyard
from forkyard import errors

HEAVY = ("httpx", "pydantic", "rich", "click", "websockets", "fastapi", "asyncio", "forkyard.sdk", "forkyard.errors")


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print('\\n'.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_importing_forkyard_loads_nothing_heavy() -> None:
    assert loaded_by("import forkyard").isdisjoint(HEAVY)


def test_importing_the_client_loads_nothing_of_the_server() -> None:
    server = {"fastapi", "uvicorn", "sqlalchemy", "structlog", "forkyard.api", "forkyard.control", "forkyard.host"}
    assert loaded_by("from forkyard import Forkyard, AsyncForkyard").isdisjoint(server)


def test_help_of_the_command_line_loads_neither_the_client_nor_rich() -> None:
    loaded = loaded_by("import sys\nfrom forkyard.cli.root import cli\ncli(['--help'], standalone_mode=False)")
    assert loaded.isdisjoint({"httpx", "pydantic", "rich", "websockets", "fastapi"})


@pytest.mark.parametrize("name", forkyard.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(forkyard, name) is not None


def test_the_list_of_public_names_is_the_one_table() -> None:
    assert sorted(forkyard.__all__) == sorted([*forkyard._HOME, "__version__"])
    assert set(dir(forkyard)) == set(forkyard.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="Sandbax"):
        forkyard.Sandbax  # noqa: B018


def test_every_error_is_public() -> None:
    missing = {cls.__name__ for cls in errors.BY_CODE.values()} - set(forkyard.__all__)
    assert not missing


@pytest.mark.parametrize(
    "name", ["Forkyard", "Sandbox", "Snapshot", "Process", "ExecStream", "Files", "Watch", "Terminal", "Repo"]
)
def test_sync_and_async_have_the_same_shape(name: str) -> None:
    def shape(cls: type) -> dict[str, list[str]]:
        return {
            member: list(inspect.signature(value).parameters)
            for member, value in vars(cls).items()
            if inspect.isfunction(value) and not member.startswith("_")
        }

    asynchronous = shape(getattr(forkyard, f"Async{name}"))
    asynchronous = {{"aclose": "close"}.get(member, member): value for member, value in asynchronous.items()}
    assert asynchronous == shape(getattr(forkyard, name))


def test_the_sync_client_is_generated_from_the_async_one_as_it_is_now() -> None:
    script = Path(__file__).parents[2] / "scripts" / "unasync.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
