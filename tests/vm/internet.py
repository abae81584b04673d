"""A small Internet for tests: two network namespaces, a cable between them, servers that write down what reaches them.

The daemon runs in the first namespace, in place of the host's; the second is everything outside. Its addresses look
public but lead nowhere else. Nothing of it touches the network of this machine.

    outside 11.0.0.2   good.test, *.wild.test: what a policy allows
    outside 11.0.0.3   evil.test: what it does not
    outside 2a00:11::3 the same, by IPv6
    outside 10.66.0.1, 169.254.169.254   a private network and a metadata service the host can reach
    host    11.0.0.1, 127.0.0.1          the host's own services
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .conftest import Daemon

GOOD, EVIL, PRIVATE, METADATA, HOST = "11.0.0.2", "11.0.0.3", "10.66.0.1", "169.254.169.254", "11.0.0.1"
HOST6, EVIL6 = "2a00:11::1", "2a00:11::3"
#: Every server speaks on all of these.
TCP_PORTS = (22, 53, 80, 443, 853, 8080, 9000)
UDP_PORTS = (53, 123, 443, 5353, 9000)
ZONE = {
    "good.test": [GOOD],
    "evil.test": [EVIL],
    "rebind.good.test": [PRIVATE],
    "loop.good.test": ["127.0.0.1"],
    "host.good.test": [HOST],
    "meta.good.test": [METADATA],
    "mixed.good.test": [PRIVATE, GOOD],
}
WILD = ".wild.test"  # any name below it is GOOD


@dataclass
class Seen:
    """One thing that reached a server, or one kind of packet on the cable."""

    kind: str  # tcp, udp, dns, packet
    to: str
    port: int
    data: str
    source: str = ""


class Internet:
    def __init__(self) -> None:
        tag = secrets.token_hex(3)
        self.inner, self.outer = f"fyt-{tag}-in", f"fyt-{tag}-out"
        self.directory = Path(tempfile.mkdtemp(prefix="fyi-", dir="/tmp"))
        self.directory.chmod(0o755)
        self._log = self.directory / "seen"
        self._log.touch()
        self._servers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in (self.inner, self.outer):
            _ip(f"netns add {name}")
            _ip(f"-n {name} link set lo up")
        _ip(f"-n {self.inner} link add cable type veth peer name cable netns {self.outer}")
        for name in (self.inner, self.outer):
            _ip(f"-n {name} link set cable addrgenmode none")
        for address in (f"{HOST}/24", f"{HOST6}/64 nodad"):
            _ip(f"-n {self.inner} addr add {address} dev cable")
        for address in (f"{GOOD}/24", f"{EVIL}/24", f"{PRIVATE}/24", f"{METADATA}/32", f"{EVIL6}/64 nodad"):
            _ip(f"-n {self.outer} addr add {address} dev cable")
        for name in (self.inner, self.outer):
            _ip(f"-n {name} link set cable up")
        _ip(f"-n {self.inner} route add default via {GOOD}")
        (self.directory / "resolv.conf").write_text(f"nameserver {GOOD}\noptions timeout:1 attempts:2\n")
        (self.directory / "hosts").write_text("127.0.0.1 localhost\n")
        self._serve(self.outer, "outside")
        self._serve(self.inner, "host")

    def _serve(self, namespace: str, role: str) -> None:
        zone = json.dumps({"zone": ZONE, "wild": [WILD, GOOD], "tcp": TCP_PORTS, "udp": UDP_PORTS})
        program = str(Path(__file__).with_name("internet_server.py"))
        words = ["ip", "netns", "exec", namespace, sys.executable, program, role, str(self._log), zone]
        self._servers.append(subprocess.Popen(words, stdout=subprocess.PIPE))
        out = self._servers[-1].stdout
        assert out is not None
        assert out.readline() == b"ready\n", "a server did not start"

    def stop(self) -> None:
        for server in self._servers:
            server.terminate()
            server.wait()
            if server.stdout is not None:
                server.stdout.close()
        for name in (self.inner, self.outer):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip(f"netns del {name}")
        shutil.rmtree(self.directory, ignore_errors=True)

    def seen(self) -> list[Seen]:
        """Everything since the last call. What is on its way gets a moment."""
        time.sleep(0.3)
        with self._log.open("r+") as log:
            lines = log.read().splitlines()
            log.truncate(0)
        return [Seen(**json.loads(line)) for line in lines]

    def command(self, *words: str) -> list[str]:
        """So that a program takes this for its machine's network: in the first namespace, with its names."""
        mounts = " && ".join(
            f"mount --bind {shlex.quote(str(self.directory / name))} /etc/{name}" for name in ("hosts", "resolv.conf")
        )
        script = f"{mounts} && exec {shlex.join(words)}"
        return [
            *("nsenter", f"--net=/run/netns/{self.inner}", "unshare", "--mount", "--propagation", "slave"),
            *("sh", "-c", script),
        ]


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)


@dataclass
class InternetDaemon(Daemon):
    """A daemon whose network is this Internet."""

    internet: Internet = field(default_factory=Internet)

    @property
    def command(self) -> list[str]:
        return self.internet.command(*super().command)


@contextlib.contextmanager
def internet() -> Iterator[Internet]:
    made = Internet()
    try:
        made.start()
        yield made
    finally:
        made.stop()
