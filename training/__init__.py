"""Graft's training engine. Only `training.comfy` imports ComfyUI; everything else is plain PyTorch."""
