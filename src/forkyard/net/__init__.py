"""The one door: what enters and leaves a sandbox passes here, where it is decided, limited, recorded and counted."""
