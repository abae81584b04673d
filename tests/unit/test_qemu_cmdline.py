"""The machine a guest sees, as a command line."""

from __future__ import annotations

from pathlib import Path

from forkyard.models import Shape
from forkyard.vmm.base import BootSource, VmRecord
from forkyard.vmm.qemu import cmdline

TCG = cmdline.Engine("/usr/bin/qemu-system-x86_64", "tcg", 64)
KVM = cmdline.Engine("/usr/bin/qemu-system-x86_64", "kvm", 64)
SOCKETS = cmdline.Sockets(qmp_fd=7, agent_fd=9)
SOURCE = BootSource(Path("/i/vmlinuz"), Path("/i/initramfs"), Path("/i/disk.raw"), "quiet")


def record(shape: Shape | None = None, directory: str = "/v/a") -> VmRecord:
    return VmRecord("a-1", Path(directory), 660000, shape or Shape())


def options(argv: list[str]) -> list[tuple[str, str]]:
    """(-option, value) pairs, in order; flags have an empty value."""
    found = []
    for word, following in zip(argv[1:], [*argv[2:], "-"], strict=True):
        if word.startswith("-"):
            found.append((word, "" if following.startswith("-") else following))
    return found


def boot(engine: cmdline.Engine = TCG, shape: Shape | None = None) -> list[tuple[str, str]]:
    return options(cmdline.boot(engine, record(shape), SOCKETS, SOURCE, Path("/dev/shm/t.ram")))


def restore(engine: cmdline.Engine = TCG, shape: Shape | None = None) -> list[tuple[str, str]]:
    return options(cmdline.restore(engine, record(shape), SOCKETS, Path("/dev/shm/t.ram")))


def visible(argv: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """What the guest can tell: the rest is how the host feeds it."""
    return [(name, value) for name, value in argv if name in ("-machine", "-cpu", "-smp", "-m", "-device", "-serial")]


def test_boot_and_restore_show_the_guest_the_same_machine() -> None:
    assert visible(boot()) == visible(restore())
    assert len([name for name, _ in visible(boot()) if name == "-device"]) == 6


def test_kvm_and_tcg_differ_in_the_cpu_only() -> None:
    assert ("-accel", "kvm") in boot(KVM)
    assert ("-cpu", "host") in boot(KVM)
    assert ("-accel", "tcg,thread=multi,tb-size=64") in boot(TCG)
    assert {name for name, _ in set(restore(KVM)) ^ set(restore(TCG))} == {"-accel", "-cpu"}


def test_memory_is_shared_while_booting_and_private_afterwards() -> None:
    (booted,) = [value for _, value in boot() if value.startswith("memory-backend-file")]
    (restored,) = [value for _, value in restore() if value.startswith("memory-backend-file")]
    assert "share=on" in booted.split(",")
    assert "share=off" in restored.split(",")
    assert "mem-path=/dev/shm/t.ram" in restored.split(",")


def test_the_shape_is_the_guests_size() -> None:
    argv = restore(shape=Shape(vcpus=4, memory_mib=2048))
    assert ("-smp", "cpus=4,sockets=1,cores=4,threads=1") in argv
    assert ("-m", "2048M") in argv
    assert any("size=2048M" in value for _, value in argv)


def test_every_vm_starts_stopped_sandboxed_and_held_when_its_guest_ends() -> None:
    for argv in (boot(), restore()):
        assert ("-S", "") in argv
        (sandbox,) = [value for name, value in argv if name == "-sandbox"]
        assert sandbox.split(",")[0] == "on"
        assert {"spawn=deny", "elevateprivileges=deny", "resourcecontrol=deny"} <= set(sandbox.split(","))
        assert ("-action", "shutdown=pause,reboot=shutdown,panic=pause") in argv


def test_a_sandboxs_console_cannot_grow() -> None:
    assert any(value.startswith("ringbuf,id=console,") for _, value in restore())
    assert not any("console.log" in value for _, value in restore())
    assert any(value.startswith("file,id=console,") and "append=on" in value for _, value in boot())


def test_only_a_boot_loads_a_kernel_and_only_a_restore_waits_for_state() -> None:
    assert ("-kernel", "/i/vmlinuz") in boot()
    assert ("-append", "console=ttyS0 root=/dev/vda panic=-1 tsc=reliable quiet") in boot()
    assert ("-incoming", "defer") in restore()
    assert not {"-kernel", "-initrd", "-append"} & {name for name, _ in restore()}
    assert "-incoming" not in {name for name, _ in boot()}


def test_the_slot_of_a_network_card_is_free() -> None:
    addresses = [part for _, value in restore() for part in value.split(",") if part.startswith("addr=")]
    assert len(addresses) == len(set(addresses)) == 4
    assert "addr=0x02" not in addresses


def test_a_comma_in_a_path_is_not_an_option() -> None:
    argv = cmdline.restore(TCG, record(directory="/v/a,share=on"), SOCKETS, Path("/dev/shm/x,share=on"))
    assert any("mem-path=/dev/shm/x,,share=on,share=off" in word for word in argv)
    assert any("file=/v/a,,share=on/disk.qcow2" in word for word in argv)
