# Generated from `_async/` by scripts/unasync.py. Do not edit.
"""The client, for threads."""
