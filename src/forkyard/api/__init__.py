"""The HTTP edge: requests in, answers out, one error mapping. Decides nothing; `control` does."""
