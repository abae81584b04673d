"""Run in the Python kernel when it starts."""
