"""The host's side of the channel into a guest: one seam (`base`), the real client, and a fake for tests above it."""
