"""The seam between deciding (`control/`) and doing (`host/`): a machine that can run sandboxes."""
