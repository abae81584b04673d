"""Dockerfiles, uploads and images against the real API. Machines are agents on this host, so steps are real commands;
they write below the test's own directory."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forkyard import BuildFailed, Forkyard, ImageNotFound, InvalidDockerfile, InvalidRequest, Spec, UploadNotFound
from forkyard.models.bases import ImageConfig, ImageInfo

from .sdk_daemon import Daemon, running_daemon


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with running_daemon() as daemon:
        yield daemon


@pytest.fixture(scope="module")
def fy(daemon: Daemon) -> Iterator[Forkyard]:
    with Forkyard(socket=daemon.socket, key_file=daemon.key_file) as client:
        yield client


@pytest.fixture
def there(tmp_path: Path, fy: Forkyard) -> Iterator[Path]:
    """Where steps put what they make."""
    (tmp_path / "there").mkdir()
    yield tmp_path / "there"
    for sandbox in fy.sandboxes.list():
        sandbox.delete()
    fy.builds.prune()


@pytest.fixture
def context(tmp_path: Path) -> Path:
    root = tmp_path / "context"
    (root / "src" / "deep").mkdir(parents=True)
    (root / "src" / "a.txt").write_text("a")
    (root / "src" / "deep" / "b.txt").write_text("b")
    (root / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (root / "run.sh").chmod(0o755)
    (root / "secret.env").write_text("token")
    (root / "link").symlink_to("run.sh")
    (root / ".dockerignore").write_text("*.env\n")
    return root


def test_a_dockerfile_is_built_with_its_context(fy: Forkyard, there: Path, context: Path) -> None:
    text = f"""
ARG DIR={there}
FROM debian
ARG DIR
ENV WORD=hello
COPY --chmod=640 src $DIR/src
COPY run.sh link $DIR/bin/
COPY --chown=1234:5678 <<EOF $DIR/said
$WORD "you"
EOF
RUN <<EOF
echo $WORD $DIR > $DIR/ran
ls -A $DIR >> $DIR/ran
EOF
RUN ["touch", "{there}/with blank"]
ADD . $DIR/all/
"""
    (context / "Dockerfile").write_text(text)
    spec = Spec().dockerfile(context / "Dockerfile")
    info = fy.builds.create(spec).wait()
    assert (there / "src" / "deep" / "b.txt").read_text() == "b"
    assert (there / "src" / "a.txt").stat().st_mode & 0o777 == 0o640
    assert (there / "src" / "a.txt").owner() == "root"
    assert subprocess.run([there / "bin" / "link"], capture_output=True, check=True).stdout == b"ran\n"
    said = there / "said"
    assert (said.read_text(), said.stat().st_uid, said.stat().st_gid) == ('hello "you"\n', 1234, 5678)
    assert (there / "ran").read_text().split() == ["hello", str(there), "bin", "ran", "said", "src"]
    assert (there / "with blank").exists()
    assert not (there / "all" / "secret.env").exists(), "what .dockerignore names stays behind"
    assert [layer.cached for layer in info.layers] == [False] * 6
    first = fy.sandboxes.create(spec=spec)
    assert first.info.snapshot_id == info.snapshot_id


def test_only_what_follows_a_change_is_built_again(fy: Forkyard, there: Path, context: Path) -> None:
    text = f"FROM debian\nRUN echo one >> {there}/log\nCOPY src {there}/src\nRUN echo two >> {there}/log\n"

    def build(text: str) -> list[bool]:
        return [layer.cached for layer in fy.builds.create(Spec().dockerfile(text, context)).wait().layers]

    assert build(text) == [False, False, False]
    (context / "run.sh").write_text("other")
    assert build(text) == [True, True, True], "what no COPY takes does not count"
    (context / "src" / "a.txt").write_text("changed")
    assert build(text) == [True, False, False]
    assert build(f"# moved down\n\n{text}") == [True, True, True]
    assert (there / "log").read_text().split() == ["one", "two", "two"]
    changed = fy.builds.explain(Spec().dockerfile(text.replace("two", "three"), context))
    assert changed[-1].reason.startswith("step 4 is `run /bin/sh -c echo three")


def test_stages_are_copied_from_and_those_not_needed_are_left(fy: Forkyard, there: Path) -> None:
    text = f"""
FROM debian AS build
RUN mkdir -p {there}/out/bin && echo made > {there}/out/bin/made
RUN chown 77 {there}/out/bin/made && chmod 4751 {there}/out/bin/made
FROM debian AS unused
RUN touch {there}/unused
FROM build AS more
RUN echo more > {there}/out/more
FROM debian
COPY --from=more {there}/out/ {there}/final/
COPY --from=build --chown=0 {there}/out/bin/ma* {there}/one
"""
    info = fy.builds.create(Spec().dockerfile(text)).wait()
    assert (there / "final" / "bin" / "made").read_text() == "made\n"
    made = (there / "final" / "bin" / "made").stat()
    assert (made.st_uid, made.st_mode & 0o7777) == (77, 0o4751), "owners and modes in a stage are kept"
    assert (there / "final" / "more").exists()
    assert (there / "one").stat().st_uid == 0
    assert not (there / "unused").exists()
    assert len(info.layers) == 5
    # Stages are not needed when what was made of them is there.
    again = fy.builds.create(Spec().dockerfile(text + f"RUN touch {there}/last\n")).wait()
    assert [layer.cached for layer in again.layers] == [True] * 5 + [False]
    assert not fy.sandboxes.list(), "a machine of a build was left"
    target = fy.builds.create(Spec().dockerfile(text, target="unused")).wait()
    assert len(target.layers) == 1
    assert (there / "unused").exists()


def test_directories_that_a_copy_makes_are_as_those_it_copies(fy: Forkyard, there: Path, context: Path) -> None:
    (context / "empty").mkdir(mode=0o711)
    (context / "dirlink").symlink_to("src")
    text = f"""
FROM debian AS build
RUN mkdir {there}/full {there}/none && touch {there}/full/f && ln -s full/f {there}/named
RUN chown 1:2 {there}/full && chmod 700 {there}/full && chmod 1777 {there}/none
FROM debian
RUN mkdir -m 750 {there}/old
COPY --chown=55:66 src {there}/app/src
COPY empty {there}/empty
COPY link dirlink {there}/links/
COPY dirlink/deep/b.txt {there}/b
COPY src {there}/old
COPY --chown=55 run.sh {there}/new/bin/run.sh
COPY --from=build {there}/full {there}/copied/full
COPY --from=build {there}/none {there}/copied/none
COPY --from=build {there}/named {there}/copied/
"""
    fy.builds.create(Spec().dockerfile(text, context)).wait()

    def seen(name: str) -> tuple[int, int, int]:
        status = (there / name).lstat()
        return status.st_uid, status.st_gid, status.st_mode & 0o7777

    assert [seen(name)[:2] for name in ("app", "app/src", "app/src/deep", "app/src/a.txt")] == [(55, 66)] * 4
    assert seen("app/src")[2] == (context / "src").stat().st_mode & 0o7777
    assert seen("empty") == (0, 0, 0o711)
    assert sorted(path.name for path in (there / "links").iterdir()) == ["a.txt", "deep", "link"]
    assert not (there / "links" / "link").is_symlink(), "a link that is named is followed"
    assert (there / "b").read_text() == "b"
    assert seen("old") == (0, 0, 0o750), "what is there stays as it is"
    assert (seen("new"), seen("new/bin")) == ((55, 55, 0o755),) * 2
    assert (seen("copied"), seen("copied/full")) == ((0, 0, 0o755), (1, 2, 0o700))
    assert seen("copied/none") == (0, 0, 0o1777)
    assert (there / "copied" / "named").is_file()
    with pytest.raises(BuildFailed, match=f"`add src to {there}/b`: {there}/b in the machine is no directory"):
        fy.builds.create(Spec().dockerfile(f"FROM debian\nCOPY src {there}/b\n", context)).wait()


def test_a_directory_that_is_mounted_for_a_run_is_there(fy: Forkyard, there: Path) -> None:
    mount = f"--mount=target={there}/cache/deep,type=cache,uid=7,mode=0750"
    fy.builds.create(Spec().dockerfile(f"FROM debian\nRUN {mount} cd {there}/cache/deep && touch f\n")).wait()
    made = (there / "cache" / "deep").stat()
    assert (made.st_uid, made.st_mode & 0o7777) == (7, 0o750)


def test_an_archive_is_unpacked_by_add_and_not_by_copy(fy: Forkyard, there: Path, context: Path) -> None:
    with tarfile.open(context / "a.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("inside/file")
        member.size = 2
        archive.addfile(member, io.BytesIO(b"in"))
    text = f"FROM debian\nADD --chown=55 a.tar.gz {there}/added\nCOPY a.tar.gz {there}/copied/\n"
    fy.builds.create(Spec().dockerfile(text, context)).wait()
    assert (there / "added" / "inside" / "file").read_text() == "in"
    assert (there / "added").stat().st_uid == 55
    assert (there / "copied" / "a.tar.gz").is_file()


def test_a_failed_run_names_its_line(fy: Forkyard, there: Path) -> None:
    with pytest.raises(BuildFailed, match="exited with 3") as failed:
        fy.builds.create(Spec().dockerfile("FROM debian\nRUN true\n\nRUN echo no; exit 3\n")).wait()
    assert (failed.value.details["step"], failed.value.details["log"]) == (4, "no\n")


def test_a_failed_add_names_itself(fy: Forkyard, context: Path) -> None:
    with tarfile.open(context / "evil.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("../evil"))
    with pytest.raises(BuildFailed, match=r"`add evil\.tar to /x/`: '\.\./evil' leads out of its archive"):
        fy.builds.create(Spec().dockerfile("FROM debian\nADD evil.tar /x/\n", context)).wait()


def test_mistakes_are_told_before_anything_is_built(fy: Forkyard, context: Path) -> None:
    with pytest.raises(InvalidDockerfile, match="line 2: unknown instruction 'FLY'") as wrong:
        fy.builds.create(Spec().dockerfile("FROM debian\nFLY away\n"))
    assert wrong.value.details["line"] == 2
    with pytest.raises(InvalidRequest, match="line 2: there is nothing called 'missing'"):
        fy.sandboxes.create(spec=Spec().dockerfile("FROM debian\nCOPY missing /x\n", context))
    (context / "gone").symlink_to("/etc/passwd")
    with pytest.raises(InvalidRequest, match="'gone' is a link to '/etc/passwd', and that is not in the context"):
        fy.builds.explain(Spec().dockerfile("FROM debian\nCOPY gone /x\n", context))
    with pytest.raises(InvalidRequest, match="neither an image nor a file"):
        Spec().from_image("x" * 600)
    (context / ".dockerignore").write_bytes(b"caf\xe9\n")
    with pytest.raises(InvalidRequest, match=r"\.dockerignore cannot be read"):
        Spec().dockerfile("FROM debian\n", context)
    (context / ".dockerignore").unlink()
    with pytest.raises(InvalidRequest, match="keep one of them"):
        Spec().base("node").dockerfile("FROM debian\n")
    with pytest.raises(UploadNotFound):
        fy.builds.create(Spec(dockerfile={"text": "FROM debian\nRUN x", "context": "sha256:" + "1" * 64}))


def test_a_run_has_secrets_that_are_nowhere_afterwards(daemon: Daemon, fy: Forkyard, there: Path) -> None:
    value = "a-value-to-be-known-again"
    fy.secrets.set("TOKEN", value)
    mounts = f"--mount=type=secret,id=TOKEN,target={there}/token,mode=0440 --mount=type=secret,id=TOKEN,env=ALSO"
    text = f"""FROM debian
RUN {mounts} --mount=type=secret,id=OTHER cat {there}/token && echo "=$ALSO" && stat -c %a {there}/token > {there}/seen
RUN echo "${{ALSO-none}}" >> {there}/seen
"""
    try:
        build = fy.builds.create(Spec().dockerfile(text), secrets={"TOKEN": {"hosts": ["example.com"]}})
        build.wait()
        said = "".join(event.text for event in build.logs() if event.type == "output")
        placeholder, also = said.strip().split("=")
        assert placeholder == also and placeholder.startswith("forkyard-secret-")
        assert (there / "seen").read_text().split() == ["440", "none"]
        assert not (there / "token").exists()
        kept = b"".join(path.read_bytes() for path in (daemon.root / "state").rglob("*") if path.is_file())
        assert value.encode() not in kept
        required = f"FROM debian\nRUN --mount=type=secret,id=OTHER,required=true touch {there}/not\n"
        with pytest.raises(BuildFailed, match="forkyard build --secret OTHER=HOST"):
            fy.builds.create(Spec().dockerfile(required)).wait()
        assert not (there / "not").exists()
        given = {"TOKEN": {"hosts": ["example.com"]}, "OWN": {"hosts": ["example.com"], "value": "mine-alone"}}
        needs = required.replace("OTHER", "TOKEN") + 'RUN test -z "$OWN"\n'
        assert fy.sandboxes.create(spec=Spec().dockerfile(needs), secrets=given).info.secret_names == ["OWN", "TOKEN"]
        daemon.host.left_behind.add(value.encode())
        with pytest.raises(BuildFailed, match="holds the value of the secret TOKEN"):
            fy.builds.create(Spec().dockerfile(f"FROM debian\nRUN touch {there}/leaky\n")).wait()
    finally:
        daemon.host.left_behind.clear()
        fy.secrets.delete("TOKEN")


def test_a_context_that_leads_out_or_is_cut_off_is_refused(daemon: Daemon, fy: Forkyard, there: Path) -> None:
    api = httpx.Client(base_url=f"{daemon.url}/api/v1", headers={"X-API-Key": daemon.key}, trust_env=False)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("../../etc/evil")
        archive.addfile(member)
    with api:
        for content, why in ((buffer.getvalue(), "leads out"), (b"no tar at all", "no whole tar archive")):
            upload = api.post("/uploads", content=content).json()["id"]
            spec = {"dockerfile": {"text": f"FROM debian\nCOPY . {there}/x/\n", "context": upload}}
            with pytest.raises(InvalidRequest, match=why):
                fy.builds.explain(Spec(**spec))
        wrong = api.post("/uploads", params={"digest": "sha256:" + "2" * 64}, content=b"x")
        assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid_request")
        assert api.get(f"/uploads/{upload}").json()["size_bytes"] == 13


def test_images_are_found_by_name_and_credentials_are_not_kept(daemon: Daemon, fy: Forkyard, there: Path) -> None:
    world = daemon.host.world
    world.registry["registry.test/app:1"] = ImageConfig(env={"FROM_IMAGE": "yes"}, user="root", workdir=str(there))
    text = f"FROM registry.test/app:1\nENV B=${{FROM_IMAGE}}2\nRUN echo $B $PWD > {there}/seen\n"
    build = fy.builds.create(Spec().dockerfile(text), registry=("me", "hidden-password"))
    build.wait()
    assert (there / "seen").read_text() == f"yes2 {there}\n"
    assert world.credentials == [("me", "hidden-password")]
    kept = b"".join(path.read_bytes() for path in (daemon.root / "state").rglob("*") if path.is_file())
    assert b"hidden-password" not in kept
    (image,) = fy.images.list()
    assert (image.names, image.config.workdir) == (["registry.test/app:1"], str(there))
    sandbox = fy.sandboxes.create(spec=Spec().from_image("registry.test/app:1"))
    assert sandbox.info.snapshot_id is not None
    fy.images.delete("registry.test/app:1")
    assert fy.images.list() == []


def test_a_create_brings_the_credentials_its_images_need(
    daemon: Daemon, fy: Forkyard, there: Path, tmp_path: Path
) -> None:
    world = daemon.host.world
    world.credentials.clear()
    world.registry |= {f"registry.test/private:{tag}": ImageConfig(workdir=str(there)) for tag in (1, 2)}
    spec = Spec().from_image("registry.test/private:1")
    assert fy.sandboxes.create(spec=spec, registry=("me", "hidden-password")).info.snapshot_id is not None
    (tmp_path / "forkyard.yaml").write_text("image: registry.test/private:2\n")
    made = daemon.cli(
        *("create", "-f", str(tmp_path / "forkyard.yaml"), "--registry-user", "me"), input="hidden-password\n"
    )
    assert made.returncode == 0, made.stderr
    assert world.credentials == [("me", "hidden-password")] * 2
    kept = b"".join(path.read_bytes() for path in (daemon.root / "state").rglob("*") if path.is_file())
    assert b"hidden-password" not in kept
    with pytest.raises(InvalidRequest, match="give a spec"):
        fy.sandboxes.create(registry=("me", "hidden-password"))


@pytest.fixture
def told(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """Which images are asked for, and whether with the password."""
    asked: list[tuple[str, bool]] = []
    images = daemon.host.images
    real = images.import_

    async def noted(name: str, **given: Any) -> ImageInfo:
        asked.append((name, given.get("credentials") == ("me", "hidden-password")))
        return await real(name, **given)

    monkeypatch.setattr(images, "import_", noted)
    return asked


def test_a_password_is_for_one_registry(
    daemon: Daemon, fy: Forkyard, there: Path, told: list[tuple[str, bool]], tmp_path: Path
) -> None:
    config = ImageConfig(workdir=str(there), env={"NEXT": "other.test/stealing:1"})
    names = [f"{registry}.test/{image}:1" for registry in ("mine", "other") for image in ("app", "tool", "stealing")]
    daemon.host.world.registry |= dict.fromkeys(names, config)

    def text(image: str, more: str = "") -> str:
        return f"FROM mine.test/{image}:1\n{more}RUN true\n"

    from_both = text("app", f"COPY --from=other.test/tool:1 {there}/none* {there}/\n")
    for ask in (fy.builds.create, fy.builds.explain, lambda spec, **more: fy.sandboxes.create(spec=spec, **more)):
        with pytest.raises(InvalidRequest, match=r"in mine\.test, other\.test; say which"):
            ask(Spec().dockerfile(from_both), registry=("me", "hidden-password"))
    with pytest.raises(InvalidRequest, match="say which"):
        fy.builds.explain(Spec().dockerfile(text("app", "ENV A=${NEXT:?}\n")), registry=("me", "x"))
    assert told == []
    with pytest.raises(InvalidRequest, match=r"registry\.registry"):
        fy.builds.create(Spec().dockerfile(from_both), registry=("me", "x", "https://mine.test"))
    (tmp_path / "Dockerfile").write_text(from_both)
    done = daemon.cli(
        *("build", "--explain", "--dockerfile", str(tmp_path / "Dockerfile")),
        *("--registry", "MINE.test", "--registry-user", "me"),
        input="hidden-password\n",
    )
    assert done.returncode == 0, done.stderr
    assert told == [("mine.test/app:1", True), ("other.test/tool:1", False)]
    told.clear()
    # What an image says names another registry: this one is not told either.
    stealing = Spec().dockerfile(text("stealing", "COPY --from=${NEXT:-mine.test/app:1} /none /\n"))
    fy.builds.explain(stealing, registry=("me", "hidden-password"))
    assert told == [("mine.test/stealing:1", True), ("other.test/stealing:1", False)]
    alone = daemon.cli("build", "--explain", "--registry", "mine.test")
    assert (alone.returncode, "--registry-user" in alone.stderr) == (2, True)


@pytest.mark.parametrize(
    ("name", "error", "why"),
    [
        ("name:", InvalidRequest, "cannot be the name of an image"),
        ("registry.test/Team/app", InvalidRequest, "small letters"),
        ("docker://registry.test/app:1", InvalidRequest, "leave out docker://"),
        ("nofile.tar", InvalidRequest, "no such file"),
        ("img-" + "0" * 16, ImageNotFound, "images ls"),
    ],
)
def test_a_name_that_no_registry_has_is_asked_nowhere(
    fy: Forkyard, told: list[tuple[str, bool]], name: str, error: type[Exception], why: str
) -> None:
    for ask in (
        lambda: fy.images.import_(name),
        lambda: fy.builds.explain(Spec().from_image(name)),
        lambda: fy.builds.explain(Spec().dockerfile(f"FROM {name}\nRUN true\n")),
    ):
        with pytest.raises(error, match=why):
            ask()
    assert told == []


def test_a_well_known_name_is_the_local_base_when_there_is_no_registry(fy: Forkyard, there: Path) -> None:
    for name in ("python:3.12-slim", "docker.io/library/node:22", "bun"):
        build = fy.builds.create(Spec().dockerfile(f"FROM {name}\nRUN echo {name} >> {there}/log\n"))
        build.wait()
        said = [event.text for event in build.logs() if event.type == "phase" and event.phase == "base"]
        assert said[-1].startswith(f"{name} is the base image of this host"), "whoever watches sees what was taken"
    assert len((there / "log").read_text().split()) == 3
    fy.builds.create(Spec().from_image("debian:bookworm")).wait()
    for name in ("debian", "python", "node", "bun"):
        assert fy.builds.explain(Spec().base(name))
    with pytest.raises(BuildFailed, match="no registry has"):
        fy.builds.create(Spec().from_image("registry.test/none:1")).wait()


def test_a_directory_of_any_size_is_added_in_one_step(fy: Forkyard, there: Path, context: Path) -> None:
    spec = Spec().add(context, f"{there}/app", owner="55", names=["src", "run.*"])
    fy.builds.create(spec).wait()
    assert sorted(path.name for path in (there / "app").iterdir()) == ["a.txt", "deep", "run.sh"]
    assert (there / "app" / "run.sh").stat().st_uid == 55
    with pytest.raises(InvalidRequest, match="needs a context"):
        fy.builds.create(Spec(steps=[{"add": {"sources": ["."], "to": "/x"}}]))


def test_the_command_line_builds_a_dockerfile_and_imports_an_archive(
    daemon: Daemon, fy: Forkyard, there: Path, context: Path
) -> None:
    (context / "Dockerfile").write_text(f"FROM debian\nARG WHO\nCOPY src {there}/\nRUN echo $WHO > {there}/who\n")
    built = daemon.cli("build", "--dockerfile", str(context / "Dockerfile"), "--build-arg", "WHO=me", str(context))
    assert built.stdout.startswith("sc-"), built.stderr
    assert (there / "who").read_text() == "me\n"
    (context / "forkyard.yaml").write_text("dockerfile: {file: Dockerfile, args: {WHO: you}}\nsteps: [{run: 'true'}]\n")
    info = json.loads(daemon.cli("build", "-f", str(context / "forkyard.yaml"), "--json").stdout)
    assert [layer["cached"] for layer in info["layers"]] == [True, False, False]
    (context / "image.tar").write_bytes(b"an archive")
    imported = daemon.cli("images", "import", str(context / "image.tar"))
    assert imported.stdout.startswith("img-"), imported.stderr
    assert imported.stdout.strip() in daemon.cli("images", "ls").stdout
    spec = Spec().from_image(context / "image.tar")
    assert fy.builds.create(spec).wait().snapshot_id
    assert daemon.cli("images", "rm", imported.stdout.strip()).stdout == imported.stdout
    assert imported.stdout.strip() not in daemon.cli("images", "ls").stdout
    gone = daemon.cli("images", "rm", "registry.test/none:1")
    assert (gone.returncode, "there is no image" in gone.stderr) == (1, True)
    wrong = daemon.cli("build", "--dockerfile", str(context / "run.sh"), str(context))
    assert wrong.returncode != 0
    assert "unknown instruction 'echo'" in wrong.stderr
