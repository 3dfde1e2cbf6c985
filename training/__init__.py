"""Graft's training engine: what trains, and nothing else. Only `training.comfy` imports ComfyUI."""
