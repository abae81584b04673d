"""How long a sandbox and its first command take with the package: one line of JSON for each line read."""

from __future__ import annotations

import json
import sys
import time

import e2b

for _ in sys.stdin:
    began = time.monotonic()
    made = e2b.Sandbox.create()
    made.commands.run("true")
    took_ms = (time.monotonic() - began) * 1000
    made.kill()
    print(json.dumps({"ms": took_ms}), flush=True)
