"""Sandboxes: made, found, ended."""

from __future__ import annotations

import datetime
import time

from registry import Yard, call, expect, until


@call("Sandbox.create")
def _(y: Yard) -> None:
    y.sbx = y.e2b.Sandbox.create(timeout=1200, metadata=y.metadata, envs={"GREETING": "hello", **y.envs})
    assert y.sbx.sandbox_id.isalnum()
    y.sbx.files.make_dir(y.dir)


@call("Sandbox.create: unknown template")
def _(y: Yard) -> None:
    expect(Exception, lambda: y.e2b.Sandbox.create("no-such-template"), "not found")


@call("Sandbox.create: wrong key")
def _(y: Yard) -> None:
    expect(y.e2b.AuthenticationException, lambda: y.e2b.Sandbox.create(api_key="e2b_" + "0" * 40))


@call("Sandbox.create: allow_internet_access=False")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(allow_internet_access=False)
    assert made.kill()


@call("Sandbox.create: network", "2.24")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(network={"allow_out": ["192.0.2.1", "example.com"], "deny_out": ["0.0.0.0/0"]})
    assert made.kill()


@call("Sandbox.create: idempotency_key", "2.60")
def _(y: Yard) -> None:
    one = y.e2b.Sandbox.create(idempotency_key="the-same")
    two = y.e2b.Sandbox.create(idempotency_key="the-same")
    assert one.sandbox_id == two.sandbox_id
    assert one.kill()


@call("with Sandbox.create()")
def _(y: Yard) -> None:
    with y.e2b.Sandbox.create() as made:
        assert made.is_running()
    assert not made.is_running()


@call("sandbox.is_running")
def _(y: Yard) -> None:
    assert y.sbx.is_running() is True


@call("sandbox.get_info")
def _(y: Yard) -> None:
    info = y.sbx.get_info()
    assert info.sandbox_id == y.sbx.sandbox_id
    assert info.metadata == y.metadata
    assert info.template_id == "base"
    assert 1100 < (info.end_at - info.started_at).total_seconds() <= 1201
    assert info.cpu_count >= 1
    assert info.memory_mb >= 128
    assert "running" in str(info.state).lower()


@call("Sandbox.get_info: unknown id")
def _(y: Yard) -> None:
    expect(y.e2b.NotFoundException, lambda: y.e2b.Sandbox.get_info("i" + "0" * 19))


@call("Sandbox.get_info (by id)")
def _(y: Yard) -> None:
    assert y.e2b.Sandbox.get_info(y.sbx.sandbox_id).sandbox_id == y.sbx.sandbox_id


@call("Sandbox.list")
def _(y: Yard) -> None:
    pages = y.e2b.Sandbox.list()
    assert y.sbx.sandbox_id in [one.sandbox_id for one in pages.next_items()]
    assert not pages.has_next


@call("Sandbox.list: metadata")
def _(y: Yard) -> None:
    query = y.e2b.SandboxQuery(metadata=y.metadata)
    assert [one.sandbox_id for one in y.e2b.Sandbox.list(query=query).next_items()] == [y.sbx.sandbox_id]
    nothing = y.e2b.SandboxQuery(metadata={"purpose": "another"})
    assert y.e2b.Sandbox.list(query=nothing).next_items() == []


@call("Sandbox.list: state")
def _(y: Yard) -> None:
    paused = y.e2b.SandboxQuery(state=[y.e2b.SandboxState.PAUSED])
    assert y.sbx.sandbox_id not in [one.sandbox_id for one in y.e2b.Sandbox.list(query=paused).next_items()]


@call("Sandbox.list: pages")
def _(y: Yard) -> None:
    mark = {"pages": str(time.time_ns())}
    made = [y.e2b.Sandbox.create(metadata=mark) for _ in range(3)]
    pages = y.e2b.Sandbox.list(query=y.e2b.SandboxQuery(metadata=mark), limit=2)
    first = pages.next_items()
    assert pages.has_next
    second = pages.next_items()
    assert not pages.has_next
    found = [one.sandbox_id for one in [*first, *second]]
    assert found == [one.sandbox_id for one in reversed(made)], "newest first"
    for one in made:
        one.kill()


@call("Sandbox.list: order", "2.60")
def _(y: Yard) -> None:
    found = y.e2b.Sandbox.list(order="asc").next_items()
    assert [one.started_at for one in found] == sorted(one.started_at for one in found)


@call("sandbox.set_timeout")
def _(y: Yard) -> None:
    y.sbx.set_timeout(1800)
    info = y.sbx.get_info()
    assert (info.end_at - info.started_at).total_seconds() > 1700


@call("Sandbox.set_timeout (by id)")
def _(y: Yard) -> None:
    y.e2b.Sandbox.set_timeout(y.sbx.sandbox_id, 1500)
    expect(y.e2b.NotFoundException, lambda: y.e2b.Sandbox.set_timeout("i" + "0" * 19, 300))


@call("timeout ends a sandbox")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(timeout=4)
    until(lambda: not made.is_running(), 30)
    expect(y.e2b.NotFoundException, made.get_info)


@call("Sandbox.connect")
def _(y: Yard) -> None:
    before = y.sbx.get_info().end_at
    again = y.e2b.Sandbox.connect(y.sbx.sandbox_id, timeout=10)
    assert again.commands.run("echo connected").stdout == "connected\n"
    assert y.sbx.get_info().end_at == before, "a shorter timeout does not shorten it"


@call("Sandbox.connect: unknown id")
def _(y: Yard) -> None:
    expect(y.e2b.NotFoundException, lambda: y.e2b.Sandbox.connect("i" + "0" * 19))


@call("sandbox.get_metrics")
def _(y: Yard) -> None:
    found = y.sbx.get_metrics()
    assert found[-1].mem_total > 0
    assert found[-1].cpu_count >= 1
    assert found[-1].disk_total >= found[-1].disk_used > 0
    assert found[-1].mem_total >= found[-1].mem_used > 0
    assert 0 <= found[-1].cpu_used_pct <= 100


@call("sandbox.get_metrics: start, end")
def _(y: Yard) -> None:
    now = datetime.datetime.now()
    day, minute = datetime.timedelta(days=1), datetime.timedelta(minutes=1)
    found = y.sbx.get_metrics(start=now - day, end=now + minute)
    times = [one.timestamp for one in found]
    assert times == sorted(times)
    assert abs(times[-1].timestamp() - now.timestamp()) < 60
    assert y.sbx.get_metrics(start=now - 2 * day, end=now - day) == []
    assert y.sbx.get_metrics(start=now + day, end=now + 2 * day) == []


@call("sandbox.get_host")
def _(y: Yard) -> None:
    assert y.sbx.get_host(3000).startswith(f"3000-{y.sbx.sandbox_id}.")
