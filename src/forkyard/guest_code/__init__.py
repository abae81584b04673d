"""Runs code inside a sandbox, with a state that lives on between runs: one process of this per context.

It goes into the guest as a zip file and is started there by an exec, whose stdin takes requests and whose stdout gives
events, one JSON object a line. Stdlib only, and what a kernel brings itself; imports nothing of forkyard.

| module | |
|---|---|
| `runner.py` | the requests, one after the other; time limits, interrupts, restarts |
| `events.py` | what is told of a run, with its bounds |
| `jupyter.py` | Python, by a Jupyter kernel |
| `setup_python.py` | what is added to that kernel: tables and charts as data |
| `charts.py` | what a figure shows |
| `piped.py` | languages whose worker is a program at the end of pipes: bash, JavaScript |

Requests: `{"op": "run", "id", "code", "language", "env", "timeout_s"}`, `{"op": "interrupt", "id"}`, `{"op": "restart", "id"}`.
Events: `ready` and `failed` of the context; `started`, `output`, `result`, `exception`, `end` of a run, each with its `id`.
"""
