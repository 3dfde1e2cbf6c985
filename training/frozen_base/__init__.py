"""The frozen base network: its layers, what a block saves for the backward pass, replaced forwards."""
