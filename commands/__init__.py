"""The `graft` command: one file a subcommand, and the ComfyUI without an editor that they start."""
