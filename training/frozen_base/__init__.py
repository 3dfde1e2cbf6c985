"""The frozen base network: its layers, their saved activations, and replaced forwards."""
