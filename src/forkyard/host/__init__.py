"""HOW sandboxes run on this machine: templates, one supervisor per VM, the journal, recovery after a restart."""
