"""<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{...}<｜tool▁call▁end｜><｜tool▁calls▁end｜>: DeepSeek.

Up to V3 and R1 the kind of call comes first, and the arguments stand in a code fence.
"""

from __future__ import annotations

from collections.abc import Collection

from pelton.text.tools.call_object import named_call
from pelton.text.tools.dialect import Dialect
from pelton.text.tools.layout import Layout
from pelton.text.tools.reader import Reader, Scan, Sink

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
KIND, FENCE = "function", "```"


class DeepSeek(Dialect):
    """As V3.1 and later write them."""

    name = "deepseek"
    markers = (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR)
    trigger = CALLS
    layout = Layout(CALLS, CALL + "{name}" + SEPARATOR, CALL_END, "", CALLS_END)

    def parse(self, reader: Reader, sink: Sink, names: Collection[str]) -> Scan[None]:
        """As in `Dialect`."""
        while marker := (yield from reader.content(sink, [CALLS, CALL])):
            if marker == CALLS:
                yield from reader.skip_space()
                if not (yield from reader.literal(CALL)):
                    sink.text(reader.taken())
                    continue
            while (yield from _call(reader, sink, names)):
                yield from reader.skip_space()
                if not (yield from reader.literal(CALL)):
                    # both markers begin alike: what was taken may be the beginning of the end
                    reader.put_back()
                    yield from reader.skip_space()
                    yield from reader.skip_marker(sink, CALLS_END)
                    break


class DeepSeekFenced(DeepSeek):
    """As V3 and R1 write them."""

    name = "deepseek-fenced"
    layout = Layout(
        CALLS, CALL + KIND + SEPARATOR + "{name}\n" + FENCE + "json\n", "\n" + FENCE + CALL_END, "\n", CALLS_END
    )


def _call(reader: Reader, sink: Sink, names: Collection[str]) -> Scan[bool]:
    """One call, whose marker has been read, to its end."""
    if not (yield from named_call(reader, sink, names, _header(reader))):
        return False
    yield from reader.skip_space()
    if (yield from reader.literal(FENCE)):
        yield from reader.skip_space()
    yield from reader.skip_marker(sink, CALL_END)
    return True


def _header(reader: Reader) -> Scan[str]:
    name = yield from reader.until(SEPARATOR[0], 128)
    yield from reader.expect(SEPARATOR, SEPARATOR)
    if name.strip() == KIND and (yield from reader.peek()) != "{":
        name = yield from reader.until("\n", 128)
        yield from reader.skip_space()
        if (yield from reader.literal(FENCE)):
            yield from reader.word()
    yield from reader.skip_space()
    return name.strip()
