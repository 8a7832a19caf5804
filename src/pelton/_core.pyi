"""The compiled core."""

def isas() -> list[str]:
    """The instruction sets that this build and this CPU have, best last."""
