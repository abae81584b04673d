"""Generate the sync SDK from the async one.

    python scripts/unasync.py            write src/forkyard/sdk/_sync/
    python scripts/unasync.py --check    fail if it is not up to date

Word for word, then formatted. `runtime.py` is not generated: it holds what differs between asyncio and threads.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

SDK = Path(__file__).resolve().parent.parent / "src" / "forkyard" / "sdk"
BY_HAND = {"runtime.py"}
HEADER = "# Generated from `_async/` by scripts/unasync.py. Do not edit.\n"

RULES = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\basync (def|with|for)\b", r"\1"),
        (r"\bawait ", ""),
        (r"\b(\w+: )?AsyncIterable\[bytes\] \| Iterable\[bytes\]", r"\1Iterable[bytes]"),
        (r"\bAsyncIterable, ", ""),
        (r"\bAsync([A-Z]\w*)", r"\1"),
        (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
        (r"\ba(close|iter_bytes|read)\b", r"\1"),
        (r"\baclosing\b", "closing"),
        (r"\basynccontextmanager\b", "contextmanager"),
        (r"\b_async\b", "_sync"),
        (
            r"written by hand for asyncio\. `_sync/` is generated from this package, except for `runtime\.py`",
            "for threads",
        ),
    )
]


def to_sync(source: str) -> str:
    for pattern, replacement in RULES:
        source = pattern.sub(replacement, source)
    ruff = [sys.executable, "-m", "ruff"]
    isort = [*ruff, "check", "--isolated", "--select", "I", "--fix", "--quiet", "--stdin-filename", "generated.py", "-"]
    form = [*ruff, "format", "--isolated", "--line-length", "120", "--stdin-filename", "generated.py", "-"]
    for command in (isort, form):
        source = subprocess.run(command, input=source, capture_output=True, text=True, check=True).stdout
    return HEADER + source


def main(arguments: list[str]) -> int:
    check = arguments == ["--check"]
    if arguments and not check:
        print(__doc__, file=sys.stderr)
        return 2
    stale = []
    for source in sorted((SDK / "_async").glob("*.py")):
        if source.name in BY_HAND:
            continue
        target, wanted = SDK / "_sync" / source.name, to_sync(source.read_text())
        if not target.exists() or target.read_text() != wanted:
            stale.append(target.name)
            if not check:
                target.write_text(wanted)
    for name in stale:
        print(f"sdk/_sync/{name}: {'not up to date; run python scripts/unasync.py' if check else 'written'}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
