"""Code in machines of images that are not ours."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from forkyard import LanguageMissing, Spec

from .conftest import Daemon
from .image_archives import BUSYBOX_CONFIG, busybox_layer, directory, file, saved, tar_of


def bash_layer() -> bytes:
    """This machine's bash, with the libraries it is linked to."""
    words = subprocess.run(["ldd", "/bin/bash"], capture_output=True, text=True, check=True).stdout.split()
    paths = sorted({word for word in ["/bin/bash", *words] if word.startswith("/")})
    folders = sorted({str(parent)[1:] for path in paths for parent in Path(path).parents if str(parent) != "/"})
    return tar_of(
        [
            *(directory(folder) for folder in folders),
            *(file(path[1:], Path(path).read_bytes(), 0o755) for path in paths),
        ]
    )


def test_an_image_without_python_runs_the_languages_it_has(own_daemon: Daemon, tmp_path: Path) -> None:
    archive = tmp_path / "bash.tar"
    archive.write_bytes(saved([busybox_layer(), bash_layer()], BUSYBOX_CONFIG))
    spec = Spec().from_image(archive).size(memory_mib=256, disk_gib=6)
    with own_daemon.client() as fy, fy.sandboxes.create(spec=spec) as sandbox:
        sandbox.run_code("n=6; cd /bin", language="bash").check()
        (fork,) = sandbox.fork(1)
        seen = fork.run_code("echo $((n * 7)) $GREETING $(id -un) $PWD", language="bash")
        assert seen.stdout == "42 hello app /bin\n"
        for language, missing in (("javascript", "no node"), ("python", "machine's python3")):
            with pytest.raises(LanguageMissing, match=missing):
                sandbox.run_code("1", language=language)
        fork.delete()
