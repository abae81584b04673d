"""The guest agent: runs inside every VM and does there what the host asks. `PROTOCOL.md` is its contract.

Standard library only, one process, one thread, one loop; imports nothing of forkyard. The directory is copied into the
guest as /opt/forkyard/agent and started as `python3 -I /opt/forkyard/agent`.
"""

VERSION = "0.1.0"
