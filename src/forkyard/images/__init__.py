"""Images: the root disk, kernel and initramfs that templates are booted from.

Owns: building the base image from the host's own package sources, caching it by content, and putting the guest agent
into the initramfs. Never does: starting VMs. `host/` is its user.

| module | |
|---|---|
| `base.py` | when an image is built, and that it is whole or not there |
| `build.py` | what is in it, step by step; `rootfs/` and `scripts/` are copied in |
| `foreign.py` | images of others, made bootable |
| `oci.py`, `registry.py` | what they come as, and from where |
| `unpack.py` | their files, in a process that can write nowhere else |
| `runtime.py` | what the agent brings into them |
| `front.py` | the agent's programs in C, compiled |
| `hostconfig.py` | what carries over from the host, and what may not |
| `initramfs.py` | the cpio format, the base initramfs, the agent's archive |
| `process.py` | running programs that end when the builder ends |

`python -m forkyard.host.setup` makes sure that the image is there.
"""

from forkyard.images.base import BaseImage, base_image_key, ensure_base_image
from forkyard.images.build import Progress
from forkyard.images.foreign import ForeignImages
from forkyard.images.front import ensure_program
from forkyard.images.initramfs import agent_archive

__all__ = [
    "BaseImage",
    "ForeignImages",
    "Progress",
    "agent_archive",
    "base_image_key",
    "ensure_base_image",
    "ensure_program",
]
