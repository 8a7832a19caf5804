"""Tools as chat templates read them."""

from __future__ import annotations

from typing import Any

from pelton.request import Tool


def template_form(tool: Tool) -> dict[str, Any]:
    """A tool in OpenAI's form, which templates expect."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}
