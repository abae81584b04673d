"""The client. Users import from `forkyard`; every module here is private.

`_async/` is written by hand, `_sync/` is generated from it by `scripts/unasync.py` (`make lint` checks that it is up to
date). What needs no I/O of its own (results, wire format, archives) and finding the daemon live beside them, once.
"""
