"""Steps from one shape of the database to the next, run by `store.migrate` when the daemon starts.

Expand first, contract in a later release: a step may add tables, nullable columns and indexes; what an older daemon
still reads is removed only when no supported version reads it any more.
"""
