"""Files under ComfyUI's names: LoRAs, jobs, folders."""
