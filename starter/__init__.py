"""What every installation ships to start with: a tiny base, its text encoder, captioned pictures."""
