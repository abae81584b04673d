"""What should be: the database of sandboxes, events, keys and idempotency records. `sql.Store` is the only way in."""
