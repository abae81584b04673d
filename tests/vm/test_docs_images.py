"""The page on images is true: of its Dockerfile, its Python and its files are made machines that run what their image does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forkyard import Sandbox, Spec

from ..integration.registry import PASSWORD, Registry, running_registry  # noqa: TID252
from .conftest import Daemon, make_daemon, remove_daemon
from .image_archives import BUSYBOX_CONFIG, busybox_layer, debian_layer, directory, file, saved, tar_of
from .test_docs import ROOT, blocks_of, python_of, run

pytestmark = pytest.mark.timeout(600)

LOOP = "while true; do echo $GREETING $(id -un) $(pwd) > /tmp/new; mv /tmp/new /tmp/said; sleep 1; done"
#: Of the image that has systemd.
CONFIG = {
    "Env": ["GREETING=hello"],
    "User": "daemon",
    "WorkingDir": "/srv",
    "Entrypoint": ["/bin/sh", "-c"],
    "Cmd": [LOOP],
}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    (tmp_path / "registry").mkdir()
    with running_registry(tmp_path / "registry", private=True) as registry:
        yield registry


@pytest.fixture
def daemon(registry: Registry) -> Iterator[Daemon]:
    daemon = make_daemon()
    daemon.extra_env["FORKYARD_INSECURE_REGISTRIES"] = registry.name
    daemon.start()
    yield daemon
    remove_daemon(daemon)


def test_what_the_page_on_images_shows_is_built_and_runs(daemon: Daemon, registry: Registry, tmp_path: Path) -> None:
    name = f"{registry.name}/team/app:1"
    page = (ROOT / "docs" / "images.md").read_text().replace("registry/name:tag", name)
    (dockerfile,) = blocks_of(page, "dockerfile")
    built, pulled = blocks_of(page, "yaml")
    archived = pulled.replace(f"image: {name}", "image: {file: image.tar}")
    assert built.count(f"or: image: {name}\n") == built.count("image: {file: image.tar}\n") == 1

    here = tmp_path / "here"
    here.mkdir()
    (here / "Dockerfile").write_text(dockerfile)
    (here / "index.html").write_text("hello\n")
    (here / "password").write_text(f"{PASSWORD}\n")
    served = tar_of([directory("srv"), file("srv/index.html", b"hello\n")])
    (here / "busybox.tar").write_bytes(saved([busybox_layer(), served], BUSYBOX_CONFIG))
    with daemon.client() as fy:
        with fy.sandboxes.create() as plain:
            layer = debian_layer(plain)
        registry.push("team/app", layer, config=CONFIG)
        (here / "image.tar").write_bytes(saved([layer], CONFIG))
        del layer

        program = here / "images.py"
        program.write_text(python_of(page))
        run(daemon, program, timeout_s=400)

        def created(text: str) -> Sandbox:
            (here / "forkyard.yaml").write_text(text)
            done = daemon.cli("create", "-f", "forkyard.yaml", "--registry-user", "me", cwd=here, input=PASSWORD)
            assert done.returncode == 0, done.stderr
            return fy.sandboxes.get(done.stdout.strip())

        with created(built) as sandbox:
            assert sandbox.exec("curl -s localhost:8080; cat version").stdout == "hello\n3\n"
        # The Python has built just that.
        for text in (built, pulled):
            (here / "forkyard.yaml").write_text(text)
            layers = fy.builds.explain(Spec.load(here / "forkyard.yaml"))
            assert all(layer.cached for layer in layers), layers

        (image,) = [one for one in fy.images.list() if name in one.names]
        assert image.config.program == ["/bin/sh", "-c", LOOP]
        for text in (pulled, archived):
            with created(text) as sandbox:
                assert sandbox.exec("command -v python3 udevadm").exit_code != 0
                assert sandbox.exec("cat /proc/1/comm").stdout == "systemd\n"
                assert sandbox.exec("systemctl list-units --no-legend '*getty*'", user="root").stdout == ""
                (main,) = sandbox.services.list()
                assert (main.name, main.active) == ("main", "active")
                sandbox.exec("until test -e /tmp/said; do sleep 0.1; done", check=True, timeout_s=60)
                assert sandbox.files.read("/tmp/said") == "hello daemon /srv\n"
        (same,) = [one for one in fy.images.list() if name in one.names]
        assert Spec.load(here / "forkyard.yaml").uploads[0].digest in same.names, "the archive is of the same image"
        for build in fy.builds.list():
            build.delete()
        fy.builds.prune()
        fy.images.delete(image.id)
        fy.images.delete(Spec().from_image(here / "busybox.tar").uploads[0].digest)
