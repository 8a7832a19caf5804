"""A profile as a table that a person can read."""

from __future__ import annotations

from pelton.backends.base import OpTime, StepProfile


def table(profile: StepProfile) -> str:
    """One line per op, with its share of the step."""
    mean = profile.seconds / profile.num_steps
    lines = [
        f"{profile.work}: {profile.num_steps} steps, {1e3 * mean:.2f} ms each",
        f"{'share':>7} {'ms/step':>9} {'calls':>7} {'GB/s':>7} {'GOP/s':>7}  op",
    ]
    lines += [_line(op, profile) for op in profile.ops]
    return "\n".join(lines) + "\n\n"


def _line(op: OpTime, profile: StepProfile) -> str:
    share, per_step = op.seconds / profile.seconds, op.seconds / profile.num_steps
    rates = [_rate(op.num_bytes, op.seconds), _rate(op.operations, op.seconds)]
    return f"{100 * share:5.1f} % {1e3 * per_step:9.3f} {op.calls:7} {rates[0]:>7} {rates[1]:>7}  {op.name}"


def _rate(count: int, seconds: float) -> str:
    return f"{count / seconds / 1e9:.1f}" if count and seconds else "-"
