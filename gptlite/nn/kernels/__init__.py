"""What is written otherwise for speed, each with its reference."""
