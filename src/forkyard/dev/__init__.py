"""Dev servers: a repository, installed and served in a sandbox, kept at the head of its branch."""
