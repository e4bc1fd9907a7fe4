"""Toy models that reason and call tools: bytes and a few marks are tokens, and nothing is learned.

Whatever they say by themselves is noise, so what parses was held to its form by a grammar.
"""

import dataclasses
import functools
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longspec_jax import LongSpec
from tests.infer.toys import toy_spec

MARKS = "<think>", "</think>", "<tool_call>", "</tool_call>"
STOP = 0
HERMES = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}\n{% endfor %}"
)
"""Messages and calls as Qwen2.5's template writes them."""
XML = HERMES.replace(
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}',
    "<function={{ call.function.name }}>\n{% for name, value in call.function.arguments.items() %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>",
)
"""As Qwen3-Coder's does; a text where an object should be raises."""
THINKING = (
    "{% if enable_thinking is not false %}<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}"
)
"""What opens the reasoning, behind either."""
HARMONY = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %} to=functions.{{ call.function.name }}<|channel|>"
    "commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}"
    "<|end|>{% endfor %}<|start|>assistant"
)
"""As gpt-oss's does."""
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]


@functools.cache
def talking_tokenizer(
    marks: bool = True, special: bool = False, names: tuple[str, ...] = MARKS
) -> Any:
    """A token for each byte, and marks if they are wanted, which may be special tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: id for id, name in enumerate(["<end>", *letters])}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<end>"])
    if marks:
        made.add_tokens([AddedToken(mark, normalized=False, special=special) for mark in names])
    own = {"additional_special_tokens": [*names]} if marks and special else {}
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>", **own)


SIZE = 257 + len(MARKS)


@functools.cache
def talking_spec(marks: bool = True) -> LongSpec:
    """Random models of these tokens."""
    spec = toy_spec(vocab_size=SIZE, max_positions=2048)
    return dataclasses.replace(spec, tokenizer=talking_tokenizer(marks), stop_tokens=(STOP,))
