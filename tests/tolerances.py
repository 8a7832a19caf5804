"""The one table of tolerances. All but KL are shares of max|logit| over the positions compared."""

PARITY_REFERENCE = 1e-4
"""The NumPy reference with f32 weights and f32 KV against Hugging Face Transformers."""

PARITY_BACKEND = 1e-3
"""A backend with f32 weights and f32 KV against Hugging Face Transformers."""

SAME_FAMILY = {"float": (1e-5, 1e-5), "int8": (1e-5, 3e-2), "bf16": (1e-3, 1e-2)}
"""A backend with f32 KV against the reference in the same kernel family's mode: three texts of four, and all. Norms,
rope and softmax sum in another order, and a value beside a rounding border may then fall to its other side."""

DEFAULT = {"float": 1e-2, "int8": 6e-2, "bf16": 2e-2}
"""A backend with f16 KV against the reference in float with f32 KV, by kernel family."""

GREEDY = 0.02
"""How far behind the reference's best logit, as a share of that position's max|logit|, a greedy choice may lie."""
