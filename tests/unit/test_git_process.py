"""What git is told to do, by what it does."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from forkyard.git.process import Git


def test_what_is_pushed_is_on_disk_before_the_push_is_answered(tmp_path: Path) -> None:
    """Git counts its own syncs, and says so in its trace."""
    git, source, bare, trace = Git(tmp_path / "root"), tmp_path / "source", tmp_path / "bare", tmp_path / "trace"
    git.install()
    env = git.env({"GIT_ALLOW_PROTOCOL": "file", "GIT_TRACE2_EVENT": str(trace)})

    def run(*args: str | Path) -> None:
        subprocess.run(("git", *args), env=env, check=True, capture_output=True)

    run("init", "--quiet", source)
    run("init", "--quiet", "--bare", bare)
    (source / "file").write_text("content")
    run("-C", source, "add", "file")
    run("-C", source, "commit", "--quiet", "-m", "first")
    trace.unlink()
    run("-C", source, "push", "--quiet", f"file://{bare}", "HEAD:main")
    events = [json.loads(line) for line in trace.read_text().splitlines()]
    names = {event["sid"]: event["name"] for event in events if event["event"] == "cmd_name"}
    synced = {
        (names[event["sid"]], event["key"]): int(event["value"])
        for event in events
        if event["event"] == "data" and event["category"] == "fsync"
    }
    assert synced.get(("index-pack", "fsync/hardware-flush"), 0) >= 2, "the pack and its index"
    assert synced.get(("receive-pack", "fsync/hardware-flush"), 0) >= 1, "the ref"
