"""Graft: train LoRAs inside ComfyUI, with ComfyUI's own models."""
