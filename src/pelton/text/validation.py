"""The last check of structured output: the finished text against the whole schema. The only home of `jsonschema`.

Regular expressions are left to the grammar, which runs them in linear time; here a client's could run for ever.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def fault_of(text: str, schema: Mapping[str, Any] | bool) -> str | None:
    """What is wrong with a JSON text by its schema: a sentence, or None."""
    import referencing
    from jsonschema import Draft202012Validator, validators
    from jsonschema.exceptions import SchemaError, best_match
    from referencing.exceptions import Unresolvable

    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return "it is not JSON"
    kind = validators.validator_for(schema, default=Draft202012Validator)
    ignored: Any = dict.fromkeys(("pattern", "patternProperties"), None)
    kind = validators.extend(kind, ignored)
    try:
        kind.check_schema(schema)
        # An empty registry: nothing is fetched.
        found = best_match(kind(schema, registry=referencing.Registry()).iter_errors(value))
    except (SchemaError, Unresolvable, RecursionError) as error:
        return f"it cannot be checked: {str(error).partition(chr(10))[0][:200]}"
    if found is None:
        return None
    return f"at {found.json_path}: {found.message[:200]}"
