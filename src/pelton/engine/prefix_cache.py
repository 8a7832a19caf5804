"""Which blocks hold the keys and values of which tokens: a radix tree over token ids.

Each node stands for the tokens of one block: exactly BLOCK_TOKENS of them, or fewer at a leaf. It holds, per cache
group, the block that is still there. No node's tokens are the beginning of a sibling's, and siblings are kept in
order, so that the one that agrees longest with a run of tokens is next to where that run would stand.

Three facts keep eviction simple:
- A sequence that publishes a node which is there already takes over its block (the bits are the same: law 1). So it
  holds the blocks of all nodes on its path, as far as a window has not passed them.
- Sequences give blocks back deepest first. So among the idle blocks of a full group a node always comes before its
  parent, and the least recently used one is a leaf. What hardly anybody asks for again (`KVMemory.release`) is put
  before all that is idle, in the same order, as far as no other node is below it.
- The blocks of a window group may go from any node: a match asks only for those that the next token can see.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence

from pelton.engine.blocks import BlockPool
from pelton.errors import InternalError
from pelton.ops.data import BLOCK_TOKENS, NULL_BLOCK

Tokens = tuple[int, ...]


class Node:
    """One block's worth of tokens below its parent."""

    __slots__ = ("blocks", "children", "depth", "is_linked", "keys", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: Tokens, blocks: list[int]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.blocks = blocks  # per cache group; NULL_BLOCK: not there (any more)
        self.keys: list[Tokens] = []  # of the children, in order
        self.children: list[Node] = []
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.is_linked = True

    def closest(self, tokens: Tokens) -> tuple[int, int]:
        """Index of the child that shares the longest beginning with `tokens`, and how long that is (0: none)."""
        at = bisect_left(self.keys, tokens)
        best, length = at, 0
        for index in (at, at - 1):
            if 0 <= index < len(self.keys) and (common := _common(self.keys[index], tokens)) > length:
                best, length = index, common
        return best, length


def _common(a: Tokens, b: Tokens) -> int:
    if a == b:
        return len(a)
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


class PrefixCache:
    """The tree of one engine. `windows` says per cache group how many tokens a token sees (None: all).

    Trees of different namespaces (all that changes the meaning of a token's keys and values) share nothing.
    """

    def __init__(self, windows: Sequence[int | None]) -> None:
        self.windows = tuple(windows)
        self.pools: tuple[BlockPool, ...] = ()
        self._roots: dict[str, Node] = {}
        self._owners: list[dict[int, Node]] = [{} for _ in windows]  # per group: block -> its node

    def match(self, namespace: str, tokens: Sequence[int], limit: int) -> tuple[list[Node], int]:
        """The longest beginning of `tokens`, at most `limit` long, that all groups can serve: its nodes and its
        length. The last node may be matched in part."""
        path: list[Node] = []
        ends: list[int] = []
        node, end = self._roots.get(namespace), 0
        while node is not None and end < limit and end == len(path) * BLOCK_TOKENS:
            index, common = node.closest(tuple(tokens[end : min(end + BLOCK_TOKENS, limit)]))
            if not common:
                break
            node = node.children[index]
            end += common
            path.append(node)
            ends.append(end)
        return self._servable(path, ends)

    def _servable(self, path: list[Node], ends: list[int]) -> tuple[list[Node], int]:
        """Cut a path to where every group still has what the token after it sees."""
        windowed = [(group, window) for group, window in enumerate(self.windows) if window is not None]
        depth = len(path)
        while depth and not all(
            self._has(path[first_seen(ends[depth - 1], window) : depth], group) for group, window in windowed
        ):
            depth -= 1
        return path[:depth], ends[depth - 1] if depth else 0

    def _has(self, nodes: list[Node], group: int) -> bool:
        return all(node.blocks[group] != NULL_BLOCK for node in nodes)

    def publish(self, namespace: str, parent: Node | None, tokens: Tokens, blocks: list[int]) -> Node | None:
        """Make the block after `parent` (None: the root) known and return its node, whose blocks may be other ones
        than those given. None: it is a part of a block that is known already, or the parent has been evicted."""
        if parent is None:
            parent = self._roots.setdefault(namespace, Node(None, (), []))
        elif not parent.is_linked:
            return None
        index, common = parent.closest(tokens)
        if common and common == len(parent.keys[index]):
            node = parent.children[index]
            if common < len(tokens):  # what is known is a part of what is published now
                self._drop_all(node)
                node.tokens = parent.keys[index] = tokens
        elif common and common == len(tokens):
            return None
        else:
            at = bisect_left(parent.keys, tokens)
            node = Node(parent, tokens, [NULL_BLOCK] * len(self.windows))
            parent.keys.insert(at, tokens)
            parent.children.insert(at, node)
        self._fill(node, blocks)
        return node

    def _fill(self, node: Node, blocks: list[int]) -> None:
        for group, block in enumerate(blocks):
            if node.blocks[group] == NULL_BLOCK and block != NULL_BLOCK:
                node.blocks[group] = block
                self._owners[group][block] = node
                self.pools[group].retain(block)

    def end_of_its_own(self, node: Node | None, start: int, tail: int) -> int:
        """Blocks of the path to `node`, from `start` on, up to where nothing is behind them but the rest of this path
        and the block `tail` of group 0: those after them may be forgotten before all others."""
        below = self._owners[0].get(tail)
        while node is not None and node.depth > start and all(child is below for child in node.children):
            node, below = node.parent, node
        return start if node is None else max(start, node.depth)

    def evict(self, group: int, block: int) -> None:
        """Forget an idle block, and its node where nothing useful is left of it."""
        node = self._owners[group][block]
        if self.windows[group] is None:
            if node.children:
                raise InternalError("prefix cache: the least recently used block is not a leaf's")
            self._unlink(node)
            return
        self._drop(node, group)
        while node.parent is not None and not node.children and not any(node.blocks):
            parent = node.parent
            self._unlink(node)
            node = parent

    def _drop(self, node: Node, group: int) -> None:
        block = node.blocks[group]
        node.blocks[group] = NULL_BLOCK
        del self._owners[group][block]
        self.pools[group].forget(block)

    def _drop_all(self, node: Node) -> None:
        for group, block in enumerate(node.blocks):
            if block != NULL_BLOCK:
                self._drop(node, group)

    def _unlink(self, node: Node) -> None:
        """Take a leaf out of the tree."""
        self._drop_all(node)
        parent = node.parent
        assert parent is not None
        at = bisect_left(parent.keys, node.tokens)
        del parent.keys[at], parent.children[at]
        node.is_linked = False
        if parent.parent is None and not parent.children:
            self._roots = {name: root for name, root in self._roots.items() if root is not parent}

    def clear(self) -> None:
        """Forget everything. Blocks that sequences hold stay theirs."""
        for owners, pool in zip(self._owners, self.pools, strict=True):
            for block in owners:
                pool.forget(block)
            owners.clear()
        for node in list(self._nodes()):
            node.is_linked = False
        self._roots.clear()

    def retained(self, group: int) -> set[int]:
        """The blocks of a group that the tree holds."""
        return set(self._owners[group])

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def check(self) -> None:
        """Raise `InternalError` unless the tree is as described above and agrees with its own index of blocks."""
        found: list[dict[int, Node]] = [{} for _ in self.windows]
        for node in self._nodes():
            if node.keys != sorted(node.keys) or node.keys != [child.tokens for child in node.children]:
                raise InternalError("prefix cache: children out of order")
            if any(b[: len(a)] == a for a, b in zip(node.keys, node.keys[1:], strict=False)):
                raise InternalError("prefix cache: a node is the beginning of its sibling")
            if node.parent is None:
                continue
            if node.children and len(node.tokens) != BLOCK_TOKENS:
                raise InternalError("prefix cache: a part of a block has children")
            if not node.is_linked or not node.parent.is_linked:
                raise InternalError("prefix cache: an evicted node is still in the tree")
            for group, block in enumerate(node.blocks):
                if block != NULL_BLOCK:
                    found[group][block] = node
                elif self.windows[group] is None:
                    raise InternalError("prefix cache: a node without its block of a full group")
        if found != self._owners:
            raise InternalError("prefix cache: the index of blocks differs from the tree")


def first_seen(position: int, window: int) -> int:
    """Index of the first block that the token at `position` sees through a window that counts itself."""
    return max(0, position - window + 1) // BLOCK_TOKENS
