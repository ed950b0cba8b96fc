"""Rows of each format, and the rows that are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from lazyjax.data.formats import DataError, Message, Row, find_format

CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def read(row: dict[str, Any]) -> Row:
    return find_format("x, row 1", row).read("x, row 1", row)


def user(content: str) -> Message:
    return Message("user", content)


def assistant(content: str, weight: float = 1.0, **more: Any) -> Message:
    return Message("assistant", content, weight, **more)


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"question": "a", "answer": "#### 2"}, (user("a"), assistant("#### 2"))),
        ({"prompt": "a", "completion": "b"}, (user("a"), assistant("b"))),
        ({"instruction": "a", "input": " \n", "output": "b"}, (user("a"), assistant("b"))),
        ({"instruction": "a", "input": None, "output": "b", "system": ""}, (user("a"), assistant("b"))),
        (
            {
                "instruction": "c",
                "input": "d",
                "output": "e",
                "system": "s",
                "history": [["a", "b"], ["f", "g"]],
            },
            (
                Message("system", "s"),
                user("a"),
                assistant("b"),
                user("f"),
                assistant("g"),
                user("c\n\nd"),
                assistant("e"),
            ),
        ),
        (
            {
                "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
                "system": "s",
            },
            (Message("system", "s"), user("a"), assistant("b")),
        ),
        (
            {"conversations": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
            (user("a"), assistant("b")),
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
                    {"from": "observation", "value": "2"},
                    {"from": "gpt", "value": "b"},
                ]
            },
            (
                user("a"),
                assistant("", extra={"tool_calls": [CALL]}),
                Message("tool", "2"),
                assistant("b"),
            ),
        ),
        (
            {
                "messages": [
                    {"role": "developer", "content": ""},
                    {"role": "user", "content": [{"type": "text", "text": word} for word in "ab"]},
                    {"role": "assistant", "content": "x", "weight": 0},
                    {"role": "user", "content": "c", "name": "Ann", "refusal": None},
                    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "hm"},
                    {"role": "tool", "content": "", "tool_call_id": "1"},
                    {"role": "assistant", "content": "d", "reasoning_content": "so", "thinking": "so"},
                ]
            },
            (
                Message("system", ""),
                user("ab"),
                assistant("x", 0.0),
                Message("user", "c", extra={"name": "Ann"}),
                assistant("", reasoning="hm", extra={"tool_calls": [CALL]}),
                Message("tool", "", extra={"tool_call_id": "1"}),
                assistant("d", reasoning="so"),
            ),
        ),
        (
            {
                "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                "text": "ab",
            },
            (user("a"), assistant("b")),
        ),
        (
            {
                "prompt": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b"},
                    {"role": "user", "content": "c"},
                ],
                "completion": [{"role": "assistant", "content": "d"}],
            },
            (user("a"), assistant("b", 0.0), Message("user", "c", 0.0), assistant("d")),
        ),
    ],
)
def test_a_row_says(row: dict[str, Any], messages: tuple[Message, ...]) -> None:
    found = read(row)
    assert [(message.role, message.content) for message in found.messages] == [
        (message.role, message.content) for message in messages
    ]
    for one, other in zip(found.messages, messages, strict=True):
        if one.role == "assistant":
            assert one == other
        assert one.extra == other.extra


def test_tools_come_as_objects_text_or_by_their_older_name() -> None:
    turns = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    for columns in (
        {"tools": [TOOL]},
        {"tools": '[{"type": "function", "function": {"name": "add", "parameters": {}}}]'},
        {"functions": [TOOL["function"]]},
    ):
        assert read(turns | columns).tools == (TOOL,)
    for columns in ({"tools": None}, {"tools": ""}, {"tools": []}, {}):
        assert read(turns | columns).tools == ()


def test_a_text() -> None:
    assert read({"text": "Once."}) == Row(text="Once.")


def turns(*changes: dict[str, Any]) -> dict[str, Any]:
    base = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    return {"messages": [one | change for one, change in zip(base, changes, strict=True)]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"instruction": "a", "output": " "}, "x, row 1: 'output' is empty"),
        ({"instruction": "a", "output": "b", "history": "x"}, "'history' must be a list of pairs"),
        ({"instruction": "a", "output": "b", "history": [["x"]]}, "history 1: expected a prompt"),
        ({"instruction": "a", "output": "b", "history": [["x", ""]]}, "history 1: 'response' is empty"),
        ({"text": " "}, "'text' is empty"),
        (turns({}, {"weight": -1}), "message 2: 'weight' must be 0 .context only., or from 0.001 .*-1"),
        (turns({}, {"weight": 1e-9}), "message 2: 'weight' must be"),
        (turns({}, {"weight": float("nan")}), "message 2: 'weight' must be"),
        (turns({}, {"weight": "much"}), "message 2: 'weight' must be"),
        (turns({}, {"weight": True}), "message 2: 'weight' must be"),
        (turns({}, {"weight": 0}), "every assistant message has weight 0"),
        (turns({}, {"prefix": "x"}), "message 2: key 'prefix' is not known"),
        (turns({"reasoning": "x"}, {}), "message 1: only an assistant turn can hold reasoning"),
        (turns({}, {"reasoning": "x", "thinking": "y"}), "message 2: reasoning under several keys"),
        (turns({"tool_calls": [CALL]}, {}), "message 1: only an assistant turn can call tools"),
        (turns({}, {"tool_calls": "x"}), "message 2: 'tool_calls' must be a list of objects"),
        (turns({}, {"function_call": {"name": "x"}}), "message 2: a function call must be"),
        (turns({"content": [{"type": "image_url"}]}, {}), "message 1, part 1: only parts of type 'text'"),
        (turns({}, {"content": None}), "message 2: 'content' must be text, found null"),
        (turns({"role": "tool"}, {}), "must take turns, found tool, assistant"),
        (turns({}, {}) | {"tools": "{"}, "'tools' is text, but no JSON"),
        (turns({}, {}) | {"tools": ["a"]}, "'tools' must be a list of objects"),
        (turns({"role": "system"}, {}) | {"system": "s"}, "which one is meant"),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "'value' is text, but no JSON"),
    ],
)
def test_what_is_refused_is_named(row: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        read(row)
