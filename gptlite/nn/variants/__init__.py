"""Blocks beside those of the presets: what each is, where it is from, what it is worth."""
