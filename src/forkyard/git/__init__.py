"""Git hosting: repositories, smart HTTP, commits without a clone, triggers, sync."""
