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
"""What opens the reasoning, after either."""
HARMONY = (
    "{% for message in messages %}<|start|>{{ message.role }}<|message|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %} to=functions.{{ call.function.name }}<|channel|>"
    "commentary json<|message|>{{ call.function.arguments | tojson }}<|call|>{% endfor %}"
    "<|end|>{% endfor %}<|start|>assistant"
)
"""As gpt-oss's does."""
GEMMA_MARKS = "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'
GEMMA = (
    """{%- macro said(value) -%}
    {%- if value is string -%}<|"|>{{ value }}<|"|>
    {%- elif value is boolean -%}{{ 'true' if value else 'false' }}
    {%- elif value is mapping -%}{ {{- fields(value) -}} }
    {%- elif value is sequence -%}[
    {%- for one in value -%}{{ said(one) }}{{ ',' if not loop.last }}{%- endfor -%}]
    {%- else -%}{{ value }}{%- endif -%}
    {%- endmacro -%}"""
    """{%- macro fields(value) -%}
    {%- for key, one in value | dictsort -%}{{ key }}:{{ said(one) }}{{ ',' if not loop.last }}
    {%- endfor -%}
    {%- endmacro -%}"""
    "{%- for tool in tools or [] %}<|tool>{{ tool.function.name }}<tool|>{% endfor -%}"
    "{%- for turn in messages if turn.role != 'tool' -%}"
    "<|turn>{{ 'model' if turn.role == 'assistant' else turn.role }}\n{%- if turn.reasoning -%}"
    "<|channel>thought\n{{ turn.reasoning }}<channel|>{%- endif -%}"
    "{%- for call in turn.tool_calls or [] -%}<|tool_call>call:{{ call.function.name }}"
    "{ {{- fields(call.function.arguments) -}} }<tool_call|>{%- endfor -%}"
    "{%- for one in turn.tool_responses or [] -%}<|tool_response>response:{{ one.name }}"
    "{value:{{ said(one.response) }}}<tool_response|>{%- endfor -%}"
    "{{ turn.content }}{%- if not turn.tool_responses -%}<turn|>\n{%- endif -%}{%- endfor -%}"
    "{%- if not messages[-1].tool_responses -%}<|turn>model\n{%- endif -%}"
    "{%- if not enable_thinking -%}<|channel>thought\n<channel|>{%- endif -%}"
)
"""As Gemma 4's does; what tools say belongs to the message that has called them."""
CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "unit"],
}


def function(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    """A tool of a request."""
    own = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **own, **more}}


TOOLS = [function("weather", CITY), function("now")]


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
