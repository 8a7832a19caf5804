"""Checks JSON text a character at a time (RFC 8259)."""

from __future__ import annotations

MAX_DEPTH = 100
"""Arrays and objects inside of each other."""

_AFTER_NUMBER = {  # state -> character class -> state
    "-": {"0": "zero", "1": "digits"},
    "zero": {".": "point", "e": "e"},
    "digits": {"0": "digits", "1": "digits", ".": "point", "e": "e"},
    "point": {"0": "fraction", "1": "fraction"},
    "fraction": {"0": "fraction", "1": "fraction", "e": "e"},
    "e": {"0": "power", "1": "power", "+": "sign", "-": "sign"},
    "sign": {"0": "power", "1": "power"},
    "power": {"0": "power", "1": "power"},
}
_ENDS_NUMBER = frozenset({"zero", "digits", "fraction", "power"})
_CLASSES = {**dict.fromkeys("123456789", "1"), "0": "0", ".": ".", "e": "e", "E": "e", "+": "+", "-": "-"}
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_HEX = frozenset("0123456789abcdefABCDEF")


class JSONText:
    """One JSON value, under way. `step` takes a character and says whether it may stand there; after a False nothing
    has changed."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        """The arrays and objects that are open, as their closing characters."""
        self._state = "value"
        self._rest = ""
        """What is to come of a literal, or as many characters as hex digits are to come."""
        self._is_key = False

    @property
    def is_complete(self) -> bool:
        """Is the text so far a whole value? A number may still go on."""
        return not self._stack and (self._state == "after" or self._state in _ENDS_NUMBER)

    def step(self, character: str) -> bool:
        """Take one more character, if it may stand here."""
        state = self._state
        if state == "string":
            return self._string(character)
        if state == "escape":
            return self._escape(character)
        if state == "hex":
            if character not in _HEX:
                return False
            self._rest = self._rest[1:]
            self._state = "hex" if self._rest else "string"
            return True
        if state == "literal":
            if character != self._rest[0]:
                return False
            self._rest = self._rest[1:]
            self._state = "literal" if self._rest else "after"
            return True
        if state in _AFTER_NUMBER:
            if (following := _AFTER_NUMBER[state].get(_CLASSES.get(character, ""))) is not None:
                self._state = following
                return True
            if state not in _ENDS_NUMBER or not self._stack:
                return False
            state = "after"
        return self._between(state, character)

    def _string(self, character: str) -> bool:
        if character == '"':
            self._state = "colon" if self._is_key else "after"
            self._is_key = False
        elif character == "\\":
            self._state = "escape"
        elif character < " ":
            return False
        return True

    def _escape(self, character: str) -> bool:
        if character == "u":
            self._state, self._rest = "hex", "0000"
        elif character in '"\\/bfnrt':
            self._state = "string"
        else:
            return False
        return True

    def _between(self, state: str, character: str) -> bool:
        """Outside of strings, numbers and literals."""
        if character in " \n\t\r":
            if state == "after" and not self._stack:
                return False
            self._state = state
            return True
        match state:
            case "colon" if character == ":":
                self._state = "value"
            case "after" if character == "," and self._stack:
                self._state = "key" if self._stack[-1] == "}" else "value"
            case "after" | "first key" | "first value" if self._stack and character == self._stack[-1]:
                self._stack.pop()
                self._state = "after"
            case "key" | "first key" if character == '"':
                self._state, self._is_key = "string", True
            case "value" | "first value":
                return self._value(character)
            case _:
                return False
        return True

    def _value(self, character: str) -> bool:
        if character in "{[":
            if len(self._stack) >= MAX_DEPTH:
                return False
            self._stack.append("}" if character == "{" else "]")
            self._state = "first key" if character == "{" else "first value"
        elif character == '"':
            self._state = "string"
        elif character in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[character][1:]
        elif character == "-":
            self._state = "-"
        elif character in "0123456789":
            self._state = "zero" if character == "0" else "digits"
        else:
            return False
        return True
