"""A machine that nobody uses goes to sleep, and wakes with the next call as if nothing had been."""

import time
from contextlib import closing

from forkyard import Forkyard

with Forkyard() as fy, fy.sandboxes.create(idle_timeout_s=3) as sbx:
    # What it counts is nowhere but in its memory.
    counter = sbx.spawn("count=0; while read line; do count=$((count + 1)); echo $count; done", stdin=True)
    counter.write_stdin("one\ntwo\n")

    now = fy.events.list(sandbox_id=sbx.id, tail=1)[-1].id
    print(f"{sbx.id} is {sbx.refresh().state}. Waiting for it to fall asleep …")
    with closing(fy.events.follow(sandbox_id=sbx.id, after=now)) as events:
        for event in events:
            if event.kind == "sandbox.paused":
                print(f"asleep, because: {event.cause}")
                break

    started = time.perf_counter()
    counter.write_stdin("three\n")
    print(f"awake {(time.perf_counter() - started) * 1000:.0f} ms after the next call")

    counter.close_stdin()
    counted = counter.wait(timeout_s=60, check=True).stdout.split()
    print(f"and it counted on: {', '.join(counted)}")
    assert counted == ["1", "2", "3"]
