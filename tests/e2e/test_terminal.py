"""`pelton run` and its kin with a real model, through pipes and on a terminal."""

from __future__ import annotations

import os
import pty
import resource
import select
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.pelton_process import PELTON, environment, pelton


def test_help_is_light(tmp_path):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = pelton(tmp_path, "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert out.returncode == 0
    for command in ("run", "serve", "pull", "list", "show", "rm", "bench"):
        assert f"\n  {command} " in out.stdout
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert cpu < 0.45  # 0.15 s on an idle machine


def test_the_server_imports_neither_the_core_nor_torch():
    heavy = ("pelton._core", "torch", "rich", "huggingface_hub")
    script = f"import pelton.server.app, sys; print([m for m in {heavy} if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_one_answer(tmp_path, smollm2):
    out = pelton(tmp_path, "run", str(smollm2), "What is 2+2?", "--temperature", "0", "--max-tokens", "24")
    assert out.returncode == 0, out.stderr
    assert "4" in out.stdout


def test_a_piped_prompt_and_repeatable_seeds(tmp_path, smollm2):
    args = ("run", str(smollm2), "--seed", "7", "--max-tokens", "16")
    first = pelton(tmp_path, *args, stdin="Tell me a story.\n")
    second = pelton(tmp_path, *args, stdin="Tell me a story.\n")
    assert first.returncode == 0
    assert first.stdout.strip()
    assert first.stdout == second.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("run", "no-such-model", "hi"), "no model"),
        (("run", "/nowhere/model.gguf", "hi"), "/nowhere/model.gguf"),
        (("serve", "no-such-model"), "no model"),
        (("show", "no-such-model"), "no"),
        (("rm", "no-such-model"), "no"),
    ],
)
def test_errors_are_one_line_that_says_what(tmp_path, args, says):
    out = pelton(tmp_path, *args)
    assert out.returncode == 1
    assert says in out.stderr
    assert "Traceback" not in out.stderr
    assert out.stderr.strip().splitlines()[-1].startswith("pelton: ")


def test_outputs_that_take_no_text(tmp_path, smollm2):
    """A closed one, a full disk, a reader that leaves, and an encoding without the answer's characters."""
    run = f"{' '.join(PELTON)} run {smollm2} 'Say: 🦙🦙🦙' --temperature 0 --max-tokens 8"
    for command, status, said in (
        (f"{run} >&-", 0, ""),
        (f"{run} > /dev/full", None, "pelton: [Errno 28] No space left on device"),
        (f"{run} | head -c 1", 0, ""),
        (f"PYTHONIOENCODING=ascii {run}", 0, ""),
        (f"printf '\\377 Say hi' | PYTHONIOENCODING=utf-8:strict {run.replace('Say: 🦙🦙🦙', '')}", 0, ""),
    ):
        out = subprocess.run(
            ["bash", "-c", command], env=environment(tmp_path), capture_output=True, errors="replace", check=False
        )
        assert status in (None, out.returncode), command
        assert "Traceback" not in out.stderr
        assert said in out.stderr


def test_an_address_that_cannot_be_had(tmp_path, smollm2):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for args, says in (
            (("--port", port), f"cannot listen on 127.0.0.1, port {port}: Address already in use"),
            (("--host", "nonsense..x", "--port", "0"), "cannot listen on nonsense..x, port 0: "),
        ):
            out = pelton(tmp_path, "serve", str(smollm2), *args)
            assert out.returncode == 1
            assert "Traceback" not in out.stderr
            assert f"pelton: {says}" in out.stderr


def test_a_damaged_file_is_refused_by_name(tmp_path, smollm2):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(smollm2.read_bytes()[:100_000])
    out = pelton(tmp_path, "run", str(damaged), "hi")
    assert out.returncode == 1
    assert "damaged.gguf" in out.stderr
    assert "Traceback" not in out.stderr


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, home: Path, *args: str) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*PELTON, *args],
            env=environment(home, TERM="dumb"),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: os.login_tty(slave) if hasattr(os, "login_tty") else _take(slave),
        )
        os.close(slave)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def expect(self, text: str, timeout: float = 60) -> None:
        """Wait until `text` has come since the last expectation."""
        deadline = time.monotonic() + timeout
        while text not in self.seen:
            left = deadline - time.monotonic()
            assert left > 0, f"no {text!r} in {self.seen!r}"
            if select.select([self.master], [], [], left)[0]:
                try:
                    self.seen += os.read(self.master, 65536).decode(errors="replace")
                except OSError:
                    break
        assert text in self.seen, self.seen
        self.seen = self.seen.split(text, 1)[1]


def _take(terminal: int) -> None:
    import fcntl
    import termios

    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def test_chat_on_a_terminal(tmp_path, smollm2):
    terminal = Terminal(tmp_path, "run", str(smollm2), "--temperature", "0", "--max-tokens", "400")
    try:
        terminal.expect(">>> ")
        terminal.type("/help\r")
        terminal.expect("Ctrl-C stops the answer")
        terminal.expect(">>> ")
        terminal.type("/nonsense\r")
        terminal.expect("/help lists them")
        terminal.type("Write a very long story about a cat.\r")
        terminal.expect("cat")
        terminal.expect(" the ")
        terminal.type("\x03")  # Ctrl-C stops the answer ...
        terminal.expect("[stopped]")
        terminal.expect(">>> ")  # ... and not the program
        terminal.type("/clear\r")
        terminal.expect("forgotten")
        terminal.type('"""What is\r2+2?"""\r')
        terminal.expect("4")
        terminal.expect(">>> ")
        terminal.type("/bye\r")
        assert terminal.process.wait(20) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
