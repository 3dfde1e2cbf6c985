"""Adapters, the trained weights: small modules beside frozen layers. One file a method."""
