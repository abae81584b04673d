"""One prepared machine, forked three ways: each copy tries an idea of its own, and the best one stays.

The preparation (here a Python session with its data loaded) happens once. A fork copies it while it runs, memory
included, so that every attempt begins where the preparation ended and none can spoil another.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from forkyard import Forkyard, Process, Sandbox

SESSION = """
import json, sys, time
data = [i * 7919 % 1999 for i in range(2000)]  # stands for an hour of preparation
print("ready", flush=True)
for line in sys.stdin:
    exec(json.loads(line))
    started = time.perf_counter()
    answer = solve(data)
    print(json.dumps({"answer": answer, "ms": (time.perf_counter() - started) * 1000}), flush=True)
"""

IDEAS = {
    "compare all": "def solve(data): return sorted({a for i, a in enumerate(data) for b in data[i + 1:] if a == b})",
    "sort first": "def solve(data): s = sorted(data); return sorted({a for a, b in zip(s, s[1:]) if a == b})",
    "off by one": "def solve(data): s = sorted(data); return sorted({a for a, b in zip(s, s[2:]) if a == b})",
}
EXPECTED = [0]


def attempt(sbx: Sandbox, session_id: str, idea: str) -> dict[str, Any]:
    """Hand the idea to the session of this copy, which has the data in its memory already."""
    session = sbx.process(session_id)
    session.write_stdin(json.dumps(idea) + "\n")
    session.close_stdin()
    lines = session.wait(timeout_s=120).stdout.splitlines()
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def wait_until_ready(session: Process) -> None:
    with session.output() as output:
        for chunk in output:
            if "ready" in chunk.text:
                return
    sys.exit("The session ended before it was ready.")


with Forkyard() as fy, fy.sandboxes.create(name="prepared", labels={"example": "fork"}) as sbx:
    session = sbx.spawn(["python3", "-c", SESSION], stdin=True)
    wait_until_ready(session)

    copies = sbx.fork(len(IDEAS))
    try:
        with ThreadPoolExecutor() as pool:
            attempts = pool.map(attempt, copies, [session.id] * len(copies), IDEAS.values())
        results = dict(zip(IDEAS, attempts, strict=True))
        for name, result in results.items():
            print(f"{name}: {'right' if result['answer'] == EXPECTED else 'wrong'}, {result['ms']:.1f} ms")
        right = {name: result["ms"] for name, result in results.items() if result["answer"] == EXPECTED}
        best = min(right, key=lambda name: right[name])
        print(f"{best!r} wins; its machine is {copies[list(IDEAS).index(best)].id}.")
        print(f"The prepared one still waits: running={session.info().running}.")
    finally:
        for copy in copies:
            copy.delete()
