"""The program that runs code in a guest (`guest_code`), as one file to put there."""

from __future__ import annotations

import hashlib
import io
import zipfile
from functools import cache
from pathlib import Path

_SOURCE = Path(__file__).parent.parent / "guest_code"
#: Gone with the memory of the machine, as the contexts are.
FOLDER = "/run/forkyard"
#: What came along into an image of others, which may have no Python, or one too old for this.
BROUGHT = (
    "/opt/forkyard/runtime/lib/ld-linux-x86-64.so.2",
    "--library-path",
    "/opt/forkyard/runtime/lib",
    "/opt/forkyard/runtime/bin/python3.11",
    "-I",
)
_MAIN = """\
import json, sys

if sys.version_info < (3, 10):
    said = "code needs Python 3.10 or newer, and the python3 of this machine is %d.%d" % sys.version_info[:2]
    print(json.dumps({"type": "failed", "id": "", "message": said}), flush=True)
    sys.exit(1)

from guest_code.runner import main

main()
"""


@cache
def bundle() -> tuple[str, bytes]:
    """Where it goes, and what it is: a zip file that Python runs."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in [
            ("__main__.py", _MAIN),
            *((f"guest_code/{file.name}", file.read_text()) for file in _files()),
        ]:
            archive.writestr(zipfile.ZipInfo(name), text)
    data = content.getvalue()
    return f"{FOLDER}/code-{hashlib.sha256(data).hexdigest()[:16]}.pyz", data


def _files() -> list[Path]:
    return sorted(file for file in _SOURCE.iterdir() if file.suffix in (".py", ".js"))
