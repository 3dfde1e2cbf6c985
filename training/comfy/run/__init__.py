"""A run inside ComfyUI: its node, progress, samples, chart and routes."""
