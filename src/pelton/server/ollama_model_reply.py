"""What there is to tell of a model, as Ollama's clients read it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pelton.pool import Preset, StoredModel, parameter_lines, write_modelfile
from pelton.server import ollama_types as wire
from pelton.server.ollama_reply import timestamp


def tagged(name: str) -> str:
    """A name as Ollama writes it: with a tag."""
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"


def model_of(found: StoredModel) -> wire.OllamaModel:
    """A model in a list."""
    return wire.OllamaModel(
        name=tagged(found.name),
        model=tagged(found.name),
        modified_at=timestamp(found.modified_at),
        size=found.size,
        digest=found.digest,
        details=details_of(found),
    )


def details_of(found: StoredModel) -> wire.OllamaDetails:
    """What it is."""
    return wire.OllamaDetails(
        parent_model="" if found.preset is None else found.preset.parent,
        format=found.format,
        family=found.family,
        families=[found.family],
        parameter_size=_count(found.parameters),
        quantization_level=found.quantization,
    )


def _count(parameters: int) -> str:
    for unit, factor in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= factor:
            return f"{parameters / factor:.{1 if parameters < 100 * factor else 0}f}{unit}"
    return str(parameters)


def shown(found: StoredModel, metadata: Mapping[str, Any], *, is_verbose: bool) -> wire.OllamaShow:
    """All about it, with the `metadata` of its file."""
    preset = found.preset or Preset()
    return wire.OllamaShow(
        modelfile=write_modelfile(preset.parent or found.name, preset),
        parameters="\n".join(parameter_lines(preset)),
        template=str(metadata.get("tokenizer.chat_template", "")),
        details=details_of(found),
        model_info={
            "general.parameter_count": found.parameters,
            **{key: _plain(value, is_verbose=is_verbose) for key, value in metadata.items()},
        },
        capabilities=list(found.capabilities),
        modified_at=timestamp(found.modified_at),
        system=preset.system,
        license="\n\n".join(preset.license) or found.license,
        messages=[wire.OllamaPresetMessage(role=each.role, content=each.content) for each in preset.messages] or None,
    )


def _plain(value: Any, *, is_verbose: bool) -> Any:
    """Lists, as of a vocabulary's tokens, are long: null stands for them unless they are asked for."""
    if isinstance(value, str | bool | int | float):
        return value
    if not is_verbose:
        return None
    return value.tolist() if hasattr(value, "tolist") else list(value)
