"""Clone, fetch and push, with the real git client."""

from __future__ import annotations

import base64
import gzip
import http.client
import os
import socket
import subprocess
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from .git_yard import GitYard, git_env
from .sdk_daemon import Daemon


@pytest.fixture
def yard(daemon: Daemon, tmp_path: Path) -> GitYard:
    return GitYard(daemon, tmp_path)


def test_what_is_pushed_can_be_cloned(yard: GitYard) -> None:
    repo = yard.repo("round-trip")
    work = yard.clone("round-trip", "first")
    data = os.urandom(300_000)
    yard.commit(work, {"a.txt": "hello\n", "dir/data.bin": data})
    yard.run("push", "--quiet", "origin", "HEAD", cwd=work)
    again = yard.clone("round-trip", "second")
    assert (again / "dir/data.bin").read_bytes() == data
    yard.fsck(repo)


def test_a_repository_is_found_by_id_and_by_name_with_and_without_the_ending(yard: GitYard) -> None:
    repo = yard.repo("addresses")
    for name in ("addresses", repo["id"]):
        for ending in (".git", ""):
            url = yard.url(name).removesuffix(".git") + ending
            assert yard.run("ls-remote", url).returncode == 0


def test_protocol_version_two_is_spoken(yard: GitYard) -> None:
    yard.repo("v2", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    done = yard.run("ls-remote", yard.url("v2"), GIT_TRACE_PACKET="1")
    assert "version 2" in done.stderr


def test_shallow_and_partial_clones_get_less(yard: GitYard) -> None:
    yard.repo("slim")
    work = yard.clone("slim", "full")
    for number in range(3):
        yard.commit(work, {"big.bin": os.urandom(50_000), "n.txt": str(number)}, f"commit {number}")
    yard.run("push", "--quiet", "origin", "HEAD", cwd=work)
    shallow = yard.clone("slim", "shallow", "--depth=1")
    assert yard.run("rev-list", "--count", "HEAD", cwd=shallow).stdout.strip() == "1"
    partial = yard.clone("slim", "partial", "--filter=blob:none", "--no-checkout")
    missing = yard.run("rev-list", "--objects", "--all", "--missing=print", cwd=partial).stdout
    assert sum(line.startswith("?") for line in missing.splitlines()) == 6
    yard.run("checkout", "--quiet", "HEAD", cwd=partial)  # fetches what it needs, one blob at a time
    assert (partial / "n.txt").read_text() == "2"


def test_a_fetch_gets_what_was_pushed_since(yard: GitYard) -> None:
    yard.repo("news", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    one, two = yard.clone("news", "one"), yard.clone("news", "two")
    sha = yard.commit(one, {"b": "b"})
    yard.run("push", "--quiet", cwd=one)
    yard.run("pull", "--quiet", "--ff-only", cwd=two)
    assert yard.run("rev-parse", "HEAD", cwd=two).stdout.strip() == sha


def test_a_pack_of_many_megabytes_goes_through_in_chunks(yard: GitYard) -> None:
    repo = yard.repo("large")
    work = yard.clone("large", "up")
    yard.commit(work, {"a.bin": os.urandom(12_000_000)})
    yard.run("-c", "http.postBuffer=100000", "push", "--quiet", "origin", "HEAD", cwd=work)
    down = yard.clone("large", "down")
    assert (down / "a.bin").read_bytes() == (work / "a.bin").read_bytes()
    yard.fsck(repo)


def test_an_atomic_push_moves_all_refs_or_none(yard: GitYard) -> None:
    repo = yard.repo("atomic", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    work, other = yard.clone("atomic", "work"), yard.clone("atomic", "other")
    yard.commit(other, {"other": "1"})
    yard.run("push", "--quiet", cwd=other)
    yard.commit(work, {"mine": "1"})
    yard.run("branch", "fresh", cwd=work)
    done = yard.run("push", "--atomic", "origin", "main", "fresh", cwd=work, check=False)
    assert done.returncode != 0
    assert "fresh" not in yard.run("ls-remote", yard.url("atomic")).stdout
    yard.fsck(repo)


def test_pushes_of_many_clients_to_one_repository_lose_nothing(yard: GitYard) -> None:
    repo = yard.repo("busy", source={"type": "files", "files": [{"path": "a", "content": "a"}]})

    def push(number: int) -> str:
        work = yard.clone("busy", f"client-{number}")
        yard.run("checkout", "--quiet", "-b", f"branch-{number}", cwd=work)
        sha = yard.commit(work, {f"file-{number}": os.urandom(1000)})
        yard.run("push", "--quiet", "origin", "HEAD", cwd=work)
        return sha

    with ThreadPoolExecutor(8) as pool:
        shas = list(pool.map(push, range(12)))
    found = yard.run("ls-remote", "--heads", yard.url("busy")).stdout
    assert all(f"{sha}\trefs/heads/branch-{number}" in found for number, sha in enumerate(shas))
    yard.fsck(repo)


def test_of_two_pushes_to_one_branch_one_is_told_to_fetch_first(yard: GitYard) -> None:
    repo = yard.repo("race", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    one, two = yard.clone("race", "one"), yard.clone("race", "two")
    yard.commit(one, {"one": "1"})
    yard.commit(two, {"two": "2"})
    yard.run("push", "--quiet", cwd=one)
    done = yard.run("push", cwd=two, check=False)
    assert done.returncode != 0 and "fetch first" in done.stderr
    yard.fsck(repo)


# ── who ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_private_repository_asks_for_a_token_and_a_public_one_does_not(yard: GitYard) -> None:
    yard.repo("closed", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    yard.repo("open", visibility="public", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    assert yard.run("ls-remote", yard.url("closed", ""), check=False).returncode != 0
    assert yard.run("ls-remote", yard.url("open", "")).stdout
    work = yard.clone("open", "anonymous", token="")
    yard.commit(work, {"b": "b"})
    done = yard.run("push", cwd=work, check=False)
    assert done.returncode != 0
    answer = httpx.get(yard.url("closed", "") + "/info/refs?service=git-upload-pack", trust_env=False)
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == 'Basic realm="Forkyard"'


def test_a_stranger_cannot_tell_a_private_repository_from_none(yard: GitYard) -> None:
    yard.repo("hidden")
    query = "/info/refs?service=git-upload-pack"
    there, absent = (httpx.get(yard.url(name, "") + query, trust_env=False) for name in ("hidden", "no-such"))
    assert (there.status_code, there.text) == (absent.status_code, absent.text) == (401, there.text)


def test_a_read_token_clones_and_may_not_push(yard: GitYard) -> None:
    repo = yard.repo("read-only", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    with yard.api as api:
        token = api.post("/git/repos/read-only/tokens", json={"permission": "read"}).json()["token"]
    work = yard.clone("read-only", "reader", token=token)
    yard.commit(work, {"b": "b"})
    done = yard.run("push", cwd=work, check=False)
    assert done.returncode != 0 and "403" in done.stderr
    query = "/info/refs?service=git-receive-pack"
    assert httpx.get(yard.url("read-only", "") + query, auth=("any", token), trust_env=False).status_code == 403
    yard.fsck(repo)


@pytest.mark.parametrize("credential", ["fyt_wrong", "fy_wrong", "", "x" * 5000, "ü", "a:b"])
def test_a_wrong_credential_is_refused_even_of_a_public_repository(yard: GitYard, credential: str) -> None:
    name = f"public-{abs(hash(credential))}"
    yard.repo(name, visibility="public")
    header = "Basic " + base64.b64encode(f"user:{credential or 'x'}".encode()).decode()
    url = yard.url(name, "") + "/info/refs?service=git-upload-pack"
    assert httpx.get(url, headers={"Authorization": header}, trust_env=False).status_code == 401


def test_a_bearer_header_works_too(yard: GitYard) -> None:
    yard.repo("bearer", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    header = f"http.extraHeader=Authorization: Bearer {yard.daemon.key}"
    assert yard.run("-c", header, "ls-remote", yard.url("bearer", "")).stdout


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────


def raw_push(yard: GitYard, repo: str, body: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    return httpx.post(
        yard.url(repo, "") + "/git-receive-pack",
        auth=("x", yard.daemon.key),
        content=body,
        headers={"Content-Type": "application/x-git-receive-pack-request", **headers},
        timeout=30,
        trust_env=False,
    )


def pkt(line: bytes) -> bytes:
    return f"{len(line) + 4:04x}".encode() + line


def create_ref(ref: str, sha: str = "1" * 40) -> bytes:
    return pkt(f"{'0' * 40} {sha} {ref}\0report-status".encode()) + b"0000"


def tip(yard: GitYard, repo: str) -> str:
    return yard.run("ls-remote", yard.url(repo)).stdout


@pytest.mark.parametrize(
    "pack",
    [
        b"",
        b"PACK",
        b"PACK\0\0\0\2\0\0\0\1garbage that is no object at all",
        b"PACK\0\0\0\2\xff\xff\xff\xff" + b"\0" * 100,
        b"NOPE" + b"\0" * 1000,
    ],
)
def test_a_malformed_pack_changes_nothing(yard: GitYard, pack: bytes) -> None:
    repo = yard.repo(f"malformed-{len(pack)}", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    before = tip(yard, repo["name"])
    answer = raw_push(yard, repo["name"], create_ref("refs/heads/evil") + pack)
    assert answer.status_code < 500
    assert b"ok refs/heads/evil" not in answer.content
    assert tip(yard, repo["name"]) == before
    yard.fsck(repo)


@pytest.mark.parametrize(
    "ref",
    [
        "refs/heads/../../config",
        "refs/heads/a..b",
        "refs/heads/-x\x07",
        "refs/heads/x.lock",
        "HEAD",
        "../../x",
        "config",
        "refs/forkyard/remotes/x",
    ],
)
def test_a_ref_with_an_evil_name_is_refused(yard: GitYard, ref: str) -> None:
    repo = yard.repo(f"evil-{abs(hash(ref))}", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    before = tip(yard, repo["name"])
    sha = before.split()[0]
    empty_pack = b"PACK\0\0\0\2\0\0\0\0" + bytes.fromhex("029d08823bd8a8eab510ad6ac75c823cfd3ed31e")
    answer = raw_push(yard, repo["name"], create_ref(ref, sha) + empty_pack)
    assert answer.status_code < 500
    assert f"ok {ref}".encode() not in answer.content
    assert tip(yard, repo["name"]) == before
    yard.fsck(repo)


def test_a_push_that_is_cut_in_the_middle_changes_nothing(yard: GitYard) -> None:
    repo = yard.repo("cut", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    before = tip(yard, "cut")
    body = create_ref("refs/heads/half") + b"PACK\0\0\0\2\0\0\0\5" + os.urandom(50_000)
    auth = base64.b64encode(f"x:{yard.daemon.key}".encode()).decode()
    with socket.create_connection(("127.0.0.1", yard.daemon.port)) as connection:
        head = (
            f"POST /git/cut.git/git-receive-pack HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Basic {auth}\r\n"
            "Content-Type: application/x-git-receive-pack-request\r\nContent-Length: 10000000\r\n\r\n"
        )
        connection.sendall(head.encode() + body)
    wait_for_quiet(yard, repo)
    assert tip(yard, "cut") == before
    yard.fsck(repo)
    work = yard.clone("cut", "after")
    yard.commit(work, {"b": "b"})
    yard.run("push", "--quiet", cwd=work)


def wait_for_quiet(yard: GitYard, repo: dict[str, object]) -> None:
    """Until no push of this repository is under way."""
    repositories = yard.daemon.hosting.repositories
    for _ in range(1000):
        if str(repo["id"]) not in repositories._writers:
            return
        threading.Event().wait(0.01)
    raise AssertionError("a push did not end")


def test_a_fetch_whose_client_goes_away_ends(yard: GitYard) -> None:
    repo = yard.repo("left")
    work = yard.clone("left", "left")
    sha = yard.commit(work, {"a.bin": os.urandom(12_000_000)})
    yard.run("push", "--quiet", "origin", "HEAD", cwd=work)
    want = pkt(f"want {sha} side-band-64k ofs-delta\n".encode()) + b"0000" + pkt(b"done\n")
    auth = base64.b64encode(f"x:{yard.daemon.key}".encode()).decode()
    with socket.create_connection(("127.0.0.1", yard.daemon.port)) as connection:
        head = (
            f"POST /git/left.git/git-upload-pack HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Basic {auth}\r\n"
            f"Content-Type: application/x-git-upload-pack-request\r\nContent-Length: {len(want)}\r\n\r\n"
        )
        connection.sendall(head.encode() + want)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    for _ in range(500):
        if not running_in(yard.bare(repo)):
            return yard.fsck(repo)
        threading.Event().wait(0.02)
    raise AssertionError("git goes on for nobody")


def running_in(directory: Path) -> list[str]:
    """Processes whose working directory this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cwd").readlink() == directory:
                found.append(process.name)
        except OSError:
            continue
    return found


def test_clean_up_goes_where_something_changed_and_nobody_writes(yard: GitYard) -> None:
    repo = yard.repo("sweep", source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    work = yard.clone("sweep", "sweeper")
    yard.commit(work, {"b": "b"})
    yard.run("push", "--quiet", cwd=work)
    hosting, run = yard.daemon.hosting, yard.daemon._run
    assert run(hosting.upkeep.sweep()) >= 1
    assert run(hosting.upkeep.sweep()) == 0
    yard.fsck(repo)


def test_trees_that_would_leave_the_checkout_are_refused(yard: GitYard) -> None:
    repo = yard.repo("dotgit")
    work = yard.root / "evil"
    yard.run("init", "--quiet", str(work))
    blob = yard.run("hash-object", "-w", "--stdin", cwd=work).stdout.strip()
    for name in (".git", "..", ".GIT", ".g\u200cit", "git~1"):
        line = f"100644 blob {blob}\t{name}\0"
        done = subprocess.run(
            ["git", "mktree", "-z"],
            input=line.encode(),
            cwd=work,
            env=git_env(yard.root),
            capture_output=True,
            check=True,
        )
        commit = yard.run("commit-tree", "-m", "evil", done.stdout.decode().strip(), cwd=work).stdout.strip()
        pushed = yard.run("push", yard.url("dotgit"), f"{commit}:refs/heads/evil", cwd=work, check=False)
        assert pushed.returncode != 0, name
    assert tip(yard, "dotgit") == ""
    yard.fsck(repo)


def test_a_blob_over_quota_is_refused_and_the_client_hears_why(yard: GitYard) -> None:
    repo = yard.repo("small", quota_mib=2, source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    before = tip(yard, "small")
    work = yard.clone("small", "big")
    yard.commit(work, {"big.bin": os.urandom(4_000_000)})
    done = yard.run("push", cwd=work, check=False)
    assert done.returncode != 0
    assert "exceeds maximum allowed size" in done.stderr
    assert tip(yard, "small") == before
    yard.fsck(repo)


def test_pushes_at_the_same_time_do_not_exceed_the_quota_together(yard: GitYard) -> None:
    """Each would fit alone."""
    repo = yard.repo("shared", quota_mib=4, source={"type": "files", "files": [{"path": "a", "content": "a"}]})
    works = [yard.clone("shared", f"shared-{number}") for number in range(4)]
    for number, work in enumerate(works):
        yard.run("checkout", "--quiet", "-b", f"b{number}", cwd=work)
        yard.commit(work, {f"big-{number}": os.urandom(2 * 2**20)})
    with ThreadPoolExecutor(4) as pool:
        pushes = [
            pool.submit(yard.run, "push", "--quiet", "origin", f"b{number}", cwd=work, check=False)
            for number, work in enumerate(works)
        ]
        codes = [push.result().returncode for push in pushes]
    assert codes.count(0) in (0, 1)
    with yard.api as api:
        assert api.get("/git/repos/shared").json()["size_bytes"] <= 4 * 2**20 + 2**17
    yard.fsck(repo)


def test_of_300_megabytes_over_quota_nothing_stays(yard: GitYard) -> None:
    repo = yard.repo("tiny", quota_mib=10)
    stored = zlib.compressobj(0)

    def body() -> Iterator[bytes]:
        yield create_ref("refs/heads/main") + b"PACK\0\0\0\2\0\0\0\1"
        yield bytes([0xB0 | (SIZE & 15), 0x80 | (SIZE >> 4) & 127, 0x80 | (SIZE >> 11) & 127])
        yield bytes([0x80 | (SIZE >> 18) & 127, SIZE >> 25])
        for _ in range(300):
            yield stored.compress(b"x" * 2**20)

    SIZE = 300 * 2**20
    answer = raw_push(yard, "tiny", body())
    assert b"ng refs/heads/main" in answer.content
    assert sum(path.stat().st_size for path in yard.bare(repo).rglob("*") if path.is_file()) < 2**20
    yard.fsck(repo)


def test_a_zip_bomb_as_request_body_is_bounded(yard: GitYard) -> None:
    repo = yard.repo("bomb", quota_mib=1)
    bomb = gzip.compress(create_ref("refs/heads/x") + b"PACK" + b"\0" * 50_000_000)
    assert raw_push(yard, "bomb", bomb, **{"Content-Encoding": "gzip"}).status_code < 500
    assert tip(yard, "bomb") == ""
    yard.fsck(repo)


@pytest.mark.parametrize(
    "path",
    [
        "/git/",
        "/git/x",
        "/git/../../etc/passwd",
        "/git/bomb.git/HEAD",
        "/git/bomb.git/objects/info/packs",
        "/git/%2e%2e/info/refs",
    ],
)
def test_nothing_else_is_served(yard: GitYard, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", yard.daemon.port)
    connection.request("GET", path, headers={"Authorization": f"Bearer {yard.daemon.key}"})
    assert connection.getresponse().status in (401, 403, 404)
    connection.close()
