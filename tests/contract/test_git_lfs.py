"""Large files, with the real git-lfs client where it is installed; the wire by hand for what it would never send."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from .git_yard import GitYard
from .sdk_daemon import Daemon


@pytest.fixture
def yard(daemon: Daemon, tmp_path: Path) -> GitYard:
    return GitYard(daemon, tmp_path)


def lfs(yard: GitYard, repo: str, method: str, path: str, token: str | None = None, **given: Any) -> httpx.Response:
    url = f"{yard.url(repo, '')}/info/lfs/{path}"
    auth = ("x", yard.daemon.key if token is None else token)
    return httpx.request(method, url, auth=auth, trust_env=False, timeout=30, **given)


def batch(yard: GitYard, repo: str, operation: str, oid: str, size: int, **given: Any) -> httpx.Response:
    body = {"operation": operation, "transfers": ["basic"], "objects": [{"oid": oid, "size": size}]}
    return lfs(yard, repo, "POST", "objects/batch", json=body, **given)


def oid_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def kept(yard: GitYard, repo: str, data: bytes) -> httpx.Response:
    return lfs(yard, repo, "PUT", f"objects/{oid_of(data)}", content=data)


def test_the_real_client_uploads_downloads_and_locks(yard: GitYard) -> None:
    repo = yard.repo("large-files")
    work = yard.clone("large-files", "up")
    yard.run("lfs", "install", "--local", cwd=work)
    yard.run("lfs", "track", "*.bin", cwd=work)
    data = os.urandom(3_000_000)
    yard.commit(work, {"big.bin": data})
    yard.run("push", "--quiet", "origin", "HEAD", cwd=work)
    pointer = yard.run("cat-file", "-p", "HEAD:big.bin", cwd=yard.bare(repo)).stdout
    assert pointer.startswith("version https://git-lfs")
    down = yard.root / "down"
    smudge = ("-c", "filter.lfs.smudge=git-lfs smudge -- %f", "-c", "filter.lfs.required=true")
    yard.run(*smudge, "clone", "--quiet", yard.url("large-files"), str(down))
    assert (down / "big.bin").read_bytes() == data
    with yard.api as api:
        other = api.post("/git/repos/large-files/tokens", json={}).json()["token"]
    yard.run("lfs", "lock", "big.bin", cwd=work)
    assert "big.bin" in yard.run("lfs", "locks", cwd=work).stdout
    yard.run("remote", "set-url", "origin", yard.url("large-files", other), cwd=work)
    refused = yard.run("lfs", "unlock", "big.bin", cwd=work, check=False)
    assert refused.returncode != 0
    yard.run("lfs", "unlock", "--force", "big.bin", cwd=work)
    assert yard.run("lfs", "locks", cwd=work).stdout.strip() == ""
    yard.fsck(repo)


def test_an_object_is_checked_before_it_is_kept(yard: GitYard) -> None:
    yard.repo("checked")
    data = b"the right bytes"
    oid = hashlib.sha256(data).hexdigest()
    wrong = lfs(yard, "checked", "PUT", f"objects/{oid}", content=b"other bytes")
    assert wrong.status_code == 422
    assert "error" in batch(yard, "checked", "download", oid, len(data)).json()["objects"][0]
    assert lfs(yard, "checked", "PUT", f"objects/{oid}", content=data).status_code == 200
    answer = batch(yard, "checked", "download", oid, len(data)).json()["objects"][0]
    assert answer["actions"]["download"]["href"].endswith(oid)
    assert lfs(yard, "checked", "GET", f"objects/{oid}").content == data
    rest = lfs(yard, "checked", "GET", f"objects/{oid}", headers={"Range": "bytes=4-"})
    assert (rest.status_code, rest.content) == (206, data[4:])
    assert lfs(yard, "checked", "POST", "objects/verify", json={"oid": oid, "size": len(data)}).status_code == 200
    assert lfs(yard, "checked", "POST", "objects/verify", json={"oid": oid, "size": 1}).status_code == 404
    assert "actions" not in batch(yard, "checked", "upload", oid, len(data)).json()["objects"][0]


def test_an_object_over_quota_is_refused_before_and_while_it_comes(yard: GitYard) -> None:
    repo = yard.repo("full", quota_mib=1)
    data = os.urandom(2_000_000)
    oid = hashlib.sha256(data).hexdigest()
    assert batch(yard, "full", "upload", oid, len(data)).json()["objects"][0]["error"]["code"] == 413
    assert lfs(yard, "full", "PUT", f"objects/{oid}", content=data).status_code == 413
    assert not [path for path in (yard.bare(repo).with_suffix(".lfs")).rglob("*") if path.is_file()]


def test_a_large_file_counts_towards_the_quota_of_its_repository(yard: GitYard) -> None:
    repo = yard.repo("shared-quota", quota_mib=1)
    data, more = os.urandom(700_000), os.urandom(500_000)
    assert kept(yard, "shared-quota", data).status_code == 200
    with yard.api as api:
        assert api.get("/git/repos/shared-quota").json()["size_bytes"] >= len(data)
        file = {"path": "big", "content": base64.b64encode(more).decode(), "encoding": "base64"}
        commit = api.post("/git/repos/shared-quota/commits", json={"message": "too much", "files": [file]})
    assert commit.status_code == 413, commit.text
    work = yard.clone("shared-quota", "shared")
    yard.commit(work, {"big": more})
    assert yard.run("push", "--quiet", "origin", "HEAD", cwd=work, check=False).returncode != 0
    assert kept(yard, "shared-quota", more).status_code == 413
    yard.fsck(repo)


def test_a_large_file_that_nothing_needs_is_removed_after_two_weeks(yard: GitYard) -> None:
    repo = yard.repo("pruned")
    needed, dropped, young, claimed = (os.urandom(50_000) for _ in range(4))
    for data in (needed, dropped, young, claimed):
        assert kept(yard, "pruned", data).status_code == 200
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid_of(needed)}\nsize {len(needed)}\n"
    with yard.api as api:
        commit = {"message": "a large file", "files": [{"path": "a.bin", "content": pointer}]}
        assert api.post("/git/repos/pruned/commits", json=commit).is_success
        before = api.get("/git/repos/pruned").json()["size_bytes"]
    for data in (needed, dropped, claimed):
        oid, long_ago = oid_of(data), time.time() - 15 * 86400
        os.utime(yard.bare(repo).with_suffix(".lfs") / oid[:2] / oid[2:4] / oid, (long_ago, long_ago))
    # Somebody is about to push a commit that names it, and is told that it need not be sent.
    assert "actions" not in batch(yard, "pruned", "upload", oid_of(claimed), 50_000).json()["objects"][0]
    with yard.api as api:
        assert api.post("/git/repos/pruned/gc").is_success
        assert api.get("/git/repos/pruned").json()["size_bytes"] < before
    found = [lfs(yard, "pruned", "GET", f"objects/{oid_of(data)}") for data in (needed, dropped, young, claimed)]
    assert [answer.status_code for answer in found] == [200, 404, 200, 200]
    missing = batch(yard, "pruned", "download", oid_of(dropped), 50_000).json()["objects"][0]
    assert "git lfs push" in missing["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "objects/batch", {"operation": "upload"}, 422),
        ("POST", "objects/batch", {"operation": "steal", "objects": []}, 422),
        ("POST", "objects/batch", {"operation": "download", "objects": [{"oid": "../../x", "size": 1}]}, 422),
        ("POST", "objects/batch", {"operation": "download", "objects": [{"oid": "a" * 64, "size": -1}]}, 422),
        ("POST", "objects/batch", {"operation": "download", "objects": [7]}, 422),
        ("POST", "locks", {"path": "../x"}, 422),
        ("POST", "locks/none/unlock", {}, 404),
        ("GET", "objects/../../HEAD", None, 404),
        ("GET", f"objects/{'a' * 64}", None, 404),
        ("DELETE", "objects/batch", {}, 404),
    ],
)
def test_what_is_not_understood_is_refused(yard: GitYard, method: str, path: str, body: Any, status: int) -> None:
    with yard.api as api:
        api.post("/git/repos", json={"name": "strict"})
    assert lfs(yard, "strict", method, path, **({} if body is None else {"json": body})).status_code == status


def test_a_read_token_downloads_and_does_not_upload_or_lock(yard: GitYard) -> None:
    yard.repo("readers")
    with yard.api as api:
        token = api.post("/git/repos/readers/tokens", json={"permission": "read"}).json()["token"]
    assert batch(yard, "readers", "download", "a" * 64, 1, token=token).status_code == 200
    assert batch(yard, "readers", "upload", "a" * 64, 1, token=token).status_code == 403
    assert lfs(yard, "readers", "PUT", f"objects/{'a' * 64}", token=token, content=b"x").status_code == 403
    assert lfs(yard, "readers", "POST", "locks", token=token, json={"path": "a"}).status_code == 403
    refused = lfs(yard, "readers", "GET", "locks", token="fyt_wrong")
    assert refused.status_code == 401 and "lfs-authenticate" in refused.headers


def test_a_batch_without_end_is_refused(yard: GitYard) -> None:
    yard.repo("endless")

    def body() -> Iterator[bytes]:
        for _ in range(100):
            yield b" " * 100_000

    assert lfs(yard, "endless", "POST", "objects/batch", content=body()).status_code == 422
