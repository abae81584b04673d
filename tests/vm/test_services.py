"""Services on a real machine, through the SDK and the command line: what systemd makes of what was asked for."""

from __future__ import annotations

import json
import time

import pytest

from forkyard import BuildFailed, Forkyard, ServiceNotReady, Spec

from .conftest import Daemon

pytestmark = pytest.mark.timeout(600)


def test_services_need_each_other_and_one_that_ends_again_and_again_is_noticed(fy: Forkyard, daemon: Daemon) -> None:
    sandbox = fy.sandboxes.create()

    def cli(verb: str, *arguments: str) -> str:
        done = daemon.cli("services", verb, sandbox.id, *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    began = time.monotonic()
    with pytest.raises(ServiceNotReady, match=r"ended 5 times before it was ready.*no such thing"):
        sandbox.services.add("typo", "echo no such thing; exit 3", ready="false", restart="always", restart_s=0.2)
    assert time.monotonic() - began < 100, "long before it would have had to be ready"
    sandbox.services.remove("typo")

    cli("add", "rescue", "echo rescued >> /root/rescued", "--type", "oneshot", "--disabled")
    sandbox.exec("rm -f /root/rescued; systemctl stop rescue", check=True)
    cli("add", "db", "for i in $(seq 2000); do echo a line that is rather long, number $i; done; id -gn; sleep 1000")
    cli("add", "web", "id -gn; sleep 1000", "--requires", "db", "--group", "user", "--wanted-by", "forkyard.target")
    web = json.loads(cli("show", "web", "--json"))
    assert (web["active"], web["service"]["requires"], web["service"]["group"]) == ("active", ["db"], "user")
    assert "requires: ['db']" in cli("show", "web") and "web: active (running" in cli("show", "web")
    assert sandbox.exec("systemctl show -p Requires,WantedBy web").stdout.count("db.service") == 1
    assert sandbox.exec("ls /etc/systemd/system/forkyard.target.wants").stdout.split() == ["web.service"]
    assert "user" in sandbox.services.logs("web").split()
    assert not json.loads(cli("show", "rescue", "--json"))["enabled"]
    assert sum("rather long" in line for line in cli("logs", "db", "-n", "5000").splitlines()) == 2000
    sandbox.services.stop("db")
    assert sandbox.services.get("web").active == "inactive", "what it requires has stopped"

    # It fails for good after two starts, and then the other one is started.
    command = ("dies", "sleep 0.5; exit 4", "--restart", "always", "--restart-pause", "0.1", "--no-wait")
    cli("add", *command, "--start-limit", "2", "--start-limit-time", "60", "--on-failure", "rescue")
    deadline = time.monotonic() + 60
    while not sandbox.files.exists("/root/rescued"):
        assert time.monotonic() < deadline, cli("show", "dies")
        time.sleep(0.5)
    assert "failed" in cli("show", "dies") and "last ended with 4" in cli("show", "dies")


def test_what_systemd_does_not_take_is_told_in_its_words(fy: Forkyard) -> None:
    sandbox = fy.sandboxes.create()
    with pytest.raises(ServiceNotReady, match=r"Unit nope\.service not found"):
        sandbox.services.add("needy", "sleep 1000", requires=["nope"])
    with pytest.raises(ServiceNotReady, match=r"(?s)lost .*/nowhere"):
        sandbox.services.add("lost", "sleep 1000", workdir="/nowhere", ready="true")
    sandbox.services.add("home", "echo $HOME $USER > /tmp/home", type="oneshot")
    assert sandbox.files.read("/tmp/home") == "/root root\n"
    sandbox.services.add("in@stance", "sleep 1000")
    assert {info.name for info in sandbox.services.list()} == {"needy", "lost", "home", "in@stance"}
    sandbox.services.remove("in@stance")


def test_of_services_side_by_side_the_one_that_failed_is_named(fy: Forkyard) -> None:
    spec = Spec().service("a", "sleep 1000").service("b", "echo b says why; exit 7", ready="false")
    with pytest.raises(BuildFailed) as caught:
        fy.builds.create(spec).wait()
    failure = caught.value.details
    assert (failure["step"], failure["what"], failure["exit_code"]) == (1, "service b: echo b says why; exit 7", 7)
    for build in fy.builds.list():
        build.delete()
    fy.builds.prune()
