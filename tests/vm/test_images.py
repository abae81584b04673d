"""Machines of images that are not ours: with nothing in them but one program, or with nothing at all."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from forkyard import BuildFailed, CommandNotFound, Conflict, Spec

from .conftest import Daemon
from .image_archives import BUSYBOX_CONFIG, busybox_layer, saved

pytestmark = pytest.mark.timeout(600)


def test_an_image_without_python_systemd_or_bash_is_a_whole_machine(own_daemon: Daemon, tmp_path: Path) -> None:
    archive = tmp_path / "busybox.tar"
    archive.write_bytes(saved([busybox_layer()], BUSYBOX_CONFIG))
    spec = Spec().from_image(archive).size(memory_mib=256, disk_gib=6)
    with own_daemon.client() as fy:
        began = time.monotonic()
        image = fy.images.import_(str(archive))
        imported_s = time.monotonic() - began
        assert (image.systemd, image.config.user) == (False, "app")
        began = time.monotonic()
        first = fy.sandboxes.create(spec=spec)
        first_s = time.monotonic() - began
        began = time.monotonic()
        second = fy.sandboxes.create(spec=spec)
        second_s = time.monotonic() - began
        print(f"import {imported_s:.2f} s, first create {first_s:.2f} s, second {second_s:.3f} s")

        seen = first.exec("id -un; pwd; echo $GREETING; id -u 2>&1 | wc -l")
        assert seen.stdout.split() == ["app", "/srv", "hello", "1"]
        assert first.exec("id -un", user="root").stdout == "root\n"
        assert first.exec(["id", "-u"], user="4321:99").stdout == "4321\n"
        assert int(first.exec("df -k / | grep /dev | head -1", user="root").stdout.split()[1]) > 5 * 2**20
        second.files.write("/srv/mine", "second")
        second.files.upload(tmp_path, "/srv/uploaded")
        assert second.exec("ls /srv/uploaded").stdout == "busybox.tar\n"

        with first.terminal() as terminal:
            terminal.send(b"echo $0-$((6 * 7)) $(pwd)\n")
            shown = b""
            for data in terminal:
                shown += data
                if b"-42 /srv" in shown:
                    break
        assert b"sh-42 /srv" in shown, shown
        with pytest.raises(CommandNotFound, match="no systemd in this machine"):
            first.services.add("main")
        snapshot = second.snapshot()
        with fy.sandboxes.create(snapshot=snapshot) as again:
            assert again.exec("id -un; cat mine; echo $GREETING").stdout.split() == ["app", "secondhello"]
        # What is built on a snapshot goes on as its image says.
        fy.builds.create(Spec().base(snapshot.id).run('test "$(id -un) $(pwd)" = "app /srv"')).wait()
        (child,) = second.fork(1)
        assert child.exec("cat mine").stdout == "second"
        second.stop()
        second.start()
        assert second.exec("cat /srv/mine; id -un").stdout == "secondapp\n"
        for sandbox in (first, second, child):
            sandbox.delete()

        # Steps over it, and one that takes all there is.
        serve = "echo made > made; httpd -f -p 8099 -h /srv >/dev/null 2>&1 &"
        more = spec.run(serve, user="root").wait_for("wget -qO- localhost:8099/made").layer()
        with fy.sandboxes.create(spec=more) as third:
            assert third.exec("wget -qO- localhost:8099/made").stdout == "made\n", "it runs already"
        with pytest.raises(BuildFailed, match="exited with 1") as full:
            fill = "fallocate -l 5200M big && dd if=/dev/zero of=more bs=1M"  # the most of it takes no time
            fy.builds.create(more.run(fill, user="root")).wait()
        assert "No space left" in full.value.details["log"]
        with pytest.raises(BuildFailed, match="exited with 127") as nobody:
            fy.builds.create(spec.user("new")).wait()
        assert "no user new, and neither useradd nor adduser" in nobody.value.details["log"]
        fy.secrets.set("TOKEN", "a-value-to-be-known-again")
        with pytest.raises(BuildFailed, match="holds the value of the secret TOKEN"):
            fy.builds.create(spec.run("echo a-value-to-be-known$(echo -again) > leaked", user="root")).wait()
        with pytest.raises(Conflict, match="rest on this image"):
            fy.images.delete(image.id)
        for build in fy.builds.list():
            build.delete()
        fy.builds.prune()
        snapshot.delete()
        fy.images.delete(image.id)
        assert image.id not in {one.id for one in fy.images.list()}
        with fy.sandboxes.create(spec=spec) as anew:
            assert anew.exec("id -un").stdout == "app\n"


def test_a_dockerfile_that_starts_from_nothing(own_daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "busybox").write_bytes(Path("/bin/busybox").read_bytes())
    (tmp_path / "busybox").chmod(0o755)
    text = """
FROM debian AS build
RUN printf '#include <stdio.h>\\nint main(void) { puts("from C"); }' > /m.c && gcc -static -o /made /m.c
RUN --mount=type=secret,id=TOKEN,required=true <<END
#!/usr/bin/python3
import os
assert open("/run/secrets/TOKEN").read().startswith("forkyard-secret-")
os.chown("/made", 7, 8)
os.chmod("/made", 0o4755)
os.setxattr("/made", "user.mark", b"kept")
os.mkdir("/none")
os.chmod("/none", 0o1777)
END
FROM scratch
COPY --from=build /made /bin/made
COPY --from=build /none /data/none
ENV COLOUR=green
WORKDIR /work
CMD ["/bin/made"]
"""
    spec = Spec().dockerfile(text, tmp_path)
    with own_daemon.client() as fy:
        fy.secrets.set("TOKEN", "a-value-to-be-known-again")
        fy.builds.create(spec, secrets={"TOKEN": {"hosts": ["example.com"]}}).wait()
        sandbox = fy.sandboxes.create(spec=spec)
        assert sandbox.exec(["/bin/made"]).stdout == "from C\n"
        assert sandbox.exec("/bin/made").stdout == "from C\n", "a program needs no shell"
        with pytest.raises(CommandNotFound, match="there is no shell"):
            sandbox.exec("made | cat")
        (made,) = sandbox.files.list("/bin")
        assert (made.name, made.owner, made.group, made.mode) == ("made", "7", "8", 0o4755)
        assert made.attributes == {"mark": "kept"}
        assert [(one.name, one.mode) for one in sandbox.files.list("/data")] == [("none", 0o1777)]
        sandbox.delete()
        fy.builds.prune()
