"""One task, several machines at once: each tries an answer of its own."""

import asyncio
import sys

from forkyard import AsyncForkyard

CANDIDATES = {
    "plus": "def solve(a, b): return a + b",
    "minus": "def solve(a, b): return a - b",
    "power": "def solve(a, b): return a ** b",
    "times": "def solve(a, b): return a * b",
}
TEST = "from answer import solve; assert solve(2, 5) == 32 and solve(3, 2) == 9"


async def passes(fy: AsyncForkyard, name: str, answer: str) -> tuple[str, bool]:
    async with await fy.sandboxes.create(name=f"try-{name}", labels={"example": "fanout"}) as sbx:
        await sbx.files.write("/root/answer.py", answer)
        result = await sbx.exec(["python3", "-c", TEST], timeout_s=60)
        return name, result.ok


async def main() -> None:
    async with AsyncForkyard() as fy:
        tries = [asyncio.create_task(passes(fy, name, answer)) for name, answer in CANDIDATES.items()]
        for done in asyncio.as_completed(tries):
            name, good = await done
            print(f"{name}: {'passes' if good else 'fails'}")
        if not any(task.result()[1] for task in tries):
            sys.exit("No candidate passes.")


asyncio.run(main())
