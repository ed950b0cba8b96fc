"""One row of a file as a conversation or a text, from columns of many names.

Formats, told apart by the columns of the first row:

    pairs      {"query", "response"} (MetaMathQA), {"instruction", "output"} (alpaca),
               {"question", "answer"}, {"prompt", "completion"}
    messages   {"messages": [{"role", "content"}, ...]} as OpenAI writes them
    ShareGPT   {"conversations": [{"from", "value"}, ...]}
    text       {"text"}: continued pretraining, every token is learned

Beside any of the first three, "system" (text), "history" (pairs of earlier turns) and "tools" (JSON
schemas) belong to the conversation; "input" is appended to the prompt of a pair after a blank line. A turn
may have "weight" (0: context only; 2: twice as much as by default), reasoning ("reasoning_content",
"reasoning" or "thinking"), "tool_calls", "tool_call_id" and "name". Any other key of a turn is refused,
because it could decide what is learned; any other column of a row is passed over and can be named (`unused`).

This module knows nothing about files or tokens.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

#: Roles as chat templates know them.
ROLES = ("system", "user", "assistant", "tool")
#: Other names of roles: OpenAI's and ShareGPT's.
_ROLE_NAMES = {role: role for role in ROLES} | {
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
#: Keys of a turn that are passed to the chat template as they are.
_TEMPLATE_KEYS = ("tool_call_id", "name")
#: Keys of a turn that say nothing about its text.
_BOOKKEEPING_KEYS = ("id", "timestamp", "created_at", "metadata")
#: Between the largest weight and the smallest, float32 still adds up.
_MOST_WEIGHT = 1000.0
_TURN_KEYS = ("role", "content", "from", "value", "weight", "tool_calls", "function_call")
_SURROGATE = re.compile("[\ud800-\udfff]")


class DataError(ValueError):
    """Data that cannot be found or used; the message names the file and row, and what is wrong."""


@dataclasses.dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        role: one of `ROLES`.
        content: may be empty in a system or tool turn, in one with tool calls, and in one of weight 0.
        weight: of an assistant turn's tokens in the loss, from 0 (context) up; 1 by default.
        reasoning: what the assistant thought before it answered.
        extra: further keys for the chat template, e.g. `tool_calls`, as JSON values.
    """

    role: str
    content: str
    weight: float = 1.0
    reasoning: str | None = None
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)


#: At least one user or system turn, then turns up to a final assistant turn.
Conversation = tuple[Message, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The contents of one row: a conversation, with the tools that it may use, or a text.

    Attributes:
        messages: the conversation; empty for a text.
        tools: JSON schemas of functions.
        text: all of it is learned.
    """

    messages: Conversation = ()
    tools: tuple[Mapping[str, Any], ...] = dataclasses.field(default=(), hash=False)
    text: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be used, and the words that name it and say why."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Format:
    """How the rows of one file are read.

    Attributes:
        required: columns that tell the format.
        optional: columns that are read where they are there.
        read: from (place, row) to a row; raises DataError.
    """

    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[str, Mapping[str, Any]], Row]

    def unused(self, row: Mapping[str, Any]) -> set[str]:
        """Columns of the row that nothing reads."""
        return {str(key) for key in row} - {*self.required, *self.optional}


def find_format(place: str, row: Mapping[str, Any]) -> Format:
    """The format of a file, from one of its rows; raises DataError when none or several fit."""
    found = [format_ for format_ in _FORMATS if row.keys() >= set(format_.required)]
    # Many conversations also carry their rendered text in a column of its own.
    found = [format_ for format_ in found if format_ is not _TEXT] or found
    if len(found) == 1:
        return found[0]
    known = "; ".join(", ".join(format_.required) for format_ in _FORMATS)
    problem = "fits several formats" if found else "fits no known format"
    raise DataError(
        f"{place}: a row with keys {', '.join(map(str, row)) or '(none)'} {problem}; known: {known}"
    )


def kind(value: Any) -> str:
    """A value's type in JSON's words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true/false", type(None): "null"}
    return names[type(value)] if type(value) in names else "a number"


def _missing(place: str, row: Mapping[str, Any], key: str) -> DataError:
    return DataError(f"{place}: missing key {key!r}; found {', '.join(map(str, row)) or 'none'}")


def _text(place: str, row: Mapping[str, Any], key: str, *, blank: bool = False) -> str:
    """The text under `key`: not blank unless that is allowed."""
    if key not in row:
        raise _missing(place, row, key)
    value = row[key]
    if not isinstance(value, str):
        raise DataError(f"{place}: {key!r} must be text, found {kind(value)}")
    if not blank and not value.strip():
        raise DataError(f"{place}: {key!r} is empty")
    if _SURROGATE.search(value):
        raise DataError(f"{place}: {key!r} holds half of a surrogate pair, which is not a character")
    return value


def _optional_text(place: str, row: Mapping[str, Any], key: str) -> str | None:
    """The text under `key`; None where it is left out, null or blank."""
    if key not in row or row[key] is None:
        return None
    return _text(place, row, key, blank=True) if _text(place, row, key, blank=True).strip() else None


def _pair(prompt_key: str, response_key: str) -> Format:
    """A format with one prompt and one response."""

    def read(place: str, row: Mapping[str, Any]) -> Row:
        if prompt_key in row and isinstance(row[prompt_key], list):
            return _read_turn_pair(place, row, prompt_key, response_key)
        prompt = _text(place, row, prompt_key)
        added = _optional_text(place, row, "input")
        if added is not None:
            prompt += "\n\n" + added
        messages = (
            *_history(place, row),
            Message("user", prompt),
            Message("assistant", _text(place, row, response_key)),
        )
        return _row(place, row, messages)

    return Format((prompt_key, response_key), ("input", "system", "history", "tools"), read)


def _read_turn_pair(place: str, row: Mapping[str, Any], prompt_key: str, response_key: str) -> Row:
    """Prompt and response as lists of turns: of these, only the response is learned."""
    prompt = _turns(place, row, prompt_key)
    response = _turns(place, row, response_key)
    context = [dataclasses.replace(turn, weight=0.0) for turn in prompt]
    return _row(place, row, (*context, *response))


def _history(place: str, row: Mapping[str, Any]) -> list[Message]:
    """Earlier turns as pairs of texts; all of them are learned."""
    if "history" not in row or row["history"] in (None, "", []):
        return []
    pairs = row["history"]
    if not isinstance(pairs, list):
        raise DataError(f"{place}: 'history' must be a list of pairs, found {kind(pairs)}")
    messages = []
    for number, pair in enumerate(pairs, start=1):
        pair_place = f"{place}, history {number}"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{pair_place}: expected a prompt and a response, found {kind(pair)}")
        named = dict(zip(("prompt", "response"), pair, strict=True))
        messages.append(Message("user", _text(pair_place, named, "prompt")))
        messages.append(Message("assistant", _text(pair_place, named, "response")))
    return messages


def _row(place: str, row: Mapping[str, Any], messages: Sequence[Message]) -> Row:
    """A conversation with the row's system prompt and tools, its turns checked."""
    system = _optional_text(place, row, "system")
    if system is not None:
        if any(message.role == "system" for message in messages):
            raise DataError(f"{place}: has a system message and a key 'system': which one is meant?")
        messages = (Message("system", system), *messages)
    _check_turns(place, messages)
    return Row(tuple(messages), _tools(place, row))


def _tools(place: str, row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Schemas under `tools` (or, OpenAI's older name, `functions`); a list, or its JSON text."""
    for key in ("tools", "functions"):
        if key not in row or row[key] in (None, "", []):
            continue
        tools = _from_json(place, key, row[key])
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise DataError(f"{place}: {key!r} must be a list of objects, found {kind(tools)}")
        if key == "functions":
            return tuple({"type": "function", "function": tool} for tool in tools)
        return tuple(tools)
    return ()


def _from_json(place: str, key: str, value: Any) -> Any:
    """The value, parsed where it is given as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: {key!r} is text, but no JSON: {error}") from error


def _conversation(column: str) -> Format:
    def read(place: str, row: Mapping[str, Any]) -> Row:
        return _row(place, row, _turns(place, row, column))

    return Format((column,), ("system", "tools", "functions"), read)


def _turns(place: str, row: Mapping[str, Any], column: str) -> list[Message]:
    if column not in row:
        raise _missing(place, row, column)
    turns = row[column]
    if not isinstance(turns, list):
        raise DataError(f"{place}: {column!r} must be a list, found {kind(turns)}")
    messages = []
    for number, turn in enumerate(turns, start=1):
        turn_place = f"{place}, message {number}"
        if not isinstance(turn, Mapping):
            raise DataError(f"{turn_place}: expected an object with role and content, found {kind(turn)}")
        message = _turn(turn_place, turn)
        if message.role == "system" and number > 1:
            raise DataError(f"{turn_place}: a system message can only come first")
        messages.append(message)
    return messages


def _turn(place: str, turn: Mapping[str, Any]) -> Message:
    """One turn, in OpenAI's words or in ShareGPT's."""
    known = {*_TURN_KEYS, *_REASONING_KEYS, *_TEMPLATE_KEYS, *_BOOKKEEPING_KEYS}
    for key, value in turn.items():
        if key not in known and value not in (None, "", [], {}):
            raise DataError(
                f"{place}: key {key!r} is not known, and could decide what is learned; "
                f"known: {', '.join((*_TURN_KEYS, *_REASONING_KEYS, *_TEMPLATE_KEYS))}"
            )
    sharegpt = "from" in turn and "role" not in turn
    role_key, content_key = ("from", "value") if sharegpt else ("role", "content")
    name = _text(place, turn, role_key)
    if name not in _ROLE_NAMES:
        raise DataError(f"{place}: role {name!r}; allowed: {', '.join(_ROLE_NAMES)}")
    role = _ROLE_NAMES[name]
    extra = {key: turn[key] for key in _TEMPLATE_KEYS if key in turn and turn[key] is not None}
    calls = _tool_calls(place, turn, content_key if name == "function_call" else None)
    weight = _weight(place, turn)
    if calls:
        if role != "assistant":
            raise DataError(f"{place}: only an assistant turn can call tools, this is a {role} turn")
        extra["tool_calls"] = calls
    may_be_blank = role in ("system", "tool") or bool(calls) or (role == "assistant" and weight == 0)
    content = "" if name == "function_call" else _content(place, turn, content_key, blank=may_be_blank)
    return Message(role, content, weight, _reasoning(place, turn, role), extra)


def _content(place: str, turn: Mapping[str, Any], key: str, *, blank: bool) -> str:
    """A turn's text: text itself, or a list of parts that are all text."""
    if key in turn and isinstance(turn[key], list):
        parts = []
        for number, part in enumerate(turn[key], start=1):
            part_place = f"{place}, part {number}"
            if not isinstance(part, Mapping) or "type" not in part or part["type"] != "text":
                raise DataError(f"{part_place}: only parts of type 'text' can be learned from")
            parts.append(_text(part_place, part, "text", blank=True))
        turn = {key: "".join(parts)}
    if blank and key in turn and turn[key] is None:
        return ""
    return _text(place, turn, key, blank=blank)


def _weight(place: str, turn: Mapping[str, Any]) -> float:
    if "weight" not in turn or turn["weight"] is None:
        return 1.0
    weight = turn["weight"]
    number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not number or not 0 <= weight <= _MOST_WEIGHT or 0 < weight < 1 / _MOST_WEIGHT:
        raise DataError(
            f"{place}: 'weight' must be 0 (context only), or from {1 / _MOST_WEIGHT:g} to {_MOST_WEIGHT:g} "
            f"(1: learned as usual), it is {weight!r}"
        )
    return float(weight)


def _reasoning(place: str, turn: Mapping[str, Any], role: str) -> str | None:
    found = {key: _optional_text(place, turn, key) for key in _REASONING_KEYS}
    texts = {text for text in found.values() if text is not None}
    if len(texts) > 1:
        raise DataError(f"{place}: reasoning under several keys: {', '.join(k for k in found if found[k])}")
    if texts and role != "assistant":
        raise DataError(f"{place}: only an assistant turn can hold reasoning, this is a {role} turn")
    return texts.pop() if texts else None


def _tool_calls(place: str, turn: Mapping[str, Any], text_key: str | None) -> list[Any]:
    """Calls as OpenAI writes them, also from its older single call and from ShareGPT's call as text."""
    single = None
    if text_key is not None:
        single = _from_json(place, text_key, _text(place, turn, text_key))
    elif "function_call" in turn and turn["function_call"] is not None:
        single = turn["function_call"]
    if single is not None:
        if not isinstance(single, Mapping) or not single.keys() >= {"name", "arguments"}:
            raise DataError(f"{place}: a function call must be an object with name and arguments")
        return [{"type": "function", "function": dict(single)}]
    if "tool_calls" not in turn or turn["tool_calls"] in (None, []):
        return []
    calls = turn["tool_calls"]
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise DataError(f"{place}: 'tool_calls' must be a list of objects, found {kind(calls)}")
    return calls


def _check_turns(place: str, messages: Iterable[Message]) -> None:
    """User, then assistant, in turns; between an assistant's calls and its next turn the tools' answers."""
    turns = [message for message in messages if message.role != "system"]
    if not turns or turns[-1].role != "assistant":
        raise DataError(f"{place}: the last message must be the assistant's (there is nothing to learn from)")
    if all(turn.weight == 0 for turn in turns if turn.role == "assistant"):
        raise DataError(f"{place}: every assistant message has weight 0: there is nothing to learn from")
    before: Message | None = None
    for turn in turns:
        if before is None or (before.role == "assistant" and "tool_calls" not in before.extra):
            allowed: tuple[str, ...] = ("user",)
        elif before.role == "user":
            allowed = ("assistant",)
        elif before.role == "tool":
            allowed = ("tool", "assistant")
        else:
            allowed = ("tool", "user")
        if turn.role not in allowed:
            found = ", ".join(one.role for one in turns)
            raise DataError(f"{place}: user and assistant must take turns, found {found}")
        before = turn


def _read_text(place: str, row: Mapping[str, Any]) -> Row:
    return Row(text=_text(place, row, "text"))


_TEXT = Format(("text",), (), _read_text)
_FORMATS = (
    _pair("query", "response"),
    _pair("instruction", "output"),
    _pair("question", "answer"),
    _pair("prompt", "completion"),
    _conversation("messages"),
    _conversation("conversations"),
    _TEXT,
)
