"""A daemon that hosts repositories, and the real git client to use it with. Nothing of this machine's git configuration
is read."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from .sdk_daemon import Daemon


@dataclass
class GitYard:
    daemon: Daemon
    root: Path

    @property
    def api(self) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.daemon.key}"}
        return httpx.Client(base_url=f"{self.daemon.url}/api/v1", headers=headers, timeout=60, trust_env=False)

    def as_(self, token: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=f"{self.daemon.url}/api/v1", headers=headers, timeout=60, trust_env=False)

    def repo(self, name: str, **fields: Any) -> dict[str, Any]:
        with self.api as api:
            answer = api.post("/git/repos", json={"name": name, **fields})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def url(self, repo: str, token: str | None = None) -> str:
        """With a credential in it: the API key, unless a token is given. An empty token: none."""
        given = self.daemon.key if token is None else token
        return f"http://{f'x:{given}@' if given else ''}127.0.0.1:{self.daemon.port}/git/{repo}.git"

    def run(
        self, *args: str, cwd: Path | None = None, check: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            ["git", *args],
            cwd=cwd or self.root,
            env=git_env(self.root, **env),
            capture_output=True,
            text=True,
            timeout=120,
        )
        if check and done.returncode:
            raise AssertionError(f"git {' '.join(args)}: {done.stderr}")
        return done

    def clone(self, repo: str, name: str | None = None, *options: str, token: str | None = None) -> Path:
        target = self.root / (name or repo)
        self.run("clone", "--quiet", *options, self.url(repo, token), str(target))
        return target

    def commit(self, work: Path, files: dict[str, str | bytes], message: str = "work") -> str:
        for path, content in files.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_bytes(content.encode() if isinstance(content, str) else content)
        self.run("add", "-A", cwd=work)
        self.run("commit", "--quiet", "-m", message, cwd=work)
        return self.run("rev-parse", "HEAD", cwd=work).stdout.strip()

    def bare(self, repo: dict[str, Any]) -> Path:
        return self.daemon.root / "state" / "git" / f"{repo['id']}.git"

    def fsck(self, repo: dict[str, Any]) -> None:
        """Whole, and with nothing left over from what was cut off."""
        done = self.run("fsck", "--full", "--strict", "--no-dangling", cwd=self.bare(repo), check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        left = [path.name for path in (self.bare(repo) / "objects").glob("tmp_objdir*")]
        assert left == []

    def cli(self, *args: str) -> Any:
        done = self.daemon.cli(*args, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


def git_env(root: Path, **extra: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(root),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_ASKPASS": "/bin/false",
        "GIT_AUTHOR_NAME": "Ann",
        "GIT_AUTHOR_EMAIL": "ann@example.com",
        "GIT_COMMITTER_NAME": "Ann",
        "GIT_COMMITTER_EMAIL": "ann@example.com",
        "GIT_CONFIG_COUNT": "2",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        "GIT_CONFIG_KEY_1": "init.defaultBranch",
        "GIT_CONFIG_VALUE_1": "main",
        **extra,
    }
