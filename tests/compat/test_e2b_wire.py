"""What no published client sends, and what it must be told."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import string
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forkyard.compat.e2b import proto
from forkyard.compat.e2b.facade import all_routes
from forkyard.guest.fake import FakeGuest
from forkyard.hosts.memory import MemoryHost

from ..contract.sdk_daemon import Daemon, running_daemon  # noqa: TID252
from .e2b_wire import api_of, envd_of, is_error, made

NOBODY = "i" + "0" * 19


def _control() -> list[tuple[str, str]]:
    """Every route of the control plane. `ID` stands for a sandbox, `x` for anything else that has a name."""

    class Anything:
        def __getattr__(self, _: str) -> Anything:
            return self

    plain = [(method, path.replace("{sandbox_id}", "ID")) for method, path, _ in all_routes(*[Anything()] * 5)]  # type: ignore[arg-type]
    return [(method, re.sub(r"\{[\w:]+\}", "x", path)) for method, path in plain]


CONTROL = _control()
NOT_SERVED = [
    ("POST", "/templates"),
    ("GET", "/volumecontent"),
    ("GET", "/teams"),
    ("PATCH", "/sandboxes/x"),
    ("GET", "/sandboxes/x/nothing"),
    ("PUT", "/templates/x/files"),
]


class Unreal(Daemon):
    """Its guests are only memory: what is made up by a fuzzer may remove anything there."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.host = MemoryHost(lambda *_: FakeGuest())  # type: ignore[assignment]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def unreal() -> Iterator[Daemon]:
    with tempfile.TemporaryDirectory(prefix="fye2b-") as root:
        daemon = Unreal(Path(root))
        daemon.start()
        yield daemon
        daemon.stop()


@pytest.fixture(scope="module")
def sandbox(api: httpx.Client) -> dict[str, str]:
    return made(api)


@pytest.fixture(scope="module")
def envd(daemon: Daemon, sandbox: dict[str, str]) -> Iterator[httpx.Client]:
    with envd_of(daemon, sandbox) as client:
        yield client


@pytest.fixture(scope="module")
def unreal_api(unreal: Daemon) -> Iterator[httpx.Client]:
    with api_of(unreal) as client:
        yield client


@pytest.fixture(scope="module")
def unreal_sandbox(unreal_api: httpx.Client) -> dict[str, str]:
    return made(unreal_api)


@pytest.fixture(scope="module")
def unreal_volume(unreal_api: httpx.Client) -> dict[str, str]:
    made = unreal_api.post("/volumes", json={"name": "files"})
    assert made.status_code == 201
    return dict(made.json())


@pytest.fixture(scope="module")
def unreal_envd(unreal: Daemon, unreal_sandbox: dict[str, str]) -> Iterator[httpx.Client]:
    with envd_of(unreal, unreal_sandbox) as client:
        yield client


# ── who may ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("method", "path"), [*CONTROL, *NOT_SERVED])
def test_nothing_is_done_without_a_key(daemon: Daemon, method: str, path: str) -> None:
    answer = httpx.request(method, daemon.url + path)
    assert answer.status_code == 401
    assert is_error(answer)


@pytest.mark.parametrize("token", [None, "", "x", "é"])
def test_a_sandbox_answers_nobody_without_its_token(daemon: Daemon, sandbox: dict[str, str], token: str | None) -> None:
    headers = {"E2b-Sandbox-Id": sandbox["sandboxID"], "E2b-Sandbox-Port": "49983"}
    if token is not None:
        headers["X-Access-Token"] = token.encode().decode("latin-1")
    for method, path in (("GET", "/files?path=/etc/hostname"), ("GET", "/envs"), ("POST", "/process.Process/List")):
        answer = httpx.request(method, daemon.url + path, headers={k: v.encode("latin-1") for k, v in headers.items()})  # type: ignore[misc]
        assert answer.status_code == 401


def test_the_token_of_one_sandbox_does_not_open_another(api: httpx.Client, envd: httpx.Client) -> None:
    other = api.post("/v2/sandboxes", json={"templateID": "base"}).json()
    answer = envd.get("/envs", headers={"E2b-Sandbox-Id": other["sandboxID"]})
    assert answer.status_code == 401
    assert api.delete(f"/sandboxes/{other['sandboxID']}").status_code == 204


def test_a_sandbox_is_found_by_its_host_name(daemon: Daemon, sandbox: dict[str, str]) -> None:
    host = {"Host": f"49983-{sandbox['sandboxID']}.localhost"}
    assert httpx.get(f"{daemon.url}/health", headers=host).status_code == 204
    old = {"Host": f"49983-{sandbox['sandboxID']}-00000000.localhost"}
    assert httpx.get(f"{daemon.url}/health", headers=old).status_code == 204


def test_routing_headers_count_for_nothing_on_a_host_of_a_sandbox(daemon: Daemon, sandbox: dict[str, str]) -> None:
    headers = {"Host": f"3000-{sandbox['sandboxID']}.localhost", "E2b-Sandbox-Id": sandbox["sandboxID"]}
    assert httpx.get(f"{daemon.url}/health", headers=headers).status_code != 204
    assert httpx.get(f"{daemon.url}/health", headers={**headers, "Host": "evil.example"}).status_code != 204


def test_contexts_that_are_not_open_to_all_are_opened_by_the_token_of_the_ports(
    daemon: Daemon, api: httpx.Client, sandbox: dict[str, str]
) -> None:
    body = {"templateID": "base", "timeout": 600, "network": {"allowPublicTraffic": False}}
    shut = api.post("/v2/sandboxes", json=body).json()
    assert "trafficAccessToken" not in sandbox
    token = {"E2b-Traffic-Access-Token": shut["trafficAccessToken"]}

    def contexts(headers: dict[str, str]) -> int:
        host = {"Host": f"49999-{shut['sandboxID']}.localhost"}
        return httpx.get(f"{daemon.url}/contexts", headers={**host, **headers}).status_code

    assert contexts({}) == 401
    assert contexts({"E2b-Traffic-Access-Token": "x" * 64}) == 401
    assert contexts(token) == 200
    assert api.delete(f"/sandboxes/{shut['sandboxID']}").status_code == 204


def test_the_files_of_a_volume_are_there_for_whoever_has_its_token(
    unreal_api: httpx.Client, unreal_volume: dict[str, str]
) -> None:
    other = unreal_api.post("/volumes", json={"name": "another"}).json()
    path = f"/volumecontent/{unreal_volume['volumeID']}/file?path=/a"
    for token, status in ((unreal_volume["token"], 404), (other["token"], 401), ("x", 401)):
        assert unreal_api.get(path, headers={"Authorization": f"Bearer {token}"}).status_code == status
    nothing = unreal_api.get("/volumecontent/nothing/file?path=/a", headers={"Authorization": "Bearer x"})
    assert nothing.status_code == 401


@pytest.mark.parametrize("path", ["/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade"])
def test_what_e2b_keeps_to_itself_is_not_there(envd: httpx.Client, path: str) -> None:
    answer = envd.post(path, json={})
    assert answer.status_code == 404
    assert is_error(answer)


# ── what is not served ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("method", "path"), NOT_SERVED)
def test_what_is_not_served_says_so(api: httpx.Client, method: str, path: str) -> None:
    answer = api.request(method, path, json={} if method in ("POST", "PATCH") else None)
    assert answer.status_code in (404, 405, 501)
    assert is_error(answer)


@pytest.mark.parametrize("path", ["/", "/v1/nothing", "/v9/nodes", "/nothing.html", "/process.Process/List"])
def test_whatever_a_client_may_ask_for_is_answered_as_it_expects(api: httpx.Client, path: str) -> None:
    answer = api.get(path, headers={"publisher": "e2b"})
    assert answer.status_code == 501
    assert is_error(answer)


@pytest.mark.parametrize("field", ["iam", "mcp"])
def test_a_field_that_is_not_served_says_so(api: httpx.Client, field: str) -> None:
    answer = api.post("/sandboxes", json={"templateID": "base", field: {"any": "thing"}})
    assert (answer.status_code, answer.json()["message"]) == (400, f"{field} is not served here yet; leave it out")


@pytest.mark.parametrize(
    "query", [{"start": "x"}, {"end": "-1"}, {"start": "1e9"}, {"end": "9" * 16}, {"start": "20", "end": "10"}]
)
def test_a_time_that_is_none_is_refused(api: httpx.Client, sandbox: dict[str, str], query: dict[str, str]) -> None:
    answer = api.get(f"/sandboxes/{sandbox['sandboxID']}/metrics", params=query)
    assert answer.status_code == 400
    assert is_error(answer)


def test_samples_are_of_the_time_that_was_asked_for(api: httpx.Client, sandbox: dict[str, str]) -> None:
    path, now = f"/sandboxes/{sandbox['sandboxID']}/metrics", int(time.time())
    for factor in (1, 1000):  # seconds, and milliseconds as the oldest clients send them
        found = api.get(path, params={"start": (now - 60) * factor, "end": (now + 60) * factor}).json()
        assert abs(found[-1]["timestampUnix"] - now) < 60
        assert api.get(path, params={"end": (now - 3600) * factor}).json() == []
    required = {"timestamp", "timestampUnix", "cpuCount", "cpuUsedPct", "memUsed", "memTotal", "memCache"}
    assert found[-1].keys() == required | {"diskUsed", "diskTotal"}
    of_all = api.get("/sandboxes/metrics", params={"sandbox_ids": f"{sandbox['sandboxID']},nothing"}).json()
    assert of_all["sandboxes"].keys() == {sandbox["sandboxID"]}


def test_logs_are_of_what_was_asked_for(
    unreal: Daemon, unreal_api: httpx.Client, unreal_sandbox: dict[str, str]
) -> None:
    sandbox_id = unreal_sandbox["sandboxID"]
    (machine,) = [one for key, one in unreal.host.world.machines.items() if key.sandbox_id == sandbox_id]
    machine.logs = machine.logs.model_copy(update={"console": "Booting\nkernel: ready\nlogin:\n"})
    now_ms = int(time.time() * 1000)

    def lines(**query: object) -> list[str]:
        asked = {name: str(value) for name, value in query.items()}
        answer = unreal_api.get(f"/v2/sandboxes/{sandbox_id}/logs", params=asked)
        assert answer.status_code == 200, answer.text
        return [one["message"] for one in answer.json()["logs"]]

    assert lines() == ["Booting", "kernel: ready", "login:"]
    assert lines(direction="backward", limit=2) == ["login:", "kernel: ready"]
    assert lines(search="KERNEL", level="info") == ["kernel: ready"]
    assert lines(level="error") == lines(cursor=now_ms + 60_000) == lines(direction="backward", cursor=1) == []
    assert len(lines(cursor=1)) == len(lines(direction="backward", cursor=now_ms + 60_000)) == 3
    for query in ({"direction": "up"}, {"level": "loud"}, {"cursor": "now"}):
        assert is_error(unreal_api.get(f"/sandboxes/{sandbox_id}/logs", params=query))


@pytest.mark.parametrize("digits", ["\u00b2", "\u0663", "0" * 5000 + "1", "1" * 5000])
def test_digits_of_another_kind_break_nothing(envd: httpx.Client, api: httpx.Client, digits: str) -> None:
    signed = {"path": "/etc/hostname", "signature": "v1_x", "signature_expiration": digits}
    for headers in ({"X-Access-Token": ""}, {}):
        assert envd.get("/files", params=signed, headers=headers).status_code < 500
    for path in ("/snapshots", "/v2/sandboxes"):
        assert api.get(path, params={"limit": digits}).status_code == 400


def test_another_port_of_a_sandbox_is_not_open(envd: httpx.Client) -> None:
    answer = envd.get("/", headers={"E2b-Sandbox-Port": "3000"})
    assert answer.status_code == 502
    assert "port is not open" in answer.json()["message"]


def test_a_sandbox_that_is_not_there_is_not_found(envd: httpx.Client) -> None:
    for sandbox_id in ("i" + "0" * 19, "X", "../.."):
        answer = envd.get("/health", headers={"E2b-Sandbox-Id": sandbox_id})
        assert answer.status_code == 502
        assert answer.json()["message"] == "The sandbox was not found"


def test_methods_of_the_services_that_do_not_exist_are_unimplemented(envd: httpx.Client) -> None:
    answer = envd.post("/process.Process/Nothing", json={})
    assert answer.status_code == 501
    assert answer.json()["code"] == "unimplemented"


# ── bad input ────────────────────────────────────────────────────────────────────────────────────────────────────

_leaf = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
_json = st.recursive(_leaf, lambda of: st.lists(of, max_size=4) | st.dictionaries(st.text(max_size=8), of, max_size=4))
_fields = [
    "templateID",
    "timeout",
    "autoPause",
    "autoResume",
    "allow_internet_access",
    "metadata",
    "envVars",
    "network",
    "volumeMounts",
    "iam",
    "mcp",
    "memory",
    "duration",
    "count",
    "name",
    "allowOut",
    "denyOut",
    "allowPublicTraffic",
    "path",
    "source",
    "destination",
    "depth",
    "recursive",
    "includeEntry",
    "watcherId",
    "process",
    "input",
    "signal",
    "pty",
    "tag",
    "stdin",
    "data",
    "start",
    "selector",
    "alias",
    "tags",
    "target",
    "cpuCount",
    "memoryMB",
    "fromImage",
    "fromTemplate",
    "steps",
    "startCmd",
    "readyCmd",
    "force",
    "public",
    "value",
]
_body = st.one_of(
    st.dictionaries(st.sampled_from(_fields), _json, max_size=6).map(lambda it: json.dumps(it).encode()),
    _json.map(lambda it: json.dumps(it).encode()),
    st.binary(max_size=60),
)
_UNARY = [
    method for method in proto.REQUESTS if method.split("/")[1] not in ("Start", "Connect", "StreamInput", "WatchDir")
]
_STREAMS = [method for method in proto.REQUESTS if method not in _UNARY]
_settings = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None
)


class Victim:
    """A sandbox that may be ended by what is done to it."""

    def __init__(self, api: httpx.Client) -> None:
        self._api = api
        self.id = NOBODY

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        self._api.delete(f"/sandboxes/{self.id}")

    def there(self) -> str:
        if self._api.get(f"/sandboxes/{self.id}").status_code == 404:
            self.id = made(self._api)["sandboxID"]
        return self.id


@pytest.fixture(scope="module")
def victim(unreal_api: httpx.Client) -> Iterator[Victim]:
    with Victim(unreal_api) as victim:
        yield victim


_WITH_BODY = [(method, path) for method, path in CONTROL if method != "GET"]


@settings(_settings, max_examples=250)
@given(st.sampled_from(_WITH_BODY), _body)
def test_no_body_breaks_the_control_plane(
    unreal_api: httpx.Client, victim: Victim, route: tuple[str, str], body: bytes
) -> None:
    method, path = route
    for sandbox_id in (NOBODY, victim.there()) if "ID" in path else ("",):
        answer = unreal_api.request(method, path.replace("ID", sandbox_id), content=body)
        assert answer.status_code < 500 or answer.json()["message"].endswith("is not served here yet"), answer.text
        assert answer.status_code < 300 or is_error(answer)
        if answer.status_code != 201 or "sandbox" not in answer.text.lower():
            continue
        made = answer.json() if isinstance(answer.json(), list) else [{"sandbox": answer.json()}]
        for one in made:
            if one["sandbox"].get("sandboxID") not in (None, sandbox_id):
                assert unreal_api.delete(f"/sandboxes/{one['sandbox']['sandboxID']}").status_code == 204


def test_the_table_is_seen() -> None:
    assert len(CONTROL) > 45
    assert len(_WITH_BODY) > 20


_step = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["RUN", "COPY", "ENV", "WORKDIR", "USER", "ADD", ""]),
        "args": st.lists(st.text(), max_size=4),
    }
)
_start = st.fixed_dictionaries(
    {},
    optional={
        "fromImage": st.sampled_from(["debian:12", "nothing", "python:3"]) | st.text(),
        "fromTemplate": st.sampled_from(["base", "fuzzed"]) | st.text(),
        "steps": st.lists(_step, max_size=3),
        "startCmd": st.text(),
        "readyCmd": st.text(),
        "force": st.booleans(),
    },
)


@_settings
@given(_start.map(lambda it: json.dumps(it).encode()) | _body)
def test_no_body_breaks_a_build(unreal_api: httpx.Client, body: bytes) -> None:
    asked = unreal_api.post("/v3/templates", json={"name": "fuzzed"}).json()
    path = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    answer = unreal_api.post(f"/v2{path}", content=body)
    assert answer.status_code == 202 or (answer.status_code < 500 and is_error(answer)), answer.text
    status = unreal_api.get(f"{path}/status")
    assert status.json()["status"] in ("waiting", "building", "ready", "error")


_QUERIES = [
    "limit",
    "nextToken",
    "metadata",
    "state",
    "order",
    "startedAfter",
    "template",
    "sandboxID",
    "name",
    "start",
    "end",
    "sandbox_ids",
    "cursor",
    "direction",
    "level",
    "search",
    "logsOffset",
]


@settings(_settings, max_examples=150)
@given(
    st.sampled_from([path for method, path in CONTROL if method == "GET"]),
    st.dictionaries(st.sampled_from(_QUERIES), st.text() | st.integers(-5, 2**70).map(str)),
)
def test_no_query_breaks_a_look(unreal_api: httpx.Client, victim: Victim, path: str, query: dict[str, str]) -> None:
    for sandbox_id in (NOBODY, victim.there()) if "ID" in path else ("",):
        answer = unreal_api.get(path.replace("ID", sandbox_id), params=query)
        assert answer.status_code == 200 or (answer.status_code in (400, 404) and is_error(answer)), answer.text


@_settings
@given(st.sampled_from(_UNARY), st.sampled_from(["json", "proto"]), _body)
def test_no_message_breaks_a_call(unreal_envd: httpx.Client, method: str, kind: str, body: bytes) -> None:
    answer = unreal_envd.post(f"/{method}", content=body, headers={"Content-Type": f"application/{kind}"})
    assert answer.status_code < 500 or answer.json()["code"] == "unimplemented", answer.text
    if answer.status_code >= 300:
        assert answer.json()["code"]


@_settings
@given(
    st.sampled_from(_STREAMS),
    st.sampled_from(["json", "proto"]),
    st.one_of(st.binary(max_size=40), _body),
    st.booleans(),
)
def test_no_message_breaks_a_stream(
    unreal_envd: httpx.Client, method: str, kind: str, body: bytes, framed: bool
) -> None:
    content = struct.pack(">BI", 0, len(body)) + body if framed else body
    headers = {"Content-Type": f"application/connect+{kind}", "Connect-Timeout-Ms": "300"}
    answer = unreal_envd.post(f"/{method}", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    last = None
    rest = answer.content
    while rest:
        flags, length = struct.unpack_from(">BI", rest)
        last, rest = (flags, rest[5 : 5 + length]), rest[5 + length :]
    assert last is not None
    assert last[0] == 2
    assert json.loads(last[1]).keys() <= {"error"}


@_settings
@given(
    st.sampled_from(["multipart/form-data", "multipart/form-data; boundary=x", "application/octet-stream", ""]),
    st.binary(),
)
def test_no_upload_breaks_the_files(unreal_envd: httpx.Client, kind: str, body: bytes) -> None:
    for gzip in ({}, {"Content-Encoding": "gzip"}):
        answer = unreal_envd.post(
            "/files", params={"path": "/tmp/x"}, content=body, headers={"Content-Type": kind, **gzip}
        )
        assert answer.status_code == 200 or (answer.status_code < 500 and is_error(answer)), answer.text


_CODE = [
    ("POST", "/execute"),
    ("POST", "/contexts"),
    ("GET", "/contexts"),
    ("POST", "/contexts/X/restart"),
    ("DELETE", "/contexts/X"),
    ("PUT", "/execute"),
    ("GET", "/health"),
    ("POST", "/"),
]
_code_fields = ["code", "context_id", "language", "env_vars", "cwd"]
_code_body = st.one_of(
    st.dictionaries(st.sampled_from(_code_fields), _json, max_size=5).map(lambda it: json.dumps(it).encode()),
    st.fixed_dictionaries(
        {"code": st.text(max_size=40)},
        optional={
            "language": st.sampled_from(["python", "js", "bash", "cobol", ""]),
            "context_id": st.text(max_size=50),
            "cwd": st.text(max_size=50),
            "env_vars": st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
        },
    ).map(lambda it: json.dumps(it).encode()),
    _body,
)


@_settings
@example(("POST", "/execute"), "x", b'{"code": "1", "context_id": "nothing"}')
@example(("POST", "/contexts/X/restart"), ".", b"")
@given(st.sampled_from(_CODE), st.from_regex(r"[^/?#\x00]{1,80}", fullmatch=True), _code_body)
def test_no_body_breaks_the_code_interpreter(
    unreal_envd: httpx.Client, call: tuple[str, str], name: str, body: bytes
) -> None:
    method, path = call
    answer = unreal_envd.request(
        method, path.replace("X", quote(name, safe="")), content=body, headers={"E2b-Sandbox-Port": "49999"}
    )
    if method == "POST" and path == "/execute" and answer.status_code == 200:
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert lines[-1]["type"] == "end_of_execution"
    elif answer.status_code == 404 and answer.headers["content-type"].startswith("text/plain"):
        assert re.fullmatch("Context .{0,64} not found", answer.text, re.DOTALL)
    else:
        assert answer.status_code == 200 or (answer.status_code < 500 and is_error(answer)), answer.text


@_settings
@given(
    st.sampled_from(["path", "dir", "file", "nothing"]),
    st.sampled_from(["GET", "PUT", "POST", "PATCH", "DELETE"]),
    st.dictionaries(st.sampled_from(["path", "uid", "gid", "mode", "force", "depth"]), st.text(max_size=12)),
    _body,
)
def test_nothing_breaks_the_files_of_a_volume(
    unreal_api: httpx.Client, unreal_volume: dict[str, str], what: str, method: str, query: dict[str, str], body: bytes
) -> None:
    path = f"/volumecontent/{unreal_volume['volumeID']}/{what}"
    token = {"Authorization": f"Bearer {unreal_volume['token']}"}
    answer = unreal_api.request(method, path, params=query, content=body, headers=token)
    assert answer.status_code < 300 or (answer.status_code < 500 and is_error(answer)), answer.text
    assert unreal_api.request(method, path, params=query, content=body).status_code in (401, 404, 405)


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


#: Well-formed as protobuf goes, of fields that may be of another type.
_wire = st.recursive(
    st.binary(max_size=12) | st.text(max_size=8).map(str.encode),
    lambda inner: st.lists(
        st.one_of(
            st.tuples(st.integers(1, 7), st.integers(0, 2**64 - 1)).map(
                lambda it: _varint(it[0] << 3) + _varint(it[1])
            ),
            st.tuples(st.integers(1, 7), inner).map(lambda it: _varint(it[0] << 3 | 2) + _varint(len(it[1])) + it[1]),
        ),
        max_size=4,
    ).map(b"".join),
    max_leaves=8,
)


@_settings
@given(st.sampled_from(_UNARY), _wire)
def test_no_fields_break_a_call_in_binary(unreal_envd: httpx.Client, method: str, message: bytes) -> None:
    answer = unreal_envd.post(f"/{method}", content=message, headers={"Content-Type": "application/proto"})
    assert answer.status_code < 500 or answer.json()["code"] == "unimplemented", answer.text


@_settings
@given(st.sampled_from(_STREAMS), _wire)
def test_no_fields_break_a_stream_in_binary(unreal_envd: httpx.Client, method: str, message: bytes) -> None:
    headers = {"Content-Type": "application/connect+proto", "Connect-Timeout-Ms": "300"}
    content = struct.pack(">BI", 0, len(message)) + message
    answer = unreal_envd.post(f"/{method}", content=content, headers=headers)
    assert answer.status_code == 200, answer.text
    assert b'"internal"' not in answer.content, answer.content


@given(st.binary(max_size=200))
def test_no_bytes_break_the_decoder(data: bytes) -> None:
    for schema in proto.REQUESTS.values():
        with contextlib.suppress(proto.Malformed):
            assert isinstance(proto.decode(schema, data), dict)


# ── binary protobuf ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_call_in_binary_says_what_it_says_in_json(envd: httpx.Client) -> None:
    schema = proto.ANSWERS["filesystem.Filesystem/Stat"]
    body = proto.encode(proto.REQUESTS["filesystem.Filesystem/Stat"], {"path": "/etc/passwd"})
    binary = envd.post("/filesystem.Filesystem/Stat", content=body, headers={"Content-Type": "application/proto"})
    assert binary.headers["content-type"] == "application/proto"
    plain = envd.post("/filesystem.Filesystem/Stat", json={"path": "/etc/passwd"}).json()
    found = proto.decode(schema, binary.content)["entry"]
    assert {name: found[name] for name in ("name", "type", "path", "size", "mode", "owner")} == {
        name: plain["entry"][name] for name in ("name", "type", "path", "size", "mode", "owner")
    }


def test_a_process_in_binary_tells_its_output_and_its_end(envd: httpx.Client) -> None:
    wanted = {"process": {"cmd": "/bin/sh", "args": ["-c", "echo $WHO; exit 3"], "envs": {"WHO": "me"}}}
    body = proto.encode(proto.REQUESTS["process.Process/Start"], wanted)
    answer = envd.post(
        "/process.Process/Start",
        content=struct.pack(">BI", 0, len(body)) + body,
        headers={"Content-Type": "application/connect+proto"},
    )
    events, rest = [], answer.content
    while rest:
        flags, length = struct.unpack_from(">BI", rest)
        if flags == 0:
            events.append(proto.decode(proto.ANSWERS["process.Process/Start"], rest[5 : 5 + length])["event"])
        rest = rest[5 + length :]
    assert events[0]["start"]["pid"] > 0
    assert base64.b64decode(events[1]["data"]["stdout"]) == b"me\n"
    assert events[-1]["end"]["exitCode"] == 3


@given(
    st.dictionaries(st.text(string.ascii_letters, max_size=9), st.text(), max_size=4),
    st.text(min_size=1),
    st.booleans(),
)
def test_a_message_survives_the_way_to_binary_and_back(envs: dict[str, str], cmd: str, stdin: bool) -> None:
    schema = proto.REQUESTS["process.Process/Start"]
    message = {"process": {"cmd": cmd, **({"envs": envs} if envs else {})}, "stdin": stdin}
    assert proto.decode(schema, proto.encode(schema, message)) == message
