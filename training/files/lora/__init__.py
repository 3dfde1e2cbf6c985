"""LoRA files in every program's spelling: read, matched to a model, written."""
