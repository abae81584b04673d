"""QEMU's command line, as a pure function of what is asked.

Owns: which machine a guest sees. All that the guest can see is in `machine`, the same for boot and restore, with
fixed PCI addresses: device state saved by one QEMU loads only into the same machine. What differs between the two
(how RAM is mapped, what is loaded, where the console goes) the guest cannot see. No disk is on it: see `disks`.
Never does: I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forkyard.models import Shape
from forkyard.vmm.base import VOLUME_SLOTS, BootSource, VmRecord
from forkyard.vmm.qemu.disks import (
    GIB,
    PLACEHOLDER,
    ROOT_NODE,
    placeholder,
    root_options,
    volume_node,
    volume_options,
)

Accel = Literal["kvm", "tcg"]

AGENT_PORT = "forkyard.agent"
CONSOLE = "console"  # id of the chardev behind ttyS0
CONSOLE_RING_BYTES = 64 * 1024  # QEMU wants a power of two
# A ring in QEMU's memory: a guest may write to its console for ever and the host's disk does not fill. It is read over QMP,
# before the VM is let go (see `-action`); only a crash of QEMU itself loses it.
_RING = ("-chardev", f"ringbuf,id={CONSOLE},size={CONSOLE_RING_BYTES}")

TAP = "tap0"
GUEST_MAC = "02:fd:00:00:00:02"

# 0x1f is q35's own.
_NET, _BLK, _SERIAL, _RNG, _PVPANIC = "0x02", "0x03", "0x04", "0x05", "0x06"
#: The agent finds a slot by its address: the first, and so on upwards.
_VOLUMES = 0x08

# Legacy devices cost start-up time, and every emulated device is attack surface.
_Q35 = "q35,usb=off,vmport=off,smm=off,hpet=off,sata=off,smbus=off,i8042=off,graphics=off"


# What a guest should know about being emulated.
_TCG_GUEST = (
    # TCG's virtual CPUs share one clock. Without the hint a guest with several of them does not trust it, and pays an
    # emulated register access for every look at the time.
    "tsc=reliable",
    # TCG keeps translated code by address: a program that starts somewhere else each time is translated anew each time.
    # Starting `bash -c true` takes half the time at a fixed address. (sysctl kernel.randomize_va_space=2 brings it back.)
    "norandmaps",
    # Against faults of real processors that an emulated one does not have.
    "mitigations=off",
    # Code that runs at every start of a program or switch between two and is of no use here: security modules without a
    # policy, auditing without rules, statistics that nobody reads.
    *("lsm=landlock,yama", "audit=0", "psi=0", "cgroup.memory=nokmem,nosocket", "nowatchdog"),
)


@dataclass(frozen=True)
class Engine:
    """How guest code is run."""

    binary: str
    accel: Accel
    tb_size_mib: int  # translation cache; TCG only


@dataclass(frozen=True)
class Sockets:
    """File descriptors QEMU inherits, already bound and listening: connecting to them works before QEMU is up."""

    qmp_fd: int
    agent_fd: int
    tap_fd: int  # opened by the launcher


def boot(
    engine: Engine, record: VmRecord, sockets: Sockets, source: BootSource, ram: Path, *, template: bool
) -> list[str]:
    """Cold boot, CPUs stopped. What the guest of a template writes to its RAM goes to the file `ram`."""
    return [
        engine.binary,
        *_process(record),
        *_ram(record.shape, ram, shared=template),
        # A template's console is read while it boots, and all of it matters. Our own image, one boot: it stays small.
        *(
            ("-chardev", f"file,id={CONSOLE},path={_value(record.dir / 'console.log')},append=on")
            if template
            else _RING
        ),
        *_channels(sockets),
        *("-kernel", str(source.kernel), "-initrd", str(source.initramfs)),
        *("-append", kernel_args(engine.accel, source.kernel_args)),
        *machine(engine, record.shape),
    ]


def shell(engine: Engine, record: VmRecord, sockets: Sockets, ram: Path) -> list[str]:
    """A machine that waits for device state; its RAM is a private copy-on-write view of the file `ram`."""
    return [
        engine.binary,
        *_process(record),
        *_ram(record.shape, ram, shared=False),
        *_RING,
        *_channels(sockets),
        # The state is that of xen-save-devices-state, which has no configuration section.
        *("-incoming", "defer", "-global", "migration.send-configuration=off"),
        # The same addresses at the same place: there is nobody to announce them to.
        *("-global", "migration.announce-rounds=0"),
        *machine(engine, record.shape),
    ]


def idle(engine: Engine, qmp_fd: int) -> list[str]:
    """A QEMU that does nothing: a plain machine of the same kind, no guest. The reference of every benchmark."""
    return [
        engine.binary,
        *("-nodefaults", "-no-user-config", "-display", "none", "-S"),
        *("-machine", "q35", *_cpu(engine), "-m", "512M"),
        *("-chardev", f"socket,id=qmp,fd={qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
    ]


def probe(engine: Engine, kernel: Path, initramfs: Path) -> list[str]:
    """A guest that prints one line on stdout and powers off, if the accelerator works."""
    return [
        engine.binary,
        *("-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"),
        *("-machine", _Q35, *_cpu(engine), "-m", "128M"),
        *("-chardev", f"stdio,id={CONSOLE},signal=off", "-serial", f"chardev:{CONSOLE}"),
        *("-kernel", str(kernel), "-initrd", str(initramfs), "-append", kernel_args(engine.accel, "quiet")),
    ]


def kernel_args(accel: Accel, extra: str) -> str:
    # panic=-1: a kernel that panics before pvpanic is loaded resets at once, and is seen, instead of hanging for ever.
    # net.ifnames=0: the card is eth0 in every image, whatever its udev would call it.
    tuned = _TCG_GUEST if accel == "tcg" else ()
    words = ["console=ttyS0", "root=/dev/vda", "panic=-1", "net.ifnames=0", *tuned, *extra.split()]
    return " ".join(words)


def machine(engine: Engine, shape: Shape) -> list[str]:
    """All that the guest can see."""
    return [
        *("-machine", f"{_Q35},memory-backend=ram,suppress-vmdesc=on"),
        *_cpu(engine),
        *("-smp", f"cpus={shape.vcpus},sockets=1,cores={shape.vcpus},threads=1"),
        *("-m", f"{shape.memory_mib}M"),
        *("-serial", f"chardev:{CONSOLE}"),
        # The disk comes later, by `disks.attach`. It is there before the CPUs run.
        *("-blockdev", f"driver=null-co,node-name={PLACEHOLDER},size={shape.disk_gib * GIB},read-zeroes=on"),
        *("-blockdev", _joined(root_options(PLACEHOLDER))),
        # Errors are reported to the guest: the default would hold the whole machine when the host's disk is full.
        *("-device", f"virtio-blk-pci,drive={ROOT_NODE},addr={_BLK},write-cache=on,werror=report,rerror=report"),
        *(word for slot in range(VOLUME_SLOTS) for word in _volume(slot)),
        *("-device", f"virtio-serial-pci,id=serial,max_ports=2,addr={_SERIAL}"),
        *("-device", f"virtserialport,bus=serial.0,nr=1,chardev=agent,name={AGENT_PORT}"),
        *("-device", f"virtio-net-pci,netdev=net,mac={GUEST_MAC},addr={_NET},guest_announce=off,romfile="),
        *("-object", "rng-random,id=rng,filename=/dev/urandom"),
        *("-device", f"virtio-rng-pci,rng=rng,addr={_RNG}"),
        *("-device", f"pvpanic-pci,addr={_PVPANIC}"),
        # A new id at every start: a kernel with the driver reseeds its random numbers when it finds it changed.
        *("-device", "vmgenid,guid=auto"),
    ]  # fmt: skip


def _process(record: VmRecord) -> list[str]:
    return [
        *name(record.dir),
        *("-nodefaults", "-no-user-config", "-display", "none", "-S"),
        *("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"),
        # A guest that powers off, reboots or panics is held, not ended: whoever looks after it, now or after a restart
        # of the daemon, can still ask why, and read the end of its console. A reboot counts as a power-off: a sandbox
        # was restored, there is nothing it could boot from.
        *("-action", "shutdown=pause,reboot=shutdown,panic=pause"),
    ]


def name(directory: Path) -> list[str]:
    """By which the process of a VM is known."""
    return ["-name", f"guest={_value(directory)}"]


def _cpu(engine: Engine) -> list[str]:
    if engine.accel == "kvm":
        return ["-accel", "kvm", "-cpu", "host"]
    # TCG runs rep movsb and rep stosb byte by byte; without erms and fsrm guests copy memory with vector code, at twice
    # the speed. Page tables of five levels, protection keys, and switching SMAP off and on for every access to user
    # memory only cost time: an emulator does all of it in software.
    return ["-accel", f"tcg,thread=multi,tb-size={engine.tb_size_mib}", "-cpu", "max,-erms,-fsrm,-la57,-pku,-smap"]


def _ram(shape: Shape, path: Path, *, shared: bool) -> list[str]:
    # reserve=off: no memory need be promised for pages of which most stay shared.
    sharing = "share=on" if shared else "share=off,reserve=off"
    # merge=off: the host must not deduplicate pages of different owners (they could tell by timing).
    size = f"size={shape.memory_mib}M"
    return ["-object", f"memory-backend-file,id=ram,{size},mem-path={_value(path)},{sharing},merge=off"]


def _channels(sockets: Sockets) -> list[str]:
    return [
        *("-chardev", f"socket,id=qmp,fd={sockets.qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
        *("-chardev", f"socket,id=agent,fd={sockets.agent_fd},server=on,wait=off"),
        *("-netdev", f"tap,id=net,fd={sockets.tap_fd},vhost=off"),
    ]


def _volume(slot: int) -> list[str]:
    """A drive without a byte, until a volume is put in (`disks.attach`)."""
    return [
        *("-blockdev", f"driver=null-co,node-name={placeholder(slot)},size=0,read-zeroes=on"),
        *("-blockdev", _joined(volume_options(slot, placeholder(slot)))),
        "-device",
        f"virtio-blk-pci,drive={volume_node(slot)},addr={_VOLUMES + slot:#x},num-queues=1,queue-size=128,"
        "disable-legacy=on,write-cache=on,werror=report,rerror=report",
    ]


def _joined(options: dict[str, str]) -> str:
    return ",".join(f"{name}={value}" for name, value in options.items())


def _value(path: Path) -> str:
    """A path inside one of QEMU's comma-separated options."""
    return str(path).replace(",", ",,")
