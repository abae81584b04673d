"""The way in: preview URLs, custom domains, SSH."""
