"""Calls of the published `e2b` package, each with what a caller may rely on.

Runs in the environment of that package, and prints a line of JSON for each call: its name, and what went wrong if anything
did. Everything happens below the directory COMPAT_DIR: sandboxes of this test are processes of this machine. With
`--list` it prints the names alone, and the oldest version that has each; that needs no package.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
import traceback

from registry import CALLS, Yard

ORDER = ("sandboxes", "commands", "files", "repositories", "sleep", "templates", "asynchronous", "end")
#: What takes a machine of its own: services, packages, memory, ports, disks.
OF_MACHINES = ("starting", "installing", "machines", "volumes")
#: What takes a registry, which those of machines have not.
OF_IMAGES = ("images",)


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])


def main() -> None:
    listing = "--list" in sys.argv
    for name in OF_MACHINES if listing or "COMPAT_VM" in os.environ else ():
        importlib.import_module(name)
    of_machines = len(CALLS)
    for name in (*(() if "COMPAT_VM" in os.environ else OF_IMAGES), *ORDER):
        importlib.import_module(name)
    if listing:
        print(json.dumps([(name, since, n < of_machines) for n, (name, since, _) in enumerate(CALLS)]))
        return
    from importlib.metadata import version

    # Old clients stand still for ever if a stream that nobody reads any more is collected while they hold a lock.
    gc.disable()
    ours, yard = _number(version("e2b")), Yard()
    for name, since, check in CALLS:
        if _number(since) > ours:
            continue
        began, wrong = time.monotonic(), None
        try:
            check(yard)
        except BaseException:
            wrong = traceback.format_exc(limit=-4)
        print(json.dumps({"call": name, "wrong": wrong, "seconds": round(time.monotonic() - began, 2)}), flush=True)


main()
