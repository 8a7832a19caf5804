"""Bars on standard error, so that answers on standard output stay clean."""

from __future__ import annotations

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, Progress, Task, TaskID, TextColumn
from rich.progress import ProgressColumn as Column
from rich.text import Text

from pelton.pool import Loading
from pelton.pool import Progress as Pull

_VERBS = {"download": "Fetching", "unpack": "Unpacking", "verify": "Checking"}


class Bars:
    """Shows a pull (where from, how far, how fast, why a source was passed over), the load of a model, and a batch."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=30), _Amount(), console=self._console, transient=True
        )
        self._tasks: dict[str, TaskID] = {}
        self._bars.start()

    def close(self) -> None:
        """Take the bars away."""
        self._bars.stop()

    def show(self, event: Pull | Loading) -> None:
        """Show one step. May be called from any thread."""
        if isinstance(event, Loading):
            self._move(f"Loading {event.name}", event.share, 1.0, f"{event.share:.0%}")
            return
        match event.phase:
            case "connect":
                self._note(f"Asking {event.source} ...")
            case "wait":
                self._note(f"Another pull fetches {event.file or event.source}; waiting for it ...")
            case "failed":
                self._note(f"{event.source} cannot give it: {event.detail}")
            case "done":
                self._note(f"Fetched from {event.source}.")
            case "download" | "unpack" | "verify":
                self._move(f"{_VERBS[event.phase]} {event.file}", event.done, event.total)

    def show_batch(self, done: int, total: int, rate: float) -> None:
        """Show how many prompts of a batch are answered, and how many tokens came in a second."""
        self._move("Answering", done, total, f"{done}/{total} prompts, {rate:.0f} tokens/s")

    def _note(self, text: str) -> None:
        self._console.print(text, style="dim", highlight=False, markup=False)

    def _move(self, description: str, done: float, total: float | None, amount: str = "") -> None:
        if description not in self._tasks:
            self._tasks[description] = self._bars.add_task(description, total=total, amount=amount)
        self._bars.update(self._tasks[description], completed=done, total=total, amount=amount)


class _Amount(Column):
    """What was said of the amount; otherwise bytes and speed."""

    def render(self, task: Task) -> Text:
        """What stands behind the bar."""
        if task.fields["amount"]:
            return Text(task.fields["amount"])
        total = "?" if task.total is None else decimal(int(task.total))
        speed = f", {decimal(int(task.speed))}/s" if task.speed else ""
        return Text(f"{decimal(int(task.completed))} of {total}{speed}")
