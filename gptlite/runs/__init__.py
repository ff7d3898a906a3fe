"""The run folder: what a training run keeps, and how it is read again."""
