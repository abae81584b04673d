"""The clone that a dev server serves, in its machine: where it stands, how it goes forward, what was installed in it.

Owns: that nothing which was changed in there is lost, and which lockfiles in it are none of the repository's. What it must
know for that is kept beside the clone's own files, so it goes back with them when the machine does. Never does: deciding
what is installed (`detection`), or services.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

from forkyard.control.commands import Finished
from forkyard.dev.detection import MANIFESTS
from forkyard.errors import DevServerFailed
from forkyard.models.specs import LOCKFILES

#: What installers write if there is none. People write `requirements.txt`.
WRITTEN = frozenset(LOCKFILES) - {"requirements.txt"}
_MAX_SAID = 1000
_NOT_FETCHED = 3

#: The commit that was installed, and the lockfiles that this left, as they were then.
_NOTE = "note=$(git rev-parse --git-dir)/forkyard-installed\n"
_TRACKED = 'tracked() { git ls-files --error-unmatch -- "$1" >/dev/null 2>&1; }\n'
_OURS = 'ours() { ! tracked "$1" && grep -qsxF -- "$(git hash-object -- "$1" 2>/dev/null) $1" "$note"; }\n'

#: `served` is the head of the branch that it was brought to last. Who has commits of his own stands beyond it.
_FORWARD = """\
before=$(git rev-parse -q --verify HEAD)
served=$(git rev-parse --git-dir)/forkyard-served
[ -s "$served" ] || git rev-parse -q --verify {tracking} > "$served"
fetch() {{ git fetch -q {place} +{ref}:{tracking}; }}
# Twice, for somebody in there may be fetching too.
fetch 2>/dev/null || {{ sleep 1; fetch; }} || exit {not_fetched}
for name in {written}; do
  if git cat-file -e "FETCH_HEAD:$name" 2>/dev/null && ours "$name"; then rm -f -- "$name"; fi
done
if ! git merge-base --is-ancestor HEAD FETCH_HEAD && git merge-base --is-ancestor HEAD "$(cat "$served")" 2>/dev/null
then git reset -q --keep FETCH_HEAD
else git merge -q --ff-only FETCH_HEAD
fi || exit
git rev-parse FETCH_HEAD > "$served"
echo "$before $(git rev-parse HEAD)"
"""


@dataclass(frozen=True)
class Left:
    """Lockfiles that are no files of the repository."""

    all: frozenset[str]
    ours: frozenset[str]
    """An install left them, and nobody has changed them since."""


class Checkout:
    def __init__(self, run: Callable[[str], Awaitable[Finished]], path: str) -> None:
        """`run`: a command, in it."""
        self._run = run
        self._path = path

    async def forward(self, branch: str, place: str = "origin") -> tuple[str, str]:
        """To the head of the branch, as `place` has it. The commits before and after. If the branch was pushed anew, what
        was served goes with it."""
        script = _NOTE + _TRACKED + _OURS
        script += _FORWARD.format(
            ref=shlex.quote(f"refs/heads/{branch}"),
            tracking=shlex.quote(f"refs/remotes/origin/{branch}"),
            place=shlex.quote(place),
            written=" ".join(sorted(WRITTEN)),
            not_fetched=_NOT_FETCHED,
        )
        done = await self._run(script)
        found = re.search(r"\b([0-9a-f]{40,64}) ([0-9a-f]{40,64})\s*\Z", done.tail)
        if done.ok and found is not None:
            return found[1], found[2]
        said = " ".join(done.tail.split())[-_MAX_SAID:]
        if done.exit_code == _NOT_FETCHED:
            raise DevServerFailed(f"the head of {branch} cannot be fetched to {self._path}: {said}", log=done.tail)
        raise DevServerFailed(
            f"{self._path} cannot be brought to the head of {branch}: {said}; commit, stash or undo what was changed there",
            log=done.tail,
        )

    async def is_installed(self, since: str) -> bool:
        """No manifest differs from those that were installed. `since`: the commit of that, if it is not known in there."""
        paths = " ".join(shlex.quote(f":(glob)**/{name}") for name in sorted(MANIFESTS))
        done = await self._run(
            f'{_NOTE}since=$(head -n 1 "$note" 2>/dev/null)\n'
            f'git diff --quiet "${{since:-{shlex.quote(since)}}}" HEAD -- {paths}'
        )
        return done.ok  # if it cannot be told any more, everything may have changed

    async def left(self) -> Left:
        done = await self._run(
            f"{_NOTE}{_TRACKED}{_OURS}for name in {' '.join(sorted(WRITTEN))}; do\n"
            '[ ! -f "$name" ] || tracked "$name" || { ! ours "$name" || echo "ours $name"; echo "left $name"; }\ndone'
        )
        lines = [line.partition(" ") for line in done.tail.splitlines()]
        found = {
            kind: frozenset(name for said, _, name in lines if said == kind) & WRITTEN for kind in ("left", "ours")
        }
        return Left(found["left"], found["ours"])

    async def installed(self, may_be_ours: Collection[str]) -> None:
        """Writes it down. `may_be_ours`: lockfiles that were not there before, or ours."""
        names: Sequence[str] = sorted(WRITTEN.intersection(may_be_ours))
        await self._run(
            f"{_NOTE}{_TRACKED}{{ git rev-parse HEAD; for name in {' '.join(names)}; do\n"
            '[ ! -f "$name" ] || tracked "$name" || echo "$(git hash-object -- "$name") $name"\ndone; } > "$note"'
        )
