"""Texts for many clients at once, over HTTP."""
