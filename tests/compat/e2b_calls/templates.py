"""Templates: built, found, tagged; and secrets."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

from registry import Yard, call, expect, until


def _build(y: Yard, template: Any, name: str, **options: Any) -> Any:
    """The first argument was once called `alias`."""
    return y.e2b.Template.build(template, alias=name, **options)


@call("Template.build")
def _(y: Yard) -> None:
    y.template = f"made-{time.time_ns()}"
    wanted = (
        y.e2b.Template()
        .from_base_image()
        .set_workdir(y.dir)
        .set_envs({"FROM_TEMPLATE": "yes", **y.envs})
        .run_cmd("echo built as $FROM_TEMPLATE; pwd > built.txt")
    )
    logs: list[Any] = []
    built = _build(y, wanted, y.template, on_build_logs=logs.append)
    assert any("built as yes" in str(one.message) for one in logs), logs
    if built is not None:  # nothing, once
        assert built.template_id
        assert built.build_id


@call("Sandbox.create: a template that was built")
def _(y: Yard) -> None:
    made = y.e2b.Sandbox.create(y.template, timeout=300)
    assert made.commands.run("cat built.txt; pwd; echo $FROM_TEMPLATE").stdout == f"{y.dir}\n{y.dir}\nyes\n"
    assert made.get_info().template_id
    assert made.kill()


@call("Template.build: from_template, run_cmd with a user")
def _(y: Yard) -> None:
    wanted = y.e2b.Template().from_template(y.template).run_cmd("echo more >> built.txt", user="root")
    _build(y, wanted, f"{y.template}-more")
    made = y.e2b.Sandbox.create(f"{y.template}-more", timeout=300)
    assert made.commands.run("tail -1 built.txt; echo $FROM_TEMPLATE").stdout == "more\nyes\n"
    assert made.kill()


@call("Template.build: copy")
def _(y: Yard) -> None:
    with tempfile.TemporaryDirectory() as context:
        (Path(context) / "app").mkdir()
        (Path(context) / "app" / "main.py").write_text("print('copied')")
        (Path(context) / "data.txt").write_text("data")
        wanted = (
            y.e2b.Template(file_context_path=context)
            .from_base_image()
            .copy("app", y.path("app"))
            .copy("data.txt", y.path("below/"), mode=0o600)
        )
        _build(y, wanted, f"{y.template}-copied")
        _build(y, wanted, f"{y.template}-copied-again")
    made = y.e2b.Sandbox.create(f"{y.template}-copied", timeout=300)
    script = (
        f"cat {y.path('app/main.py')} {y.path('below/data.txt')}; stat -c ' %a %U' {y.path('below/data.txt')}; whoami"
    )
    found = made.commands.run(script).stdout.split()
    assert " ".join(found[:2]) == "print('copied')data 600", found
    assert found[2] == found[3], found
    assert made.kill()


@call("Template.build: from_dockerfile", "2.20")
def _(y: Yard) -> None:
    dockerfile = f"FROM python:3.12\nENV SAID=yes\nWORKDIR {y.dir}\nRUN echo $SAID > said.txt\nUSER root\n"
    _build(y, y.e2b.Template().from_dockerfile(dockerfile), f"{y.template}-docker")
    made = y.e2b.Sandbox.create(f"{y.template}-docker", timeout=300)
    assert made.commands.run(f"cat {y.path('said.txt')}").stdout == "yes\n"
    assert made.kill()


@call("template.make_dir, rename, make_symlink, remove, copy_items, set_user, skip_cache, to_dockerfile")
def _(y: Yard) -> None:
    with tempfile.TemporaryDirectory() as context:
        (Path(context) / "one.txt").write_text("one")
        (Path(context) / "two.txt").write_text("two")
        wanted = (
            y.e2b.Template(file_context_path=context)
            .skip_cache()
            .from_debian_image()
            .set_user("root")
            .make_dir(y.path("made/below"))
            .copy_items([{"src": "one.txt", "dest": y.path("made/")}, {"src": "two.txt", "dest": y.path("made/")}])
            .rename(y.path("made/one.txt"), y.path("made/renamed.txt"))
            .make_symlink(y.path("made/renamed.txt"), y.path("made/link.txt"))
            .remove(y.path("made/two.txt"))
        )
        assert y.e2b.Template.to_dockerfile(wanted).startswith("FROM ")
        _build(y, wanted, f"{y.template}-steps")
    made = y.e2b.Sandbox.create(f"{y.template}-steps", timeout=300)
    found = made.commands.run(f"cd {y.path('made')} && whoami && ls && readlink -f link.txt && cat link.txt").stdout
    assert found.split() == ["root", "below", "link.txt", "renamed.txt", y.path("made/renamed.txt"), "one"], found
    assert made.kill()


@call("Template.build: a step that fails")
def _(y: Yard) -> None:
    wanted = y.e2b.Template().from_base_image().run_cmd("echo about to fail; exit 3")
    logs: list[Any] = []
    expect(
        y.e2b.BuildException,
        lambda: _build(y, wanted, f"{y.template}-fails", on_build_logs=logs.append),
        "exit",
    )
    assert any("about to fail" in str(one.message) for one in logs)
    expect(Exception, lambda: y.e2b.Sandbox.create(f"{y.template}-fails"), "not found")


@call("Template.build: cpu_count, memory_mb")
def _(y: Yard) -> None:
    _build(y, y.e2b.Template().from_python_image("3").run_cmd("true"), f"{y.template}-big", cpu_count=2, memory_mb=1024)
    made = y.e2b.Sandbox.create(f"{y.template}-big", timeout=300)
    info = made.get_info()
    assert (info.cpu_count, info.memory_mb) == (2, 1024)
    assert made.kill()


@call("Template.build: min_free_disk_mb", "2.51")
def _(y: Yard) -> None:
    _build(y, y.e2b.Template().from_base_image().run_cmd("true"), f"{y.template}-roomy", min_free_disk_mb=20 * 1024)
    made = y.e2b.Sandbox.create(f"{y.template}-roomy", timeout=300)
    until(made.get_metrics, 30)
    assert made.get_metrics()[-1].disk_total == 28 * 2**30
    assert made.kill()


@call("template.from_node_image, from_bun_image, from_image")
def _(y: Yard) -> None:
    for name, wanted in {
        "node": y.e2b.Template().from_node_image("24"),
        "bun": y.e2b.Template().from_bun_image("1"),
        "image": y.e2b.Template().from_image("debian:12"),
    }.items():
        _build(y, wanted.run_cmd(f"mkdir -p {y.dir} && echo {name} > {y.path('from.txt')}"), f"{y.template}-{name}")
        made = y.e2b.Sandbox.create(f"{y.template}-{name}", timeout=300)
        assert made.commands.run(f"cat {y.path('from.txt')}").stdout == f"{name}\n"
        assert made.kill()


@call("template.git_clone")
def _(y: Yard) -> None:
    origin, who = y.path("origin"), "git -c user.name=a -c user.email=a@example.com"
    wanted = (
        y.e2b.Template()
        .from_base_image()
        .set_envs(y.envs)
        .run_cmd(
            f"rm -rf {origin} && git init -q -b main {origin} && cd {origin} && echo it > it.txt && git add it.txt"
        )
        .run_cmd(f"cd {origin} && {who} commit -q -m it && rm -rf {y.path('cloned')}")
        .git_clone(f"file://{origin}", y.path("cloned"), branch="main", depth=1)
    )
    _build(y, wanted, f"{y.template}-cloned")
    made = y.e2b.Sandbox.create(f"{y.template}-cloned", timeout=300)
    assert made.commands.run(f"cat {y.path('cloned/it.txt')}").stdout == "it\n"
    assert made.kill()


@call("Template.build: from_template (a snapshot)", "2.20")
def _(y: Yard) -> None:
    first = y.e2b.Sandbox.create(y.template, timeout=300)
    snapshot = first.create_snapshot()
    assert first.kill()
    wanted = y.e2b.Template().from_template(snapshot.snapshot_id).run_cmd("echo on top of it > top.txt")
    _build(y, wanted, f"{y.template}-snapped")
    made = y.e2b.Sandbox.create(f"{y.template}-snapped", timeout=300)
    assert made.commands.run("cat top.txt; pwd").stdout == f"on top of it\n{y.dir}\n"
    assert made.kill()


@call("Template.build_in_background, get_build_status")
def _(y: Yard) -> None:
    # Of this run alone: a step that another has built says nothing.
    wanted = y.e2b.Template().from_base_image().run_cmd(f"echo in the background of {y.template}")
    begun = y.e2b.Template.build_in_background(wanted, alias=f"{y.template}-later")
    end = time.monotonic() + 60
    while True:
        status = y.e2b.Template.get_build_status(begun)
        word = str(getattr(status.status, "value", status.status))
        if word not in ("building", "waiting"):
            break
        assert time.monotonic() < end
        time.sleep(0.1)
    assert word == "ready"
    assert any("in the background" in one.message for one in status.log_entries)


@call("Template.exists: one that was built", "2.20")
def _(y: Yard) -> None:
    assert y.e2b.Template.exists(y.template) is True
    assert y.e2b.Template.exists(f"{y.template}-nothing") is False


@call("Template.build: name:tag, tags", "2.20")
def _(y: Yard) -> None:
    wanted = y.e2b.Template().from_base_image().run_cmd("true")
    built = y.e2b.Template.build(wanted, f"{y.template}-tagged:v1", tags=["stable"])
    assert {"v1", "stable"} <= set(built.tags)
    made = y.e2b.Sandbox.create(f"{y.template}-tagged:stable", timeout=300)
    assert made.kill()
    expect(Exception, lambda: y.e2b.Sandbox.create(f"{y.template}-tagged:v2"), "not found")


@call("Template.assign_tags, get_tags, remove_tags", "2.20")
def _(y: Yard) -> None:
    name = f"{y.template}-tagged"
    assert y.e2b.Template.assign_tags(f"{name}:v1", ["v2", "newest"]).tags == ["v2", "newest"]
    assert {one.tag for one in y.e2b.Template.get_tags(name)} == {"v1", "stable", "v2", "newest"}
    y.e2b.Template.remove_tags(name, ["v2"])
    assert {one.tag for one in y.e2b.Template.get_tags(name)} == {"v1", "stable", "newest"}
    expect(Exception, lambda: y.e2b.Template.assign_tags(f"{name}:nothing", ["x"]))


@call("Secret.create, get_info, update, list, exists, destroy", "2.43")
def _(y: Yard) -> None:
    name = f"secret-{time.time_ns()}"
    made = y.e2b.Secret.create(name, "first", metadata={"team": "a"})
    assert (made.name, made.metadata) == (name, {"team": "a"})
    assert y.e2b.Secret.update(name, "second").metadata == {"team": "a"}
    assert y.e2b.Secret.get_info(name).name == name
    assert name in [one.name for one in y.e2b.Secret.list().next_items()]
    expect(Exception, lambda: y.e2b.Secret.create(name, "again"))
    assert y.e2b.Secret.exists(name) is True
    assert y.e2b.Secret.destroy(name) is True
    assert y.e2b.Secret.destroy(name) is False
    assert y.e2b.Secret.exists(name) is False


@call("Secret.fill, Sandbox.create: network rules", "2.45")
def _(y: Yard) -> None:
    name = f"filled-{time.time_ns()}"
    y.e2b.Secret.create(name, "sk-nobody-sees-this")
    rules = {"api.example.com": [{"transform": {"headers": {"Authorization": f"Bearer {y.e2b.Secret.fill(name)}"}}}]}
    made = y.e2b.Sandbox.create(timeout=300, network={"rules": rules, "allow_out": ["api.example.com"]})
    told = made.get_info().network
    assert told is not None
    assert "sk-nobody-sees-this" not in str(told)
    assert y.e2b.Secret.fill(name) in str(told)
    assert "sk-nobody-sees-this" not in made.commands.run("env").stdout
    made.update_network({"rules": rules})
    made.update_network({})
    wrong = {"api.example.com": [{"transform": {"headers": {"X": y.e2b.Secret.fill("no-such-secret")}}}]}
    expect(y.e2b.SandboxException, lambda: made.update_network({"rules": wrong}), "no-such-secret")
    assert made.kill()
    assert y.e2b.Secret.destroy(name)


@call("files.write: metadata", "2.63")
def _(y: Yard) -> None:
    noted = {"author": "ada", "stage": "draft"}
    assert y.sbx.files.write(y.path("m.txt"), "x", metadata=noted).metadata == noted
    assert y.sbx.files.get_info(y.path("m.txt")).metadata == noted
    y.sbx.files.write(y.path("m.txt"), "x")
    assert not y.sbx.files.get_info(y.path("m.txt")).metadata
