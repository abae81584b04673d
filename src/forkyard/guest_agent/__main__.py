"""Starts the agent from its directory, however that is called: `agent` in a guest, `guest_agent` in the source."""

import os
import sys

_directory = os.path.dirname(os.path.abspath(__file__))
# At the end of the path, and without the directory itself: no module of ours may hide one of the standard library.
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _directory] + [os.path.dirname(_directory)]

if __name__ == "__main__":
    server = __import__(os.path.basename(_directory) + ".server", fromlist=["main"])
    sys.exit(server.main(sys.argv[1:]))
