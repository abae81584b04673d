"""The machine a guest sees, as a command line."""

from __future__ import annotations

from pathlib import Path

from forkyard.models import Shape
from forkyard.net.base import GUEST_MAC
from forkyard.net.slots import TAP
from forkyard.vmm.base import VOLUME_SLOTS, BootSource, VmRecord
from forkyard.vmm.qemu import cmdline

TCG = cmdline.Engine("/usr/bin/qemu-system-x86_64", "tcg", 64)
KVM = cmdline.Engine("/usr/bin/qemu-system-x86_64", "kvm", 64)
SOCKETS = cmdline.Sockets(qmp_fd=7, agent_fd=9, tap_fd=1000)
SOURCE = BootSource(Path("/i/vmlinuz"), Path("/i/initramfs"), Path("/i/disk.raw"), "quiet")


def record(shape: Shape | None = None, directory: str = "/v/a") -> VmRecord:
    return VmRecord("a-1", Path(directory), 660000, shape or Shape(), Path(directory, "disk.qcow2"))


def options(argv: list[str]) -> list[tuple[str, str]]:
    """(-option, value) pairs, in order; flags have an empty value."""
    found = []
    for word, following in zip(argv[1:], [*argv[2:], "-"], strict=True):
        if word.startswith("-"):
            found.append((word, "" if following.startswith("-") else following))
    return found


def boot(engine: cmdline.Engine = TCG, shape: Shape | None = None, *, template: bool = True) -> list[tuple[str, str]]:
    return options(cmdline.boot(engine, record(shape), SOCKETS, SOURCE, Path("/dev/shm/t.ram"), template=template))


def shell(engine: cmdline.Engine = TCG, shape: Shape | None = None) -> list[tuple[str, str]]:
    return options(cmdline.shell(engine, record(shape), SOCKETS, Path("/dev/shm/t.ram")))


def visible(argv: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """What the guest can tell: the rest is how the host feeds it."""
    return [(name, value) for name, value in argv if name in ("-machine", "-cpu", "-smp", "-m", "-device", "-serial")]


def test_boot_and_restore_show_the_guest_the_same_machine() -> None:
    assert visible(boot()) == visible(boot(template=False)) == visible(shell())
    assert len([name for name, _ in visible(boot()) if name == "-device"]) == 7 + VOLUME_SLOTS


def test_kvm_and_tcg_differ_in_the_cpu_only() -> None:
    assert ("-accel", "kvm") in boot(KVM)
    assert ("-cpu", "host") in boot(KVM)
    assert ("-accel", "tcg,thread=multi,tb-size=64") in boot(TCG)
    assert {name for name, _ in set(shell(KVM)) ^ set(shell(TCG))} == {"-accel", "-cpu"}


def test_memory_is_shared_while_booting_and_private_afterwards() -> None:
    (booted,) = [value for _, value in boot() if value.startswith("memory-backend-file")]
    (restored,) = [value for _, value in shell() if value.startswith("memory-backend-file")]
    assert "share=on" in booted.split(",")
    (started,) = [value for _, value in boot(template=False) if value.startswith("memory-backend-file")]
    assert started == restored
    assert "share=off" in restored.split(",")
    assert "mem-path=/dev/shm/t.ram" in restored.split(",")


def test_the_shape_is_the_guests_size() -> None:
    argv = shell(shape=Shape(vcpus=4, memory_mib=2048))
    assert ("-smp", "cpus=4,sockets=1,cores=4,threads=1") in argv
    assert ("-m", "2048M") in argv
    assert any("size=2048M" in value for _, value in argv)


def test_every_vm_starts_stopped_sandboxed_and_held_when_its_guest_ends() -> None:
    for argv in (boot(), shell()):
        assert ("-S", "") in argv
        (sandbox,) = [value for name, value in argv if name == "-sandbox"]
        assert sandbox.split(",")[0] == "on"
        assert {"spawn=deny", "elevateprivileges=deny", "resourcecontrol=deny"} <= set(sandbox.split(","))
        assert ("-action", "shutdown=pause,reboot=shutdown,panic=pause") in argv


def test_a_sandboxs_console_cannot_grow() -> None:
    assert any(value.startswith("ringbuf,id=console,") for _, value in shell())
    assert not any("console.log" in value for _, value in shell())
    assert any(value.startswith("ringbuf,id=console,") for _, value in boot(template=False))
    assert any(value.startswith("file,id=console,") and "append=on" in value for _, value in boot())


def test_only_a_boot_loads_a_kernel_and_only_a_restore_waits_for_state() -> None:
    assert ("-kernel", "/i/vmlinuz") in boot()
    (append,) = (value for name, value in boot() if name == "-append")
    assert append.startswith("console=ttyS0 root=/dev/vda panic=-1 net.ifnames=0 tsc=reliable norandmaps ")
    assert append.endswith(" quiet")
    assert ("-incoming", "defer") in shell()
    assert not {"-kernel", "-initrd", "-append"} & {name for name, _ in shell()}
    assert "-incoming" not in {name for name, _ in boot()}


def test_every_device_has_a_place_of_its_own() -> None:
    addresses = [part for _, value in shell() for part in value.split(",") if part.startswith("addr=")]
    assert len(addresses) == len(set(addresses)) == 5 + VOLUME_SLOTS


def test_the_network_card_is_that_of_the_slots_and_its_cable_comes_from_the_launcher() -> None:
    (card,) = [value for name, value in shell() if name == "-device" and value.startswith("virtio-net-pci,")]
    assert f"mac={GUEST_MAC}" in card.split(",")
    assert "romfile=" in card.split(",")
    assert ("-netdev", "tap,id=net,fd=1000,vhost=off") in shell()
    assert cmdline.TAP == TAP


def test_a_comma_in_a_path_is_not_an_option() -> None:
    argv = cmdline.shell(TCG, record(directory="/v/a,share=on"), SOCKETS, Path("/dev/shm/x,share=on"))
    assert any("mem-path=/dev/shm/x,,share=on,share=off" in word for word in argv)
    assert "guest=/v/a,,share=on" in argv


def test_no_disk_is_needed_to_start_but_its_size_is_known() -> None:
    for argv in (boot(shape=Shape(disk_gib=20)), shell(shape=Shape(disk_gib=20))):
        assert not any("qcow2" in value for _, value in argv)
        root, *volumes = [value.split(",") for _, value in argv if value.startswith("driver=null-co")]
        assert f"size={20 << 30}" in root
        assert len(volumes) == VOLUME_SLOTS
        assert all("size=0" in volume for volume in volumes), "a slot is empty until a volume is put in"
