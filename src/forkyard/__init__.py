"""Self-hosted Linux machines for coding agents."""
