"""Conversations as token ids, with a mask over the tokens to learn from.

The tokenizer's own chat template writes the conversation; the loss covers what the assistant would have
to generate: its words and the end-of-turn token of every turn, never a prompt, a header or an empty thinking
block. Where a response starts is found by rendering the prompt alone, as generation would, and checking
that the whole conversation begins with it.

This module knows nothing about files or batches.
"""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jinja2
import numpy as np
from jaxtyping import Bool, Int32

from lazyjax.data.sources import Conversation, DataError, Message, problems_folder
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
    """One conversation: token ids, and True on the T tokens that count towards the loss."""

    tokens_T: Int32[np.ndarray, " T"]
    response_T: Bool[np.ndarray, " T"]


class Rendered(NamedTuple):
    """One conversation as text; the character ranges [start, stop) of its responses."""

    text: str
    responses: tuple[tuple[int, int], ...]


def load_tokenizer(folder: pathlib.Path | str | None = None) -> Tokenizer:
    """Loads a tokenizer from a Hugging Face folder, or the one in the package; never downloads.

    Raises CheckpointError when the folder holds no usable one (`lazyjax.huggingface.tokenizer`).
    """
    return tokenizer_files.load_tokenizer(problems_folder() if folder is None else folder)


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
    return last if last in tokenizer.added_tokens_decoder else None


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Changes when any conversation may be encoded differently."""
    parts = (tokenizer.backend_tokenizer.to_str(), _template(tokenizer), str(tokenizer.special_tokens_map))
    return hashlib.blake2b("\0".join(parts).encode()).hexdigest()


def render_prompt(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """The text after which generation starts: non-thinking where the template knows the difference."""
    return _render(tokenizer, messages, add_generation_prompt=True, enable_thinking=False)


def render(tokenizer: Tokenizer, conversation: Conversation) -> Rendered:
    """Writes a conversation and finds its responses.

    Each response runs from the end of its prompt through the end-of-turn token; what the template writes
    after the last one is left out. Raises DataError when the template cannot write the conversation, or
    writes it so that the responses cannot be told apart.
    """
    text = _render(tokenizer, conversation)
    last = len(conversation) - 1
    responses = []
    for index, message in enumerate(conversation):
        if message.role != "assistant":
            continue
        start = _response_start(tokenizer, conversation, index, text)
        stop = len(text.rstrip()) if index == last else _response_stop(tokenizer, message, text, start)
        if stop <= start:
            raise DataError(f"message {index + 1}: the chat template leaves nothing of the response")
        responses.append((start, stop))
    return Rendered(text[: responses[-1][1]], tuple(responses))


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
        response_T = np.zeros(len(token_ids), np.bool_)
        for start, stop in one.responses:
            # Blanks may be trimmed from a token's range, so a range can be empty: test both ends.
            response_T |= (borders[:, 1] > start) & (borders[:, 0] < stop)
        encoded.append(Encoded(np.asarray(token_ids, np.int32), response_T))
    return encoded


def _template(tokenizer: Tokenizer) -> str:
    template = tokenizer.chat_template
    if isinstance(template, dict):  # several named templates
        template = template["default"] if "default" in template else None
    if template:
        return str(template)
    if tokenizer.eos_token is None:
        raise DataError("the tokenizer has neither a chat template nor an end-of-sequence token")
    return PLAIN_TEMPLATE


def _render(tokenizer: Tokenizer, messages: Sequence[Message], **settings: bool) -> str:
    turns = [{"role": message.role, "content": message.content} for message in messages]
    try:
        text = tokenizer.apply_chat_template(
            turns, chat_template=_template(tokenizer), tokenize=False, **settings
        )
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template cannot write this conversation: {error}") from error
    return str(text)


def _response_start(tokenizer: Tokenizer, conversation: Conversation, index: int, text: str) -> int:
    """Where the assistant starts to write message `index`."""
    before = conversation[:index]
    prompt = render_prompt(tokenizer, before)
    if text.startswith(prompt):
        return len(prompt)
    # The message brings its own thinking: the prompt that leaves thinking open fits.
    open_prompt = _render(tokenizer, before, add_generation_prompt=True)
    if text.startswith(open_prompt):
        return len(open_prompt)
    # Templates leave thinking blocks out of earlier turns: the header is then only the prompt's beginning.
    context = _render(tokenizer, before)
    content = conversation[index].content.strip()
    if text.startswith(context) and prompt.startswith(context):
        start = text.find(content, len(context))
        if start >= 0 and prompt.startswith(text[:start]):
            return start
    raise DataError(
        f"message {index + 1}: cannot tell the response from its prompt, because the chat template writes "
        f"the conversation differently from prompt plus response"
    )


def _response_stop(tokenizer: Tokenizer, message: Message, text: str, start: int) -> int:
    """The end of an earlier turn that starts at `start`: its content, then what closes a turn."""
    probe = _render(tokenizer, (Message("user", "question"), Message("assistant", "answer")))
    closing = probe[probe.rindex("answer") + len("answer") :].strip()
    content = message.content.strip()
    stop = _skip_blanks(text, start) + len(content)
    if text.endswith(content, start, stop):
        stop = _skip_blanks(text, stop)
        if text.startswith(closing, stop):
            return stop + len(closing)
    raise DataError(
        f"an assistant turn before the last is rewritten by the chat template: {content[:60]!r}; "
        f"leave thinking out of it"
    )


def _skip_blanks(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start
