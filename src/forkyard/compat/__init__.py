"""Facades: the APIs of other services, so that clients written for them work here unmodified. Each is thin and calls the
same control services as our own API."""
