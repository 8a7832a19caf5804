"""The vocabulary that models are written in."""
