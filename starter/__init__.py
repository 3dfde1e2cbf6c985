"""The starter of every installation: a tiny base, its text encoder, captioned images."""
