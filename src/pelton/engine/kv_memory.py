"""The blocks of sequences: found in the prefix cache, grown, forked, given back.

All tables of a sequence are equally long: entry b is the block of positions 32b .. 32b+31. In a window group the
entries that no later token can see are the null block, and their blocks are given back as soon as that is so.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from pelton.engine.blocks import BlockPool
from pelton.engine.budget import peak_blocks
from pelton.engine.moves import Copy, Move, Restore, Save, Saved
from pelton.engine.prefix_cache import Node, PrefixCache, first_seen
from pelton.engine.sequence import Sequence
from pelton.errors import InternalError
from pelton.ops.data import BLOCK_TOKENS, NULL_BLOCK
from pelton.request import IDLE


class Match(NamedTuple):
    """What the prefix cache can give: nodes, the last perhaps in part, and how many tokens in all."""

    nodes: list[Node]
    length: int


@dataclass(eq=False)
class Fetch:
    """Blocks [start, end) of a prefix, which are being read from disk, and those before them, which are held so that
    they are still there when that is done. `tables` are like those of a sequence."""

    namespace: str
    tokens: array[int]
    start: int
    tables: tuple[array[int], ...]
    node: Node | None
    sequences: list[Sequence] = field(default_factory=list)
    """Who waits for it."""

    @property
    def end(self) -> int:
        """Blocks in all."""
        return len(self.tables[0])


def _whole_blocks(match: Match) -> Match:
    """A match without the part of a block at its end."""
    num_blocks = match.length // BLOCK_TOKENS
    return Match(match.nodes[:num_blocks], num_blocks * BLOCK_TOKENS)


def _resumed(sequence: Sequence, match: Match) -> int:
    """Tokens that a sequence has as soon as it is admitted: those of the match, or what was saved of it."""
    return match.length if sequence.saved is None else max(match.length, sequence.saved.num_computed)


def namespace_of(sequence: Sequence) -> str:
    """What a cached prefix is of, beside its tokens. The tree dies with the engine, so that the numerics fingerprint is
    no part of it."""
    return sequence.group.request.cache_salt


def blocks_for(num_tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


def _phases(window: int) -> set[int]:
    """Where in a block a sequence's length is when a window passes a block."""
    lengths = range(window, window + 2 * BLOCK_TOKENS)
    return {n % BLOCK_TOKENS for n in lengths if first_seen(n - 1, window) != first_seen(n, window)}


class KVMemory:
    """All block pools and the prefix cache of an engine.

    `windows`: per cache group the tokens that a token sees, None for all. `num_blocks`: per group, the null block
    included. `max_chunk`: the most tokens that one step adds to one sequence. `block_bytes`: per group. `host_bytes`:
    how much of preempted sequences may lie in host memory.
    """

    def __init__(
        self,
        windows: tuple[int | None, ...],
        num_blocks: tuple[int, ...],
        *,
        max_chunk: int,
        is_caching: bool,
        block_bytes: tuple[int, ...] = (),
        host_bytes: int = 0,
    ) -> None:
        self.windows = windows
        self._windowed = [(group, window) for group, window in enumerate(windows) if window is not None]
        self.phases = frozenset({0}.union(*(_phases(window) for window in windows if window is not None)))
        """Where in a block a sequence's length must be for its tables to change with it."""
        self.max_chunk = max_chunk
        self.is_caching = is_caching
        self.cache = PrefixCache(windows)
        self.pools = tuple(BlockPool(count, partial(self.cache.evict, group)) for group, count in enumerate(num_blocks))
        self.cache.pools = self.pools
        self._block_bytes = block_bytes or (0,) * len(windows)
        self._host_bytes = self._host_free = host_bytes
        self.fetches: list[Fetch] = []
        self._pinned: list[tuple[array[int], ...]] = []
        self.moves: list[Move] = []
        """What the next step makes, in order, before it writes anything."""

    # what would fit

    @property
    def capacity(self) -> int:
        """Tokens that fit in all; a window group does not count where another one keeps all tokens."""
        full = [pool for pool, window in zip(self.pools, self.windows, strict=True) if window is None]
        return min(pool.num_usable for pool in full or self.pools) * BLOCK_TOKENS

    def _needed(self, group: int, sequence: Sequence) -> int:
        """Blocks of a group that a sequence holds at most until it has drawn a token."""
        return peak_blocks(min(sequence.num_tokens + 1, sequence.max_length), self.windows[group], self.max_chunk)

    def _held(self, group: int, sequence: Sequence) -> int:
        window = self.windows[group]
        held = len(sequence.tables[group]) if sequence.tables else 0
        return held if window is None else held - min(held, first_seen(sequence.num_computed, window))

    def can_admit(self, sequence: Sequence, match: Match, others: Iterable[Sequence], length: int = 0) -> bool:
        """Do the prompt and one token more fit, beside what the prefills of `others` will still take? `length`: tokens
        that it will have from elsewhere, where that is more than the match has; windows do not see back as far then,
        and hold less of the match."""
        others = list(others)
        length = max(length, _resumed(sequence, match))
        for group, pool in enumerate(self.pools):
            promised = sum(max(0, self._needed(group, other) - self._held(group, other)) for other in others)
            window = self.windows[group]
            first = 0 if window is None else first_seen(length, window)
            shared = match.nodes[first : match.length // BLOCK_TOKENS]
            fresh = max(0, self._needed(group, sequence) - len(shared))
            woken = sum(pool.is_idle(node.blocks[group]) for node in shared)
            if fresh + woken + promised > pool.num_available:
                return False
        return True

    # a sequence's way

    def match(self, sequence: Sequence) -> Match:
        """The longest cached beginning. The last token is always left to be computed, and those that score the ones
        behind them or whose hidden states are pooled: what they come to is needed."""
        if not self.is_caching:
            return Match([], 0)
        return Match(*self.cache.match(namespace_of(sequence), sequence.tokens, self.limit(sequence)))

    def limit(self, sequence: Sequence) -> int:
        """The most tokens that may come from the cache."""
        if (pool := sequence.group.pool) is not None:
            return pool.next
        return sequence.num_tokens - 1 if sequence.is_scored else sequence.group.num_scored - 1

    def attach(self, sequence: Sequence, match: Match) -> None:
        """Give a sequence without blocks what the cache has for it; `can_admit` has said that it fits. The head of
        a block that is matched in part is copied into a block of its own. What it had when it was preempted comes back
        from host memory, where that is more."""
        length = _resumed(sequence, match)
        saved, sequence.saved = sequence.saved, None
        self._attach(sequence, _whole_blocks(match) if length > match.length else match, length)
        if saved is not None:
            self._host_free += saved.num_bytes
            if length > match.length:
                self._restore(sequence, saved)

    def _attach(self, sequence: Sequence, match: Match, length: int) -> None:
        """What of a match is seen by the tokens behind the first `length`."""
        whole, part = divmod(match.length, BLOCK_TOKENS)
        sequence.num_computed = sequence.num_cached = match.length
        sequence.node = match.nodes[whole - 1] if whole else None
        sequence.tables = tuple(array("i") for _ in self.windows)
        for group, (pool, table, window) in enumerate(zip(self.pools, sequence.tables, self.windows, strict=True)):
            first = 0 if window is None else min(first_seen(length, window), whole)
            table.extend([NULL_BLOCK] * first)
            table.extend(node.blocks[group] for node in match.nodes[first:whole])
            for block in table[first:]:
                pool.take(block)
        if part:
            self._copy_tail(sequence, tuple(match.nodes[whole].blocks), part)

    def _restore(self, sequence: Sequence, saved: Saved) -> None:
        """Give a sequence that has whole blocks of the cache the rest of what was saved."""
        num_blocks = blocks_for(saved.num_computed)
        for group, (pool, table, window) in enumerate(zip(self.pools, sequence.tables, self.windows, strict=True)):
            first = 0 if window is None else first_seen(saved.num_computed, window)
            for index in range(len(table), num_blocks):
                table.append(NULL_BLOCK if index < first else pool.allocate())
                if index >= first:
                    self.moves.append(Restore(group, table[index], index, saved))
        sequence.num_computed = saved.num_computed

    def save(self, sequence: Sequence, seconds: float, seconds_per_byte: float) -> bool:
        """Copy a sequence that is about to be preempted to host memory, if there is room and the way there and back
        is faster than the `seconds` that computing it again would take."""
        num_blocks = blocks_for(sequence.num_computed)
        held = [
            (group, table[index], index)
            for group, table in enumerate(sequence.tables)
            for index in range(num_blocks)
            if table[index] != NULL_BLOCK
        ]
        num_bytes = sum(self._block_bytes[group] for group, _, _ in held)
        if not held or num_bytes > self._host_free or 2 * num_bytes * seconds_per_byte >= seconds:
            return False
        saved = sequence.saved = Saved(sequence.num_computed, num_bytes)
        self._host_free -= num_bytes
        self.moves += [Save(*place, saved) for place in held]
        return True

    def forget_saved(self, sequence: Sequence) -> None:
        """Give back the host memory of a sequence that has ended."""
        if sequence.saved is not None:
            self._host_free += sequence.saved.num_bytes
            sequence.saved = None

    def num_bytes(self, moves: Iterable[Move]) -> int:
        """Bytes that are moved."""
        return sum(self._block_bytes[move.group] for move in moves)

    def set_aside(self, sequence: Sequence, match: Match, num_blocks: int) -> Fetch:
        """Memory for the blocks from the whole ones of a match on up to `num_blocks`; `can_admit` has said that the
        sequence fits."""
        start = match.length // BLOCK_TOKENS
        firsts = [0 if w is None else first_seen(num_blocks * BLOCK_TOKENS, w) for w in self.windows]
        tables = tuple(array("i", [NULL_BLOCK] * min(first, start)) for first in firsts)
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            table.extend(node.blocks[group] for node in match.nodes[len(table) : start])
            for block in table:
                if block != NULL_BLOCK:
                    pool.take(block)
        for pool, table, first in zip(self.pools, tables, firsts, strict=True):
            table.extend(pool.allocate() if index >= first else NULL_BLOCK for index in range(start, num_blocks))
        tokens = sequence.tokens[: num_blocks * BLOCK_TOKENS]
        node = match.nodes[start - 1] if start else None
        self.fetches.append(fetch := Fetch(namespace_of(sequence), tokens, start, tables, node))
        return fetch

    def take_in(self, fetch: Fetch, num_read: int) -> None:
        """The first so many blocks have been read: publish them, and give all of them back."""
        self.fetches.remove(fetch)
        for index in range(fetch.start, fetch.start + num_read):
            fetch.node = self._publish_block(fetch.namespace, fetch.node, fetch.tokens, fetch.tables, index)
            if fetch.node is None:
                break
        self._give_all(fetch.tables)

    def pin(self, node: Node | None) -> tuple[array[int], ...]:
        """Hold what a sequence that begins with a path of the tree needs of it, until `unpin`."""
        path: list[Node] = []
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        path.reverse()
        tables = tuple(array("i", [NULL_BLOCK] * len(path)) for _ in self.windows)
        for group, (pool, table, window) in enumerate(zip(self.pools, tables, self.windows, strict=True)):
            for index in range(0 if window is None else first_seen(len(path) * BLOCK_TOKENS, window), len(path)):
                if (block := path[index].blocks[group]) != NULL_BLOCK:
                    pool.take(block)
                    table[index] = block
        self._pinned.append(tables)
        return tables

    def unpin(self, tables: tuple[array[int], ...]) -> None:
        """Give back what `pin` gave."""
        self._pinned = [each for each in self._pinned if each is not tables]
        self._give_all(tables)

    def _copy_tail(self, sequence: Sequence, sources: tuple[int, ...], num_tokens: int) -> None:
        """Append a block to each table that begins like its source. The source may be evicted for it, or even be
        the block that is given out: its slots stay as they are until the next step has made its copies."""
        for group, (pool, table, src) in enumerate(zip(self.pools, sequence.tables, sources, strict=True)):
            pool.touch(src)
            dst = pool.allocate()
            table.append(dst)
            if dst != src:
                self.moves.append(Copy(group, src, dst, num_tokens))

    def has_place(self, sequence: Sequence, num_tokens: int) -> bool:
        """Do so many more tokens fit into the blocks that a sequence has?"""
        return sequence.num_computed + num_tokens <= len(sequence.tables[0]) * BLOCK_TOKENS

    def room(self, sequence: Sequence) -> int:
        """Tokens that can be added to a sequence now."""
        length = len(sequence.tables[0]) + min(pool.num_available for pool in self.pools)
        return length * BLOCK_TOKENS - sequence.num_computed

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Allocate blocks for `num_tokens` more tokens; `room` has said that they fit."""
        more = blocks_for(sequence.num_computed + num_tokens) - len(sequence.tables[0])
        for pool, table in zip(self.pools, sequence.tables, strict=True):
            for _ in range(more):
                table.append(pool.allocate())

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that so many more tokens are in memory: publish full blocks, give back what a window has passed."""
        before = sequence.num_computed
        sequence.num_computed = after = before + num_tokens
        if self.is_caching and before // BLOCK_TOKENS != after // BLOCK_TOKENS:
            self._publish(sequence)
        for group, window in self._windowed:
            for index in range(first_seen(before, window), first_seen(after, window)):
                table = sequence.tables[group]
                self.pools[group].give(table[index])
                table[index] = NULL_BLOCK

    def _publish(self, sequence: Sequence) -> None:
        """Make full blocks known. Where the cache has the same tokens already, its blocks replace the sequence's."""
        depth = 0 if sequence.node is None else sequence.node.depth
        for index in range(depth, sequence.num_computed // BLOCK_TOKENS):
            namespace = namespace_of(sequence)
            node = self._publish_block(namespace, sequence.node, sequence.tokens, sequence.tables, index)
            if node is None:
                return
            sequence.node = node

    def _publish_block(
        self, namespace: str, parent: Node | None, tokens: array[int], tables: tuple[array[int], ...], index: int
    ) -> Node | None:
        start = index * BLOCK_TOKENS
        blocks = [table[index] for table in tables]
        node = self.cache.publish(namespace, parent, tuple(tokens[start : start + BLOCK_TOKENS]), blocks)
        for group, (pool, table) in enumerate(zip(self.pools, tables, strict=True)):
            if node is not None and table[index] not in (NULL_BLOCK, node.blocks[group]):
                pool.take(node.blocks[group])
                pool.give(table[index])
                table[index] = node.blocks[group]
        return node

    def publish_tail(self, sequence: Sequence) -> None:
        """Make the last, partly filled block known, too."""
        start = sequence.num_computed - sequence.num_computed % BLOCK_TOKENS
        depth = 0 if sequence.node is None else sequence.node.depth
        if self.is_caching and sequence.num_computed > start == depth * BLOCK_TOKENS:
            self.cache.publish(
                namespace_of(sequence),
                sequence.node,
                tuple(sequence.tokens[start : sequence.num_computed]),
                [table[start // BLOCK_TOKENS] for table in sequence.tables],
            )

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Let a child share its parent's blocks, with a copy of the partly filled one. False: no block is free."""
        whole, part = divmod(parent.num_computed, BLOCK_TOKENS)
        if part and not all(pool.num_available for pool in self.pools):
            return False
        child.num_computed, child.num_cached, child.node = parent.num_computed, parent.num_cached, parent.node
        child.tables = tuple(table[:whole] for table in parent.tables)
        for pool, table in zip(self.pools, child.tables, strict=True):
            for block in table:
                if block != NULL_BLOCK:
                    pool.take(block)
        if part:
            self._copy_tail(child, tuple(table[whole] for table in parent.tables), part)
        return True

    def release(self, sequence: Sequence) -> None:
        """Give everything back, deepest first. What a sequence of idle priority, or one that is embedded, has added to
        the cache is the first to go: a million lines of a batch push out no chat's beginning. What several of them
        begin with stays like anything else."""
        self._give_all(sequence.tables, self._kept(sequence))
        sequence.tables, sequence.node, sequence.num_computed = (), None, 0

    def _kept(self, sequence: Sequence) -> int | None:
        """The blocks of a sequence that stay in the cache like any other ones; None: all."""
        request = sequence.group.request
        if not sequence.tables or (request.priority < IDLE and request.pooling is None):
            return None
        depth = 0 if sequence.node is None else sequence.node.depth
        table = sequence.tables[0]
        tail = table[depth] if len(table) > depth else NULL_BLOCK
        return self.cache.end_of_its_own(sequence.node, sequence.num_cached // BLOCK_TOKENS, tail)

    def _give_all(self, tables: tuple[array[int], ...], num_kept: int | None = None) -> None:
        for pool, table in zip(self.pools, tables, strict=False):
            if num_kept is not None:
                for block in filter(None, table[num_kept:]):
                    pool.give(block, goes_first=True)
            for block in filter(None, reversed(table[:num_kept])):
                pool.give(block)

    def clear_cache(self) -> None:
        """Forget all cached prefixes, and what was to be moved for sequences that have all ended."""
        self.cache.clear()
        self.moves.clear()

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Raise `InternalError` unless every block is accounted for. `sequences`: all that are not finished."""
        sequences = list(sequences)
        for group, (pool, window) in enumerate(zip(self.pools, self.windows, strict=True)):
            holders: Counter[int] = Counter()
            for sequence in sequences:
                table = sequence.tables[group] if sequence.tables else array("i")
                first = 0 if window is None else min(len(table), first_seen(sequence.num_computed, window))
                if any(table[:first]) or not all(table[first:]):
                    raise InternalError(f"kv memory: group {group}: a table has a hole or holds what has passed")
                holders.update(table[first:])
            for tables in (*(fetch.tables for fetch in self.fetches), *self._pinned):
                holders.update(filter(None, tables[group]))
            pool.check(dict(holders), self.cache.retained(group))
        if self._host_free + sum(s.saved.num_bytes for s in sequences if s.saved is not None) != self._host_bytes:
            raise InternalError("kv memory: host memory is lost or counted twice")
        self.cache.check()
