"""The way of git to another host: with the real git client, as if 127.0.0.1 were on the public Internet."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard.errors import Forbidden, RemoteFailed
from forkyard.git.ways import Ways
from forkyard.net import errands, policy
from forkyard.net.outside import Outside
from forkyard.net.resolver import HostResolver

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def public(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "is_special", lambda address: str(address) != "127.0.0.1")
    monkeypatch.setattr(errands, "is_own", lambda address: False)


@pytest.fixture
def outside() -> Iterator[Outside]:
    names = {"public.example": ["127.0.0.1"], "inside.example": ["10.0.0.1"], "both.example": ["10.0.0.1", "127.0.0.1"]}
    resolver = HostResolver(lambda name: names.get(name, []))
    yield Outside(resolver)
    resolver.close()


@pytest.fixture
def git_daemon(tmp_path: Path) -> Iterator[int]:
    subprocess.run(["git", "init", "-q", "--bare", tmp_path / "public.example" / "a.git"], check=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    # By the name that clients say, so that it can be seen which one they say.
    served = [f"--interpolated-path={tmp_path}/%H/%D", "--export-all", "--listen=127.0.0.1", f"--port={port}"]
    daemon = subprocess.Popen(["git", "daemon", *served], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5):
                break
            time.sleep(0.05)
        yield port
    finally:
        daemon.terminate()
        daemon.wait()


async def test_git_goes_to_the_address_that_was_looked_at_under_its_name(outside: Outside, git_daemon: int) -> None:
    url = f"git://public.example:{git_daemon}/a.git"
    async with Ways(outside, allow_private=False).to(url, "ask") as way:
        config = [option for item in way.config.items() for option in ("-c", "=".join(item))]
        args = ("git", *config, "ls-remote", url)
        done = await asyncio.to_thread(subprocess.run, args, env={**os.environ, **way.env}, capture_output=True)
    assert done.returncode == 0, done.stderr


async def test_ssh_goes_to_the_address_that_was_looked_at_and_knows_the_host_by_its_name(outside: Outside) -> None:
    for url in ("ssh://git@public.example:2222/a.git", "git@both.example:a.git"):
        async with Ways(outside, allow_private=False).to(url, "ask") as way:
            assert "-oHostName=127.0.0.1 -oHostKeyAlias=" in way.env["GIT_SSH_COMMAND"]


async def test_a_name_that_leads_inside_is_refused_and_says_how(outside: Outside) -> None:
    ways = Ways(outside, allow_private=False)
    for url in ("git://inside.example/a.git", "ssh://inside.example/a.git", "git://[::1]/a.git"):
        with pytest.raises(Forbidden, match=r"ask|no host name"):
            async with ways.to(url, "ask"):
                pass
    with pytest.raises(RemoteFailed, match="looked up"):
        async with ways.to("git://nowhere.example/a.git", "ask"):
            pass


async def test_with_leave_git_goes_wherever_it_likes(outside: Outside) -> None:
    async with Ways(outside, allow_private=False).to("git://inside.example/a.git", "ask", allow_private=True) as way:
        assert not way.config and not way.env
