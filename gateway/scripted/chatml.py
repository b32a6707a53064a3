"""ChatML with tools and tool calls in the style of Hermes, for tokenizers whose own template knows no tools."""

from __future__ import annotations

import json
from typing import Any

TEMPLATE = r"""
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}
{{- 'Functions that may be called:\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}
{{- 'A call is written as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and tools and loop.first %}{% continue %}{% endif %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '\n' if message.content or not loop.first }}
{{- '<tool_call>\n' + {"name": call.function.name, "arguments": call.function.arguments} | tojson + '\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""


def reply_text(content: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What a model samples for a reply with tool calls; the template above writes the same in the history."""
    texts = [content] if content else []
    for name, arguments in calls:
        texts.append(
            "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) + "\n</tool_call>"
        )
    return "\n".join(texts)
