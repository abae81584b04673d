"""Builds against the real API: the cache, one build for many, failures, logs that are followed and read again.

Machines are agents on this host, so steps are real commands; they write below the test's own directory.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forkyard import (
    BuildFailed,
    BuildNotFound,
    Forkyard,
    HostFailure,
    InvalidRequest,
    InvalidShape,
    SnapshotNotFound,
    Spec,
)
from forkyard.hosts.base import Incarnation

from .sdk_daemon import Daemon


@pytest.fixture
def clean(fy: Forkyard) -> Iterator[None]:
    yield
    for sandbox in fy.sandboxes.list():
        sandbox.delete()
    fy.builds.prune()


@pytest.fixture
def done(tmp_path: Path, clean: None) -> Path:
    """What steps have done, a line each."""
    return tmp_path / "done"


def note(done: Path, word: str) -> str:
    return f"echo {word} >> {done}"


def words(done: Path) -> list[str]:
    return done.read_text().split() if done.exists() else []


def until(condition: object) -> None:
    deadline = time.monotonic() + 20
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_layers_are_built_once_and_an_unchanged_prefix_is_reused(fy: Forkyard, done: Path) -> None:
    prefix = Spec().run(note(done, "one")).layer().run(note(done, "two")).layer()
    first = fy.builds.create(prefix.run(note(done, "three"))).wait()
    assert [layer.cached for layer in first.layers] == [False, False, False]
    assert words(done) == ["one", "two", "three"]
    second = fy.builds.create(prefix.run(note(done, "four"))).wait()
    assert [layer.cached for layer in second.layers] == [True, True, False]
    assert words(done) == ["one", "two", "three", "four"]
    third = fy.builds.create(prefix.run(note(done, "four"))).wait()
    assert third.snapshot_id == second.snapshot_id
    assert words(done) == ["one", "two", "three", "four"]
    assert not fy.sandboxes.list(), "a machine of a build was left"


def test_a_sandbox_of_a_spec_is_built_first_and_restored_later(fy: Forkyard, daemon: Daemon, done: Path) -> None:
    spec = Spec().run(note(done, "built")).env(COLOUR="green")
    first, second = (fy.sandboxes.create(spec=spec) for _ in range(2))
    assert words(done) == ["built"]
    assert first.info.snapshot_id == second.info.snapshot_id is not None
    assert daemon.host.world.machines[Incarnation(second.id, 1)].spec.env["COLOUR"] == "green"


def test_what_starts_from_a_snapshot_goes_on_as_its_spec_said(fy: Forkyard, daemon: Daemon, clean: None) -> None:
    with tempfile.TemporaryDirectory() as there:
        Path(there).chmod(0o777)
        spec = Spec().env(COLOUR="green").workdir(there).user("daemon")
        snapshot = fy.sandboxes.create(spec=spec, env={"MINE": "alone"}).snapshot()
        second = fy.sandboxes.create(snapshot=snapshot)
        said = {"COLOUR": "green", "FORKYARD_WORKDIR": there, "FORKYARD_USER": "daemon"}
        assert daemon.host.world.machines[Incarnation(second.id, 1)].spec.env == said
        more = Spec().base(snapshot.id).run("echo $(id -un) $(pwd) $COLOUR $MINE > whose").env(SIZE="big")
        third = fy.sandboxes.create(spec=more)
        assert Path(there, "whose").read_text() == f"daemon {there} green\n"
        assert daemon.host.world.machines[Incarnation(third.id, 1)].spec.env == {**said, "SIZE": "big"}
        snapshot.delete()


def test_the_network_of_a_build_is_not_that_of_its_sandboxes(fy: Forkyard, done: Path) -> None:
    go = done.with_name("go")
    spec = Spec().run(f"{note(done, 'built')}; until test -e {go}; do sleep 0.05; done")
    build = fy.builds.create(spec, network="open")
    until(lambda: words(done))
    (machine,) = fy.sandboxes.list()
    assert machine.info.network.egress.preset == "open"
    go.touch()
    build.wait()
    assert fy.sandboxes.create(spec=spec).info.network.egress.preset == "coding"
    assert fy.sandboxes.create(snapshot=str(build.info.snapshot_id)).info.network.egress.preset == "coding"
    assert fy.sandboxes.create(spec=spec, network="none").info.network.egress.preset == "none"


def test_concurrent_builds_of_one_spec_build_it_once(fy: Forkyard, done: Path) -> None:
    spec = Spec().run(f"sleep 0.3; {note(done, 'slow')}").layer().run(note(done, "rest"))
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: fy.builds.create(spec).wait(), range(4)))
    assert words(done) == ["slow", "rest"]
    assert len({info.snapshot_id for info in made}) == 1


def test_steps_have_the_environment_directory_and_files_of_those_before(
    fy: Forkyard, done: Path, tmp_path: Path
) -> None:
    spec = (
        Spec()
        .workdir(str(tmp_path / "work"))
        .env(WORD="hello")
        .layer()
        .files({"a.txt": "text", "b.bin": b"\xff\x00", "run.sh": {"content": "#!/bin/sh\necho ran", "mode": 0o755}})
        .run(f"echo $WORD $(cat a.txt) $(wc -c < b.bin) $(./run.sh) $PWD > {done}")
    )
    fy.builds.create(spec).wait()
    assert words(done) == ["hello", "text", "2", "ran", str(tmp_path / "work")]


def test_a_clone_of_a_repository_is_a_step(fy: Forkyard, daemon: Daemon, done: Path, tmp_path: Path) -> None:
    repo = fy.git.create("app-of-a-spec", visibility="public")
    repo.commit("first", {"README.md": "made here"})
    spec = Spec().git(f"{daemon.url}/git/app-of-a-spec.git", str(tmp_path / "repo"), "main")
    fy.builds.create(spec).wait()
    assert (tmp_path / "repo" / "README.md").read_text() == "made here"
    with pytest.raises(BuildFailed, match="no repository 'none'"):
        fy.builds.create(Spec().git(f"{daemon.url}/git/none.git", str(tmp_path / "none"))).wait()


def test_a_failed_step_is_diagnosed_and_leaves_a_machine_to_look_at(fy: Forkyard, done: Path) -> None:
    spec = Spec().run(note(done, "fine")).layer().run("true").run("echo broken >&2; exit 7")
    build = fy.builds.create(spec)
    with pytest.raises(BuildFailed, match="exited with 7") as failed:
        build.wait()
    details = failed.value.details
    assert (details["layer"], details["step"], details["exit_code"], details["log"]) == (1, 3, 7, "broken\n")
    debug = fy.sandboxes.create(snapshot=str(details["debug_snapshot_id"]))
    assert debug.exec("true").exit_code == 0
    debug.delete()
    assert not fy.sandboxes.list(), "a machine of a build was left"
    with pytest.raises(BuildFailed):
        fy.sandboxes.create(spec=spec)
    assert words(done) == ["fine"], "the layer before the failure is kept"
    for build in fy.builds.list():
        build.delete()
    assert not fy.snapshots.list() or all(snapshot.id != debug.info.snapshot_id for snapshot in fy.snapshots.list())


def test_a_build_that_never_gets_ready_is_ended(fy: Forkyard, done: Path) -> None:
    with pytest.raises(BuildFailed, match="was not done within 1 s"):
        fy.builds.create(Spec().wait_for("false", timeout_s=1, interval_s=0.1)).wait()


def test_a_build_goes_on_without_its_client_and_is_followed_again(fy: Forkyard, daemon: Daemon, done: Path) -> None:
    go_on = done.with_name("go-on")
    build = fy.builds.create(Spec().run(f"echo begun; until [ -e {go_on} ]; do sleep 0.05; done; echo ended"))
    seen: list[str] = []
    events: list[str] = []

    def follow() -> None:
        for event in fy.builds.get(build.id).logs(follow=True):
            events.append(event.type)
            seen.append(getattr(event, "text", "") if event.type == "output" else "")

    following = threading.Thread(target=follow)
    following.start()
    until(lambda: "begun\n" in "".join(seen))
    daemon.break_connections()
    assert fy.builds.get(build.id).info.state == "running"
    go_on.touch()
    following.join(20)
    assert "".join(seen) == "begun\nended\n", "nothing twice, nothing missing"
    assert events[-1] == "end"
    assert [event.type for event in build.logs()][-1] == "end"
    assert build.refresh().state == "succeeded"


def test_a_build_that_is_deleted_ends_and_leaves_nothing(fy: Forkyard, done: Path) -> None:
    build = fy.builds.create(Spec().run(f"{note(done, 'begun')}; sleep 60"))
    until(lambda: words(done))
    build.delete()
    with pytest.raises(BuildNotFound):
        build.refresh()
    until(lambda: not fy.sandboxes.list())


def test_skip_cache_and_a_discriminator_build_anew(fy: Forkyard, done: Path) -> None:
    spec = Spec().run(note(done, "built"))
    first = fy.builds.create(spec).wait()
    again = fy.builds.create(spec, skip_cache=True).wait()
    assert first.snapshot_id != again.snapshot_id == fy.builds.create(spec).wait().snapshot_id
    fy.builds.create(spec.discriminator("other")).wait()
    assert words(done) == ["built"] * 3


def test_explain_says_what_has_changed(fy: Forkyard, done: Path) -> None:
    prefix = Spec().run(note(done, "a")).layer()
    assert [layer.cached for layer in fy.builds.explain(prefix.run("true"))] == [False, False]
    fy.builds.create(prefix.run("true")).wait()
    hit, miss = fy.builds.explain(prefix.run("echo other"))
    assert hit.cached
    assert not miss.cached
    assert miss.reason == "step 2 is `run echo other`, and was `run true`"
    assert words(done) == ["a"]


def test_a_layer_whose_snapshot_was_deleted_is_built_again(fy: Forkyard, done: Path) -> None:
    spec = Spec().run(note(done, "built"))
    info = fy.builds.create(spec).wait()
    fy.snapshots.delete(str(info.snapshot_id))
    (layer,) = fy.builds.explain(spec)
    assert (layer.cached, layer.reason) == (False, "it was built before, and evicted or deleted since")
    fy.sandboxes.create(spec=spec)
    assert words(done) == ["built", "built"]


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"steps": [{"run": {"command": "x", "comand": "y"}}]}, "body.spec.steps.0.run.comand"),
        ({"stepz": []}, "body.spec.stepz"),
        ({"steps": [{"service": {"name": "A b", "exec": "x"}}]}, "body.spec.steps.0.service.name"),
        (
            {"steps": [{"service": {"name": n, "exec": "x", "after": [m]}} for n, m in ("ab", "ba")]},
            "body.spec",
        ),
    ],
)
def test_a_mistake_is_named_by_its_path(daemon: Daemon, spec: dict[str, object], path: str) -> None:
    import httpx

    answer = httpx.post(
        f"{daemon.url}/api/v1/builds", json={"spec": spec}, headers={"X-API-Key": daemon.key}, trust_env=False
    )
    assert answer.status_code == 422
    assert path in [error["field"] for error in answer.json()["details"]["errors"]]


def test_layers_beyond_the_budget_go_those_not_used_for_longest_first(
    fy: Forkyard, daemon: Daemon, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fy.builds.prune()
    specs = [Spec().run(note(done, word)) for word in ("one", "two", "three")]
    for spec in specs[:2]:
        fy.builds.create(spec).wait()
    in_use = fy.sandboxes.create(spec=specs[1])
    fy.sandboxes.create(spec=specs[0])  # now the second is the one not used for longest
    cache = daemon.builds._cache
    kept = [fy.builds.explain(spec)[0].snapshot_id for spec in specs[:2]]
    sizes = [fy.snapshots.get(str(snapshot_id)).info.size_bytes for snapshot_id in kept]
    assert all(sizes)
    monkeypatch.setattr(cache, "_budget_bytes", sum(sizes))
    fy.builds.create(specs[2]).wait()
    assert [fy.builds.explain(spec)[0].cached for spec in specs] == [True, False, True]
    assert in_use.exec("echo lives").stdout == "lives\n", "who started from a layer does not need it"
    monkeypatch.setattr(cache, "_budget_bytes", 1)
    long = Spec().run(note(done, "four")).layer().run(note(done, "five")).layer().run(note(done, "six"))
    fy.builds.create(long).wait()
    assert words(done)[-3:] == ["four", "five", "six"], "what a build works on stays until it is done"


def test_requirements_are_installed_into_an_environment_that_has_a_pip(
    fy: Forkyard, done: Path, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "requirements.txt").write_text("# nothing: this test needs no registry\n")
    there = tmp_path / "there"
    spec = Spec().install(tmp_path / "here" / "requirements.txt", path=str(there))
    # As it is called with and without the environment being active, and from elsewhere.
    spec = spec.run(f'cd {there} && . .venv/bin/activate && pip --version | tr " " "\\n" > {done} && cd / && pip3 list')
    spec = spec.run(f"{there}/.venv/bin/pip debug 2>/dev/null | grep sys.executable >> {done}")
    fy.builds.create(spec).wait()
    assert words(done)[0] == "pip" and f"{there}/.venv/bin/python" in done.read_text()


def test_a_lockfile_in_the_machine_is_installed_where_it_lies(fy: Forkyard, done: Path, tmp_path: Path) -> None:
    front, back = tmp_path / "app" / "front", tmp_path / "app" / "back" / "deep"
    files = {f"{front}/requirements.txt": "", f"{back}/requirements.txt": "-r more.txt\n", f"{back}/more.txt": ""}
    spec = Spec().files(files).workdir(str(tmp_path / "app"))
    spec = spec.install("front/requirements.txt").install("deep/requirements.txt", path="back")
    fy.builds.create(spec).wait()
    assert (front / ".venv").is_dir() and (back / ".venv").is_dir() and not (tmp_path / "app" / ".venv").exists()


def test_two_specs_of_one_name_are_two(fy: Forkyard, done: Path) -> None:
    one, two = (Spec().name("app").run(note(done, word)) for word in ("one", "two"))
    snapshots = {fy.builds.create(spec).wait().snapshot_id for spec in (one, two, one.name("other"))}
    assert (len(snapshots), words(done)) == (2, ["one", "two"]), "a name is for people"


def test_an_unknown_base_and_a_second_size_are_refused(fy: Forkyard) -> None:
    with pytest.raises(InvalidRequest, match="no base 'plan9'"):
        fy.builds.create(Spec().base("plan9"))
    with pytest.raises(InvalidRequest, match="leave it out"):
        fy.sandboxes.create(spec=Spec(), vcpus=2)


def test_what_starts_from_a_snapshot_has_its_size_and_no_other(fy: Forkyard, done: Path) -> None:
    snapshot = fy.sandboxes.create(memory_mib=1024).snapshot()
    built = Spec().base(snapshot.id)
    with pytest.raises(InvalidShape, match="has memory_mib 1024, and what starts from it cannot have 2048") as refused:
        fy.sandboxes.create(spec=built.size(memory_mib=2048))
    assert refused.value.details["field"] == "body.spec.size.memory_mib"
    assert fy.sandboxes.create(spec=built.size(memory_mib=1024)).info.shape.memory_mib == 1024
    (layer,) = fy.builds.explain(built)
    assert layer.cached, "the size of the snapshot, said or not"
    assert fy.builds.create(built.run("true")).wait().snapshot_id is not None
    snapshot.delete()


def test_what_forkyard_made_for_a_task_is_known_by_labels_that_nobody_else_gives(fy: Forkyard, done: Path) -> None:
    with pytest.raises(InvalidRequest, match="Forkyard's own"):
        fy.sandboxes.create(labels={"forkyard.build": "x"})
    go = done.with_name("go")
    build = fy.builds.create(Spec().run(f"{note(done, 'built')}; until test -e {go}; do sleep 0.05; done"))
    until(lambda: words(done))
    (machine,) = fy.sandboxes.list()
    (child,) = machine.fork(1)
    machine.update(labels={"mine": "too"})
    with pytest.raises(InvalidRequest, match="Forkyard's own"):
        child.update(labels={"forkyard.build": "x"})
    go.touch()
    build.wait()
    ended = fy.sandboxes.get(machine.id).info
    assert (ended.state, ended.cause, ended.labels["mine"]) == ("deleted", "task_over", "too")
    assert [one.id for one in fy.sandboxes.list()] == [child.id], "a fork of it is its owner's"


def test_a_layer_stays_until_what_is_made_of_it_is_there(
    fy: Forkyard, daemon: Daemon, done: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = Spec().run(note(done, "built"))
    fy.builds.create(spec).wait()
    made, pruned = daemon.host.create, []

    async def slow(*args: Any) -> Any:
        pruned.append(await asyncio.to_thread(fy.builds.prune))
        return await made(*args)

    monkeypatch.setattr(daemon.host, "create", slow)
    fy.sandboxes.create(spec=spec)
    assert (pruned[0].layers, words(done)) == (0, ["built"])


def test_a_create_whose_snapshot_goes_meanwhile_says_so(
    fy: Forkyard, daemon: Daemon, clean: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = fy.sandboxes.create().snapshot()

    async def gone(*_: Any) -> Any:
        await asyncio.to_thread(snapshot.delete)
        raise HostFailure("could not make a disk")

    monkeypatch.setattr(daemon.host, "create", gone)
    with pytest.raises(SnapshotNotFound, match="was deleted while a sandbox was made of it"):
        fy.sandboxes.create(snapshot=snapshot)


def test_a_build_whose_machine_is_taken_away_says_so(fy: Forkyard, done: Path) -> None:
    build = fy.builds.create(Spec().run(f"{note(done, 'begun')}; sleep 600"))
    until(lambda: words(done))
    fy.sandboxes.list()[0].delete()
    with pytest.raises(BuildFailed, match=r"ended its machine: delet\w+ \(deleted_by_user\)"):
        build.wait()


def test_a_lockfile_that_is_nowhere_is_named(fy: Forkyard, done: Path, tmp_path: Path) -> None:
    with pytest.raises(
        BuildFailed, match=f"there is no {tmp_path}/app/requirements.txt in the machine, and there was no "
    ):
        fy.builds.create(Spec().workdir(str(tmp_path)).install("app/requirements.txt")).wait()


def test_the_command_line_builds_explains_and_creates(daemon: Daemon, fy: Forkyard, done: Path, tmp_path: Path) -> None:
    file = tmp_path / "forkyard.yaml"
    (tmp_path / "local.txt").write_text("from here")
    file.write_text(
        f"steps:\n- files: {{{tmp_path}/there.txt: {{from: local.txt}}}}\n- layer\n"
        f"- run: cat {tmp_path}/there.txt; {note(done, 'ran')}\n"
    )
    explained = daemon.cli("build", "-f", str(file), "--explain")
    assert explained.stdout.count("miss") == 2, explained.stderr
    built = daemon.cli("build", "-f", str(file))
    assert built.returncode == 0, built.stderr
    assert "from here" in built.stderr
    assert built.stdout.startswith("sc-")
    info = json.loads(daemon.cli("build", "-f", str(file), "--json").stdout)
    assert [layer["cached"] for layer in info["layers"]] == [True, True]
    created = daemon.cli("create", "-f", str(file), "--json")
    assert json.loads(created.stdout)["snapshot_id"] == built.stdout.strip(), created.stderr
    assert words(done) == ["ran"]
    listed = json.loads(daemon.cli("builds", "ls", "--json").stdout)
    assert info["id"] in {build["id"] for build in listed}
    assert '"end"' in daemon.cli("builds", "logs", info["id"], "--json").stdout
    assert daemon.cli("builds", "rm", info["id"]).returncode == 0
    file.write_text("steps: [{run: 'exit 3'}]")
    failed = daemon.cli("build", "-f", str(file))
    assert failed.returncode == 1
    assert "exited with 3" in failed.stderr
    assert "forkyard create --snapshot sc-" in failed.stderr


def test_a_create_gives_its_build_what_it_is_given(daemon: Daemon, fy: Forkyard, done: Path, tmp_path: Path) -> None:
    fy.git.create("of-somebody", files={"README.md": "read me"})
    identity = fy.identities.create("builder")
    fy.secrets.set("TOKEN", "a-value-to-be-known-again")
    file = tmp_path / "forkyard.yaml"
    file.write_text(
        f"steps:\n- run: echo $TOKEN >> {done}\n- layer\n- git: {{url: of-somebody, path: {tmp_path}/clone}}\n"
    )
    options = ("create", "-f", str(file), "--secret", "TOKEN=example.com", "--identity", identity.id)
    try:
        refused = daemon.cli(*options)
        assert refused.returncode == 1
        assert "of-somebody" in refused.stderr, "the build clones with the rights of the identity"
        fy.identities.grant_repo(identity.id, "of-somebody", "read")
        created = daemon.cli(*options)
        assert created.returncode == 0, created.stderr
        assert words(done)[0].startswith("forkyard-secret-")
    finally:
        fy.secrets.delete("TOKEN")
        fy.git.repo("of-somebody").delete()


@pytest.mark.parametrize("where", ["skip_cache: true\n", "- layer: {skip_cache: true}\n"])
def test_a_create_builds_anew_once(daemon: Daemon, done: Path, tmp_path: Path, where: str) -> None:
    file = tmp_path / "forkyard.yaml"
    steps = f"steps:\n- run: {note(done, 'ran')}\n"
    file.write_text(steps + where if where.startswith("-") else where + steps)
    for times in (1, 2):
        assert daemon.cli("create", "-f", str(file)).returncode == 0
        assert words(done) == ["ran"] * times


def test_a_create_says_at_once_what_a_spec_has_of_its_own(daemon: Daemon, done: Path, tmp_path: Path) -> None:
    file = tmp_path / "forkyard.yaml"
    file.write_text(f"steps:\n- run: {note(done, 'ran')}\n")
    for option in (("--memory", "1024"), ("--vcpus", "1"), ("--disk", "8"), ("--snapshot", "sc-1")):
        refused = daemon.cli("create", "-f", str(file), *option)
        assert (refused.returncode, words(done)) == (2, [])
        assert f"--file and {option[0]}" in refused.stderr


def test_logs_that_are_followed_end_as_the_build_does(daemon: Daemon, fy: Forkyard, done: Path) -> None:
    good, bad = fy.builds.create(Spec().run("echo fine")), fy.builds.create(Spec().run("echo oh no; exit 3"))
    followed = daemon.cli("builds", "logs", "-f", good.id)
    assert (followed.returncode, followed.stdout.strip()) == (0, good.refresh().snapshot_id)
    followed = daemon.cli("builds", "logs", "-f", bad.id)
    assert followed.returncode == 1
    for said in ("oh no", "exited with 3", "forkyard create --snapshot sc-"):
        assert said in followed.stderr
    lines = daemon.cli("builds", "logs", "-f", bad.id, "--json")
    assert (lines.returncode, json.loads(lines.stdout.splitlines()[-1])["state"]) == (1, "failed")


def test_the_command_line_names_what_a_build_may_reach(
    daemon: Daemon, fy: Forkyard, done: Path, tmp_path: Path
) -> None:
    file = tmp_path / "forkyard.yaml"
    file.write_text(f"steps:\n- run: {note(done, 'begun')}; sleep 1\n")
    building = threading.Thread(target=daemon.cli, args=("build", "-f", str(file), "--preset", "none"))
    building.start()
    until(lambda: words(done))
    (machine,) = fy.sandboxes.list()
    assert machine.info.network.egress.preset == "none"
    building.join()


def test_a_layer_that_holds_a_stored_secret_is_refused_unless_told(fy: Forkyard, daemon: Daemon, done: Path) -> None:
    fy.secrets.set("TOKEN", "a-value-to-be-known-again")
    spec = Spec().run(note(done, "leaky"))
    daemon.host.left_behind.add(b"a-value-to-be-known-again")
    before = {snapshot.id for snapshot in fy.snapshots.list()}
    try:
        with pytest.raises(BuildFailed, match="holds the value of the secret TOKEN") as failed:
            fy.builds.create(spec).wait()
        assert "a-value" not in str(failed.value)
        assert {snapshot.id for snapshot in fy.snapshots.list()} <= before, "nothing of it is left to start from"
        told = fy.builds.create(spec, allow_secrets=True)
        assert told.wait().snapshot_id is not None
        assert fy.builds.explain(spec, allow_secrets=True)[0].cached
        with pytest.raises(BuildFailed, match="holds the value of the secret TOKEN"):
            fy.sandboxes.create(spec=spec)
        assert fy.sandboxes.create(snapshot=str(told.info.snapshot_id)).exec("true").ok
    finally:
        daemon.host.left_behind.clear()
        fy.secrets.delete("TOKEN")


def test_a_machine_that_holds_a_stored_secret_is_not_kept_to_look_at(fy: Forkyard, daemon: Daemon, done: Path) -> None:
    fy.secrets.set("TOKEN", "a-value-to-be-known-again")
    spec = Spec().run(f"{note(done, 'leaky')}; exit 3")
    daemon.host.left_behind.add(b"a-value-to-be-known-again")
    before = {snapshot.id for snapshot in fy.snapshots.list()}
    try:
        with pytest.raises(BuildFailed, match=r"exited with 3.*is not kept to look at.*secret TOKEN") as failed:
            fy.builds.create(spec).wait()
        assert failed.value.details["debug_snapshot_id"] is None
        assert {snapshot.id for snapshot in fy.snapshots.list()} <= before
        with pytest.raises(BuildFailed) as failed:
            fy.builds.create(spec, allow_secrets=True).wait()
        assert fy.snapshots.get(str(failed.value.details["debug_snapshot_id"]))
    finally:
        daemon.host.left_behind.clear()
        fy.secrets.delete("TOKEN")


def test_builds_at_once_have_each_what_they_were_given(fy: Forkyard, done: Path) -> None:
    fy.secrets.set("TOKEN", "a-value-to-be-known-again")
    given = {"TOKEN": {"hosts": ["example.com"]}}
    spec = Spec().run(f'{note(done, "begun")}; sleep 0.5; test -n "$TOKEN"')
    try:
        without = fy.builds.create(spec)
        until(lambda: words(done))
        assert fy.builds.create(spec, secrets=given).wait().snapshot_id is not None
        with pytest.raises(BuildFailed, match="exited with 1"):
            without.wait()
    finally:
        fy.secrets.delete("TOKEN")


def test_builds_at_once_with_other_means_keep_one_layer(fy: Forkyard, done: Path) -> None:
    fy.secrets.set("TOKEN", "a-value-to-be-known-again")
    before = len(fy.snapshots.list())
    spec = Spec().run(f"{note(done, 'begun')}; sleep 0.5")
    try:
        builds = [fy.builds.create(spec), fy.builds.create(spec, secrets={"TOKEN": {"hosts": ["example.com"]}})]
        assert len({build.wait().snapshot_id for build in builds}) == 1
    finally:
        fy.secrets.delete("TOKEN")
    assert len(words(done)) == 2
    assert len(fy.snapshots.list()) == before + 1


def test_a_layer_that_takes_the_place_of_another_leaves_nothing_behind(fy: Forkyard, done: Path) -> None:
    before = len(fy.snapshots.list())
    prefix = Spec().run(note(done, "prefix")).layer()
    old = fy.builds.create(prefix).wait().snapshot_id
    longer = fy.builds.create(prefix.run(f"{note(done, 'longer')}; sleep 1"))
    until(lambda: "longer" in words(done))
    new = fy.builds.create(prefix, skip_cache=True).wait().snapshot_id
    assert fy.snapshots.get(str(old)), "a build works on it"
    longer.wait()
    until(lambda: len(fy.snapshots.list()) == before + 2)
    assert new in {snapshot.id for snapshot in fy.snapshots.list()}
    fy.builds.prune()
    until(lambda: len(fy.snapshots.list()) == before)


def test_what_a_daemon_did_not_come_to_keep_goes_when_the_next_begins(fy: Forkyard, daemon: Daemon, done: Path) -> None:
    lost, named, layer = (fy.builds.create(Spec().run(note(done, word))).wait() for word in ("one", "two", "three"))
    daemon._run(daemon.builds._control.snapshots.rename(str(named.snapshot_id), "somebodys"))
    for build in (lost, named):
        daemon._run(daemon.builds._store.forget_layer(build.layers[0].key, str(build.snapshot_id)))
    with pytest.raises(BuildFailed) as failed:
        fy.builds.create(Spec().run("exit 3")).wait()
    own = fy.sandboxes.create().snapshot()
    daemon._run(daemon.builds._workshop.sweep())
    for kept in (named.snapshot_id, layer.snapshot_id, failed.value.details["debug_snapshot_id"], own.id):
        fy.snapshots.get(str(kept)).delete()
    with pytest.raises(SnapshotNotFound):
        fy.snapshots.get(str(lost.snapshot_id))


def test_a_machine_to_look_at_is_there_as_long_as_one_of_its_builds(fy: Forkyard, done: Path) -> None:
    spec = Spec().run(f"{note(done, 'begun')}; sleep 0.5; exit 3")
    builds = [fy.builds.create(spec) for _ in range(2)]
    kept = set()
    for build in builds:
        with pytest.raises(BuildFailed) as failed:
            build.wait()
        kept.add(failed.value.details["debug_snapshot_id"])
    (snapshot_id,) = kept
    builds[0].delete()
    assert fy.snapshots.get(str(snapshot_id))
    builds[1].delete()
    with pytest.raises(SnapshotNotFound):
        fy.snapshots.get(str(snapshot_id))


def test_secrets_of_a_build_are_stored_ones(fy: Forkyard, daemon: Daemon, done: Path) -> None:
    with pytest.raises(InvalidRequest, match="stored ones"):
        fy.builds.create(Spec().run("true"), secrets={"TOKEN": {"value": "v", "hosts": ["example.com"]}})
    fy.secrets.set("TOKEN", "a-value-to-be-known-again")
    try:
        build = fy.builds.create(Spec().run(f"echo $TOKEN > {done}"), secrets={"TOKEN": {"hosts": ["example.com"]}})
        build.wait()
        assert words(done)[0].startswith("forkyard-secret-")
    finally:
        fy.secrets.delete("TOKEN")


def test_what_a_spec_sets_is_passed_on_and_what_its_user_sets_is_not(fy: Forkyard, done: Path) -> None:
    spec = Spec().env(COLOUR="green").run(note(done, "built"))
    first = fy.sandboxes.create(spec=spec, env={"TOKEN": "mine"})
    assert first.exec("echo $COLOUR $TOKEN").stdout == "green mine\n"
    assert first.fork()[0].exec("echo $COLOUR $TOKEN").stdout == "green mine\n"
    second = fy.sandboxes.create(snapshot=first.snapshot())
    assert second.exec("echo $COLOUR $TOKEN").stdout == "green\n"


def test_a_change_in_the_last_step_does_only_that_step_again(fy: Forkyard, done: Path) -> None:
    prefix = Spec().run(note(done, "one")).env(A="b").run(note(done, "two"))
    fy.builds.create(prefix.run(note(done, "three"))).wait()
    changed = prefix.run(note(done, "four"))
    (layer,) = fy.builds.explain(changed)
    assert (layer.cached, layer.steps_kept) == (False, 3)
    fy.builds.create(changed).wait()
    assert words(done) == ["one", "two", "three", "four"]
    # One in the middle: what stands before it is kept, what follows is not.
    fy.builds.create(Spec().run(note(done, "one")).env(A="c").run(note(done, "two")).run(note(done, "four"))).wait()
    assert words(done) == ["one", "two", "three", "four", "two", "four"]
    # What failed begins where it failed.
    with pytest.raises(BuildFailed):
        fy.sandboxes.create(spec=changed.run("exit 3").run(note(done, "five")))
    fy.builds.create(changed.run(note(done, "five"))).wait()
    assert words(done)[-1] == "five" and words(done).count("four") == 2


def test_user_and_workdir_of_a_spec_are_the_defaults_of_commands(fy: Forkyard, daemon: Daemon, done: Path) -> None:
    place = done.parent / "place"
    spec = Spec().run(note(done, "built")).workdir(str(place)).env(COLOUR="green")
    sandbox = fy.sandboxes.create(spec=spec)
    assert daemon.host.world.machines[Incarnation(sandbox.id, 1)].spec.env == {
        "FORKYARD_WORKDIR": str(place),
        "COLOUR": "green",
    }
