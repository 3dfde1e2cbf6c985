"""Graft's demo: tiny captioned images, a tiny base model, and how both are used in a real ComfyUI."""
