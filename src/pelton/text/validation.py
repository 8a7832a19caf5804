"""The last check of structured output: the finished text against the whole schema. Run in the sandbox; the only home
of `jsonschema`.

Regular expressions are left to the grammar, which runs them in linear time; here a client's could run for ever. What
would be decided wrongly without them is left out, too. References that branch could also run for ever: the number of
steps is bounded. Values are compared by their JSON, each against any number of others at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_STEPS = 20_000
"""Keywords that are looked at in one text: a tenth of a second."""
_NEED_PATTERNS = (
    "pattern", "patternProperties", "additionalProperties", "unevaluatedProperties", "not", "if", "contains",
)  # fmt: skip
_Keyword = Callable[[Any, Any, Any, Any], Iterator[Any] | None]


class _TooLong(Exception):
    """The bound was reached."""


def fault_of(text: str, schema: Mapping[str, Any] | bool) -> str | None:
    """What is wrong with a JSON text by its schema: a sentence, or None."""
    import referencing
    from jsonschema import Draft202012Validator, validators
    from jsonschema.exceptions import best_match

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "it is not JSON"
    kind = validators.validator_for(schema, default=Draft202012Validator)
    checks: dict[str, Any] = {**kind.VALIDATORS, "uniqueItems": _unique_items, "enum": _enum_check()}
    if _has_pattern(schema):
        checks |= {**dict.fromkeys(_NEED_PATTERNS, _left_out), "oneOf": checks.get("anyOf", _left_out)}
    kind = validators.extend(kind, _bounded(checks))
    try:
        # An empty registry: nothing is fetched.
        found = best_match(kind(schema, registry=referencing.Registry()).iter_errors(value))
    except _TooLong:
        return "it is too long to be checked"
    except Exception as error:  # a schema may be wrong in many ways where a grammar needs nothing of it
        return f"it cannot be checked: {str(error).partition(chr(10))[0][:200]}"
    if found is None:
        return None
    return f"at {found.json_path}: {found.message[:200]}"


def _bounded(keywords: Mapping[str, _Keyword]) -> dict[str, Any]:
    """The keywords' checks, with one bound for all."""
    num_steps = 0

    def bounded(check: _Keyword) -> _Keyword:
        def step(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any] | None:
            nonlocal num_steps
            num_steps += 1
            if num_steps > MAX_STEPS:
                raise _TooLong
            return check(validator, value, instance, schema)

        return step

    return {name: bounded(check) for name, check in keywords.items()}


def _left_out(validator: Any, value: Any, instance: Any, schema: Any) -> None:
    """No check."""


def _has_pattern(schema: Any) -> bool:
    if isinstance(schema, dict):
        return not schema.keys().isdisjoint(("pattern", "patternProperties")) or any(map(_has_pattern, schema.values()))
    return isinstance(schema, list) and any(map(_has_pattern, schema))


def _unique_items(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema.exceptions import ValidationError

    if value and isinstance(instance, list) and len(set(map(_key, instance))) < len(instance):
        yield ValidationError("it has non-unique elements")


def _enum_check() -> _Keyword:
    """`enum`, for one schema."""
    from jsonschema.exceptions import ValidationError

    known: dict[int, frozenset[str]] = {}

    def check(validator: Any, value: Any, instance: Any, schema: Any) -> Iterator[Any]:
        keys = known.get(id(value)) or known.setdefault(id(value), frozenset(map(_key, value)))
        if _key(instance) not in keys:
            yield ValidationError("it is none of the values that it may be")

    return check


def _key(value: Any) -> str:
    """The same for equal values: 1 is 1.0, and not true."""
    return json.dumps(_plain(value), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
