"""The kernels' selftest, which checks them where there is no Python: in an emulator of a CPU that is not here."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pelton import _core

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not (shutil.which("cmake") and find_spec("nanobind")), reason="needs cmake and nanobind")
def test_every_instruction_set_of_this_cpu_passes(tmp_path: Path) -> None:
    options = ["-DPELTON_SELFTEST=ON", "-DCMAKE_BUILD_TYPE=None", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(["cmake", "-S", str(ROOT), "-B", str(tmp_path), *options], check=True, stdout=subprocess.DEVNULL)
    build = ["cmake", "--build", str(tmp_path), "--target", "selftest", "--parallel", "2"]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    for isa in _core.isas():
        told = subprocess.run([tmp_path / "selftest", isa], capture_output=True, text=True)
        assert told.returncode == 0, told.stdout
        subjects = {line.split(":")[0].split()[1] for line in told.stdout.splitlines()}
        assert subjects >= {"rows", "attention", "sample", "limits", "Q4_K", "Q6_K", "IQ4_XS"}
    assert subprocess.run([tmp_path / "selftest", "nonsense"], capture_output=True).returncode == 2
