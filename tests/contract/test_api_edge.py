"""The edge: who is let in, and what every refusal looks like."""

from __future__ import annotations

import pytest

from forkyard.errors import BY_CODE

from .conftest import JSON, World, as_json

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("headers", [{}, {"Authorization": ""}, {"Authorization": "Bearer "}, {"X-API-Key": ""}])
@pytest.mark.parametrize("path", ["/sandboxes", "/keys", "/events", "/doctor", "/sandboxes/x/files?path=/", "/nothing"])
async def test_without_a_key_nothing_opens(world: World, headers: dict[str, str], path: str) -> None:
    world.client.headers.pop("Authorization")
    answer = await world.client.get(path, headers=headers)
    assert answer.status_code == 401
    assert answer.json()["code"] == "unauthenticated"
    assert answer.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize(
    "scheme", [("Authorization", "Bearer {}"), ("authorization", "bearer  {}"), ("X-API-Key", "{}")]
)
async def test_a_key_opens_in_either_header(world: World, scheme: tuple[str, str]) -> None:
    world.client.headers.pop("Authorization")
    name, form = scheme
    assert (await world.client.get("/sandboxes", headers={name: form.format(world.key)})).status_code == 200


async def test_a_wrong_key_is_refused(world: World) -> None:
    answer = await world.client.get("/sandboxes", headers={"Authorization": f"Bearer {world.key}x"})
    assert answer.json()["code"] == "unauthenticated"


async def test_a_key_in_the_query_does_not_open_plain_requests(world: World) -> None:
    world.client.headers.pop("Authorization")
    assert (await world.client.get("/sandboxes", params={"key": world.key})).status_code == 401


@pytest.mark.parametrize("path", ["/health", "/openapi.json", "/docs"])
async def test_health_and_documentation_are_open(world: World, path: str) -> None:
    world.client.headers.pop("Authorization")
    assert (await world.client.get(path)).status_code == 200


async def test_health_says_starting_until_the_daemon_is_ready(world: World) -> None:
    await world.sandbox()
    health = (await world.client.get("/health")).json()
    assert (health["status"], health["accel"], health["sandboxes_running"]) == ("ok", "memory", 1)
    world.control.ready.clear()
    assert (await world.client.get("/health")).json()["status"] == "starting"


async def test_a_request_that_comes_too_early_waits_and_then_is_told_to_retry(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forkyard.api.auth.READY_WAIT_S", 0.01)
    world.control.ready.clear()
    answer = await world.client.get("/sandboxes")
    assert (answer.status_code, answer.json()["retryable"]) == (504, True)
    world.control.ready.set()
    assert (await world.client.get("/sandboxes")).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:7070", 200),
        ("127.0.0.1:7070", 200),
        ("[::1]:7070", 200),
        ("10.1.2.3", 200),
        ("3000-abc.localhost:7070", 200),
        ("forkyard.example", 200),
        ("evil.example:7070", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("notlocalhost", 403),
    ],
)
async def test_only_names_of_this_machine_are_answered_to(world: World, host: str, status: int) -> None:
    answer = await world.client.get("/health", headers={"Host": host})
    assert answer.status_code == status
    if status == 403:
        assert answer.json()["code"] == "forbidden"


async def test_no_cross_origin_reading_is_allowed(world: World) -> None:
    answer = await world.client.get("/health", headers={"Origin": "https://evil.example"})
    assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_an_unknown_path_and_a_wrong_method_are_problems(world: World) -> None:
    missing = await world.client.get("/nothing")
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    wrong = await world.client.patch("/sandboxes")
    assert (wrong.status_code, wrong.json()["status"]) == (405, 405)
    for answer in (missing, wrong):
        assert answer.headers["content-type"] == "application/problem+json"


async def test_an_unexpected_error_tells_nothing_of_the_inside(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken() -> int:
        raise ZeroDivisionError("secret of the inside")

    monkeypatch.setattr(world.control.sandboxes, "count_running", broken)
    answer = await world.client.get("/health")
    assert (answer.status_code, answer.json()["code"]) == (500, "internal")
    assert "secret" not in answer.text
    assert "secret of the inside" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"vcpus": "many"}, "body.vcpus"),
        ({"labels": {"a b": "c"}}, "body.labels"),
        ({"nmae": "typo"}, "body.nmae"),
        ({"name": "x" * 129}, "body.name"),
        ({"name": "\udc80"}, "body.name"),
        ([], "body"),
        (None, "body"),
    ],
)
async def test_an_invalid_body_names_the_field(world: World, body: object, field: str) -> None:
    answer = await world.client.post("/sandboxes", content=as_json(body), headers=JSON)
    problem = answer.json()
    assert answer.status_code == 422
    assert problem["details"]["errors"][0]["field"].startswith(field)
    assert field in problem["detail"]


@pytest.mark.parametrize(
    "shape", [{"vcpus": 0}, {"memory_mib": 64}, {"disk_gib": 10**9}, {"vcpus": 9, "memory_mib": 1}]
)
async def test_an_impossible_shape_has_its_own_code(world: World, shape: dict[str, int]) -> None:
    assert (await world.client.post("/sandboxes", json=shape)).json()["code"] == "invalid_shape"


@pytest.mark.parametrize("content", [b"{", b"\xff\xfe", b"[" * 100_000, b'{"vcpus": NaN}', b""])
async def test_a_body_that_is_no_json_is_refused(world: World, content: bytes) -> None:
    answer = await world.client.post("/sandboxes", content=content, headers={"Content-Type": "application/json"})
    assert 400 <= answer.status_code < 500
    assert answer.headers["content-type"] == "application/problem+json"


async def test_a_large_json_body_is_refused(world: World) -> None:
    answer = await world.client.post("/keys", json={"name": "x" * 2**20})
    assert "larger than" in answer.json()["detail"]


@pytest.mark.parametrize(
    "query",
    [
        "limit=0",
        "limit=1001",
        "limit=x",
        "state=sleeping",
        "label=novalue",
        "label==x",
        "cursor=!!",
        "all=perhaps",
    ],
)
async def test_bad_queries_are_refused(world: World, query: str) -> None:
    answer = await world.client.get(f"/sandboxes?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


async def test_ids_beyond_what_a_database_can_hold_are_refused(world: World) -> None:
    assert (await world.client.get(f"/events?after={2**63}")).status_code == 422
    assert (await world.client.get(f"/events?after={2**63 - 1}")).json()["items"] == []


async def test_the_root_leads_to_the_documentation(world: World) -> None:
    answer = await world.client.get("http://localhost:7070/")
    assert answer.headers["location"] == "/api/v1/docs"


async def test_every_operation_documents_its_errors_and_names_codes_that_exist(world: World) -> None:
    schema = (await world.client.get("/openapi.json")).json()
    assert schema["components"]["securitySchemes"].keys() == {"bearer", "key"}
    operations = [(path, *item) for path, methods in schema["paths"].items() for item in methods.items()]
    assert len(operations) > 25
    for path, method, operation in operations:
        assert operation.get("summary"), (path, method)
        assert "401" in operation["responses"], (path, method)
        assert "HTTPValidationError" not in str(operation["responses"]), (path, method)
        for answer in operation["responses"].values():
            problem = answer.get("content", {}).get("application/problem+json", {})
            assert set(problem.get("examples", {})) <= set(BY_CODE)
    assert operations[0][2]["security"] == []
