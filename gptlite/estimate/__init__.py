"""Estimates of a training step on devices that are not there."""
