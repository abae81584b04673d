"""What the host allows a sandbox, whatever goes on inside it."""

import signal
import subprocess
import time
from pathlib import Path

from forkyard import Forkyard, Sandbox

from .conftest import Daemon
from .test_ends import vm_pid, wait_for_end

SPIN = "while :; do :; done"


def groups_of(pid: int, controller: str) -> Path:
    """The group of a process that has this controller, in v1 or v2."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return Path("/sys/fs/cgroup", controllers, path.lstrip("/"))
    return Path("/sys/fs/cgroup", Path(f"/proc/{pid}/cgroup").read_text().rpartition("::")[2].strip().lstrip("/"))


def used_cpu_s(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / 100


def cores_used(pids: list[int], seconds: float = 3) -> float:
    started, before = time.monotonic(), used_cpu_s(pids)
    time.sleep(seconds)
    return (used_cpu_s(pids) - before) / (time.monotonic() - started)


def test_a_busy_sandbox_gets_its_vcpu_and_little_more(daemon: Daemon, sbx: Sandbox) -> None:
    sbx.spawn(f"{SPIN} & {SPIN} & while :; do dd if=/dev/urandom of=/root/x bs=1M count=8 conv=fsync; done")
    time.sleep(1)
    assert 0.3 < cores_used([vm_pid(daemon, sbx)]) < 1.15


def test_a_hypervisor_that_runs_wild_is_held_back_by_the_host(daemon: Daemon, sbx: Sandbox) -> None:
    """Two processes that would use two cores, in the place of a hypervisor somebody broke into."""
    group = groups_of(vm_pid(daemon, sbx), "cpu")
    wild = [subprocess.Popen(["sh", "-c", SPIN]) for _ in range(2)]
    try:
        for process in wild:
            (group / "cgroup.procs").write_text(str(process.pid))
        time.sleep(0.5)  # what it had saved up is used
        assert cores_used([process.pid for process in wild]) < 1.2
    finally:
        for process in wild:
            process.kill()
            process.wait()


FILL = "import time\nx = []\nwhile True: x.append(bytearray(b'x' * (1 << 20)))"


def test_a_guest_without_memory_says_so_when_it_ends(fy: Forkyard) -> None:
    sandbox = fy.sandboxes.create(memory_mib=512)
    sandbox.exec("sysctl -w vm.panic_on_oom=2").check()
    sandbox.spawn(["python3", "-c", FILL])
    ended = wait_for_end(fy, sandbox, 60)
    assert (ended.state, ended.info.cause) == ("failed", "guest_out_of_memory")
    assert "memory_mib" in (ended.info.cause_detail or "")


def test_a_process_that_takes_all_memory_ends_and_its_sandbox_does_not(sbx: Sandbox) -> None:
    assert sbx.exec(["python3", "-c", FILL], timeout_s=60).signal == signal.SIGKILL
    assert sbx.exec("echo unharmed").stdout == "unharmed\n"


def test_a_hypervisor_over_its_memory_limit_is_ended_with_that_cause(fy: Forkyard, daemon: Daemon) -> None:
    sandbox = fy.sandboxes.create()
    group = groups_of(vm_pid(daemon, sandbox), "memory")
    v1 = (group / "memory.limit_in_bytes").exists()
    used = int((group / ("memory.usage_in_bytes" if v1 else "memory.current")).read_text())
    (group / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(used + (32 << 20)))
    sandbox.spawn(["python3", "-c", FILL])
    ended = wait_for_end(fy, sandbox, 60)
    assert (ended.state, ended.info.cause) == ("failed", "vm_crashed")
    assert "more memory than its limit" in (ended.info.cause_detail or "")
