"""The readers by name, and which one a model needs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from rollyard.gateway.tokens.parsers.deepseek import DeepSeekParser
from rollyard.gateway.tokens.parsers.glm45 import Glm45Parser
from rollyard.gateway.tokens.parsers.harmony import HarmonyParser
from rollyard.gateway.tokens.parsers.hermes import HermesParser
from rollyard.gateway.tokens.parsers.kimi_k2 import KimiK2Parser
from rollyard.gateway.tokens.parsers.llama3 import Llama3Parser
from rollyard.gateway.tokens.parsers.mistral import MistralParser
from rollyard.gateway.tokens.parsers.parser import ReplyParser
from rollyard.gateway.tokens.parsers.plain import PlainParser
from rollyard.gateway.tokens.parsers.qwen3_coder import Qwen3CoderParser
from rollyard.gateway.tokens.parsers.reading import FamilyParser
from rollyard.schemas.call import Message
from rollyard.schemas.errors import ConfigError

FAMILIES: Final[dict[str, type[FamilyParser]]] = {
    "hermes": HermesParser,
    "qwen3_coder": Qwen3CoderParser,
    "llama3": Llama3Parser,
    "mistral": MistralParser,
    "deepseek": DeepSeekParser,
    "glm45": Glm45Parser,
    "kimi_k2": KimiK2Parser,
    "harmony": HarmonyParser,
    "plain": PlainParser,
}

# What only one family writes, the most particular first: all of these marks. Templates of some models leave calls to
# the caller; then the marks stand among the special tokens.
_MARKS: Final = (
    ("harmony", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("kimi_k2", ("<|im_middle|>",)),
    ("deepseek", ("<\uff5ctool\u2581calls\u2581begin\uff5c>",)),
    ("deepseek", ("<\uff5cAssistant\uff5c>",)),
    ("glm45", ("<arg_key>", "<tool_call>")),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("mistral", ("[TOOL_CALLS]",)),
    ("llama3", ("<|start_header_id|>", "<|python_tag|>")),
    ("llama3", ("<|start_header_id|>", '"parameters": ')),
)
# These are special tokens in many models that were never trained to use them so.
_BY_TEMPLATE: Final = ("<|python_tag|>", "<tool_call>")
_REASONING_TAILS: Final = ("<think>", "[THINK]", "<|channel|>analysis<|message|>")


def family_of(chat_template: str, specials: Iterable[str] = ()) -> str:
    """The family that writes replies as this template shows; `plain` when it shows no tool calls."""
    names = frozenset(specials) - frozenset(_BY_TEMPLATE)
    for family, marks in _MARKS:
        if all(mark in chat_template or mark in names for mark in marks):
            return family
    return "plain"


def make_parser(name: str, *, tools: Sequence[Message] | None = None, reasoning_open: bool = False) -> ReplyParser:
    """A reader for one reply. Without tools calls stay content. Raises ConfigError when the family is not known."""
    family = FAMILIES.get(name)
    if family is None:
        known = ", ".join(FAMILIES)
        raise ConfigError(f"there is no parser {name!r} for replies", hint=f"choose one of {known}")
    return family(tools, reasoning_open=reasoning_open)


def ends_in_reasoning(prompt_tail: str) -> bool:
    """Whether a prompt that ends with this text has opened the reasoning of the reply."""
    return prompt_tail.rstrip().endswith(_REASONING_TAILS)
