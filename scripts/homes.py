"""Each library has one home: it is imported there and nowhere else. Prints every breach and exits 1."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

HOMES = {
    "tokenizers": ("text/byte_pairs.py",),
    "minijinja": ("text/jinja.py",),
    "llguidance": ("engine/constraints.py", "engine/grammar_forms.py", "engine/grammar_trial.py"),
    "jsonschema": ("text/validation.py",),
    "referencing": ("text/validation.py",),
    "huggingface_hub": ("hub/huggingface.py",),
    "filelock": ("hub/store.py", "server/batch_runner.py"),
    "starlette": ("server/",),
    "python_multipart": ("server/multipart.py",),
    "uvicorn": ("server/",),
    "httpx2": ("hub/download.py", "hub/huggingface.py", "hub/package_index.py"),
    "click": ("cli/",),
    "prompt_toolkit": ("cli/",),
    "httptools": ("bench/serving/http.py",),
    "matplotlib": ("bench/serving/plot.py",),
    "rich": ("cli/", "progress/", "bench/"),
    "opentelemetry": ("server/tracing.py",),
    "prometheus_client": ("server/metrics.py",),
    "sqlite3": ("server/store.py",),
    "platformdirs": ("config.py",),
    "pelton._core": (
        "backends/cpu/",
        "bench/",
        "formats/gguf.py",
        "text/byte_pairs.py",
        "text/sentencepiece.py",
        "text/tokenizer.py",
    ),
    "torch": (),
    "transformers": (),
    "os.environ": ("config.py",),
    "os.getenv": ("config.py",),
}
ROOT = Path(__file__).parent.parent / "src" / "pelton"


def names_used(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, dotted name) of everything that a module imports, and of `os.` attributes."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found.append((node.lineno, f"os.{node.attr}"))
    return found


def is_home(where: str, homes: tuple[str, ...]) -> bool:
    """Is this module one of the homes (a file, or a folder ending in a slash)?"""
    return any(where == home or (home.endswith("/") and where.startswith(home)) for home in homes)


def breaches() -> list[str]:
    """One line for each use of a library outside of its home."""
    lines: list[str] = []
    for path in sorted(ROOT.rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        for line, name in names_used(ast.parse(path.read_text())):
            for library, homes in HOMES.items():
                if (name == library or name.startswith(library + ".")) and not is_home(where, homes):
                    lines.append(f"src/pelton/{where}:{line}: the home of {library} is {', '.join(homes) or 'nowhere'}")
    return lines


if __name__ == "__main__":
    found = breaches()
    sys.stdout.write("".join(line + "\n" for line in found))
    sys.exit(bool(found))
