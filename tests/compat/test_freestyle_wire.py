"""What no published Freestyle client sends, and what it must be told."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forkyard.builds.runs import new_record
from forkyard.compat.freestyle import routes
from forkyard.compat.freestyle.errors import refusal
from forkyard.errors import StateConflict
from forkyard.git.automation import Outward
from forkyard.guest.fake import FakeGuest
from forkyard.hosts.memory import MemoryHost
from forkyard.lifecycle import State
from forkyard.models.builds import ServiceLogs
from forkyard.models.runs import RunCreate

from ..contract.place import Place  # noqa: TID252
from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252
from .clients import clients, places

SOURCES = Path(routes.__file__).parent
#: Only the newest client has what these are about, and the oldest cannot resize and sends no specs.
NEWEST_ONLY = re.compile(r"SESSION_|INVALID_SESSION_ID|EXEC_TIMED_OUT")
NOT_OLDEST = re.compile("RESIZE_VM_|CREATE_VM_.*_(OUT_OF_RANGE|NOT_POWER_OF_TWO)|CONFLICTING_SPEC_SOURCES_ERROR")
NOBODY = "i" + "0" * 19
NOT_SERVED = [
    ("POST", "/web/v1/deployment"),
    ("GET", "/web/v1/deployments"),
    ("POST", "/v1/vpcs"),
    ("POST", "/v1/vpcs/x/wireguard/peers"),
    ("GET", "/v1/vms/x/nothing"),
    ("PATCH", "/v1/vms/x"),
    ("GET", "/git/v1/identity"),
    ("GET", "/execute/v9/script"),
]


class Unreal(Daemon):
    """Its guests are only memory: what is made up by a fuzzer may remove anything there."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.host = MemoryHost(lambda *_: FakeGuest())  # type: ignore[assignment]


@pytest.fixture(scope="module")
def unreal() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="fyfs-") as root:
        daemon = Unreal(Path(root))
        daemon.start()
        yield daemon
        daemon.stop()


@pytest.fixture(scope="module")
def api(unreal: Daemon) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {unreal.key}"}
    with httpx.Client(base_url=unreal.url, headers=headers, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def vm(api: httpx.Client) -> str:
    return str(api.post("/v1/vms", json={}).json()["id"])


def _table() -> list[tuple[str, str]]:
    class Anything:
        def __getattr__(self, _: str) -> Anything:
            return self

    found = routes.all_routes(Anything())  # type: ignore[arg-type]
    plain = [(route.method, re.sub(r"\{\w+\}", "x", route.path)) for route in found]
    return [(method, path) for method, path in plain if method != "WEBSOCKET"]


def _is_error(answer: httpx.Response) -> bool:
    body = answer.json()
    return re.fullmatch(r"[A-Z][A-Z_0-9]+", body["code"]) is not None and body["message"] != ""


def test_the_table_is_seen() -> None:
    assert len(_table()) > 35


def test_every_code_is_one_that_clients_know() -> None:
    """Some try again for ever if it is not."""
    used = set()
    for source in SOURCES.glob("*.py"):
        text = source.read_text()
        used |= set(re.findall(r'"([A-Z][A-Z0-9]+(?:_[A-Z0-9]+)+)"', text))
        used |= set(re.findall(r'\b[1-5][0-9]{2}, "([A-Z]+)"', text))
    for verb in ("RESIZE", "CREATE"):
        used |= {f"{verb}_VM_{what}_{why}" for what in ("VCPU", "MEM") for why in ("OUT_OF_RANGE", "NOT_POWER_OF_TWO")}
    used.add("CREATE_VM_ROOTFS_OUT_OF_RANGE")
    assert len(used) > 25
    assert used > {"UNAUTHORIZED", "FORBIDDEN", "CONFLICT"}
    for client in [*clients("npm", "freestyle"), *clients("npm", "freestyle-sandboxes")]:
        package = Path(places(client.name)[client]) / "node_modules" / client.name
        known = set(re.findall(r'static code = "([A-Z0-9_]+)"', (package / "index.mjs").read_text()))
        excused = {code for code in used if NEWEST_ONLY.match(code) and not client.has("0.1.63")}
        excused |= {code for code in used if NOT_OLDEST.match(code) and not client.has("0.1.49")}
        strangers = used - known - excused
        assert not strangers, f"{client} does not know {strangers}"


@pytest.mark.parametrize(("method", "path"), [*_table(), *NOT_SERVED])
def test_nothing_is_done_without_a_key(unreal: Daemon, method: str, path: str) -> None:
    answer = httpx.request(method, unreal.url + path)
    assert answer.status_code in (401, 405, 501)
    assert _is_error(answer)


@pytest.mark.parametrize(("method", "path"), NOT_SERVED)
def test_what_is_not_served_says_so(api: httpx.Client, method: str, path: str) -> None:
    answer = api.request(method, path, json={} if method in ("POST", "PATCH") else None)
    assert answer.status_code in (404, 405, 501)
    assert _is_error(answer)


@pytest.mark.parametrize("path", ["/", "/v1/nothing", "/v9/vms", "/health", "/nothing.html"])
def test_whatever_a_client_may_ask_for_is_answered_as_it_expects(api: httpx.Client, path: str) -> None:
    answer = api.get(path, headers={"X-Freestyle-SDK": "freestyle-sdk-ts"})
    assert (answer.status_code, answer.json()["code"]) == (501, "SERVICE_UNAVAILABLE")


def test_a_page_of_a_sandbox_keeps_its_paths(unreal: Daemon, vm: str) -> None:
    answer = httpx.get(f"{unreal.url}/v1/vms", headers={"Host": f"3000-{vm}.localhost"})
    assert "code" not in answer.text or answer.json().get("code") != "UNAUTHORIZED"


def test_a_path_may_be_quoted_or_not(api: httpx.Client, vm: str) -> None:
    for path in ("%2Ftmp%2Fa%20b.txt", "/tmp/a%20b.txt"):
        assert api.put(f"/v1/vms/{vm}/files/{path}", json={"content": "x"}).status_code == 200
        assert api.get(f"/v1/vms/{vm}/files/{path}").json() == {"content": "x", "encoding": "utf8"}


# ── identities ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_identity_may_what_it_was_granted_and_no_more(unreal: Daemon, api: httpx.Client) -> None:
    mine, other = (str(api.post("/v1/vms", json={}).json()["id"]) for _ in range(2))
    own = {"Authorization": f"Bearer {unreal.key}"}
    identity = httpx.post(f"{unreal.url}/api/v1/identities", json={"name": "agent"}, headers=own).json()["id"]
    grant = f"{unreal.url}/api/v1/identities/{identity}/permissions/sandboxes/{mine}"
    assert httpx.put(grant, json={"allowed_users": ["root"]}, headers=own).status_code == 200
    made = httpx.post(f"{unreal.url}/api/v1/identities/{identity}/tokens", json={}, headers=own).json()
    headers = {"X-Freestyle-Identity-Access-Token": made["token"]}
    with httpx.Client(base_url=unreal.url, headers=headers) as agent:
        assert agent.get("/auth/v1/whoami").json()["identityId"] == identity
        assert agent.get(f"/v1/vms/{mine}").status_code == 200
        assert agent.put(f"/v1/vms/{mine}/files/%2Ftmp%2Fx", json={"content": "x"}).status_code == 200
        assert agent.get(f"/v1/vms/{other}").status_code == 404
        for method, path in (("DELETE", f"/v1/vms/{mine}"), ("POST", "/v1/vms"), ("POST", f"/v1/vms/{mine}/fork")):
            answer = agent.request(method, path)
            assert answer.status_code == 403
            assert answer.json()["code"] == "FORBIDDEN"


def test_who_may_be_one_user_does_nothing_as_another(unreal: Daemon, api: httpx.Client, vm: str) -> None:
    """Files are root's here, and so are units and what terminals have printed."""
    identity = api.post("/identity/v1/identities").json()["id"]
    grant = f"/identity/v1/identities/{identity}/permissions/vm/{vm}"
    assert api.post(grant, json={"allowedUsers": ["bob"]}).status_code == 200
    token = api.post(f"/identity/v1/identities/{identity}/tokens").json()["token"]
    as_bob = {"X-Freestyle-Identity-Access-Token": token, "X-Freestyle-Vm-Linux-User-Id": "bob"}
    with httpx.Client(base_url=unreal.url, headers=as_bob) as agent:
        assert agent.get(f"/v1/vms/{vm}").status_code == 200
        for method, path in (
            ("GET", "files/%2Fetc%2Fshadow"),
            ("PUT", "files/%2Fetc%2Fshadow"),
            ("POST", "watch-files"),
            ("POST", "systemd/services"),
            ("POST", "systemd/stop"),
            ("GET", "terminals/x/logs"),
            ("DELETE", "pty/sessions/x"),
        ):
            assert agent.request(method, f"/v1/vms/{vm}/{path}").status_code == 403, path
        as_root = {"X-Freestyle-Vm-Linux-User-Id": "root"}
        assert agent.post(f"/v1/vms/{vm}/exec-await", json={"command": "id"}, headers=as_root).status_code == 403


# ── what has a word of its own ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "RESIZE_VM_EMPTY_REQUEST"),
        ({"vcpuCount": 3}, "RESIZE_VM_VCPU_NOT_POWER_OF_TWO"),
        ({"vcpuCount": 64}, "RESIZE_VM_VCPU_OUT_OF_RANGE"),
        ({"vcpuCount": 0}, "RESIZE_VM_VCPU_OUT_OF_RANGE"),
        ({"memSizeGb": 3}, "RESIZE_VM_MEM_NOT_POWER_OF_TWO"),
        ({"memSizeGb": 1024}, "RESIZE_VM_MEM_OUT_OF_RANGE"),
        ({"rootfsSizeGb": 1}, "RESIZE_VM_ROOTFS_SHRINK_NOT_SUPPORTED"),
    ],
)
def test_a_size_that_cannot_be_is_named(api: httpx.Client, vm: str, body: dict[str, int], code: str) -> None:
    answer = api.post(f"/v1/vms/{vm}/resize", json=body)
    assert (answer.status_code, answer.json()["code"]) == (400, code)
    assert api.get(f"/v1/vms/{vm}").json()["state"] == "running"


def test_what_is_not_served_of_a_create_is_refused(api: httpx.Client) -> None:
    for body in ({"nics": [{"vpc": "x"}]}, {"udpHolePunchPorts": [{"targetPort": 1}]}):
        answer = api.post("/v1/vms", json=body)
        assert (answer.status_code, answer.json()["code"]) == (501, "SERVICE_UNAVAILABLE")


def test_a_vm_without_ports_has_no_domain(api: httpx.Client) -> None:
    made = api.post("/v1/vms", json={"ports": []}).json()
    assert made["domains"] == []
    assert api.post(f"/v1/vms/{made['id']}/start", json={}).json()["domains"] == []
    api.delete(f"/v1/vms/{made['id']}")


def test_what_is_no_id_of_a_vm_is_told_from_one_that_is_not_there(api: httpx.Client) -> None:
    for name, status, code in (("no-vm", 400, "INVALID_VM_ID"), (NOBODY, 404, "VM_NOT_FOUND")):
        for path in ("", "/pty/sessions", "/terminals"):
            answer = api.get(f"/v1/vms/{name}{path}")
            assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_a_vm_that_is_being_suspended_says_so() -> None:
    told = refusal(StateConflict("it is pausing", state=State.PAUSING))
    assert (told.status, told.code) == (409, "VM_IS_SUSPENDING")
    assert refusal(StateConflict("it is stopped", state=State.STOPPED)).code == "VM_NOT_RUNNING"


def test_commits_come_in_pages_from_either_end(api: httpx.Client) -> None:
    repo = api.post("/git/v1/repo", json={}).json()["repoId"]
    path = f"/git/v1/repo/{repo}"
    shas = []
    for n in range(5):
        body = {"message": f"{n}", "files": [{"path": "n", "content": f"{n}"}]}
        shas.append(api.post(f"{path}/commits", json=body).json()["commit"]["sha"])

    def listed(**query: object) -> tuple[list[int], int | None, object]:
        answer = api.get(f"{path}/git/commits", params={name: str(value) for name, value in query.items()})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        following = found["next_commit"]
        numbers = [shas.index(one["sha"]) for one in found["commits"]]
        return numbers, None if following is None else shas.index(following), found.get("total")

    assert listed(limit=2) == ([4, 3], 2, 5)
    assert listed(limit=2, until=shas[2]) == ([2, 1], 0, 3)
    assert listed(limit=2, until=shas[0]) == ([0], None, 1)
    assert listed(order="asc", limit=2) == ([0, 1], 2, 5)
    assert listed(order="asc", limit=2, since=shas[2]) == ([2, 3], 4, 3)
    assert listed(order="asc", limit=2, since=shas[4]) == ([4], None, 1)
    assert listed(since=shas[2]) == ([4, 3], None, 2), "what is new since then"
    assert listed(order="asc", until=shas[1]) == ([0, 1], None, 2)
    assert listed(since=shas[0], until=shas[3]) == ([3, 2, 1], None, 3)
    assert listed(order="asc", since=shas[0], until=shas[3]) == ([1, 2, 3], None, 3)
    assert listed(offset=3, disableTotalCount="true") == ([1, 0], None, None)
    chosen = api.get(f"{path}/git/commits", params={"since": shas[0], "until": shas[3]}).json()["selector"]
    assert chosen == {"Range": {"since": shas[0], "until": shas[3]}}
    for query, code in (
        ({"since": shas[4], "until": shas[1]}, "COMMIT_NOT_IN_BRANCH"),
        ({"since": "0" * 40}, "COMMIT_NOT_FOUND"),
        ({"until": "--all"}, "INVALID_REQUEST"),
        ({"branch": "nothing"}, "BRANCH_NOT_FOUND"),
        ({"since": shas[0], "offset": "1"}, "OFFSET_WITH_SELECTOR"),
    ):
        answer = api.get(f"{path}/git/commits", params=query)
        assert answer.json()["code"] == code, answer.text


def test_a_directory_is_shown_with_all_that_is_in_it(api: httpx.Client) -> None:
    files = {"README": "0", "src/a.ts": "1", "src/deep/b.ts": "22"}
    made = api.post("/git/v1/repo", json={"import": {"type": "files", "files": files, "commitMessage": "In"}})
    path = f"/git/v1/repo/{made.json()['repoId']}/contents"

    def paths(entries: list[dict[str, Any]]) -> list[object]:
        return [one["path"] if one["type"] == "file" else {one["path"]: paths(one["entries"])} for one in entries]

    assert paths(api.get(f"{path}/").json()["entries"]) == ["README", {"src": []}]
    whole = api.get(f"{path}/", params={"recursive": "true"}).json()["entries"]
    assert paths(whole) == ["README", {"src": ["src/a.ts", {"src/deep": ["src/deep/b.ts"]}]}]
    part = api.get(f"{path}/src", params={"recursive": "true"}).json()
    assert (part["type"], paths(part["entries"])) == ("dir", ["src/a.ts", {"src/deep": ["src/deep/b.ts"]}])
    assert part["entries"][1]["entries"][0]["size"] == 2


def test_files_are_searched_as_clients_expect(api: httpx.Client) -> None:
    files = {
        "src/app.ts": "a needle, a needle\nnothing\n  näh needle\n",
        "src/deep/b.ts": "needle\n",
        "c.md": "needle\n",
        "d.min.ts": "needle\n",
    }
    made = api.post("/git/v1/repo", json={"import": {"type": "files", "files": files, "commitMessage": "In"}})
    path = f"/git/v1/repo/{made.json()['repoId']}/search"

    def found(where: str = "", **query: object) -> dict[str, Any]:
        answer = api.get(path + where, params={name: str(value) for name, value in query.items()})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    whole = found(query="needle", pathPattern="*.ts", excludePattern="*.min.ts")
    assert (whole["totalFiles"], whole["totalMatches"], whole["hasMore"]) == (2, 3, False)
    assert [file["path"] for file in whole["files"]] == ["src/app.ts", "src/deep/b.ts"]
    matches = whole["files"][0]["matches"]
    assert [(one["lineNumber"], one["startColumn"], one["endColumn"]) for one in matches] == [(1, 2, 8), (3, 6, 12)]
    assert (matches[1]["contextBefore"], matches[1]["contextAfter"]) == (["a needle, a needle", "nothing"], [])
    page = found(query="needle", maxResults=2, offset=1)
    assert [file["path"] for file in page["files"]] == ["d.min.ts", "src/app.ts"]
    assert (page["totalFiles"], page["totalMatches"], page["hasMore"]) == (4, 5, True)
    assert not found(query="needle", maxResults=2, offset=2)["hasMore"]
    (commit,) = found("/diffs", query=r"h ne+", isRegex="true", excludePattern="*.md")["commits"]
    (line,) = commit["files"][0]["matches"]
    assert (line["lineNumber"], line["startColumn"], line["endColumn"]) == (3, 5, 10), "in bytes"
    assert found("/diffs", query="needle", pathPattern="*.ts", excludePattern="**/*.ts")["commits"] == []


def test_logs_come_in_pages_from_the_newest(api: httpx.Client, vm: str) -> None:
    query = {"vmId": vm, "pageSize": "1"}
    whole = api.get("/observability/v1/logs", params={"vmId": vm}).json()["logs"]
    seen = []
    while True:
        page = api.get("/observability/v1/logs", params=query).json()
        seen = page["logs"] + seen
        if page["nextPageToken"] is None:
            break
        query["pageToken"] = page["nextPageToken"]
    assert seen == whole
    assert len(whole) > 1
    found = api.get("/observability/v1/logs", params={"vmId": vm, "search": "SANDBOX.RUNNING"}).json()["logs"]
    assert found
    wrong = api.get("/observability/v1/logs", params={"vmId": vm, "pageToken": "x"})
    assert (wrong.status_code, wrong.json()["code"]) == (400, "INVALID_REQUEST")


def test_the_journal_of_a_service_streams(
    api: httpx.Client, unreal: Daemon, vm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client asks for what is newer than now, and then than the last it saw."""
    journal = "2026-01-31T12:00:00+0000 vm app[7]: one\n  more of it\n2026-01-31T12:00:05+0000 vm app[7]: two: halves\n"

    async def logs(sandbox_id: str, name: str, lines: int = 100) -> ServiceLogs:
        assert (sandbox_id, name) == (vm, "app")
        return ServiceLogs(name=name, log=journal)

    monkeypatch.setattr(unreal._control.services, "logs", logs)

    def told(**query: str) -> list[tuple[str, str]]:
        answer = api.get("/observability/v1/logs", params={"vmId": vm, "vmService": "app.service", **query})
        return [(one["timestamp"], one["message"]) for one in answer.json()["logs"]]

    first, second = "2026-01-31T12:00:00.000Z", "2026-01-31T12:00:05.000Z"
    assert told() == [(first, "one"), (first, "  more of it"), (second, "two: halves")]
    assert told(startTime="2026-01-31T12:00:05.900Z") == [(second, "two: halves")]
    assert told(startTime="2026-01-31T12:00:06.000Z") == []


def test_logs_of_a_vm_are_by_time(api: httpx.Client, vm: str) -> None:
    times = [one["timestamp"] for one in api.get("/observability/v1/logs", params={"vmId": vm}).json()["logs"]]
    assert times == sorted(times)


# ── scripts ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_is_on_record_unless_nothing_is_to_be_kept_of_it() -> None:
    with (
        running_daemon() as daemon,
        httpx.Client(base_url=daemon.url, headers={"Authorization": f"Bearer {daemon.key}"}, timeout=60) as api,
    ):

        def ran(script: str, **config: object) -> httpx.Response:
            return api.post("/execute/v3/script", json={"script": script, "config": config})

        assert ran("export default () => 1", zeroRetention=True).json() == {"result": 1, "logs": []}
        assert api.get("/execute/v1/deployments").json() == {"entries": [], "total": 0, "offset": 0}
        script = "export default () => { console.log('said'); return process.env.A }"
        run_id = ran(script, envVars={"A": "b"}).json()["runId"]
        (entry,) = api.get("/execute/v1/deployments").json()["entries"]
        assert (entry["deployment"], entry["state"], entry["envVars"]) == (run_id, "complete", {"A": "b"})
        one = api.get(f"/execute/v1/deployments/{run_id}").json()
        assert one == {"metadata": entry, "code": {"code": script, "nodeModules": {}}}
        output = api.get(f"/execute/v1/deployments/{run_id}/output").json()
        logs = [{"type": "log", "message": "said"}]
        assert output == {"status": "complete", "result": "b", "error": None, "logs": logs}
        refused = ran(script, customHeaders={"X-A": "b"})
        assert (refused.status_code, refused.json()["code"]) == (501, "SERVICE_UNAVAILABLE")


def test_a_timeline_counts_what_ended_by_the_hour(api: httpx.Client, unreal: Daemon) -> None:
    wanted = {"cron": "0 0 1 1 *", "run": {"script": "export default 1"}}
    schedule = api.post("/v1/cron/schedules", json=wanted).json()["schedule"]["id"]
    at = datetime(2030, 1, 31, 12, 20, tzinfo=UTC)
    for minutes, state in ((0, "succeeded"), (10, "failed"), (90, "succeeded")):
        run_at = at + timedelta(minutes=minutes)
        record = new_record(RunCreate(script="1"), "", run_at, state="running", schedule_id=schedule)
        ended = {"state": state, "attempts": 1, "finished_at": run_at + timedelta(seconds=2)}
        unreal._run(unreal._control.ground.store.add_run(dataclasses.replace(record, **ended)))
    time = {"start": "2030-01-31T00:00:00Z", "end": "2030-02-01T00:00:00Z"}
    found = api.get(f"/v1/cron/schedules/{schedule}/metrics-timeline", params=time).json()
    told = [(one["timestamp"], one["succeededCount"], one["failedCount"]) for one in found["dataPoints"]]
    assert told == [("2030-01-31T12:00:00.000Z", 1, 1), ("2030-01-31T13:00:00.000Z", 1, 0)]
    assert found["dataPoints"][0]["p99SuccessLatencyMs"] == 2000
    assert (found["scheduleId"], found["start"]) == (schedule, "2030-01-31T00:00:00.000Z")
    assert api.get(f"/v1/cron/schedules/{schedule}/success-rate", params=time).json()["total"] == 3
    listed = api.get("/v1/cron/schedules", params={"deploymentId": "x"}).json()
    assert listed == {"schedules": []}


# ── domains ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _verified(unreal: Daemon, api: httpx.Client, domain: str) -> dict[str, str]:
    made = api.post("/domains/v1/verifications", json={"domain": domain}).json()
    unreal._run(unreal._control.ground.store.verify_domain(domain))
    return {"domain": domain, "verificationCode": str(made["verificationCode"])}


def test_a_verification_is_cancelled_by_its_code_and_before_it_is_complete(
    unreal: Daemon, api: httpx.Client, vm: str
) -> None:
    def cancelled(body: dict[str, str]) -> tuple[int, str]:
        answer = api.request("DELETE", "/domains/v1/verifications", json=body)
        return answer.status_code, answer.json().get("code", "")

    mine = _verified(unreal, api, "kept.example.com")
    assert api.post("/domains/v1/mappings/kept.example.com", json={"vmId": vm, "vmPort": 80}).status_code == 200
    for code in (mine["verificationCode"], "nonsense"):
        assert cancelled({**mine, "verificationCode": code}) == (400, "FAILED_TO_DELETE_VERIFICATION")
    assert api.get("/domains/v1/mappings", params={"domain": "kept.example.com"}).json()[0]["vmId"] == vm
    begun = api.post("/domains/v1/verifications", json={"domain": "begun.example.com"}).json()
    begun = {"domain": "begun.example.com", "verificationCode": begun["verificationCode"]}
    assert cancelled({**begun, "verificationCode": "nonsense"}) == (404, "VERIFICATION_NOT_FOUND")
    assert cancelled(begun) == (200, "")


def test_names_below_a_verified_domain_are_its_owners_too(unreal: Daemon, api: httpx.Client, vm: str) -> None:
    _verified(unreal, api, "parent.example.net")
    mapped = api.post("/domains/v1/mappings/app.parent.example.net", json={"vmId": vm, "vmPort": 80})
    assert (mapped.status_code, mapped.json().get("domain")) == (200, "app.parent.example.net")
    for other in ("app.example.net", "xparent.example.net"):
        refused = api.post(f"/domains/v1/mappings/{other}", json={"vmId": vm, "vmPort": 80})
        assert (refused.status_code, refused.json()["code"]) == (400, "DOMAIN_OWNERSHIP_NOT_VERIFIED")


# ── imports ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_repository_is_imported_from_where_it_is(api: httpx.Client) -> None:
    """As clients send it. Of this host, which only a daemon that is told so reads from."""
    zipped = io.BytesIO()
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("README", "all")
        archive.writestr("packages/app/index.js", "app")
    tarred = io.BytesIO()
    with tarfile.open(fileobj=tarred, mode="w:gz") as tar:
        info = tarfile.TarInfo("packages/app/index.js")
        info.size = 3
        tar.addfile(info, io.BytesIO(b"app"))
    about = {"commitMessage": "In", "authorName": "Ada", "authorEmail": "ada@example.com", "dir": "packages/app"}
    with running_daemon(Outward(allow_private=True)) as daemon, Place() as place:
        place.files |= {"/a.zip": zipped.getvalue(), "/a.tgz": tarred.getvalue()}
        with httpx.Client(
            base_url=daemon.url, headers={"Authorization": f"Bearer {daemon.key}"}, timeout=30
        ) as open_api:

            def made(**source: object) -> httpx.Response:
                return open_api.post("/git/v1/repo", json={"import": {**about, **source}})

            first = made(type="zip", url=place.url("/a.zip")).json()["repoId"]
            second = made(type="tar", url=place.url("/a.tgz")).json()["repoId"]
            clone = f"http://x:{daemon.key}@127.0.0.1:{daemon.port}/git/{first}.git"
            third = made(type="git", url=clone, dir=None).json()["repoId"]
            for repo in (first, second, third):
                there = open_api.get(f"/git/v1/repo/{repo}/contents/").json()
                assert [entry["path"] for entry in there["entries"]] == ["index.js"]
                (commit,) = open_api.get(f"/git/v1/repo/{repo}/git/commits").json()["commits"]
                assert (commit["message"].strip(), commit["author"]["name"]) == ("In", "Ada")
            for source, code in (
                ({"type": "zip", "url": place.url("/nothing")}, "SOURCE_NOT_FOUND"),
                ({"type": "tar", "url": place.url("/a.zip")}, "SOURCE_NOT_FOUND"),
                ({"type": "tar", "url": place.url("/a.tgz"), "dir": "nowhere"}, "SOURCE_NOT_FOUND"),
                ({"type": "git", "url": clone, "dir": "nowhere"}, "SOURCE_NOT_FOUND"),
                ({"type": "rar", "url": place.url("/a.tgz")}, "GIT_INVALID_REQUEST"),
                ({"type": "tar"}, "GIT_INVALID_REQUEST"),
            ):
                answer = made(**source)
                assert (answer.status_code, answer.json()["code"]) == (400, code)
        refused = api.post("/git/v1/repo", json={"import": {**about, "type": "zip", "url": place.url("/a.zip")}})
        assert (refused.status_code, refused.json()["code"]) == (403, "FORBIDDEN")


# ── requests in the background ───────────────────────────────────────────────────────────────────────────────────


def test_a_client_that_does_not_wait_comes_again_for_the_answer(unreal: Daemon, api: httpx.Client) -> None:
    begun = api.post("/v1/vms", json={}, headers={"x-freestyle-background-after-secs": "0"})
    assert begun.status_code == 202
    where = f"/auth/v1/background-requests/{begun.headers['x-freestyle-background-request-id']}"
    deadline = time.monotonic() + 20
    while (answer := api.get(where)).status_code == 202:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert answer.status_code == 200
    assert api.delete(f"/v1/vms/{answer.json()['id']}").status_code == 200
    unknown = api.get("/auth/v1/background-requests/ri-nothing")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "NOT_FOUND")


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────

_leaf = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
_json = st.recursive(_leaf, lambda of: st.lists(of, max_size=4) | st.dictionaries(st.text(max_size=8), of, max_size=4))


def _fields() -> list[str]:
    text = "".join(source.read_text() for source in SOURCES.glob("*.py"))
    aliases = re.findall(r'alias="(\w+)"', text)
    plain = re.findall(r"^    (\w+): [^=\n]+(?:=|$)", (SOURCES / "models.py").read_text(), re.MULTILINE)
    return sorted({*aliases, *plain})


_body = st.one_of(
    st.dictionaries(st.sampled_from(_fields()), _json, max_size=6).map(lambda it: json.dumps(it).encode()),
    st.dictionaries(
        st.sampled_from(_fields()), st.dictionaries(st.sampled_from(_fields()), _json, max_size=4), max_size=4
    ).map(lambda it: json.dumps(it).encode()),
    _json.map(lambda it: json.dumps(it).encode()),
    st.binary(max_size=60),
)
_WITH_BODY = [(method, path) for method, path in _table() if method in ("POST", "PUT", "PATCH", "DELETE")]
#: Of the VM that is there, those that neither end nor wait.
_HARMLESS = ("exec-await", "files/", "systemd", "start", "snapshot")
_settings = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


#: What a path may be below, and how it is made.
_MADE: dict[str, tuple[str, dict[str, Any], str]] = {
    "/git/v1/repo/x": (
        "/git/v1/repo",
        {"import": {"type": "files", "files": {"a": "1"}, "commitMessage": "In"}},
        "repoId",
    ),
    "/identity/v1/identities/x": ("/identity/v1/identities", {}, "id"),
    "/v1/cron/schedules/x": ("/v1/cron/schedules", {"cron": "0 0 1 1 *", "run": {"script": "export default 1"}}, "id"),
    "/v1/vms/snapshots/x": ("/v1/vms/snapshots", {}, "snapshotId"),
}


class There:
    """One of each, made anew when it is gone."""

    def __init__(self, api: httpx.Client) -> None:
        self._api = api
        self._ids: dict[str, str] = {}

    def path(self, path: str) -> str:
        """Below what there is, if it is below anything."""
        for place, (make, body, field) in _MADE.items():
            if path == place or path.startswith(f"{place}/"):
                where = place.removesuffix("x")
                look = where + self._ids.get(place, "x") + ("/tokens" if "identities" in place else "")
                if self._api.get(look).status_code == 404:
                    made = self._api.post(make, json=body)
                    assert made.status_code == 200, made.text
                    self._ids[place] = str(made.json().get("schedule", made.json())[field])
                return where + self._ids[place] + path.removeprefix(place)
        return path


@pytest.fixture(scope="module")
def there(api: httpx.Client) -> There:
    return There(api)


@settings(_settings, max_examples=300)
@given(st.sampled_from([(method, path) for method, path in _table() if "stream" not in path]), _body)
def test_no_body_breaks_what_is_there(api: httpx.Client, there: There, route: tuple[str, str], body: bytes) -> None:
    method, path = route
    known = there.path(path)
    if known != path:
        _harmless(api.request(method, known, content=body))


@_settings
@given(st.sampled_from(_WITH_BODY), _body)
def test_no_body_breaks_it(api: httpx.Client, vm: str, route: tuple[str, str], body: bytes) -> None:
    method, path = route
    answer = api.request(method, path.replace("/vms/x", f"/vms/{NOBODY}"), content=body)
    _harmless(answer)
    if method == "POST" and path == "/v1/vms" and answer.status_code == 200:
        api.delete(f"/v1/vms/{answer.json()['id']}")
    if "/vms/x/" in path and path.split("/vms/x/")[1].startswith(_HARMLESS):
        _harmless(api.request(method, path.replace("/vms/x", f"/vms/{vm}"), content=body))


def _harmless(answer: httpx.Response) -> None:
    if answer.status_code != 200:
        if answer.status_code == 404 and not answer.content:
            return  # a GitHub repository that is not set: clients want it so
        assert _is_error(answer)
        assert answer.json()["code"] != "INTERNAL_ERROR", answer.text
        assert answer.status_code < 500 or answer.json()["code"] in ("VM_SETUP_FAILED", "SERVICE_UNAVAILABLE")


def _queries() -> list[str]:
    """What is read of a query, anywhere."""
    text = "".join(source.read_text() for source in SOURCES.glob("*.py"))
    found = {
        *re.findall(r'\.(?:query|number|flag)\("(\w+)"', text),
        *re.findall(r'_(?:instant|globs)\(call, "(\w+)"', text),
    }
    assert found >= {"pathPattern", "excludePattern", "startTime", "limit", "isRegex", "since"}
    return sorted(found)


@settings(_settings, max_examples=300)
@given(
    st.sampled_from([path for method, path in _table() if method == "GET" and "stream" not in path]),
    st.dictionaries(
        st.sampled_from(_queries()), st.text() | st.sampled_from(["\0", "0", "-1", "true", "**", "main"]), max_size=6
    ),
    st.booleans(),
)
def test_no_query_breaks_it(api: httpx.Client, there: There, path: str, query: dict[str, str], searching: bool) -> None:
    """Neither of what is there nor of what is not."""
    asked = {**query, **({"query": "a"} if searching else {})}
    _harmless(api.get(path.replace("/vms/x", f"/vms/{NOBODY}"), params=asked))
    known = there.path(path)
    if known != path:
        _harmless(api.get(known, params=asked))
