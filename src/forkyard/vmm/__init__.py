"""How a virtual machine is run: one small seam (`base`), the QEMU driver (`qemu/`), and a fake for control-plane tests."""
