"""A session's calls as a graph: intents joined with ends, deltas resolved, ids in a tree whose nodes hold what is new.

Two calls whose prompts begin with the same ids share nodes, whatever their records say of parents. Work and memory
grow with what the records hold, not with the length of the prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from rollyard.schemas.call import CallEnd, CallEvent, CallIntent, Message
from rollyard.schemas.packed import TokenIds
from rollyard.stages.calls import bare_intent, by_call

_ITEM: Final = TokenIds.itemsize


class Node:
    """A stretch of ids after those of its parent; `depth` counts the ids from the root to its end.

    `owners` are the calls whose prompt and reply end here and can be trained. Nearly every node has one child, `only`;
    the children of others stand in `children`, by their first id.
    """

    __slots__ = ("children", "depth", "edge", "only", "owners", "parent")

    def __init__(self, parent: Node | None, edge: bytes, depth: int) -> None:
        self.parent = parent
        self.edge = edge
        self.depth = depth
        self.only: Node | None = None
        self.children: dict[bytes, Node] | None = None
        self.owners: list[Turn] | None = None

    def child(self, ids: bytes, start: int) -> Node | None:
        """The child that begins as `ids` do at byte `start`."""
        only = self.only
        if only is not None:
            return only if ids.startswith(only.edge[:_ITEM], start) else None
        return self.children.get(ids[start : start + _ITEM]) if self.children is not None else None

    def path(self) -> list[Node]:
        """The nodes from the root to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def ids(self) -> bytes:
        """All ids from the root to the end of this node, packed."""
        return b"".join([node.edge for node in self.path()])

    def holds(self, other: Node) -> bool:
        """Whether the ids up to this node begin with those up to `other`."""
        node: Node | None = self
        while node is not None and node.depth > other.depth:
            node = node.parent
        return node is other


class TokenTree:
    """Sequences of ids, packed; what they share from the start is kept once."""

    def __init__(self) -> None:
        self.root = Node(None, b"", 0)

    def at(self, node: Node, depth: int) -> Node:
        """The node on the way to `node` that ends at `depth`, made if there is none."""
        while node.parent is not None and node.parent.depth >= depth:
            node = node.parent
        return node if node.depth == depth else self._split(node, (depth - _depth_before(node)) * _ITEM)

    def insert(self, node: Node, ids: bytes) -> Node:
        """The node that ends after `ids`, beginning at the end of `node`; made if there is none."""
        start, end = 0, len(ids)
        while start < end:
            child = node.child(ids, start)
            if child is None:
                return self._hang(node, ids[start:] if start else ids)
            edge = child.edge
            if ids.startswith(edge, start):
                node, start = child, start + len(edge)
            else:
                same = common_bytes(edge, ids, start)
                node, start = self._split(child, same), start + same
        return node

    def _hang(self, node: Node, edge: bytes) -> Node:
        child = Node(node, edge, node.depth + len(edge) // _ITEM)
        if node.children is not None:
            node.children[edge[:_ITEM]] = child
        elif node.only is None:
            node.only = child
        else:
            node.children = {node.only.edge[:_ITEM]: node.only, edge[:_ITEM]: child}
            node.only = None
        return child

    def _split(self, node: Node, size: int) -> Node:
        """Cut the edge of `node` after `size` bytes; returns the upper part, `node` stays the lower one."""
        above = node.parent
        assert above is not None
        upper = Node(above, node.edge[:size], above.depth + size // _ITEM)
        if above.children is not None:
            above.children[node.edge[:_ITEM]] = upper
        else:
            above.only = upper
        node.parent, node.edge = upper, node.edge[size:]
        upper.only = node
        return upper


def _depth_before(node: Node) -> int:
    return node.parent.depth if node.parent is not None else 0


def common_bytes(left: bytes, right: bytes, start: int = 0) -> int:
    """How many bytes of whole ids are equal at the start of `left` and of `right[start:]`."""
    size = min(len(left), len(right) - start) // _ITEM * _ITEM
    differs = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[start : start + size], "little")
    # Its lowest bit stands in the first byte that differs.
    return ((differs & -differs).bit_length() - 1) // 8 // _ITEM * _ITEM if differs else size


def fork(left: Node, right: Node) -> Node:
    """The deepest node that lies on the way to both."""
    while left is not right:
        if left.depth > right.depth:
            assert left.parent is not None
            left = left.parent
        else:
            assert right.parent is not None
            right = right.parent
    return left


def stretch(node: Node, start: int, count: int) -> TokenIds:
    """At most `count` ids on the way to `node`, from position `start` on."""
    pieces: list[bytes] = []
    below: Node | None = node
    while below is not None and below.depth > start:
        before = _depth_before(below)
        if before < start + count:
            pieces.append(below.edge[max(0, start - before) * _ITEM : (start + count - before) * _ITEM])
        below = below.parent
    return TokenIds(b"".join(reversed(pieces)))


@dataclass(slots=True, eq=False)
class Turn:
    """A call in the graph.

    `named` is the call that its record names as parent, `length` counts the messages of the request and the reply.
    `prompt` and `tip` are the nodes where its prompt ids and its sampled ids end. `excluded` says why it cannot be
    trained; `parent` is the call whose ids its prompt continues, among those that can, and `children` the reverse.
    """

    call_id: str
    intent: CallIntent
    end: CallEnd | None
    seq: int
    end_seq: int
    named: Turn | None
    length: int
    prompt: Node
    tip: Node
    broken: bool = False
    excluded: str | None = None
    parent: Turn | None = None
    children: list[Turn] | None = None
    thread: tuple[str, str, str] = ("", "", "")
    own_chains: list[bytes] | None = None

    @property
    def reply(self) -> Message | None:
        """The reply as sent, whole or not."""
        return self.end.reply if self.end is not None else None

    @property
    def count(self) -> int:
        """Messages of the request."""
        return self.length - (self.reply is not None)

    def messages(self) -> list[Message]:
        """The messages of the request, whole."""
        path = [self]
        while path[-1].intent.shared_messages and path[-1].named is not None:
            path.append(path[-1].named)
        messages: list[Message] = []
        for turn in reversed(path):
            del messages[turn.intent.shared_messages :]
            messages += turn.intent.messages
            if turn is not self and turn.reply is not None:
                messages.append(turn.reply)
        return messages

    def settings(self) -> tuple[list[Message] | None, dict[str, object]]:
        """Tool definitions and template options of the request."""
        turn = self
        while turn.intent.tools is None and turn.named is not None:
            turn = turn.named
        return turn.intent.tools, turn.intent.template


def read_turns(events: Iterable[tuple[int, CallEvent]]) -> list[Turn]:
    """The calls of a session in the order of their intents; the order of the events does not matter.

    Of duplicates the one with the lower sequence counts. A record that cannot be resolved is `broken`; an end without
    intent is that and has sequence 0.
    """
    intents, ends = by_call(events)
    tree = TokenTree()
    turns = dict(_orphans(intents, ends, tree))
    # A parent's end is acknowledged before a child's intent is written: parents come first in the log.
    for seq, intent in sorted(intents.values(), key=itemgetter(0)):
        turns[intent.call_id] = _read_turn(seq, intent, ends.get(intent.call_id), turns, tree)
    return list(turns.values())


def _read_turn(
    seq: int, intent: CallIntent, ended: tuple[int, CallEnd] | None, turns: dict[str, Turn], tree: TokenTree
) -> Turn:
    named = turns.get(intent.parent) if intent.parent is not None else None
    end_seq, end = ended if ended is not None else (0, None)
    has_reply = end is not None and end.reply is not None
    root = tree.root
    length = intent.shared_messages + len(intent.messages) + has_reply
    turn = Turn(intent.call_id, intent, end, seq, end_seq, named, length, root, root)
    agent = intent.agent
    turn.thread = (agent.session, agent.thread, agent.sub_agent)
    if named is None:
        turn.broken = intent.parent is not None or intent.shared_messages != 0
    else:
        turn.broken = named.broken or not named.seq or not 0 <= intent.shared_messages <= named.length
    if end is None:
        return turn
    shared = end.shared_prompt_ids
    base = named.tip if named is not None else root
    if not 0 <= shared <= base.depth:
        turn.broken = True
    if not turn.broken:
        start = base if shared == base.depth else tree.at(base, shared) if shared else root
        turn.prompt = tree.insert(start, end.prompt_ids.data)
        turn.tip = tree.insert(turn.prompt, end.completion_ids.data)
    return turn


def _orphans(
    intents: dict[str, tuple[int, CallIntent]], ends: dict[str, tuple[int, CallEnd]], tree: TokenTree
) -> Iterator[tuple[str, Turn]]:
    """Ends without intent, each with an intent of its ids only."""
    for end_seq, end in sorted((ends[call_id] for call_id in ends.keys() - intents.keys()), key=itemgetter(0)):
        intent = bare_intent(end)
        yield end.call_id, Turn(end.call_id, intent, end, 0, end_seq, None, 0, tree.root, tree.root, broken=True)


def link_parents(turns: Iterable[Turn]) -> None:
    """Set parent and children of each call that is not excluded.

    The parent is the one with the longest ids that the prompt begins with, among those that ended before it began.
    """
    living = [turn for turn in turns if turn.excluded is None]
    for turn in living:
        if turn.tip.owners is None:
            turn.tip.owners = []
        turn.tip.owners.append(turn)
    for turn in living:
        turn.parent = _parent(turn)
        if turn.parent is not None:
            if turn.parent.children is None:
                turn.parent.children = []
            turn.parent.children.append(turn)


def _parent(turn: Turn) -> Turn | None:
    """Only what had ended can be continued. Of twins that say the same, one of the call's own thread comes first."""
    own_thread = turn.named is not None and turn.named.thread == turn.thread
    other: Turn | None = None
    node: Node | None = turn.prompt
    while node is not None:
        if node.owners is not None:
            owner = _owner(node.owners, turn)
            if owner is not None and (owner.thread == turn.thread or not own_thread):
                return owner
            other = other or owner
        node = node.parent
    return other


def _owner(owners: list[Turn], turn: Turn) -> Turn | None:
    """Of calls with the same ids one of the same thread, the one that the record names, the latest before."""
    if len(owners) == 1:
        return owners[0] if owners[0].end_seq < turn.seq else None
    earlier = [each for each in owners if each.end_seq < turn.seq]
    return max(earlier, key=lambda each: (each.thread == turn.thread, each is turn.named, each.end_seq), default=None)
