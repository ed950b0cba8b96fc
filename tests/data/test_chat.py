"""Which tokens of a conversation are learned."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazyjax.data import chat
from lazyjax.data.sources import DataError, Message, Row
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


#: As DeepSeek-R1's distilled models: the prompt opens a thinking block, the conversation has none, and
#: drops what an answer thought.
OPEN_THINKING_TEMPLATE = """
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
{%- else %}{{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|><think>\\n' }}{%- endif %}
"""


@pytest.fixture
def open_thinking() -> Any:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = OPEN_THINKING_TEMPLATE
    return tokenizer


#: As Qwen3.5: the last answer has a thinking block, with or without content; the prompt opens one, or
#: closes it where thinking is off; tools and their calls are written.
REASONING_TEMPLATE = """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' + tools | tojson + '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- if loop.index0 > ns.last %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content | trim }}
{%- for call in message.tool_calls or [] %}
{{- '\\n' if message.content or not loop.first }}
{{- '<tool_call>' + call.function.name }}
{%- for name, value in call.function.arguments | items %}{{- ' ' + name + '=' + value | string }}{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- else %}{{- message.content }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- set off = enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' if off else '<think>\\n' }}
{%- endif %}
"""


@pytest.fixture
def reasoning() -> Any:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = REASONING_TEMPLATE
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
    with pytest.raises(DataError, match="message 2: an assistant turn is rewritten by the chat template"):
        chat.render(thinking, _talk("Hi", "<think>\nhm\n</think>\n\nHello", "a", "b"))


def test_a_template_that_hides_the_response_is_refused(shipped: Any) -> None:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = "{{ messages | length }}{{ 'go' if add_generation_prompt else '' }}"
    with pytest.raises(DataError, match="message 1: the chat template leaves out what this user turn says"):
        chat.render(tokenizer, _talk("Hi", "Hello"))
    tokenizer.chat_template = "{{ messages[-1].content | upper }} {{ messages[0].content }}"
    with pytest.raises(DataError, match="message 2: the chat template leaves out what this assistant turn"):
        chat.render(tokenizer, _talk("Hi", "Hello"))
    tokenizer.chat_template = "{{ '#' * (messages[-1].content | length) }}" + (
        "{% for message in messages %} {{ message.content }}{% endfor %}"
    )
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


def _learned(tokenizer: Any, row: Row) -> list[str]:
    [encoded] = chat.encode(tokenizer, [chat.render_row(tokenizer, row)])
    pairs = zip(encoded.tokens_T.tolist(), encoded.response_T.tolist(), strict=True)
    groups = itertools.groupby(pairs, key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in group]) for learned, group in groups if learned]


@pytest.mark.parametrize("answer", ["A", "n", "an", "s", "<", "Assistant", "<|", "think", "Paris"])
def test_letters_of_a_header_are_never_learned(open_thinking: Any, answer: str) -> None:
    expected = [f"{answer}<|im_end|>"]
    assert _learned(open_thinking, Row(_talk("Which?", answer))) == expected
    assert _learned(open_thinking, Row(_talk("Which?", answer, "A", answer))) == expected * 2


def test_thinking_that_a_template_drops_is_not_lost_without_a_word(open_thinking: Any) -> None:
    with pytest.raises(DataError, match="message 2: an assistant turn is rewritten by the chat template"):
        chat.render(open_thinking, _talk("Hi", "<think>\nhm\n</think>\n\nHello"))


@pytest.mark.parametrize("answer", ["assistant", "as", "<", "im_start", "A"])
def test_an_earlier_answer_may_be_a_piece_of_the_header(reasoning: Any, answer: str) -> None:
    assert _learned(reasoning, Row(_talk("Hi", answer, "Bye", answer))) == [f"{answer}<|im_end|>"] * 2


def test_a_turn_of_weight_0_is_context(reasoning: Any, shipped: Any) -> None:
    talk = list(_talk("Hi", "No", "Bye", "Yes", "So", "End"))
    talk[3] = dataclasses.replace(talk[3], weight=0.0)
    for tokenizer in (reasoning, shipped):
        assert _learned(tokenizer, Row(tuple(talk))) == ["No<|im_end|>", "End<|im_end|>"]
    talk[3] = dataclasses.replace(talk[3], weight=0.0, reasoning="left out, as in generation")
    assert _learned(reasoning, Row(tuple(talk))) == ["No<|im_end|>", "End<|im_end|>"]


def test_a_turn_counts_with_its_weight(reasoning: Any, shipped: Any) -> None:
    talk = list(_talk("Hi", "No", "Bye", "Yes", "So", "End"))
    talk[1] = dataclasses.replace(talk[1], weight=0.25)
    talk[3] = dataclasses.replace(talk[3], weight=2.5)
    for tokenizer in (reasoning, shipped):
        plain, weighted = chat.encode(
            tokenizer, [chat.render(tokenizer, row) for row in (_talk(*"abcdef"), tuple(talk))]
        )
        assert plain.response_T.dtype == np.bool_
        assert weighted.response_T.dtype == np.float32
        text = [
            (weight, tokenizer.decode(weighted.tokens_T[weighted.response_T == weight]))
            for weight in (0.25, 2.5, 1)
        ]
        assert text == [(0.25, "No<|im_end|>"), (2.5, "Yes<|im_end|>"), (1, "End<|im_end|>")]


def test_reasoning_is_learned_where_the_template_writes_it(reasoning: Any, shipped: Any) -> None:
    question, answer = _talk("Hi", "Hello")
    thought = (question, dataclasses.replace(answer, reasoning="they greet"))
    assert _learned(reasoning, Row(thought)) == ["they greet\n</think>\n\nHello<|im_end|>"]
    with pytest.raises(DataError, match=r"message 2: .* does not write the turn's .reasoning_content"):
        chat.render(shipped, thought)
    # Templates leave it out of earlier turns.
    with pytest.raises(DataError, match=r"message 2: .* does not write the turn's .reasoning_content"):
        chat.render(reasoning, (*thought, *_talk("Bye", "Bye")))


ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("arguments", [{"a": 2, "b": 3}, '{"a": 2, "b": 3}'])
@pytest.mark.parametrize("words", ["", "Let me add."])
def test_tools_and_calls(reasoning: Any, shipped: Any, arguments: Any, words: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    talk = (
        Message("user", "2 + 3?"),
        Message("assistant", words, extra={"tool_calls": [call]}),
        Message("tool", "5"),
        Message("assistant", "It is 5."),
    )
    row = Row(talk, (ADD,))
    calls = (words + "\n" if words else "") + "<tool_call>add a=2 b=3</tool_call><|im_end|>"
    assert _learned(reasoning, row) == [calls, "It is 5.<|im_end|>"]
    assert '"name": "add"' in chat.render_row(reasoning, row).text
    assert _learned(reasoning, Row(talk[:2], (ADD,))) == [calls]
    with pytest.raises(DataError, match=r"message 2: .* does not write the turn's 'tool_calls'"):
        chat.render(shipped, talk)
    with pytest.raises(DataError, match="the chat template does not write 'tools'"):
        chat.render(shipped, _talk("Hi", "Hello"), (ADD,))


def test_what_a_template_leaves_out_is_refused(shipped: Any) -> None:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}" + (
        "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt else '' }}"
    )
    assert _learned(tokenizer, Row(_talk("Hi", "Hello"))) == ["Hello<|im_end|>"]
    with pytest.raises(DataError, match="message 1: the chat template leaves out what this system turn says"):
        chat.render(tokenizer, _talk("Hi", "Hello", system="Be brief."))
    # An empty system message says nothing that could be left out.
    chat.render(tokenizer, _talk("Hi", "Hello", system=""))
    assert _parts(shipped, _talk("Hi", "Hello", system=""))[0][1].startswith("<|im_start|>system\n<|im_end|>")


def test_named_templates(shipped: Any, tmp_path: Any) -> None:
    tokenizer = chat.load_tokenizer()
    tokenizer.chat_template = {"short": OPEN_THINKING_TEMPLATE, "tool_use": REASONING_TEMPLATE}
    with pytest.raises(DataError, match=r"templates named short, tool_use, and none is the default"):
        chat.render(tokenizer, _talk("Hi", "Hello"))
    # As in Transformers, rows with tools have a template of their own.
    assert "# Tools" in chat.render(tokenizer, _talk("Hi", "Hello"), (ADD,)).text
    assert chat.tokenizer_fingerprint(tokenizer) != chat.tokenizer_fingerprint(shipped)
    with pytest.raises(DataError, match=r"data\.chat_template: 'long' cannot be read.*short, tool_use"):
        chat.choose_template(tokenizer, "long")
    chat.choose_template(tokenizer, "short")
    assert chat.render(tokenizer, _talk("Hi", "Hello")).text.startswith("<|User|>Hi")
    (tmp_path / "mine.jinja").write_text(REASONING_TEMPLATE)
    chat.choose_template(tokenizer, str(tmp_path / "mine.jinja"))
    assert chat.render(tokenizer, _talk("Hi", "Hello")).text.startswith("<|im_start|>user")


def test_a_text_is_learned_whole_and_ends(shipped: Any) -> None:
    assert _learned(shipped, Row(text="Once upon <b>.\n")) == ["Once upon <b>.\n<|im_end|>"]


@pytest.mark.parametrize("name", ["shipped", "thinking", "plain", "open_thinking", "reasoning"])
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
    if name == "open_thinking":
        return  # its prompt opens a thinking block that no conversation has
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
