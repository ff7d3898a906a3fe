"""Relatives of the decoder, from the same blocks: encoders, encoder-decoders."""
