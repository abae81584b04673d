"""Machines built from specs, in layers that are kept: each a snapshot of a machine that runs."""
