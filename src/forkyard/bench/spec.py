"""Specs: a machine of three layers with a server that runs, beside a plain one; and that server's first answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

import httpx

from forkyard import AsyncSandbox, Spec
from forkyard.bench import yard
from forkyard.bench.figures import Sample
from forkyard.errors import HostFailure

Say = Callable[[str], None]

PORT = 3000
READY = f"curl -sf -o /dev/null localhost:{PORT}"
SPEC = (
    Spec()
    .files({"/srv/www/index.html": "hello"})
    .layer()
    .run("date > /srv/www/built")
    .layer()
    .workdir("/srv/www")
    .service("web", f"python3 -m http.server {PORT}", ready=READY)
)


async def spec(n: int | None, say: Say) -> dict[str, Sample]:
    plain: list[float] = []
    cached: list[float] = []
    answers: list[float] = []
    async with yard.daemon(pool_size=0, pool_shells=0) as fy:
        for wish in (None, SPEC):  # what is made once is made
            say("spec: building its layers")
            await (await fy.sandboxes.create(spec=wish)).delete()
        for i in range(n or 10):
            say(f"create, plain and of a spec {i + 1}")
            for values, wish in ((plain, None), (cached, SPEC)):
                started = time.perf_counter()
                sandbox = await fy.sandboxes.create(spec=wish)
                values.append((time.perf_counter() - started) * 1000)
                if wish is not None:
                    answers.append(await _first_answer(sandbox))
                await sandbox.delete()
    return {
        "plain_create": Sample(plain),
        "spec_cached_create": Sample(cached),
        "spec_create_ratio": Sample([Sample(cached).p50 / Sample(plain).p50], "×"),
        "first_http_after_create": Sample(answers),
    }


async def _first_answer(sandbox: AsyncSandbox) -> float:
    address = urlsplit(await sandbox.url(PORT))
    async with httpx.AsyncClient(trust_env=False, timeout=60) as client:
        started = time.perf_counter()
        # Not every resolver knows names below `localhost`.
        answer = await client.get(f"http://127.0.0.1:{address.port}/", headers={"Host": address.netloc})
        took_ms = (time.perf_counter() - started) * 1000
    if answer.text != "hello":
        raise HostFailure(f"the server of the spec did not answer: {answer.status_code} {answer.text[:200]}")
    return took_ms
