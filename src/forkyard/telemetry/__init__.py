"""What the daemon says about itself."""
