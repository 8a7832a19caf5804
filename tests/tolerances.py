"""The one table of tolerances. All but KL are shares of max|logit| over the positions compared."""

PARITY_REFERENCE = 1e-4
"""The NumPy reference with f32 weights and f32 KV against Hugging Face Transformers."""

PARITY_BACKEND = 1e-3
"""A backend with f32 weights and f32 KV against Hugging Face Transformers."""
