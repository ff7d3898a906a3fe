"""What a training step takes on devices that are not there."""
