"""ComfyUI's models as the engine's Denoiser and Encoder."""
