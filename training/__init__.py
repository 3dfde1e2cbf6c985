"""Graft's training engine. Of it only `training.comfy` imports ComfyUI; `training.headless` starts one."""
