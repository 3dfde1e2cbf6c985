"""Merge, extract, resize, convert and inspect finished LoRAs: plain functions over tensors and files."""
