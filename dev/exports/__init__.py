"""The halves of `dev/check_exports.py`: LoRA files as ComfyUI and as diffusers load them."""
