"""HTTP: dialects in front of the pool."""
