"""The base image as it really is: built if need be, looked into, and booted once at the smallest size there is.

The guest runs a stand-in for the agent that prints a report on the serial console and turns the machine off.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forkyard.images import BaseImage, agent_archive, ensure_base_image
from forkyard.images.build import PATH
from forkyard.images.hostconfig import read_ca_certificates
from forkyard.settings import Settings

pytestmark = pytest.mark.timeout(900)

SMALLEST_MEMORY_MIB = 128
DISK_GIB = 40

PROBE_UNIT = """\
[Service]
ExecStart=/usr/bin/python3 -I /opt/forkyard/agent
"""
PROBE = """\
import json, subprocess
commands = json.loads(%r)
environment = dict(line.split("=", 1) for line in open("/etc/environment").read().splitlines())
report = {}
for name, command in commands.items():
    done = subprocess.run(command, shell=True, executable="/bin/bash", capture_output=True, text=True, env=environment)
    report[name] = (done.stdout + done.stderr).strip()
with open("/dev/ttyS0", "w") as console:
    console.write("\\nREPORT " + json.dumps(report) + "\\n")
subprocess.run(["systemctl", "poweroff", "--force", "--force"])
"""
QUESTIONS = {
    "state": "systemctl is-system-running --wait",
    "failed": "systemctl --failed --no-legend",
    "timers": "systemctl list-timers --no-legend",
    "node": "node --version",
    "npm": "npm --version",
    "bun": "bun -e 'console.log(6 * 7)'",
    "python": "python -c 'print(6 * 7)' && python -m venv --help >/dev/null && pip --version >/dev/null && echo all",
    "tools": "for t in bash git curl cc make tmux rg jq unzip tput sudo; do type $t >/dev/null || echo no $t; done",
    "login_path": "su - user -c 'echo $PATH; pwd; id -un'",
    "unit_path": "systemd-run --quiet --pipe --wait sh -c 'echo $PATH'",
    "sudo": "su user -c 'sudo -n sh -c \"id -u; echo \\$PATH\"'",
    "passwords": "passwd -S root; passwd -S user",
    "ssh": "systemctl is-active ssh; ls /etc/ssh/ssh_host_*_key",
    "gettys": "pgrep -l getty",
    "disk_gib": "df --block-size=1G --output=size / | tail -1",
    "hostname": "hostname; getent hosts $(hostname) >/dev/null && echo resolves",
    "modules": "ls /dev/virtio-ports; cat /sys/class/misc/hw_random/rng_current",
    "authorities": "grep -c BEGIN /etc/ssl/certs/ca-certificates.crt",
}


@pytest.fixture(scope="module")
def image() -> BaseImage:
    return asyncio.run(ensure_base_image(Settings().cache_dir, lambda step, fraction=None: None))


@pytest.fixture(scope="module")
def console(image: BaseImage, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What one boot printed."""
    work = tmp_path_factory.mktemp("boot")
    agent = work / "agent"
    agent.mkdir()
    (agent / "__main__.py").write_text(PROBE % json.dumps(QUESTIONS))
    (agent / "forkyard-agent.service").write_text(PROBE_UNIT)
    (work / "initramfs").write_bytes(image.initramfs.read_bytes() + agent_archive(agent, {"front": b""}))
    overlay = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", str(image.disk)]
    subprocess.run([*overlay, str(work / "disk.qcow2"), f"{DISK_GIB}G"], check=True, timeout=60)
    subprocess.run(
        [
            *("qemu-system-x86_64", "-nodefaults", "-display", "none", "-no-reboot"),
            *("-machine", "q35,accel=tcg", "-cpu", "max", "-m", str(SMALLEST_MEMORY_MIB)),
            *("-kernel", str(image.kernel), "-initrd", str(work / "initramfs")),
            *("-append", "console=ttyS0 root=/dev/vda rw quiet panic=-1"),
            *("-drive", f"file={work / 'disk.qcow2'},if=none,id=root,discard=unmap"),
            *("-device", "virtio-blk-pci,drive=root", "-device", "virtio-rng-pci"),
            *("-device", "virtio-serial-pci", "-chardev", "null,id=agent"),
            *("-device", "virtserialport,chardev=agent,name=forkyard.agent"),
            *("-serial", f"file:{work / 'console'}"),
        ],
        check=True,
        timeout=600,
    )
    return (work / "console").read_text(errors="replace")


@pytest.fixture(scope="module")
def report(console: str) -> dict[str, str]:
    lines = [line for line in console.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, console[-2000:]
    answers: dict[str, str] = json.loads(lines[0].removeprefix("REPORT "))
    return answers


def in_image(image: BaseImage, request: str) -> str:
    command = ["debugfs", "-R", request, str(image.disk)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_disk_is_a_bare_file_system_that_takes_only_the_room_it_needs(image: BaseImage) -> None:
    status = image.disk.stat()
    assert "Filesystem volume name:   forkyard" in in_image(image, "stats -h")
    assert status.st_blocks * 512 < status.st_size
    assert status.st_size <= image.min_disk_gib << 30


def test_nothing_in_the_image_would_be_the_same_secret_or_identity_in_every_sandbox(image: BaseImage) -> None:
    assert "ssh_host" not in in_image(image, "ls /etc/ssh")
    assert in_image(image, "cat /etc/machine-id") == ""
    assert "random-seed" not in in_image(image, "ls /var/lib/systemd")


def test_asking_again_for_a_built_image_needs_no_network_and_no_program(
    image: BaseImage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert asyncio.run(ensure_base_image(Settings().cache_dir, lambda step, fraction=None: None)) == image


def test_the_boot_tells_its_milestones_in_order(console: str) -> None:
    marker = "forkyard: milestone "
    found = [line.partition(marker)[2].strip() for line in console.splitlines() if marker in line]
    assert found == ["kernel", "root-mounted", "sshd"]


def test_systemd_reports_running_with_no_failed_unit_and_no_timer_that_fires_at_every_wake(
    report: dict[str, str],
) -> None:
    assert report["state"] == "running"
    assert report["failed"] == ""
    assert report["timers"] == ""


def test_languages_and_tools_run_in_the_smallest_machine(report: dict[str, str]) -> None:
    assert report["node"].startswith("v")
    assert report["npm"][0].isdigit()
    assert report["bun"] == "42"
    assert report["python"] == "42\nall"
    assert report["tools"] == ""


def test_login_shells_units_and_sudo_all_have_the_path(report: dict[str, str]) -> None:
    assert report["login_path"] == f"{PATH}\n/home/user\nuser"
    assert report["unit_path"] == PATH
    assert report["sudo"] == f"0\n{PATH}"


def test_nobody_can_log_in_with_a_password_or_on_the_console(report: dict[str, str]) -> None:
    assert [line.split()[:2] for line in report["passwords"].splitlines()] == [["root", "L"], ["user", "L"]]
    assert report["gettys"] == ""


def test_sshd_runs_with_a_host_key_of_its_own(report: dict[str, str]) -> None:
    assert report["ssh"] == "active\n/etc/ssh/ssh_host_ed25519_key"


def test_the_file_system_grows_to_the_disk_it_finds(report: dict[str, str]) -> None:
    assert DISK_GIB - 2 <= int(report["disk_gib"]) <= DISK_GIB


def test_the_machine_knows_its_own_name_and_finds_its_devices(report: dict[str, str]) -> None:
    assert report["hostname"] == "sandbox\nresolves"
    assert report["modules"] == "forkyard.agent\nvirtio_rng.0"


def test_the_hosts_certificate_authorities_are_trusted(report: dict[str, str]) -> None:
    public = 100
    assert int(report["authorities"]) > public + len(read_ca_certificates())


def test_a_builder_that_is_killed_takes_all_its_programs_with_it(tmp_path: Path) -> None:
    marker = tmp_path / "started"
    program = f"""
import asyncio
from forkyard.images.process import run
asyncio.run(run("sh", "-c", "sleep 300.7531 & touch {marker}; sleep 300.7531", timeout_s=300, contained=True))
"""
    builder = subprocess.Popen([sys.executable, "-c", program])
    try:
        wait_until(marker.exists)
        assert sleepers()
    finally:
        builder.send_signal(signal.SIGKILL)
        builder.wait(timeout=30)
    wait_until(lambda: not sleepers())


def sleepers() -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:
            continue
        if command == b"sleep\x00300.7531\x00":
            found.append(process.name)
    return found


def wait_until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.02)
