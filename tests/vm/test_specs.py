"""Specs on real machines: layers that are kept, a server that is restored while it serves, failures that explain."""

from __future__ import annotations

import time

import pytest

from forkyard import BuildFailed, ServiceNotReady, Spec

from .conftest import Daemon
from .previews import get

pytestmark = pytest.mark.timeout(600)

WEB = "python3 -m http.server 3000 --bind 127.0.0.1"
READY = "curl -sf -o /dev/null localhost:3000"


def test_a_spec_from_its_layers_to_a_server_that_answers_at_once(own_daemon: Daemon) -> None:
    prefix = Spec().files({"/srv/www/index.html": "hello"}).run("date +%s%N > /srv/www/built").layer()
    prefix = prefix.user("user").workdir("/srv/www").env(GREETING="hello").layer()
    spec = prefix.service("web", WEB, ready=READY, restart="on-failure").wait_for(READY)
    with own_daemon.client() as fy:
        began = time.monotonic()
        first = fy.sandboxes.create(spec=spec)
        cold_s = time.monotonic() - began
        built = get(first.url(3000), "/built").text
        began = time.monotonic()
        second = fy.sandboxes.create(spec=spec)
        cached_s = time.monotonic() - began
        began = time.monotonic()
        answer = get(second.url(3000))
        first_answer_s = time.monotonic() - began
        print(f"cold {cold_s:.2f} s, cached {cached_s:.2f} s, first answer {first_answer_s:.3f} s")
        assert answer.text == "hello"
        assert get(second.url(3000), "/built").text == built, "the second one was not built again"
        assert cached_s < cold_s
        (web,) = second.services.list()
        assert (web.name, web.active, web.sub) == ("web", "active", "running")
        assert second.exec("echo $GREETING; ps -o user= -C python3 | sort -u").stdout.split() == [
            "hello",
            "root",
            "user",
        ]

        # The last step alone is done again.
        changed = prefix.service("web", WEB, ready=READY).run("echo changed > index.html", user="root")
        plan = fy.builds.explain(changed)
        assert [layer.cached for layer in plan] == [True, True, False]
        third = fy.sandboxes.create(spec=changed)
        assert get(third.url(3000)).text == "changed\n"
        assert get(third.url(3000), "/built").text == built

        # Services of a running sandbox.
        third.services.stop("web")
        assert third.services.get("web").active == "inactive"
        assert third.services.start("web").active == "active"
        once = third.services.add("once", "echo done > /root/once", type="oneshot")
        assert (once.active, third.files.read("/root/once")) == ("active", "done\n")
        third.services.add("talks", "echo $WORD; sleep 1000", env={"WORD": 'say "50%"'}, after=["once"])
        assert 'say "50%"' in third.services.logs("talks")
        with pytest.raises(ServiceNotReady, match="was not ready within 2 s") as late:
            third.services.add("late", "echo I try; sleep 1000", ready="false", ready_timeout_s=2)
        assert "I try" in late.value.details["unit"]["log"]
        with pytest.raises(ServiceNotReady, match="ended before it was ready"):
            third.services.add("dies", "echo no >&2; exit 4", ready="false")
        third.services.remove("talks")
        assert "talks" not in {info.name for info in third.services.list()}
        fy.builds.prune()
        for snapshot in fy.snapshots.list():
            snapshot.delete()


def test_a_failed_build_says_why_and_leaves_a_machine_to_look_at(own_daemon: Daemon) -> None:
    spec = Spec().service("db", "echo db is up; sleep 1000").layer().run("echo half > /srv/half; echo oh no; exit 9")
    with own_daemon.client() as fy:
        with pytest.raises(BuildFailed, match="exited with 9") as failed:
            fy.sandboxes.create(spec=spec)
        details = failed.value.details
        assert (details["layer"], details["step"], details["exit_code"], details["log"]) == (1, 2, 9, "oh no\n")
        (unit,) = details["units"]
        assert (unit["name"], unit["active"]) == ("db", "active")
        assert "db is up" in unit["log"]
        with fy.sandboxes.create(snapshot=str(details["debug_snapshot_id"])) as sandbox:
            assert sandbox.files.read("/srv/half") == "half\n"
        for build in fy.builds.list():
            build.delete()
        fy.builds.prune()
        assert not fy.snapshots.list()
        assert not fy.sandboxes.list()


def test_what_a_build_rests_on_may_go_and_what_it_wrote_counts(own_daemon: Daemon) -> None:
    with own_daemon.client() as fy:
        fy.secrets.set("KNOWN", "a value that is looked for in layers")
        with fy.sandboxes.create() as plain:
            base = plain.snapshot()
        written = "dd if=/dev/urandom of=/srv/big bs=1M count=80 oflag=direct"
        build = fy.builds.create(Spec().base(base.id).run(f"touch /srv/begun; {written}; sleep 3"))
        deadline = time.monotonic() + 60
        while not any(one.info.state == "running" and one.files.exists("/srv/begun") for one in fy.sandboxes.list()):
            assert time.monotonic() < deadline
        base.delete()
        made = fy.snapshots.get(str(build.wait().snapshot_id))
        assert made.info.size_bytes > 80 << 20
        assert fy.builds.prune().freed_bytes >= made.info.size_bytes


def test_a_build_that_may_not_go_out_says_where_it_wanted_to(own_daemon: Daemon) -> None:
    with own_daemon.client() as fy:
        with pytest.raises(BuildFailed, match=r"network policy of the build refused docs\.example\.com") as failed:
            fy.builds.create(Spec().run("curl -sS https://docs.example.com"), network="none").wait()
        assert failed.value.details["denied"] == ["docs.example.com"]
        for build in fy.builds.list():
            build.delete()
