"""The QEMU driver: stock QEMU, unprivileged, restored from memory. Outside, only `QemuDriver` is used."""

from forkyard.vmm.qemu.driver import QemuDriver

__all__ = ["QemuDriver"]
