"""What the families' chat templates ask for: system messages, thinking, channels, markers, stops.

The templates state each family's format in our words; their markers are those of its checkpoints.
"""

import json
from pathlib import Path

import pytest

from longspec_jax import LongSpec
from longspec_jax.generation.chat import render_chat
from longspec_jax.weights.hf import load_stop_tokens
from tests.generation.test_chat import with_template
from tests.kit import each_row

pytestmark = pytest.mark.full

_TURN = "{%- for m in messages %}"
_ALTERNATE = (
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
)
WITHOUT_SYSTEM = (
    "{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    + _TURN
    + _ALTERNATE
    + "{% endfor %}"
)
"""As Gemma 2's and others'."""
GEMMA_3 = (
    "{{ bos_token }}{% set first = '' %}{% set turns = messages %}"
    "{% if messages[0].role == 'system' %}"
    "{% if messages[0].content is string %}{% set first = messages[0].content + '\n\n' %}"
    "{% else %}{% set first = messages[0].content[0].text + '\n\n' %}{% endif %}"
    "{% set turns = messages[1:] %}{% endif %}"
    "{% for m in turns %}"
    + _ALTERNATE
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
    "+ (first if loop.first else '') }}"
    "{% if m.content is string %}{{ m.content | trim }}{% elif m.content is iterable %}"
    "{% for part in m.content %}{{ part.text | trim }}{% endfor %}{% endif %}"
    "{{ '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
QWEN_3_8 = (
    "{% set effort = reasoning_effort | default('xhigh') %}"
    "{% set thinks = enable_thinking is not defined or enable_thinking %}"
    "{% if effort not in ('xhigh', 'medium', 'low') %}{{ raise_exception('Unknown effort') }}"
    "{% endif %}{% set told = 'Effort: ' + effort if thinks and effort != 'medium' else '' %}"
    "{% set first = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% if told or first %}{{ '<|im_start|>system\n' + told + ('\n\n' if told and first else '') "
    "+ first + '<|im_end|>\n' }}{% endif %}{% for m in messages if m.role != 'system' %}"
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and (preserve_thinking is not "
    "defined or preserve_thinking) %}{{ '<think>\n' + (m.reasoning_content or '') + "
    "'\n</think>\n\n' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if not thinks %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
SMOLLM_3 = (
    "{% set ns = namespace(think=true, system='') %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}{% endif %}"
    "{% if '/no_think' in ns.system %}{% set ns.think = false %}"
    "{% set ns.system = ns.system.replace('/no_think', '').rstrip() %}{% endif %}"
    "{{ '<|im_start|>system\nReasoning Mode: ' + ('/think' if ns.think else '/no_think') "
    "+ '\n\n' + ns.system + '<|im_end|>\n' }}"
    "{% for m in messages if m.role != 'system' %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{{ '<|im_start|>assistant\n' + ('' if ns.think else '<think>\n\n</think>\n') }}"
)
HARMONY = (
    "{%- macro opening(role) -%}{{ '<|start|>' + role + '<|message|>' }}{%- endmacro -%}"
    "{{- opening('system') + 'Current date: ' ~ (strftime_now('%Y-%m-%d') | length) }}"
    "{{- '\nReasoning: ' + (reasoning_effort if reasoning_effort is defined else 'medium') }}"
    "{{- '\n# Valid channels: analysis, commentary, final.<|end|>' }}"
    "{%- if messages[0].role in ['system', 'developer'] %}"
    "{{- opening('developer') + '# Instructions\n\n' + messages[0].content + '<|end|>' }}"
    "{%- set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{%- if tools %}{{- '# Tools' }}{% endif %}"
    "{%- for m in turns %}{% if m.role == 'assistant' %}"
    "{%- if '<|channel|>' in m.content %}"
    "{{- raise_exception('an answer must not hold its channels') }}{% endif %}"
    "{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}"
    "{%- else %}{{- opening(m.role) + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}"
)
FAMILIES = {
    "gemma3": GEMMA_3,
    "qwen3.8": QWEN_3_8,
    "smollm3": SMOLLM_3,
    "gpt-oss": HARMONY,
}
CHAT = [
    {"role": "system", "content": "Be brief. /no_think"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>x</think>\n\nHello"},
    {"role": "user", "content": "Bye"},
]


@each_row("name", FAMILIES)
def test_a_template_of_every_family_is_rendered_as_transformers_does(name: str) -> None:
    tokenizer = with_template(FAMILIES[name])
    theirs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    assert render_chat(tokenizer, CHAT) == theirs and "Hello" in theirs and "Bye" in theirs


def test_a_system_message_that_a_family_lacks_is_explained() -> None:
    tokenizer = with_template(WITHOUT_SYSTEM)
    with pytest.raises(ValueError, match="System role not supported .*; write the system message"):
        render_chat(tokenizer, CHAT)
    with pytest.raises(ValueError, match="roles must alternate .*; pass another one") as error:
        render_chat(tokenizer, [*CHAT[1:], CHAT[1]])
    assert "system message" not in str(error.value)
    with pytest.raises(ValueError, match="must not hold its channels"):
        said = {"role": "assistant", "content": "<|channel|>analysis<|message|>hm"}
        render_chat(with_template(HARMONY), [CHAT[1], said, CHAT[3]])


@pytest.mark.parametrize(
    ("target", "generation", "expected"),
    [
        pytest.param({"eos_token_id": 106}, {"eos_token_id": [1, 106]}, (1, 106), id="gemma3"),
        pytest.param({"eos_token_id": [1, 106]}, None, (1, 106), id="gemma3 without the file"),
        pytest.param({}, {"eos_token_id": [5, 2, 7]}, (5, 2, 7), id="gpt-oss"),
    ],
)
def test_stop_tokens_beside_a_target_that_is_inside(
    target: dict, generation: dict | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """A model that also sees names them next to its ``text_config``."""
    raw = {"vocab_size": 200, "eos_token_id": None}
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": raw, **target}
    (tmp_path / "config.json").write_text(json.dumps(outer))
    if generation:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert load_stop_tokens(tmp_path) == expected


def test_a_chat_ends_at_any_of_its_stop_tokens(tmp_path: Path) -> None:
    """Of gpt-oss, which has three; the last of them is drawn here."""
    families = pytest.importorskip("tests.models.families")
    tokenizer = with_template(HARMONY)
    model = families.make_model("gpt-oss", vocab_size=len(tokenizer), max_position_embeddings=512)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    settings = tmp_path / "generation_config.json"
    settings.write_text('{"eos_token_id": []}')
    given: dict = dict(max_new_tokens=12, tree="chain:2")
    spec = LongSpec.from_pretrained(tmp_path, "ngram", dtype="float32")
    [tokens] = spec.generate([CHAT], **given).sequences
    assert len(tokens) == 12
    stop = next(at for at in range(4, 12) if tokens[at] not in tokens[:at])
    others = [each for each in range(2, len(tokenizer)) if each not in tokens][:2]
    settings.write_text(json.dumps({"eos_token_id": [*others, int(tokens[stop])]}))
    ending = LongSpec.from_pretrained(tmp_path, "ngram", dtype="float32")
    [found] = ending.generate([CHAT], **given).sequences
    assert list(found) == list(tokens[: stop + 1])
