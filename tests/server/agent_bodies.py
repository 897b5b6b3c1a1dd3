"""Bodies of Messages and Responses as agents send them."""

from __future__ import annotations

from typing import Any

from spd.conversation.tool_choice import function_tool
from tests.server.conftest import MESSAGES, QUESTION

TOOL = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
TWO_CALLS = 'Let me.\n<tool_call>{"name": "read", "arguments": {"path": "a"}}</tool_call>\n' * 2
THINKING_AND_CALLS = "Hm.\n</think>\n" + TWO_CALLS
CALL = {"path": "a"}
USER = {"role": "user", "content": "Hi"}
PLAIN = {"max_tokens": 24, "temperature": 0, "messages": MESSAGES}


def messages_body(**fields: Any) -> dict[str, Any]:
    """Return a body of Messages."""
    tools = [{"name": "read", "input_schema": TOOL, "cache_control": {"type": "ephemeral"}}]
    body = {
        "max_tokens": 32000,
        "messages": MESSAGES,
        "tools": tools,
        "thinking": {"type": "adaptive"},
    }
    return {**body, **fields}


def response_body(**fields: Any) -> dict[str, Any]:
    """Return a body of Responses."""
    tools = [{"type": "function", "name": "read", "parameters": TOOL, "strict": False}]
    return {"input": QUESTION, "tools": tools, "reasoning": {"effort": "high"}, **fields}


def body_without_thinking(path: str, **fields: Any) -> dict[str, Any]:
    """Return a body of either, or of chat completions, that asks for no thinking."""
    if "resp" in path:
        return response_body(reasoning={}, **fields)
    chat = {
        "messages": MESSAGES,
        "tools": [function_tool({"name": "read", "parameters": TOOL})],
        **fields,
    }
    return chat if "chat" in path else messages_body(thinking={"type": "disabled"}, **fields)


def blocks_message(*blocks: Any, role: str = "user") -> dict[str, Any]:
    """Return a message of blocks; one of text may be a text."""
    parts = [
        {"type": "text", "text": block} if isinstance(block, str) else block for block in blocks
    ]
    return {"role": role, "content": parts}


def tool_use(**fields: Any) -> dict[str, Any]:
    """Return a call in a message."""
    return {"type": "tool_use", "id": "c", "name": "read", "input": {}, **fields}


def tool_result(content: Any, **fields: Any) -> dict[str, Any]:
    """Return the result of a call."""
    return {"type": "tool_result", "tool_use_id": "c", "content": content, **fields}


def unanswered_call(call: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a conversation with a call that has no result."""
    return [USER, blocks_message(call, role="assistant"), USER]


def without_ids(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return parts with all ids replaced by 0."""
    return [{**part, "id": 0, "call_id": 0} for part in parts]
