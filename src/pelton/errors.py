"""Everything that can go wrong, as types.

PeltonError                       500  the root; anything else that escapes is a bug
|- InvalidRequest                 400  the client's request cannot be served as it stands
|  |- ContextLengthExceeded       400  prompt and max_tokens do not fit the context: names both numbers
|  |- NotFound                    404  what it names is not there
|  |- Conflict                    409  what it names is not in a state for that
|  |- RequestTooLarge             413  a body or a field over its bound
|  |- SlowRequest                 408  a body that has not come in the time it may take
|  |- HeadersTooLarge             431  headers over their bound
|  |- ClientGone                  499  the client went away before its answer: nobody reads this error
|  |- Unauthorized                401  no key, or none that is known and valid now
|  `- Forbidden                   403  the key may not do this
|- RateLimited                    429  the key has had its requests or tokens for now
|- ModelNotFound                  404  no model of that name
|- Overloaded                     429  the queue is full: try again after `retry_after` seconds
|- Unavailable                    503  draining, or the engine is being started again
|  |- QueueTimeout                503  the request has waited longer than it may
|  `- EngineDied                  503  the engine process ended while the request was in flight
|- TimedOut                       504  the request has taken longer than it may
|- InsufficientMemory             507  the plan for a model does not fit: says what it needs and what there is
|- FormatError                    422  a model file's bytes are wrong: says which file and which field
|- UnsupportedModel               422  well-formed, but Pelton cannot run it: says what is missing
|- HubError                       502  a model could not be fetched
|- ConfigError                    400  a setting is wrong: says which and where it came from
`- InternalError                  500  a broken invariant inside Pelton
"""

from __future__ import annotations

from typing import ClassVar


class PeltonError(Exception):
    """Root of the tree. `str(error)` is a sentence for the person who reads it: what, where, what to do next."""

    status: ClassVar[int] = 500
    """The HTTP status that a server answers with."""
    type: ClassVar[str] = "server_error"
    """The `type` field of an OpenAI-shaped error body."""
    code: ClassVar[str | None] = None
    """The `code` field of an OpenAI-shaped error body."""

    retry_after: float | None = None
    """Seconds after which it is worth trying again, where it is."""

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if retry_after is not None:
            self.retry_after = retry_after


class InvalidRequest(PeltonError):
    """The request cannot be served as it stands; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(InvalidRequest):
    """The prompt (and the tokens asked for) do not fit the model's context."""

    code = "context_length_exceeded"


class NotFound(InvalidRequest):
    """What the request names is not there, or is somebody else's."""

    status = 404


class Conflict(InvalidRequest):
    """What the request names is not in a state for that."""

    status = 409


class RequestTooLarge(InvalidRequest):
    """A body, or a part of it, is over its bound."""

    status = 413


class SlowRequest(InvalidRequest):
    """The request's body has not come in the time that it may take."""

    status = 408


class HeadersTooLarge(InvalidRequest):
    """The request's headers are over their bound."""

    status = 431


class ClientGone(InvalidRequest):
    """The client went away before it had an answer. The status is nginx's; it is for logs and metrics alone."""

    status = 499


class Unauthorized(InvalidRequest):
    """The request has no key, or one that is unknown, revoked or expired."""

    status = 401
    code = "invalid_api_key"


class Forbidden(InvalidRequest):
    """The request's key may not do this."""

    status = 403
    code = "forbidden"


class RateLimited(PeltonError):
    """The request's key has had its requests or tokens for now."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class ModelNotFound(PeltonError):
    """No model of that name is known or loaded."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class Overloaded(PeltonError):
    """The queue is full."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after = 1.0


class Unavailable(PeltonError):
    """The server drains, or an engine is being started."""

    status = 503
    code = "unavailable"
    retry_after = 1.0


class QueueTimeout(Unavailable):
    """The request has waited for its turn as long as it may."""

    code = "queue_timeout"


class EngineDied(Unavailable):
    """The engine process ended while this request was in flight."""

    code = "engine_died"


class TimedOut(PeltonError):
    """The request has not ended in the time that it may take."""

    status = 504
    code = "timeout"


class InsufficientMemory(PeltonError):
    """A model's memory plan does not fit."""

    status = 507
    code = "insufficient_memory"


class FormatError(PeltonError):
    """The bytes of a model file are wrong. The message starts with the file and names the field."""

    status = 422
    type = "invalid_request_error"
    code = "bad_model_file"


class UnsupportedModel(PeltonError):
    """A well-formed model that Pelton cannot run."""

    status = 422
    type = "invalid_request_error"
    code = "unsupported_model"


class HubError(PeltonError):
    """A model could not be fetched from any of its sources."""

    status = 502
    code = "hub_error"


class ConfigError(PeltonError):
    """A setting is wrong."""

    status = 400
    type = "invalid_request_error"
    code = "bad_config"


class InternalError(PeltonError):
    """A broken invariant inside Pelton."""

    code = "internal_error"
