"""Generated requests against every operation: no 500, and every answer is as documented."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
import schemathesis
import uvicorn
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import checks
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from forkyard.api.app import create_app

from .conftest import running_world

#: They have no end, by design.
ENDLESS = "/api/v1/sandboxes/{sandbox_id}/files/watch"
CHECKS: list[Any] = [
    checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """URL, API key and the id of a running sandbox. In a thread: generated requests are sent by blocking code."""
    told: Future[tuple[str, str, str]] = Future()
    stop = threading.Event()

    async def serve() -> None:
        async with running_world(tmp_path_factory.mktemp("schema")) as world:
            config = uvicorn.Config(world.app, port=0, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
            running = uvicorn.Server(config)
            running.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
            serving = asyncio.create_task(running.serve())
            while not running.started:
                await asyncio.sleep(0.005)
            port = running.servers[0].sockets[0].getsockname()[1]
            told.set_result((f"http://127.0.0.1:{port}", world.key, await world.sandbox()))
            await asyncio.to_thread(stop.wait)
            running.should_exit = True
            await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    yield told.result(10)
    stop.set()
    thread.join(20)
    assert not thread.is_alive()


@schemathesis.serializer("application/x-tar")
def _as_it_is(_context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else b"no tar"


schema = schemathesis.openapi.from_dict(create_app(None).openapi()).exclude(path=ENDLESS)  # type: ignore[arg-type]


OPERATIONS: dict[str, Any] = {found.ok().label: found.ok() for found in schema.get_all_operations()}  # type: ignore[union-attr]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_answer_is_as_documented(operation: str, server: tuple[str, str, str]) -> None:
    url, key, sandbox_id = server

    @settings(
        max_examples=5,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=OPERATIONS[operation].as_strategy())
    def check(case: Any) -> None:
        if "sandbox_id" in case.path_parameters and case.method != "DELETE":
            case.path_parameters["sandbox_id"] = sandbox_id
        if case.path.endswith(("/events", "/egress")):
            (case.query or {}).pop("follow", None)
        answer = case.call(base_url=url, headers={"Authorization": f"Bearer {key}"}, timeout=10)
        case.validate_response(answer, checks=CHECKS)

    check()
