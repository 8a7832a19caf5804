"""Every setting. This module is the only reader of the environment: C++ and all other modules are told.

Each setting is a field here; its environment variable is PELTON_ and the field's name in capitals. Lists are separated
by commas there.
"""

from __future__ import annotations

import math
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_origin

import msgspec

from pelton.errors import ConfigError

S = TypeVar("S", bound=msgspec.Struct)


class Bytes(int):
    """A number of bytes; as text also with a unit: 8GB, 512MiB, 1.5g."""

    _UNITS: ClassVar = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}

    @classmethod
    def parse(cls, given: str | int) -> Bytes:
        """Raises `ValueError` for what is no size."""
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmg]?|[kmg]i)b?\s*", str(given).lower())
        if match is None:
            raise ValueError(f"{str(given)[:40]!r} is no size, as 8GB or 512MiB")
        return cls(float(match[1]) * cls._UNITS[match[2]])


class Seconds(float):
    """A time span; as text also with a unit: 30s, 5m, 1h30m, 250ms. Less than 0: for ever, which is `inf`."""

    _UNITS: ClassVar = {"ms": 0.001, "s": 1, "m": 60, "h": 3600}

    @classmethod
    def parse(cls, given: str | float) -> Seconds:
        """Raises `ValueError` for what is no time span."""
        text = str(given).strip().lower()
        parts = re.findall(r"(\d+(?:\.\d+)?)(ms|[smh])", text)
        with suppress(ValueError):
            return cls._checked(float(text))
        if not parts or "".join(map("".join, parts)) != text.removeprefix("-"):
            raise ValueError(f"{str(given)[:40]!r} is no time span, as 30s, 5m or -1 (for ever)")
        return cls._checked(sum(float(n) * cls._UNITS[unit] for n, unit in parts) * (-1 if text[0] == "-" else 1))

    @classmethod
    def _checked(cls, seconds: float) -> Seconds:
        if math.isnan(seconds):
            raise ValueError("a time span must be a number")
        return cls(math.inf if seconds < 0 else seconds)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How one model is run. Sent to the engine process as it starts."""

    threads: int = 0
    """0: one per physical core this process may use."""
    isa: str = ""
    """"": the best this CPU has; or generic, avx2, avx512, amx."""
    kv_dtype: str = "f16"
    """What keys and values are stored as: f32, bf16, f16 or int8. f16 keeps 11 bits of each, bf16 8, and holds at most
    65504 in magnitude: what is larger is stored as that. int8 has a scale for each 32 columns of a token and head, and
    takes 0.56 of f16's memory."""
    context: int = 0
    """Tokens a sequence may hold; 0: what the model was trained for, as far as memory allows."""
    kv_memory: int = 0
    """Bytes for KV memory; 0: decided from the machine's free memory."""
    swap_memory: int = 64 << 20
    """Bytes of host memory for preempted sequences, at most as many as KV memory has; beyond that they are computed
    again."""
    max_batch_tokens: int = 512
    """The token budget of one step, shared by decodes and prefill chunks."""
    target_itl: float = 0.0
    """Milliseconds between two tokens of a stream that prefill chunks are cut to keep; 0: 50, or twice what a step
    takes that decodes all that run, those included whose prompts are still computed, where that is more."""
    max_sequences: int = 64
    """Sequences that run at once."""
    max_queue: int = 256
    """Requests that may wait; one more is refused with 429."""
    max_queue_tokens: int = 1 << 20
    """Prompt tokens that may wait; a request over that is refused with 429 unless it is the only one."""
    queue_timeout: float = 0.0
    """Seconds that a request may wait for its turn; 0: any time. A request can set its own."""
    request_timeout: float = 0.0
    """Seconds that a request may take in all; 0: any time. A request can set its own."""
    processor_timeout: float = 10.0
    """Seconds that a logits processor may take for a step, and to be loaded; the requests that asked for it then end in
    an error. 0: any time."""
    patience: int = 100_000
    """Tokens that are computed for others at most, while a priority's requests wait, before it has a turn."""
    prefix_cache: bool = True
    speculation: Literal["auto", "off"] = "auto"
    """auto: draft tokens, where that is measured to pay, by looking up what followed the last ones earlier in a text,
    and with the draft model, if there is one."""
    draft_model: str = ""
    """A smaller model with the same vocabulary, named as any model, that drafts for this one; "": none."""
    profile: bool = False
    """Measure each op; where the time went is printed to standard error as the engine ends."""
    log_format: Literal["text", "json"] = "text"
    heartbeat_timeout: float = 30.0
    """Seconds without a sign of life after which an engine process counts as dead. A long step is none: signs come
    from beside it."""


TOOL_DIALECTS = (
    "auto", "hermes", "llama3", "mistral", "mistral-named", "deepseek", "deepseek-fenced", "pythonic", "json",
)  # fmt: skip


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's text is read."""

    tool_dialect: str = "auto"
    """How the model writes tool calls; auto: by its chat template. Others: docs/tools.md."""
    pooling: Literal["auto", "last", "mean", "cls"] = "auto"
    """How a text becomes one vector, where neither the model's file nor the request says; auto: last."""

    def __post_init__(self) -> None:
        if self.tool_dialect not in TOOL_DIALECTS:
            message = f"tool_dialect is {self.tool_dialect!r}, must be one of {', '.join(TOOL_DIALECTS)}"
            raise ConfigError(message, param="tool_dialect")


class HubConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where models are kept and fetched from."""

    home: Path
    offline: bool = False
    """Also set by HF_HUB_OFFLINE: fetch nothing."""
    hf_endpoint: str = ""
    """Where the Hugging Face Hub is; also set by HF_ENDPOINT. "": where huggingface_hub says."""
    ca_bundle: str = ""
    """Also set by REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE: the certificates that a package index is checked against where
    pip's `cert` names none."""
    packed_cache_size: float = 20.0
    """GB of disk for packed weights, which make a model's next start fast; 0: none are written or read."""
    prefix_cache_dir: str = ""
    """Where cached prefixes are kept for the next start; "": HOME/prefixes."""
    prefix_cache_size: float = 4.0
    """GB of disk for cached prefixes; 0: none are written or read."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which models one process holds at once, and for how long."""

    memory_budget: Bytes = Bytes(0)
    """Bytes that all loaded models may take together; 0: what the machine or the container has free at the start."""
    max_loaded_models: int = 0
    """Models that are loaded at once; 0: as many as the memory holds."""
    keep_alive: Seconds = Seconds(300)
    """How long a model that was loaded for a request stays after its last one. A request can set its own."""
    load_timeout: Seconds = Seconds(600)
    """How long a request waits for its model to be loaded."""
    models_file: str = ""
    """A TOML file of models, with settings of each; "": none. docs/models.md has its form."""
    max_load_queue: int = 256
    """Requests that may wait for models that are being loaded; one more is refused with 429."""


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server."""

    host: str = "127.0.0.1"
    port: int = 8000
    ollama: str = ""
    """A second address to listen on, as OLLAMA_HOST has it: host:port, either of which may be missing; "": none."""
    drain_timeout: float = 30.0
    max_body: int = 32 << 20
    """Bytes that a request's body may have."""
    max_headers: int = 64 << 10
    """Bytes that a request's first line and headers may have together."""
    max_connections: int = 0
    """Connections that are open at once; 0: as many as the process may have files for. Others wait."""
    header_timeout: float = 20.0
    """Seconds in which a request's headers must have come."""
    body_timeout: float = 30.0
    """Seconds in which a request's body must have come, plus one for each 16 KiB of it."""
    api_key: str = ""
    """A key that may do everything; "": none."""
    api_key_file: str = ""
    """A file of such keys, one a line, each alone or behind a name; "": none."""
    store: str = ""
    """The SQLite file of keys, of what they have used and of all else that outlives the server. `load` names
    HOME/server.sqlite; "": nothing is kept."""
    responses_size: Bytes = Bytes(1 << 30)
    """Bytes that all stored responses may take; 0: none are stored."""
    responses_max_age: Seconds = Seconds(30 * 24 * 3600)
    """How long a stored response stays after it was made or last gone on with; 0: none are stored."""
    max_file: Bytes = Bytes(512 << 20)
    """Bytes that a file of /v1/files may have."""
    max_files: int = 1000
    """Files that a key may keep."""
    max_files_size: Bytes = Bytes(8 << 30)
    """Bytes that all files of a key may have."""
    max_batch_lines: int = 50_000
    """Requests that a batch may have."""
    insecure: bool = False
    """Listen beyond this machine without any key?"""
    cors_origin: tuple[str, ...] = ()
    """Origins of web pages that may use the server from a browser; "*": all."""
    allowed_host: tuple[str, ...] = ()
    """Names by which a server without keys may be called, beside addresses and those of this machine and its network;
    "*": any."""
    ssl_certfile: str = ""
    ssl_keyfile: str = ""
    """"": in `ssl_certfile`."""
    log_format: Literal["text", "json"] = "text"
    log_prompts: bool = False
    """Log what requests ask? It may be anything that people trust a model with."""
    otel: bool = False
    """Send OpenTelemetry traces; where to is what OTEL_EXPORTER_OTLP_ENDPOINT says."""
    strict_params: bool = False
    """Refuse parameters that would be ignored?"""


class ClientConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How commands reach a server that runs."""

    url: str = ""
    """"": at `host` and `port` of the server's settings."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of one Pelton process."""

    engine: EngineConfig
    text: TextConfig
    hub: HubConfig
    pool: PoolConfig
    server: ServerConfig
    client: ClientConfig


def _written(kind: type, value: Any) -> Any:
    """Paths, sizes and time spans may be given as strings."""
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    if kind is Bytes and isinstance(value, str | int):
        return Bytes.parse(value)
    if kind is Seconds and isinstance(value, str | int | float):
        return Seconds.parse(value)
    raise TypeError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")


def _read(section: type[msgspec.Struct], environment: dict[str, str], overrides: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for field in msgspec.structs.fields(section):
        variable = f"PELTON_{field.name.upper()}"
        source, value = field.name, overrides.get(field.name)
        if value is None and variable in environment:
            source, value = variable, environment[variable]
        if value is None:
            continue
        if source != field.name and get_origin(field.type) is tuple:
            value = [each.strip() for each in value.split(",") if each.strip()]
        try:
            values[field.name] = msgspec.convert(value, field.type, strict=False, dec_hook=_written)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{source}={value!r}: {error}", param=field.name) from None
    return section(**values)


def override(section: S, values: dict[str, Any]) -> S:
    """The section with some fields replaced. Raises `ConfigError`, with `param` set, for a value that cannot be."""
    types = {field.name: field.type for field in msgspec.structs.fields(section)}
    for name, value in values.items():
        try:
            section = msgspec.structs.replace(section, **{name: msgspec.convert(value, types[name], dec_hook=_written)})
        except (msgspec.ValidationError, ConfigError) as error:
            raise ConfigError(f"{value!r}: {error}", param=name) from None
    return section


SECTIONS = (EngineConfig, TextConfig, HubConfig, PoolConfig, ServerConfig, ClientConfig)


def load(**overrides: Any) -> Config:
    """Settings from keyword arguments (None: not given), then the environment, then the defaults."""
    environment = dict(os.environ)
    known = {field.name for section in SECTIONS for field in msgspec.structs.fields(section)}
    if unknown := sorted(set(overrides) - known):
        raise ConfigError(f"unknown settings: {', '.join(unknown)}")
    import platformdirs  # not at the top: an engine process is sent its settings

    hub: dict[str, Any] = {"home": Path(platformdirs.user_data_dir("pelton"))}
    if home := environment.get("PELTON_HOME"):
        hub["home"] = Path(home)
    if environment.get("HF_HUB_OFFLINE", "").lower() in {"1", "true", "yes", "on"}:
        hub["offline"] = True
    if (endpoint := environment.get("HF_ENDPOINT")) and "PELTON_HF_ENDPOINT" not in environment:
        hub["hf_endpoint"] = endpoint
    bundles = (environment.get(name) for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"))
    if (bundle := next(filter(None, bundles), None)) and "PELTON_CA_BUNDLE" not in environment:
        hub["ca_bundle"] = bundle
    hub_config = _read(HubConfig, environment, {**hub, **{k: v for k, v in overrides.items() if v is not None}})
    server_config = _read(ServerConfig, environment, overrides)
    if not server_config.store:
        server_config = msgspec.structs.replace(server_config, store=str(hub_config.home / "server.sqlite"))
    return Config(
        engine=_read(EngineConfig, environment, overrides),
        text=_read(TextConfig, environment, overrides),
        hub=hub_config,
        pool=_read(PoolConfig, environment, overrides),
        server=server_config,
        client=_read(ClientConfig, environment, overrides),
    )
