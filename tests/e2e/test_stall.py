"""Streams keep their pace while a long prompt comes in, on a real model and a quiet machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "stall.py"


@pytest.mark.slow
def test_sixteen_streams_beside_a_prompt_of_four_thousand_tokens(smollm2: Path):
    command = [sys.executable, str(SCRIPT), str(smollm2), "--streams", "16", "--prompt", "4000", "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["num_gaps"] > 500
    assert found["beside_p99_of_target"] <= 1.25
