"""Specs: the model, the builder, what makes a layer the same, and the words for why it is not."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml
from pydantic import ValidationError

from forkyard import InvalidRequest, Spec
from forkyard.builds.layers import Layer, Start, why_missing
from forkyard.builds.layers import layers_of as made_of
from forkyard.control import units
from forkyard.models.bases import ImageConfig
from forkyard.models.specs import Service, start_order
from forkyard.models.specs import Spec as SpecModel

ROOT = Path(__file__).parents[2]
SCHEMA = jsonschema_rs.validator_for(json.loads((ROOT / "docs" / "reference" / "spec.schema.json").read_text()))


def layers_of(spec: SpecModel, template: str) -> list[Layer]:
    return made_of(spec, Start(spec.base, template), list(enumerate(spec.steps)))


def keys(spec: Spec, template: str = "t") -> list[str]:
    return [layer.key for layer in layers_of(spec.model(), template)]


def test_a_spec_is_a_value_and_every_call_gives_a_new_one() -> None:
    first = Spec().run("a")
    second = first.run("b")
    assert len(first.model().steps) == 1
    assert len(second.model().steps) == 2
    assert first == Spec().run("a") != second


def test_yaml_and_the_builder_say_the_same() -> None:
    text = """
    size: {vcpus: 2, memory_mib: 1024}
    steps:
    - apt: [ripgrep]
    - git: {url: "https://example.com/a.git", path: /repo, rev: main}
    - layer
    - run: npm ci
    - env: {PORT: "3000"}
    - service: {name: web, exec: npm run dev, ready: curl -sf localhost:3000, restart: on-failure}
    - wait_for: curl -sf localhost:3000
    """
    built = (
        Spec()
        .size(vcpus=2, memory_mib=1024)
        .apt("ripgrep")
        .git("https://example.com/a.git", "/repo", "main")
        .layer()
        .run("npm ci")
        .env(PORT="3000")
        .service("web", "npm run dev", ready="curl -sf localhost:3000", restart="on-failure")
        .wait_for("curl -sf localhost:3000")
    )
    assert Spec.parse(text) == built
    assert Spec(**built.to_dict()) == built
    assert SpecModel.model_validate(built.model().model_dump(mode="json")) == built.model()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"steps": [{"run": {"comand": "x"}}]}, "steps.0.run.comand"),
        ({"steps": [{"run": "a", "apt": ["b"]}]}, "has apt and run"),
        ({"steps": [{}]}, "is empty"),
        ({"steps": [{"git": {"url": "https://me:secret@example.com/a"}}]}, "credential"),
        ({"steps": [{"git": {"url": "https://example.com/a", "rev": "--upload-pack=x"}}]}, "does not begin"),
        ({"steps": [{"files": {"/a": {"content": "?", "encoding": "base64"}}}]}, "not base64"),
        ({"steps": [{"run": "a\0b"}]}, "NUL"),
        ({"steps": [{"workdir": "/a\nUser=root"}]}, "control character"),
        ({"steps": [{"install": "what.lock"}]}, "no lockfile"),
        ({"steps": [{"run": ["echo", 1]}]}, "steps.0.run.command.1: "),
        ({"steps": [{"service": {"name": "a@", "exec": "x"}}]}, "steps.0.service.name"),
        ({"steps": [{"service": {"name": "a", "exec": "x", "workdir": "-/app"}}]}, "from the root"),
        ({"steps": [{"files": {"/a": {"content": "", "mode": 755}}}]}, "0o1363 as permission bits; write '0755'"),
        ({"steps": [{"files": {"/a": {"content": "", "mode": "rwx"}}}]}, "no mode such as"),
        ({"steps": [{"service": {"name": "a", "exec": "x"}}, {"service": {"name": "a", "exec": "y"}}]}, "two services"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(spec: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said.replace(".", r"\.")):
        Spec(**spec).model()


def test_services_that_wait_for_each_other_are_refused() -> None:
    circle = [Service(name="a", exec="x", after=["b"]), Service(name="b", exec="x", requires=["a.service"])]
    with pytest.raises(ValidationError, match="circle"):
        SpecModel.model_validate({"steps": [{"service": one} for one in circle]})


def test_services_start_after_those_they_need() -> None:
    services = [Service(name="web", exec="x", requires=["db"], after=["network.target"]), Service(name="db", exec="x")]
    assert [service.name for service in start_order(services)] == ["db", "web"]


def test_a_change_gives_its_layer_and_all_later_ones_another_key() -> None:
    spec = Spec().run("a").layer().run("b").layer().run("c")
    assert keys(spec) == keys(Spec().run("a").layer().run("b").layer().run("c"))
    changed = keys(Spec().run("a").layer().run("B").layer().run("c"))
    assert [one == other for one, other in zip(keys(spec), changed, strict=True)] == [True, False, False]
    for other in (spec.size(vcpus=2), spec.discriminator("x"), spec.base("other")):
        assert set(keys(other)).isdisjoint(keys(spec))
    assert set(keys(spec, "another template")).isdisjoint(keys(spec))


def test_saying_a_default_changes_no_key() -> None:
    assert keys(Spec(steps=[{"run": "a"}])) == keys(Spec(steps=[{"run": {"command": "a", "timeout_s": 3600}}]))


def test_layers_without_steps_are_none() -> None:
    assert len(keys(Spec().layer().run("a").layer().layer())) == 1
    assert len(keys(Spec())) == 1


def test_what_is_said_of_a_layer_without_steps_is_said_of_the_next_or_else_of_the_last() -> None:
    def salted(text: str) -> list[str]:
        return keys(Spec().layer(discriminator=text).run("a").layer().run("b"))

    assert set(salted("v1")).isdisjoint(salted("v2"))
    skipping = Spec().run("a").layer().run("b").layer().layer(skip_cache=True)
    assert [layer.skip_cache for layer in layers_of(skipping.model(), "t")] == [False, True]
    assert keys(skipping) == keys(Spec().run("a").layer().run("b"))


def test_an_install_is_keyed_by_its_lockfile_and_manifest(tmp_path: Path) -> None:
    lockfile = tmp_path / "package-lock.json"
    lockfile.write_text("{}")
    (tmp_path / "package.json").write_text('{"name": "a"}')
    before = Spec().install(lockfile)
    assert before == Spec.parse("steps: [{install: package-lock.json}]", tmp_path)
    assert set(before.model().steps[0].install.files) == {"package-lock.json", "package.json"}  # type: ignore[union-attr]
    (tmp_path / "unrelated.txt").write_text("x")
    assert keys(Spec().install(lockfile)) == keys(before)
    lockfile.write_text('{"lockfileVersion": 3}')
    assert keys(Spec().install(lockfile)) != keys(before)


def test_a_lockfile_brings_no_credential_along(tmp_path: Path) -> None:
    (tmp_path / "package-lock.json").write_text("{}")
    npmrc, yarnrc = tmp_path / ".npmrc", tmp_path / ".yarnrc.yml"
    for text, said in (
        ("//npm.example/:_authToken=abc\n", "_authToken"),
        ("a=b\n//npm.example/:_password = 'abc'\n", "_password"),
        ("_auth=abc\n", "_auth"),
        ("registry=https://me:abc@npm.example/\n", "a password or token in an address"),
        ("registry=https://abc@npm.example/\n", "a password or token in an address"),
    ):
        npmrc.write_text(text)
        with pytest.raises(InvalidRequest, match=rf"npmrc has {said}, which would stay") as caught:
            Spec().install(tmp_path / "package-lock.json")
        assert "abc" not in str(caught.value) and "NPM_TOKEN" in str(caught.value)
    npmrc.write_text("//npm.example/:_authToken=${NPM_TOKEN}\nregistry=https://npm.example:8443/@scope\n")
    requirements = tmp_path / "requirements.txt"
    requirements.write_text("--index-url https://${TOKEN}@pip.example/simple\na @ git+https://git@host.example/a.git\n")
    Spec().install(requirements)
    requirements.write_text("a @ git+https://abc@host.example/a.git\n")
    with pytest.raises(InvalidRequest, match="a password or token in an address"):
        Spec().install(requirements)
    yarnrc.write_text("npmAuthToken: abc\n")
    with pytest.raises(InvalidRequest, match="npmAuthToken"):
        Spec.parse("steps: [{install: package-lock.json}]", tmp_path)
    yarnrc.write_text('npmAuthToken: "${NPM_TOKEN}"\n')
    step = Spec().install(tmp_path / "package-lock.json").model().steps[0].install
    assert step is not None and {".npmrc", ".yarnrc.yml"} <= set(step.files)


def test_requirements_bring_along_what_they_include(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "requirements.txt").write_text(
        "six  # -r none.txt\n-r more/dev.txt # these\n-cpins.txt\n-r https://e.example/r\n"
    )
    (tmp_path / "more" / "dev.txt").write_text("--requirement=../more.txt\n--constraint \\\n  ../pins.txt\n")
    (tmp_path / "more.txt").write_text("-r requirements.txt\n")
    (tmp_path / "pins.txt").write_text("six==1.16.0\n")
    spec = Spec().install(tmp_path / "requirements.txt")
    step = spec.model().steps[0].install
    assert step is not None
    assert set(step.files) == {"requirements.txt", "more/dev.txt", "more.txt", "pins.txt"}
    (tmp_path / "pins.txt").write_text("six==1.17.0\n")
    assert keys(Spec().install(tmp_path / "requirements.txt")) != keys(spec)
    with pytest.raises(InvalidRequest, match="not below its directory"):
        Spec().install(tmp_path / "more" / "dev.txt", manager="pip")
    (tmp_path / "pins.txt").unlink()
    with pytest.raises(InvalidRequest, match=r"pins\.txt cannot be read"):
        Spec().install(tmp_path / "requirements.txt")


def test_variables_are_what_stands_in_the_file() -> None:
    text = """
    dockerfile: {text: "FROM debian\\n", args: {VERSION: 1.10}}
    steps:
    - env: {PORT: 3000, DEBUG: true, VERSION: 1.10, MASK: 0022, ANSWER: yes, NAME: x}
    - run: {command: a, env: {N: 1}}
    - service: {name: web, exec: x, env: {PORT: 08}}
    """
    spec = Spec.parse(text).model()
    assert spec.steps[0].env == {
        "PORT": "3000",
        "DEBUG": "true",
        "VERSION": "1.10",
        "MASK": "0022",
        "ANSWER": "yes",
        "NAME": "x",
    }
    assert spec.steps[1].run is not None and spec.steps[1].run.env == {"N": "1"}
    assert spec.steps[2].service is not None and spec.steps[2].service.env == {"PORT": "08"}
    assert spec.dockerfile is not None and spec.dockerfile.args == {"VERSION": "1.10"}
    assert Spec(steps=[{"env": {"PORT": 3000, "DEBUG": False}}]).model().steps[0].env == {
        "PORT": "3000",
        "DEBUG": "false",
    }


def test_what_yaml_makes_of_no_is_no_and_of_dates_what_stands_there() -> None:
    spec = Spec.parse("steps: [{env: {DAY: 2024-01-01}}, {service: {name: a, exec: x, restart: no}}]").model()
    assert spec.steps[0].env == {"DAY": "2024-01-01"}
    assert spec.steps[1].service is not None and spec.steps[1].service.restart == "no"


@pytest.mark.parametrize(
    "text", ["steps: [{run: a}]\nsteps: []", "steps: [{env: {A: 1, A: 2}}]", '{"steps": [], "name": "a", "name": "b"}']
)
def test_what_is_said_twice_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="there twice"):
        Spec.parse(text)


@pytest.mark.parametrize(
    "step",
    [
        "layer",
        "layer: {discriminator: a}",
        "run: [npm, ci]",
        "node: 22",
        "bun: true",
        "python: '3.12'",
        "git: https://example.com/a.git#main:/a",
        "service: main",
        "service: {name: a, exec: x, restart: no}",
        "install: uv.lock",
        "add: {from: ., to: /app}",
        "files: {/a: text, /b: {from: spec.yaml, mode: '0755'}}",
    ],
)
def test_the_published_schema_knows_what_a_file_may_say(step: str) -> None:
    assert SCHEMA.is_valid(yaml.safe_load(f"steps: [{step if step == 'layer' else '{' + step + '}'}]"))


def test_the_published_schema_refuses_what_a_file_may_not_say() -> None:
    for wrong in ({"stepz": []}, {"steps": [{"run": 1}]}, {"image": {"fil": "a"}}, {"steps": [{"node": "new"}]}):
        assert not SCHEMA.is_valid(wrong)


@pytest.mark.parametrize("page", ["specs.md", "images.md"])
def test_the_files_of_a_page_are_as_the_published_schema_says(page: str) -> None:
    for text in re.findall(r"^```yaml\n(.*?)^```", (ROOT / "docs" / page).read_text(), flags=re.DOTALL | re.MULTILINE):
        assert not list(SCHEMA.iter_errors(yaml.safe_load(text))), text


def test_a_spec_may_be_json_with_tabs() -> None:
    assert Spec.parse('{\n\t"steps": [\n\t\t{"env": {"PORT": 3000}}\n\t]\n}') == Spec().env(PORT="3000")
    assert Spec.parse("{steps: [{run: a}]}") == Spec().run("a")
    with pytest.raises(InvalidRequest, match="is no YAML"):
        Spec.parse("steps:\n\t- run: a")


def test_modes_are_octal_as_everywhere(tmp_path: Path) -> None:
    def mode(text: str) -> object:
        files = Spec.parse(f"steps: [{{files: {{/a: {{content: x, mode: {text}}}}}}}]").model().steps[0].files
        return files and files["/a"].mode

    assert {mode(text) for text in ("0755", "'0755'", "'755'", "'0o755'", "493")} == {0o755}
    add = Spec().add(tmp_path, "/app", mode="0700").model().steps[0].add
    assert add is not None and add.mode == 0o700


def test_a_directory_of_this_machine_is_added_from_a_file_as_from_python(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "run").write_text("x")
    spec = Spec.parse("steps: [{add: {from: app, to: /app}}, {add: {from: app, to: /b/, sources: [r*]}}]", tmp_path)
    assert spec == Spec().add(tmp_path / "app", "/app").add(tmp_path / "app", "/b/", names=["r*"])
    assert [len(upload.digest) for upload in spec.uploads] == [71, 71]
    with pytest.raises(InvalidRequest, match="no directory"):
        Spec.parse("steps: [{add: {from: none, to: /app}}]", tmp_path)


def test_local_files_and_directories_travel_with_the_spec(tmp_path: Path) -> None:
    (tmp_path / "app" / "bin").mkdir(parents=True)
    (tmp_path / "app" / "bin" / "run").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "app" / "bin" / "run").chmod(0o755)
    (tmp_path / "app" / "logo").write_bytes(b"\xff\xfe")
    files = Spec.parse("steps: [{files: {/app: {from: app}}}]", tmp_path).model().steps[0].files
    assert files is not None
    assert files["/app/bin/run"].mode == 0o755
    assert files["/app/logo"].data() == b"\xff\xfe"
    with pytest.raises(InvalidRequest, match="cannot be read"):
        Spec.parse("steps: [{files: {/app: {from: none}}}]", tmp_path)


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (Spec().run("a").run("c"), "step 1 is `run c`, and was `run b`"),
        (Spec().run("a").run("b").run("c"), "step 2 (run c) is new"),
        (Spec().run("a"), "step 1 (run b) is gone"),
        (Spec().run("a").run("b").discriminator("x"), "discriminator is `x`, and was ``"),
        (Spec().run("a").run("b"), "it was built before, and evicted or deleted since"),
        (Spec().run("p").run("q"), "nothing like it was built before"),
        (
            Spec().run("a").run("b").size(memory_mib=1024),
            "size is `1 cpu, 1024 MiB, 8 GiB`, and was `1 cpu, 512 MiB, 8 GiB`",
        ),
        (Spec().apt("tree"), "nothing like it was built before"),
    ],
)
def test_a_miss_names_the_first_difference_to_the_nearest_layer(now: Spec, reason: str) -> None:
    kept = [
        (layer.parent_key, [one.to_json() for one in layer.inputs])
        for spec in (Spec().run("x").run("y"), Spec().run("a").run("b"))
        for layer in layers_of(spec.model(), "template of 512 MiB")
    ]
    (layer,) = layers_of(now.model(), f"template of {now.model().size.memory_mib} MiB")
    assert why_missing(layer, kept, parent_cached=True) == reason


def test_a_miss_of_a_single_step_is_compared_with_one_of_its_kind() -> None:
    (old,), (new,) = (layers_of(Spec().run(text).model(), "t") for text in ("one", "two"))
    kept = [(old.parent_key, [one.to_json() for one in old.inputs])]
    assert why_missing(new, kept, parent_cached=True) == "step 0 is `run two`, and was `run one`"


def test_a_file_with_other_content_is_named_without_it() -> None:
    (old,), (new,) = (layers_of(Spec().files({"/a": text}).model(), "t") for text in ("one", "two"))
    kept = [(old.parent_key, [one.to_json() for one in old.inputs])]
    assert why_missing(new, kept, parent_cached=True) == "step 0 (files /a) has other content"


def test_a_unit_holds_what_was_asked_for() -> None:
    service = Service(name="web", exec="run me", env={"A": 'x "50%" \\ \n'}, user="user", watchdog_s=5, after=["db"])
    text = units.unit(service, "/bin/bash")
    assert units.asked(text) == service
    assert 'Environment="A=x \\"50%%\\" \\\\ \\n"' in text.splitlines()
    assert "After=db.service" in text.splitlines()
    assert units.asked("[Unit]\n[X-Forkyard]\nService={not json") is None


def test_a_service_may_be_started_only_so_often() -> None:
    limited = units.unit(Service(name="web", exec="x", start_limit=4, start_limit_s=60), "/bin/sh").splitlines()
    assert {"StartLimitIntervalSec=60", "StartLimitBurst=4"} <= set(limited)
    assert "StartLimitIntervalSec=0" in units.unit(Service(name="web", exec="x"), "/bin/sh").splitlines()


@pytest.mark.parametrize(
    ("states", "ready", "code"),
    [
        (["NRestarts=0\nActiveState=active"], "true", 0),
        (["NRestarts=0\nActiveState=failed"], "false", 3),
        (["ActiveState=inactive\nNRestarts=0"], "false", 3),
        ([f"NRestarts={count}\nActiveState=activating" for count in range(units.CRASHES + 1)], "false", 4),
        ([f"ActiveState=active\nNRestarts={count}" for count in range(units.CRASHES + 1)], "false", 4),
    ],
)
def test_who_waits_for_a_service_is_told_when_it_ends_again_and_again(
    tmp_path: Path, states: list[str], ready: str, code: int
) -> None:
    for number, state in enumerate(states):
        (tmp_path / str(number)).write_text(state + "\n")
    last = len(states) - 1
    (tmp_path / "systemctl").write_text(
        f"#!/bin/sh\ncd {tmp_path}; n=$(cat n 2>/dev/null || echo 0); cat $n; [ $n -eq {last} ] || echo $((n+1)) > n\n"
    )
    (tmp_path / "systemctl").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FORKYARD_READY": ready}
    script = units.wait_script(Service(name="web", exec="x"))
    assert subprocess.run(["sh", "-c", script], env=env, timeout=60).returncode == code


def test_a_service_has_any_name_that_a_unit_has() -> None:
    for name in ("MyService", "dev.server@1", "bun-workspace--app", "a:b"):
        assert units.unit_name(name) == f"{name}.service"
        text = units.unit(Service(name=name, exec="x", after=["app.js", "web.service", "a.socket"]), "/bin/sh")
        assert "After=app.js.service web.service a.socket\n" in text
        assert f"ExecStart=/bin/sh {units.SCRIPTS}/{name}.sh\n" in text
    for name in ("web.service", "a.socket", "-x", "a/b", ".", "", "x" * 129):
        with pytest.raises(ValidationError):
            Service(name=name, exec="x")


def test_a_oneshot_counts_as_up_when_it_has_succeeded_unless_it_says_otherwise() -> None:
    def remains(**fields: object) -> bool:
        return "RemainAfterExit=yes" in units.unit(
            Service.model_validate({"name": "a", "exec": "x", **fields}), "/bin/sh"
        )

    assert remains(type="oneshot")
    assert remains(remain=True)
    assert not remains(type="oneshot", remain=False)
    assert not remains()


def test_a_service_without_a_command_is_what_the_image_runs() -> None:
    says = {
        "entrypoint": ["/srv/go", "a b"],
        "cmd": ["-v"],
        "user": "12:34",
        "workdir": "/srv",
        "env": {"A": "1", "B": "2"},
    }
    image = ImageConfig.model_validate(says)
    service = units.completed(Service.model_validate("main"), image)
    assert service.exec == "exec /srv/go 'a b' -v"
    text = units.unit(service.model_copy(update={"env": {"A": "3"}}), "/bin/sh")
    lines = (
        "User=12",
        "Group=34",
        "WorkingDirectory=/srv",
        'Environment="A=3"',
        f"ExecStart=/bin/sh {units.SCRIPTS}/main.sh",
    )
    assert set(lines) <= set(text.splitlines())
    assert units.asked(units.unit(service, "/bin/sh")) == service
    own = units.completed(Service(name="own", exec="x", env={"A": "3"}), image)
    assert (own.user, own.workdir, own.env) == (None, None, {"A": "3", "B": "2"}), "its variables are everybody's"
    with pytest.raises(InvalidRequest, match="no ENTRYPOINT or CMD"):
        units.completed(Service(name="main"), ImageConfig())


def test_a_layer_is_kept_after_each_step_that_runs_something() -> None:
    spec = Spec().apt("a").env(A="b").run("c").service("s", "x").service("t", "y").user("u").run("last")
    (layer,) = layers_of(spec.model(), "base")
    assert layer.stops() == [1, 3, 5]
    other = layers_of(Spec().apt("a").env(A="b").run("d").model(), "base")[0]
    assert layer.part(1).key == other.part(1).key
    assert len({layer.key, *(layer.part(count).key for count in layer.stops())}) == 4
    rest = layer.rest(3)
    assert [step.kind for _, step in rest.steps] == ["service", "service", "user", "run"]
    assert dict(rest.context.env) == {"A": "b"}
    assert layer.env_after() == {"FORKYARD_USER": "u", "A": "b"}


def test_versions_of_runtimes_are_given_as_people_write_them() -> None:
    assert Spec().node(22).bun().to_dict()["steps"] == [{"node": "22"}, {"bun": "latest"}]
    assert Spec.parse("steps: [{python: '3.12'}, {uv: true}]").to_dict()["steps"] == [
        {"python": "3.12"},
        {"uv": "latest"},
    ]
    for wrong, said in ((3.10, "in quotes"), ("3.12; rm -rf /", "pattern"), ("", "pattern")):
        with pytest.raises(InvalidRequest, match=said):
            Spec(steps=[{"python": wrong}]).model()
