"""The only package of Graft that imports ComfyUI."""
