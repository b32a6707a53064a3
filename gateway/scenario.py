"""What a call is for: an agent's own work, or what it does beside it. Pure.

An ordered table of small rules, each by one fact; the first that holds decides. A call that no rule knows is `main`.
Facts that an agent states (headers, metadata, a schema) come before words. Words are looked for only where agents
put instructions, the head of the first system message and what the user said last, so the cost does not grow with the
history. A rule by words needs several of them together with a shape, since people use the same words.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, Final

from rollyard.gateway.exchange import ModelRequest
from rollyard.schemas.call import Message
from rollyard.schemas.names import Scenario

HEAD_CHARS: Final = 400
"""Of a system message: where it says what the model is to be."""

EDGE_CHARS: Final = 2000
"""Of what the user said last: so much from the start and so much from the end."""

LONG_CHARS: Final = 250
"""An agent's demand for a summary is a form to fill in; a person's is a sentence."""


def classify(request: ModelRequest) -> Scenario:
    """The scenario of a request whose `ids` are filled in."""
    facts = Facts(request)
    for scenario, rule in RULES:
        if rule(facts):
            return scenario
    return "main"


class Facts:
    """What the rules look at, worked out when a rule asks for it."""

    def __init__(self, request: ModelRequest) -> None:
        self.request = request
        self.ids = request.ids
        self.tools = bool(request.tools)

    @cached_property
    def role(self) -> str:
        """Head of the first system message, where there is one at the start; else of the first message."""
        for message in self.request.messages[:2]:
            if message.get("role") in ("system", "developer"):
                return _text(message)[:HEAD_CHARS]
        return _text(self.request.messages[0])[:HEAD_CHARS] if self.request.messages else ""

    @cached_property
    def opening(self) -> str:
        """Head of the first user message, behind the system messages of the start."""
        for message in self.request.messages[:4]:
            if message.get("role") == "user":
                return _text(message)[:HEAD_CHARS]
        return ""

    @cached_property
    def asked(self) -> list[str]:
        """The user messages at the end, the last one first. Agents put notes of their own behind the user's words."""
        asked: list[str] = []
        for message in self.request.messages[:-4:-1]:
            if message.get("role") in ("system", "developer") and not asked:
                continue
            if message.get("role") != "user":
                break
            asked.append(_edges(_last_text(message)))
        return asked

    @cached_property
    def answered(self) -> bool:
        """Whether the conversation already holds a reply."""
        return any(message.get("role") == "assistant" for message in self.request.messages)

    @cached_property
    def last_said(self) -> str:
        """What the user said last, if that ends the request."""
        return self.asked[0] if self.asked else ""


_SUMMARY: Final = re.compile(r"\b(summar(y|ies|i[sz]\w*)|compact(ed|ion|ing)?|condens\w+|hand-?off|recap)\b", re.I)
_CONVERSATION: Final = re.compile(r"\b(conversation|session|dialog(ue)?|context|transcript|history|so far)\b", re.I)
_NO_TOOLS: Final = re.compile(
    r"\b(no|not|never|without|don't|avoid|forbidden)\b[^.\n]{0,60}\b(tools?|functions?)\b|\btext[ -]only\b",
    re.I,
)
_FORM: Final = re.compile(r"^[ \t]*(?:\d+[.)]|[-*#])", re.M)
_LIMIT: Final = re.compile(
    r"\b(max(imum)?|limit|budget)\b[^.\n]{0,60}\b(iterations?|turns?|steps?|rounds?|calls?)\b", re.I
)
_COMPACTOR: Final = re.compile(
    r"\b(context|conversation)[ -](summari[sz]ation|compaction|compression|checkpoint)\b"
    r"|\bsummari[sz](ation|er|ing) (agent|assistant)\b.{0,80}\b(context|checkpoint|compaction)\b",
    re.I | re.S,
)
_TITLE: Final = re.compile(r"\btitles?\b", re.I)
_TITLED: Final = re.compile(r"\b(conversation|thread|session|chat)\b", re.I)
_WRITE: Final = re.compile(r"\b(generat|writ|creat|output|return|com(e|ing) up)\w*", re.I)
_SUB_AGENT: Final = re.compile(r"\byou are (\w+ as )?(an?|the) (\*\*)?([\w-]+ ){0,3}?sub-?agent\b", re.I)
_HEARTBEAT_REPLY: Final = re.compile(r"\b(reply|respond|answer|return|say)\b[^\n]{0,60}\bHEARTBEAT_OK\b", re.I)


def counts_tokens(facts: Facts) -> bool:
    """The endpoint is one that only counts: its adapter says so."""
    return facts.request.scenario == "count"


def probes(facts: Facts) -> bool:
    """Claude Code asks for one token to one short message to see that key and quota are good."""
    request = facts.request
    return (
        request.protocol == "messages"
        and request.params.get("max_tokens") == 1
        and not facts.tools
        and len(request.messages) == 1
        and len(facts.role) <= 16
    )


def says_compaction(facts: Facts) -> bool:
    """Codex names the kind of its requests."""
    return facts.ids.kind in ("compaction", "compact") or facts.ids.sub_agent == "compact"


def title_schema(facts: Facts) -> bool:
    """No tools, and the reply has to be JSON with a title and little else (Claude Code)."""
    form = facts.request.extras.get("response_format")
    outer = form.get("json_schema") if isinstance(form, dict) else None
    schema = outer.get("schema") if isinstance(outer, dict) else None
    names = schema.get("properties") if isinstance(schema, dict) else None
    return not facts.tools and isinstance(names, dict) and "title" in names and len(names) <= 2


def title_prompt(facts: Facts) -> bool:
    """No tools, at most a system message and two others, no reply yet, and a title of the conversation is the whole job
    (opencode, Hermes).
    """
    if facts.tools or len(facts.request.messages) > 3 or facts.answered:
        return False
    return all(words.search(facts.role) for words in (_TITLE, _TITLED, _WRITE))


def heartbeat_tool(facts: Facts) -> bool:
    """A tool for the outcome of a heartbeat is offered, and the user's words speak of it (OpenClaw)."""
    if not any("heartbeat" in text.lower() for text in facts.asked):
        return False
    return any(_name(tool).startswith("heartbeat") for tool in facts.request.tools or ())


def heartbeat_reply(facts: Facts) -> bool:
    """The user's words ask for the reply by which OpenClaw knows that nothing is to be done."""
    return any("heartbeat_ok" in text.casefold() and _HEARTBEAT_REPLY.search(text) for text in facts.asked)


def limit_summary(facts: Facts) -> bool:
    """No tools any more, not streamed, and the last message asks to sum up because a limit is reached (Hermes)."""
    if facts.tools or facts.request.stream or not facts.answered:
        return False
    return bool(_LIMIT.search(facts.last_said) and _SUMMARY.search(facts.last_said))


def compaction_demand(facts: Facts) -> bool:
    """An answered conversation ends with a long demand to sum it up without tools: a form, if tools are offered.

    Nothing else marks a compaction of Claude Code, which sends its tools as ever; opencode sends none.
    """
    text = facts.last_said
    if len(text) < LONG_CHARS or not facts.answered:
        return False
    if not all(words.search(text) for words in (_SUMMARY, _CONVERSATION, _NO_TOOLS)):
        return False
    return not facts.tools or len(_FORM.findall(text)) >= 3


def compaction_role(facts: Facts) -> bool:
    """No tools, and the model is told that it sums up the context (opencode, Hermes, OpenClaw)."""
    return not facts.tools and bool(_COMPACTOR.search(facts.role))


def says_sub_agent(facts: Facts) -> bool:
    """A header names a sub-agent, or the thread that started this one (Codex, Claude Code, opencode)."""
    return bool(facts.ids.sub_agent or facts.ids.parent_thread)


def sub_agent_role(facts: Facts) -> bool:
    """The model is told that it is a sub-agent, by the system (Hermes) or with its task (OpenClaw)."""
    return bool(_SUB_AGENT.search(facts.role) or _SUB_AGENT.search(facts.opening))


RULES: Final[tuple[tuple[Scenario, Callable[[Facts], bool]], ...]] = (
    ("count", counts_tokens),
    ("count", probes),
    ("compaction", says_compaction),
    ("title", title_schema),
    ("title", title_prompt),
    ("heartbeat", heartbeat_tool),
    ("heartbeat", heartbeat_reply),
    ("summary", limit_summary),
    ("compaction", compaction_demand),
    ("compaction", compaction_role),
    ("sub_agent", says_sub_agent),
    ("sub_agent", sub_agent_role),
)
"""In this order: what a sub-agent does beside its work, such as a compaction, counts as that."""


def _name(tool: Message) -> str:
    function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _parts(message: Message) -> list[str]:
    """The texts of a message."""
    content: Any = message.get("content")
    if isinstance(content, str):
        return [content]
    texts = [part.get("text") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    return [text for text in texts if isinstance(text, str)]


def _text(message: Message) -> str:
    return "\n".join(text[:HEAD_CHARS] for text in _parts(message)[:3])


def _last_text(message: Message) -> str:
    """Agents put a demand of their own into the last part of a message."""
    parts = _parts(message)
    return parts[-1] if parts else ""


def _edges(text: str) -> str:
    return text if len(text) <= 2 * EDGE_CHARS else f"{text[:EDGE_CHARS]}\n{text[-EDGE_CHARS:]}"
