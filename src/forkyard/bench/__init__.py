"""`forkyard bench`: measures every number that SPECIFICATION.md promises, against a reference of the same run.

Machines are noisy, so a bar is a multiple of T0, the time to start an idle hypervisor to its first answer, measured in
the same minute. `figures` says what is promised, `measure` how it is measured through the public SDK, `report` how it
is shown and written down.
"""

from forkyard.bench.report import main

__all__ = ["main"]
