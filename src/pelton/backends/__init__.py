"""What runs a recorded model."""
