"""Which tokens of a conversation are learned."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.data import chat
from lazyjax.data.sources import DataError, Message
from lazyjax.huggingface.tensor_files import CheckpointError

#: The thinking parts of Qwen3's and Qwen3.5's templates: an empty block for a last turn without thinking
#: (and in the prompt when thinking is off), none in earlier turns.
THINKING_TEMPLATE = """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
{%- set thought = '' %}
{%- if '</think>' in message.content %}
{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}{%- endif %}
{{- content + '<|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def shipped() -> Any:
    return chat.load_tokenizer()


@pytest.fixture
def thinking() -> Any:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = THINKING_TEMPLATE
    return tokenizer


@pytest.fixture
def plain() -> Any:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = None
    return tokenizer


def _talk(*contents: str, system: str | None = None) -> tuple[Message, ...]:
    turns = zip(itertools.cycle(("user", "assistant")), contents, strict=False)
    head = () if system is None else (Message("system", system),)
    return head + tuple(Message(role, content) for role, content in turns)


def _parts(tokenizer: Any, conversation: tuple[Message, ...]) -> list[tuple[bool, str]]:
    """The encoded conversation, decoded again, cut where the mask changes."""
    [encoded] = chat.encode(tokenizer, [chat.render(tokenizer, conversation)])
    parts = []
    for learned, group in itertools.groupby(
        zip(encoded.tokens_T.tolist(), encoded.response_T.tolist(), strict=True), key=lambda pair: pair[1]
    ):
        parts.append((learned, tokenizer.decode([token for token, _ in group])))
    return parts


def test_only_the_response_is_learned(shipped: Any) -> None:
    assert _parts(shipped, _talk("What is 1 + 1?", "1 + 1 = 2\nThe answer is: 2")) == [
        (False, "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "1 + 1 = 2\nThe answer is: 2<|im_end|>"),
    ]


def test_every_assistant_turn_is_learned(shipped: Any) -> None:
    assert _parts(shipped, _talk("Hi", "Hello", "<b>?", "\n<b>! ", system="Be brief.")) == [
        (
            False,
            "<|im_start|>system\nBe brief.<|im_end|>\n"
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        (True, "Hello<|im_end|>"),
        (False, "\n<|im_start|>user\n<b>?<|im_end|>\n<|im_start|>assistant\n"),
        (True, "<b>!<|im_end|>"),
    ]


def test_an_empty_thinking_block_belongs_to_the_prompt(thinking: Any) -> None:
    assert _parts(thinking, _talk("Hi", "Hello", "Bye", "<b>Bye")) == [
        (False, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        (True, "Hello<|im_end|>"),
        (
            False,
            "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        ),
        (True, "<b>Bye<|im_end|>"),
    ]


def test_thinking_in_the_last_turn_is_learned(thinking: Any) -> None:
    assert _parts(thinking, _talk("Hi", "<think>\nhm\n</think>\n\nHello"))[1] == (
        True,
        "<think>\nhm\n</think>\n\nHello<|im_end|>",
    )


def test_a_turn_that_the_template_rewrites_is_refused(thinking: Any) -> None:
    with pytest.raises(DataError, match="before the last is rewritten by the chat template"):
        chat.render(thinking, _talk("Hi", "<think>\nhm\n</think>\n\nHello", "a", "b"))


def test_a_template_that_hides_the_response_is_refused(shipped: Any) -> None:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{{ 'go' if add_generation_prompt else '' }}"
    with pytest.raises(DataError, match="message 2: cannot tell the response from its prompt"):
        chat.render(tokenizer, _talk("Hi", "Hello"))


def test_a_template_that_refuses_is_reported(shipped: Any) -> None:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no system messages') }}"
    with pytest.raises(DataError, match="cannot write this conversation: no system messages"):
        chat.render(tokenizer, _talk("Hi", "Hello"))


def test_a_tokenizer_without_template_gets_the_plain_one(plain: Any) -> None:
    assert _parts(plain, _talk("Hi", "Hello", "Bye", "Bye!", system="Be brief.")) == [
        (False, "Be brief.\n\n### Instruction:\nHi\n\n### Response:\n"),
        (True, "Hello<|im_end|>"),
        (False, "\n\n### Instruction:\nBye\n\n### Response:\n"),
        (True, "Bye!<|im_end|>"),
    ]
    plain.eos_token = None
    with pytest.raises(DataError, match="neither a chat template nor an end-of-sequence token"):
        chat.render(plain, _talk("Hi", "Hello"))


@pytest.mark.parametrize("name", ["shipped", "thinking", "plain"])
@given(data=st.data())
def test_masks_are_exact_for_any_text(name: str, request: pytest.FixtureRequest, data: st.DataObject) -> None:
    tokenizer = request.getfixturevalue(name)
    words = st.text(st.characters(codec="utf-8", exclude_characters="<>|#"), min_size=1, max_size=30)
    content = words.map(str.strip).filter(bool)
    contents = data.draw(st.lists(content, min_size=2, max_size=6).filter(lambda items: len(items) % 2 == 0))
    conversation = _talk(*contents)
    rendered = chat.render(tokenizer, conversation)
    [encoded] = chat.encode(tokenizer, [rendered])
    assert tokenizer.decode(encoded.tokens_T) == rendered.text
    learned = "".join(text for mask, text in _parts(tokenizer, conversation) if mask)
    assert learned == "".join(f"{answer}<|im_end|>" for answer in contents[1::2])
    # Generation starts from exactly the tokens that precede the last response.
    prompt = tokenizer.encode(chat.render_prompt(tokenizer, conversation[:-1]), add_special_tokens=False)
    np.testing.assert_array_equal(encoded.tokens_T[: len(prompt)], prompt)
    assert encoded.response_T[len(prompt) :].all()
    assert not encoded.response_T[len(prompt) - 1]


def test_fingerprints_tell_tokenizers_and_templates_apart(shipped: Any, thinking: Any, plain: Any) -> None:
    prints = {chat.tokenizer_fingerprint(tokenizer) for tokenizer in (shipped, thinking, plain)}
    assert len(prints) == 3
    assert chat.tokenizer_fingerprint(chat.load_tokenizer()) == chat.tokenizer_fingerprint(shipped)


def test_a_missing_tokenizer_is_named(tmp_path: Any) -> None:
    with pytest.raises(CheckpointError, match="no such tokenizer folder"):
        chat.load_tokenizer(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"holds no tokenizer\.json"):
        chat.load_tokenizer(tmp_path)


def test_ids_may_have_gaps(shipped: Any, tmp_path: Any) -> None:
    assert chat.largest_token_id(shipped) == 2047
    shipped.save_pretrained(tmp_path)
    words = json.loads((tmp_path / "tokenizer.json").read_text())
    [last] = [token for token, number in words["model"]["vocab"].items() if number == 2047]
    words["model"]["vocab"][last] = 5000
    (tmp_path / "tokenizer.json").write_text(json.dumps(words))
    gap = chat.load_tokenizer(tmp_path)
    assert (len(gap), chat.largest_token_id(gap)) == (2048, 5000)


def test_the_token_that_ends_a_turn(shipped: Any, plain: Any) -> None:
    assert chat.end_of_turn_id(shipped) == shipped.convert_tokens_to_ids("<|im_end|>")
    assert chat.end_of_turn_id(plain) == plain.eos_token_id
    plain.chat_template = "{% for m in messages %}{{ '# ' + m.role + '\n' + m.content + '\n' }}{% endfor %}"
    plain.chat_template += "{% if add_generation_prompt %}{{ '# assistant\n' }}{% endif %}"
    assert chat.end_of_turn_id(plain) is None


def test_encoding_nothing_gives_nothing(shipped: Any) -> None:
    assert chat.encode(shipped, []) == []
