"""The client, written by hand for asyncio. `_sync/` is generated from this package, except for `runtime.py`."""
