"""Work on finished LoRAs: plain functions over tensors, each with its `graft` subcommand beside it."""
