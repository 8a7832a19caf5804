"""The dialect of llama.cpp's server: completions, infill, embeddings, tokens, templates and what there is to know of a
model."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response
from starlette.types import ASGIApp

from pelton import __version__, structured
from pelton.checks import MAX_CHOICES, MAX_PROMPTS, check_ids, check_range
from pelton.errors import ContextLengthExceeded, InvalidRequest, PeltonError, Unavailable
from pelton.pool import StoredModel
from pelton.request import EmbeddingParams, Request, SamplingParams
from pelton.server import llamacpp_types as wire
from pelton.server.answer import answer, ignored_params, left_open, using
from pelton.server.embedding import embed_all, floats, inputs_of
from pelton.server.llamacpp_reply import LlamaReply, error_body
from pelton.server.models import Models
from pelton.server.openai import message, token_id, tool
from pelton.server.operation import Dialect, get, post
from pelton.server.wire import JSON, read, unless_gone

if TYPE_CHECKING:
    from pelton.service import Service

_RENAMED = {"repeat_penalty": "repetition_penalty", "mirostat": "mirostat_mode", "n_predict": "max_tokens"}
_OURS = {name: _RENAMED.get(name, name) for name in wire.DEFAULTS}
"""How `SamplingParams` calls what llama.cpp has other values for."""
PATHS = (
    "/completion", "/completions", "/infill", "/embedding", "/embeddings", "/tokenize", "/detokenize",
    "/apply-template", "/props", "/slots",
    "/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/score", "/v1/score",
)  # fmt: skip


class NotOffered(PeltonError):
    """A route that other servers have, and that needs what is not built."""

    status = 501
    code = "not_supported"


def dialect(models: Models) -> Dialect:
    """The dialect over these models."""
    here = _Operations(models)
    sse = ("text/event-stream",)
    completion = wire.Completion | list[wire.Completion]
    operations = (
        post(
            "/completion",
            here.complete,
            "Go on with a text, as llama.cpp",
            wire.CompletionRequest,
            completion,
            streams=sse,
        ),
        post("/completions", here.complete, "The same as /completion", wire.CompletionRequest, completion, streams=sse),
        post("/infill", here.infill, "Fill in between two texts", wire.InfillRequest, completion, streams=sse),
        post("/embedding", here.embedding, "Embed texts, as llama.cpp", wire.EmbeddingRequest, list[wire.Embedding]),
        post("/embeddings", here.embedding, "The same as /embedding", wire.EmbeddingRequest, list[wire.Embedding]),
        post("/tokenize", here.tokenize, "A text's tokens", wire.TokenizeRequest, wire.Tokens),
        post("/detokenize", here.detokenize, "The text of tokens", wire.DetokenizeRequest, wire.Content),
        post("/apply-template", here.apply_template, "A chat as a text", wire.TemplateRequest, wire.Rendered),
        get("/props", here.props, "What the model is", wire.Props),
        get("/slots", here.slots, "Places for sequences", list[wire.Slot]),
        *(
            post(path, here.rank, "Not offered yet", is_offered=False)
            for path in PATHS
            if "rank" in path or "score" in path
        ),
    )
    return Dialect(operations=operations, prefixes=PATHS, error_body=error_body, error=wire.LlamaError)


class _Operations:
    """What each operation does: gets the request, gives the answer."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def complete(self, http: HTTPRequest) -> ASGIApp:
        """Go on with texts."""
        body, extras = await read(http, wire.CompletionRequest)
        async with using(self._models, http, name := await self._models.named(body.model)) as service:
            prompts = await unless_gone(http, _encoded(service, body.prompt))
            return await _answer(self._models, http, service, name, body, extras, prompts)

    async def infill(self, http: HTTPRequest) -> ASGIApp:
        """Fill in between two texts."""
        body, extras = await read(http, wire.InfillRequest)
        if not isinstance(body.prompt, str):
            raise InvalidRequest("prompt: a text, with which the middle begins", param="prompt")
        files = [(each.filename, each.text) for each in body.input_extra]
        async with using(self._models, http, name := await self._models.named(body.model)) as service:
            encoding = service.encode_infill(body.input_prefix, body.input_suffix, body.prompt, files)
            return await _answer(self._models, http, service, name, body, extras, [await unless_gone(http, encoding)])

    async def embedding(self, http: HTTPRequest) -> Response:
        """Embed texts."""
        body, extras = await read(http, wire.EmbeddingRequest)
        if body.embd_normalize not in (-1, 2):
            message = f"embd_normalize is {body.embd_normalize}: -1 (as it is) and 2 (Euclidean) are offered"
            raise InvalidRequest(message, param="embd_normalize")
        ignored = _listed(extras)
        given = body.content if body.input is None else body.input
        inputs = inputs_of(given or [], "content" if body.input is None else "input")
        base = Request(
            id=f"embd-{secrets.token_hex(12)}",
            model=(name := await self._models.named(body.model)),
            embedding=EmbeddingParams(pooling=body.pooling, is_normalized=body.embd_normalize == 2),
            priority=body.priority or 0,
            timeout=body.timeout,
            queue_timeout=body.queue_timeout,
            cache_salt=body.cache_salt or "",
        )
        async with using(self._models, http, name) as service:
            embedded = await embed_all(self._models, http, service, base, inputs)
        vectors = enumerate(map(floats, embedded.vectors))
        return JSON([wire.Embedding(index=i, embedding=[each], ignored_params=ignored) for i, each in vectors])

    async def tokenize(self, http: HTTPRequest) -> Response:
        """A text's tokens."""
        body, extras = await read(http, wire.TokenizeRequest)
        async with using(self._models, http, await self._models.named(body.model)) as service:
            ids = await service.encode_text(body.content, add_special=body.add_special, is_marked=body.parse_special)
            pieces = [wire.Piece(id=id, piece=_piece(service.tokenizer.token_bytes(id))) for id in ids]
        return JSON(wire.Tokens(tokens=[*pieces] if body.with_pieces else [*ids], ignored_params=_listed(extras)))

    async def detokenize(self, http: HTTPRequest) -> Response:
        """The text of tokens."""
        body, extras = await read(http, wire.DetokenizeRequest)
        async with using(self._models, http, await self._models.named(body.model)) as service:
            check_ids(body.tokens, service.vocab_size, "tokens")
            text = service.tokenizer.decode(body.tokens, skip_special=False)
        return JSON(wire.Content(content=text, ignored_params=_listed(extras)))

    async def apply_template(self, http: HTTPRequest) -> Response:
        """A chat as its template writes it."""
        body, extras = await read(http, wire.TemplateRequest)
        name = await self._models.named(body.model)
        request = Request(
            id="",
            model=name,
            messages=tuple(message(i, each) for i, each in enumerate(body.messages)),
            tools=tuple(tool(each) for each in body.tools or ()),
            add_generation_prompt=body.add_generation_prompt,
            template_kwargs=body.chat_template_kwargs or {},
        )
        async with using(self._models, http, name) as service:
            return JSON(wire.Rendered(prompt=await service.render(request), ignored_params=_listed(extras)))

    async def props(self, http: HTTPRequest) -> Response:
        """What the model is."""
        name = await self._models.named(http.query_params.get("model"))
        found = await self._models.look_at(name)
        return JSON(_props(name, found, await self._models.metadata(name) if isinstance(found, StoredModel) else {}))

    async def slots(self, http: HTTPRequest) -> Response:
        """Places for sequences, and how many are taken."""
        found = await self._models.look_at(await self._models.named(http.query_params.get("model")))
        if isinstance(found, StoredModel):  # there are none before it is loaded, and to look at them loads nothing
            return JSON([])
        running = found.engine.counters.num_running
        total, context = found.engine.info.max_sequences, found.context
        if http.query_params.get("fail_on_no_slot") == "1" and running >= total:
            raise Unavailable("no slot is free")
        return JSON([wire.Slot(id=i, n_ctx=context, is_processing=i < running) for i in range(total)])

    async def rank(self, http: HTTPRequest) -> NoReturn:
        """Say why not."""
        raise NotOffered("ranking needs a model that scores pairs of texts, and Pelton runs none yet")


async def _answer(
    models: Models,
    http: HTTPRequest,
    service: Service,
    name: str,
    body: wire.CompletionRequest,
    extras: dict[str, Any],
    prompts: Sequence[list[int]],
) -> ASGIApp:
    for ids in prompts:
        check_ids(ids, service.vocab_size, "prompt")
    given = _sampling(body)
    asked = Request(
        id=f"cmpl-{secrets.token_hex(12)}",
        model=name,
        sampling=given,
        left_open=_left_open(body),
        grammar=structured.one_of(
            [
                structured.grammar(body.grammar, "grammar") if body.grammar else None,
                None if body.json_schema is None else structured.json_schema(body.json_schema, "json_schema"),
            ]
        ),
        echo=body.n_predict == 0,  # an answer of nothing must be asked for
        priority=body.priority or 0,
        timeout=body.timeout,
        queue_timeout=body.queue_timeout,
        cache_salt=body.cache_salt or "",
    )
    base = service.as_meant(asked)
    requests = [
        msgspec.structs.replace(base, id=f"{base.id}-{i}", prompt_ids=tuple(ids)) for i, ids in enumerate(prompts)
    ]
    texts = [service.tokenizer.decode(ids, skip_special=False) for ids in prompts]
    return await answer(
        models,
        http,
        LlamaReply(body, extras, requests, texts, _settings(body, base.sampling, service.name, service.context)),
        requests,
    )


async def _encoded(service: Service, given: str | list[str | int | list[str | int]]) -> list[list[int]]:
    """The ids of all prompts."""
    if isinstance(given, str):
        return [await service.encode_text(given, add_special=True, is_marked=True)]
    is_one = any(isinstance(each, int) for each in given) and not any(isinstance(each, list) for each in given)
    prompts: list[list[str | int]] = (
        [[each for each in given if not isinstance(each, list)]]
        if is_one
        else [each if isinstance(each, list) else [each] for each in given]
    )
    if not 1 <= len(prompts) <= MAX_PROMPTS:
        raise InvalidRequest(f"prompt: 1 to {MAX_PROMPTS} prompts, got {len(prompts)}", param="prompt")
    return [await _mixed(service, prompt) for prompt in prompts]


async def _mixed(service: Service, prompt: Sequence[str | int]) -> list[int]:
    """Texts and ids, one behind the other. Only a text at the beginning gets a begin token."""
    if len(prompt) > service.context:  # each text is encoded in a thread's turn of its own
        message = (
            f"the prompt has {len(prompt)} texts and ids, but the context of this model is {service.context} tokens"
        )
        raise ContextLengthExceeded(message, param="prompt")
    ids: list[int] = []
    for i, part in enumerate(prompt):
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += await service.encode_text(part, add_special=i == 0, is_marked=True)
    return ids


def _sampling(body: wire.CompletionRequest) -> SamplingParams:
    check_range("n_cmpl", body.n_cmpl, 1, MAX_CHOICES)
    given = {ours: _value(body, name) for name, ours in _OURS.items()}
    if given["seed"] < 0 or given["seed"] == 0xFFFFFFFF:
        given["seed"] = None
    if given["max_tokens"] < 0:
        given["max_tokens"] = None
    return SamplingParams(
        **{**given, "temperature": max(given["temperature"], 0.0)},
        n=body.n_cmpl,
        stop=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        logit_bias=_logit_bias(body.logit_bias or {}),
        logprobs=body.n_probs if body.n_probs > 0 else None,
    )


def _value(body: wire.CompletionRequest, name: str) -> Any:
    given = getattr(body, name)
    return wire.DEFAULTS[name] if given is None else given


def _left_open(body: wire.CompletionRequest) -> tuple[str, ...]:
    given = {"n", "logprobs", *(ours for name, ours in _OURS.items() if getattr(body, name) is not None)}
    return left_open(given | ({"stop"} if body.stop is not None else set()))


def _logit_bias(given: wire.Bias) -> dict[int, float]:
    biases: dict[int, float] = {}
    for token, bias in given.items() if isinstance(given, dict) else given:
        if bias is True:
            raise InvalidRequest("logit_bias: a bias is a number, or false", param="logit_bias")
        biases[token_id(token)] = -100.0 if bias is False else bias
    return biases


def _settings(body: wire.CompletionRequest, meant: SamplingParams, name: str, context: int) -> dict[str, Any]:
    """`generation_settings`. `meant`: with what the model's name brings along."""
    settings = {each: getattr(meant, ours) for each, ours in _OURS.items()}
    settings |= {each: -1 for each in ("n_predict", "seed") if settings[each] is None}
    return settings | {
        "n_probs": body.n_probs,
        "stream": body.stream,
        "stop": list(meant.stop),
        "max_tokens": settings["n_predict"],
        "grammar": body.grammar or "",
        "n_ctx": context,
        "model": name,
    }


def _props(name: str, found: Service | StoredModel, metadata: Mapping[str, Any]) -> wire.Props:
    """`metadata`: of the model's file, where it is not loaded."""
    if isinstance(found, StoredModel):
        slots, file, template = 0, PurePath(found.source).name, metadata.get("tokenizer.chat_template")
        bos, eos = (_named(metadata, f"tokenizer.ggml.{each}_token_id") for each in ("bos", "eos"))
    else:
        slots, file, template = found.engine.info.max_sequences, found.path.name, found.chat_template
        text, end_ids = found.tokenizer.token_text, found.tokenizer.end_ids
        bos = "" if found.tokenizer.bos_id is None else text(found.tokenizer.bos_id)
        eos = text(end_ids[0]) if end_ids else ""
    context, nothing = found.context or 0, wire.CompletionRequest()
    return wire.Props(
        default_generation_settings={
            "id": 0,
            "id_task": -1,
            "n_ctx": context,
            "speculative": False,
            "is_processing": False,
            "params": _settings(nothing, _sampling(nothing), found.name, context),
        },
        total_slots=slots,
        model_alias=name,
        model_path=file,
        chat_template=str(template or ""),
        bos_token=bos,
        eos_token=eos,
        modalities={"vision": False, "audio": False},
        build_info=f"pelton {__version__}",
        is_sleeping=isinstance(found, StoredModel),
    )


def _named(metadata: Mapping[str, Any], key: str) -> str:
    id, tokens = metadata.get(key), metadata.get("tokenizer.ggml.tokens", ())
    return str(tokens[id]) if isinstance(id, int) and 0 <= id < len(tokens) else ""


def _listed(extras: dict[str, Any]) -> list[str] | msgspec.UnsetType:
    return ignored_params(extras, {}) or msgspec.UNSET


def _piece(data: bytes) -> str | list[int]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)
