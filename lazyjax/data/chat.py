"""Conversations as token ids, with a mask over the tokens to learn from.

The tokenizer's own chat template writes the conversation; the loss covers what the assistant would have
to generate: its words and the end-of-turn token of every turn that has a weight, never a prompt, a header
or an empty thinking block. Where a response starts is found by rendering the prompt alone, as generation
would; where that does not fit, by rendering the conversation with a marker in the response's place.

What a row says and the template does not write (a system prompt, tools, reasoning) would be lost without
a word, so it is refused.

This module knows nothing about files or batches.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jaxtyping import Bool, Float32, Int32

from lazyjax.data.formats import Conversation, DataError, Message, Row
from lazyjax.data.sources import expanded, problems_folder
from lazyjax.huggingface import tokenizer as tokenizer_files

#: A transformers tokenizer (transformers is imported only when one is loaded: it takes seconds).
Tokenizer = Any
#: Used for a tokenizer without a chat template: headers in plain words, each response closed by the
#: tokenizer's end-of-sequence token, which is therefore the only special token it needs.
PLAIN_TEMPLATE = (
    "{{- bos_token if bos_token is defined else '' }}"
    "{%- for message in messages %}"
    "{%- if message.role == 'system' %}{{- message.content + '\\n\\n' }}"
    "{%- elif message.role == 'user' %}{{- '### Instruction:\\n' + message.content + '\\n\\n' }}"
    "{%- else %}{{- '### Response:\\n' + message.content + eos_token + '\\n\\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '### Response:\\n' }}{%- endif %}"
)


class Encoded(NamedTuple):
    """One row: token ids, and True on the T tokens that count towards the loss, or their weights."""

    tokens_T: Int32[np.ndarray, " T"]
    response_T: Bool[np.ndarray, " T"] | Float32[np.ndarray, " T"]


class Rendered(NamedTuple):
    """One row as text; the character ranges [start, stop) that are learned, and the weight of each."""

    text: str
    responses: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]


def load_tokenizer(folder: pathlib.Path | str | None = None) -> Tokenizer:
    """Loads a tokenizer from a Hugging Face folder, or the one in the package; never downloads.

    Raises CheckpointError when the folder holds no usable one (`lazyjax.huggingface.tokenizer`).
    """
    return tokenizer_files.load_tokenizer(problems_folder() if folder is None else folder)


def choose_template(tokenizer: Tokenizer, name: str) -> None:
    """Makes another chat template the tokenizer's own.

    Args:
        name: of one of the tokenizer's named templates, or a file with a Jinja template.

    Raises DataError for neither.
    """
    templates = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if name in templates:
        tokenizer.chat_template = templates[name]
        return
    path = expanded(name)
    try:
        tokenizer.chat_template = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        named = f"; the tokenizer's named templates: {', '.join(templates)}" if templates else ""
        raise DataError(f"data.chat_template: {name!r} cannot be read ({error}){named}") from error


def default_template(tokenizer: Tokenizer) -> str | None:
    """The template that rows without tools are written with; None for named ones without a default."""
    named = isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template
    return None if named else _template(tokenizer)


def largest_token_id(tokenizer: Tokenizer) -> int:
    """The largest id that a text can get; ids may have gaps, so this can exceed the number of tokens."""
    return int(max(tokenizer.get_vocab().values()))


def padding_token_id(tokenizer: Tokenizer) -> int:
    """The token that fills padding: the tokenizer's own, else its end of sequence, else 0."""
    for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token_id is not None:
            return int(token_id)
    return 0


def end_of_turn_id(tokenizer: Tokenizer) -> int | None:
    """The special token that the chat template ends an assistant's turn with; None if it writes none."""
    probe = (Message("user", "question"), Message("assistant", "answer"))
    [encoded] = encode(tokenizer, [render(tokenizer, probe)])
    last = int(encoded.tokens_T[-1])
    return last if is_special(tokenizer, last) else None


def is_special(tokenizer: Tokenizer, token_id: int) -> bool:
    """Whether a token never occurs in ordinary text, and so can end a turn."""
    return token_id in tokenizer.added_tokens_decoder


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Changes when any conversation may be encoded differently."""
    template = tokenizer.chat_template
    words = json.dumps(template) if isinstance(template, dict) else _template(tokenizer)
    parts = (tokenizer.backend_tokenizer.to_str(), words, str(tokenizer.special_tokens_map))
    return hashlib.blake2b("\0".join(parts).encode()).hexdigest()


def render_prompt(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
) -> str:
    """The text after which generation starts: non-thinking where the template knows the difference."""
    return _render(tokenizer, messages, tools, add_generation_prompt=True, enable_thinking=False)


def render_row(tokenizer: Tokenizer, row: Row) -> Rendered:
    """Writes a conversation or a text; see `render`. A text is learned whole, with the token that ends it."""
    if row.text is None:
        return render(tokenizer, row.messages, row.tools)
    end = tokenizer.eos_token or ""
    # The first token is never a target, so a beginning-of-sequence token costs nothing.
    start = tokenizer.bos_token if _adds_bos(tokenizer) else ""
    text = start + row.text + end
    return Rendered(text, ((len(start), len(text)),), (1.0,))


def render(
    tokenizer: Tokenizer, conversation: Conversation, tools: Sequence[Mapping[str, Any]] = ()
) -> Rendered:
    """Writes a conversation and finds its responses.

    Each response of an assistant turn with a weight runs from the end of its prompt through the
    end-of-turn token; what the template writes after the last one is left out. Raises DataError when the
    template cannot write the conversation, leaves out a part of it, or writes it so that the responses
    cannot be told apart.
    """
    row = Row(tuple(conversation), tuple(tools))
    text = _render(tokenizer, conversation, tools)
    last = len(conversation) - 1
    responses, weights = [], []
    for index, message in enumerate(conversation):
        _check_calls(tokenizer, row, index, text)
        if message.role != "assistant" or message.weight == 0:
            _check_context(tokenizer, row, index, text)
            continue
        start = _response_start(tokenizer, row, index, text)
        stop = len(text.rstrip()) if index == last else _response_stop(tokenizer, row, index, text)
        if stop <= start:
            raise DataError(f"message {index + 1}: the chat template leaves nothing of the response")
        _check_response(index, message, text[start:stop])
        responses.append((start, stop))
        weights.append(message.weight)
    if tools and _render(tokenizer, conversation, (), template=_template(tokenizer, tools)) == text:
        raise DataError("the chat template does not write 'tools', so the model would not see them")
    return Rendered(text[: responses[-1][1]], tuple(responses), tuple(weights))


def encode(tokenizer: Tokenizer, rendered: Sequence[Rendered]) -> list[Encoded]:
    """Tokenizes rendered conversations together (the tokenizer uses all cores)."""
    if not rendered:
        return []
    encodings = tokenizer(
        [one.text for one in rendered],
        add_special_tokens=False,  # the template has written them
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    encoded = []
    for one, token_ids, offsets in zip(
        rendered, encodings["input_ids"], encodings["offset_mapping"], strict=True
    ):
        borders = np.asarray(offsets, np.int64).reshape(-1, 2)
        plain = all(weight == 1 for weight in one.weights)
        response_T: np.ndarray = np.zeros(len(token_ids), np.bool_ if plain else np.float32)
        for (start, stop), weight in zip(one.responses, one.weights, strict=True):
            # Blanks may be trimmed from a token's range, so a range can be empty: test both ends.
            within_T = (borders[:, 1] > start) & (borders[:, 0] < stop)
            response_T[within_T] = np.maximum(response_T[within_T], response_T.dtype.type(weight))
        encoded.append(Encoded(np.asarray(token_ids, np.int32), response_T))
    return encoded


def _adds_bos(tokenizer: Tokenizer) -> bool:
    ids = tokenizer("a")["input_ids"]
    return tokenizer.bos_token_id is not None and ids[:1] == [tokenizer.bos_token_id]


def _template(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several named templates
        if tools and "tool_use" in template:
            return str(template["tool_use"])
        if "default" not in template:
            raise DataError(
                f"the tokenizer has chat templates named {', '.join(template)}, and none is the default: "
                f"choose one as data.chat_template"
            )
        template = template["default"]
    if template:
        return str(template)
    if tokenizer.eos_token is None:
        raise DataError("the tokenizer has neither a chat template nor an end-of-sequence token")
    return PLAIN_TEMPLATE


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    *,
    template: str | None = None,
    **settings: bool,
) -> str:
    """The text that a template writes; by default the tokenizer's own template."""
    if template is None:
        template = _template(tokenizer, tools)

    def write(*, parsed: bool) -> str:
        turns = [_turn(message, parsed=parsed) for message in messages]
        text = tokenizer.apply_chat_template(
            turns, tools=list(tools) or None, chat_template=template, tokenize=False, **settings
        )
        return str(text)

    # Templates run arbitrary expressions over the row: anything can go wrong inside.
    wrong = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError)
    try:
        return write(parsed=False)
    except wrong as error:
        if any("tool_calls" in message.extra for message in messages):
            try:
                return write(parsed=True)
            except wrong:
                pass
        raise DataError(f"the chat template cannot write this conversation: {error}") from error


def _turn(message: Message, *, parsed: bool) -> dict[str, Any]:
    """A message as templates expect it.

    Args:
        parsed: arguments of tool calls as objects; OpenAI writes them as JSON text, some templates need
            the object.
    """
    turn: dict[str, Any] = {"role": message.role, "content": message.content, **message.extra}
    if message.reasoning is not None:
        turn["reasoning_content"] = turn["thinking"] = message.reasoning
    if parsed and "tool_calls" in turn:
        turn["tool_calls"] = [_with_parsed_arguments(call) for call in turn["tool_calls"]]
    return turn


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    inner = call["function"] if "function" in call else call
    arguments = inner["arguments"] if "arguments" in inner else {}
    inner = {**inner, "arguments": json.loads(arguments) if isinstance(arguments, str) else arguments}
    return {**call, "function": inner} if "function" in call else inner


def _around(tokenizer: Tokenizer, row: Row, index: int, text: str) -> tuple[str, str]:
    """The text that the template writes before and after the content of message `index`.

    Found by writing the conversation with a marker (a word that is not in `text`, the row as written) in
    the content's place. Raises DataError when the template leaves that content out, or repeats it.
    """
    marker = "Marker0"
    while marker in text:
        marker += "0"
    message = dataclasses.replace(row.messages[index], content=marker)
    marked = (*row.messages[:index], message, *row.messages[index + 1 :])
    parts = _render(tokenizer, marked, row.tools).split(marker)
    if len(parts) != 2:
        found = "leaves out" if len(parts) == 1 else "repeats"
        raise DataError(f"message {index + 1}: the chat template {found} what this {message.role} turn says")
    return parts[0], parts[1]


def _response_start(tokenizer: Tokenizer, row: Row, index: int, text: str) -> int:
    """Where the assistant starts to write message `index`."""
    before = row.messages[:index]
    prompt = render_prompt(tokenizer, before, row.tools)
    if text.startswith(prompt):
        return len(prompt)
    # The message brings its own thinking: the prompt that leaves thinking open fits.
    open_prompt = _render(tokenizer, before, row.tools, add_generation_prompt=True)
    if text.startswith(open_prompt):
        return len(open_prompt)
    # The template begins a thinking block in the prompt that it does not write here, as for earlier turns.
    header, _ = _around(tokenizer, row, index, text)
    if text.startswith(header):
        return len(header)
    raise DataError(
        f"message {index + 1}: cannot tell the response from its prompt, because the chat template writes "
        f"the conversation differently from prompt plus response"
    )


def _response_stop(tokenizer: Tokenizer, row: Row, index: int, text: str) -> int:
    """The end of an earlier assistant turn: its words, then what closes a turn."""
    _, after = _around(tokenizer, row, index, text)
    until = dataclasses.replace(row, messages=row.messages[: index + 1])
    _, closing = _around(tokenizer, until, index, text)
    closing = closing.rstrip()
    # Tool calls follow without a break where a turn says nothing else.
    for rest, end in ((after, closing), (after.lstrip(), closing.lstrip())):
        if text.endswith(rest) and rest.startswith(end):
            return len(text) - len(rest) + len(end)
    raise DataError(
        f"message {index + 1}: cannot tell where the response ends, because the chat template writes a turn "
        f"differently when others follow"
    )


def _check_response(index: int, message: Message, response: str) -> None:
    """All that an assistant turn says must be in what is learned of it."""
    parts = [part for part in re.split("</?think>", message.content) if part.strip()]
    if not _holds(response, parts):
        raise DataError(
            f"message {index + 1}: an assistant turn is rewritten by the chat template, which leaves out a "
            f"part of {message.content[:60]!r}; leave thinking out of it, or give it weight 0"
        )
    if message.reasoning is not None and not _holds(response, [message.reasoning]):
        raise DataError(
            f"message {index + 1}: the chat template does not write the turn's 'reasoning_content' "
            f"({message.reasoning[:60]!r}); leave it out, or give the turn weight 0"
        )


def _check_context(tokenizer: Tokenizer, row: Row, index: int, text: str) -> None:
    """The words of a turn that is not learned must be somewhere in the text; else raises DataError."""
    message = row.messages[index]
    # Thinking of earlier turns is left out in generation too.
    content = message.content.rpartition("</think>")[2] if message.role == "assistant" else message.content
    if not _holds(text, [content]):
        # A template may quote or escape: then it is enough that it writes the turn at all.
        _around(tokenizer, row, index, text)


def _check_calls(tokenizer: Tokenizer, row: Row, index: int, text: str) -> None:
    """A turn's tool calls must change the text; raises DataError otherwise."""
    message = row.messages[index]
    if "tool_calls" not in message.extra:
        return
    extra = {key: value for key, value in message.extra.items() if key != "tool_calls"}
    without = dataclasses.replace(message, extra=extra)
    if _render(tokenizer, (*row.messages[:index], without, *row.messages[index + 1 :]), row.tools) == text:
        raise DataError(f"message {index + 1}: the chat template does not write the turn's 'tool_calls'")


def _holds(text: str, parts: Sequence[str]) -> bool:
    """Whether all parts are in the text, apart from blanks."""
    if all(part.strip() in text for part in parts):
        return True
    squeezed = "".join(text.split())
    return all("".join(part.split()) in squeezed for part in parts)
