"""What the families' chat templates ask for: system messages, thinking, channels, markers, stops.

The templates state each family's format in our words; their markers are those of its checkpoints.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from longspec_jax import LongSpec
from longspec_jax.generation.chat import render_chat
from longspec_jax.weights.hf import load_stop_tokens
from tests.generation.test_chat import with_template

pytestmark = pytest.mark.full

_TURN = "{%- for m in messages %}"
_ALTERNATE = (
    "{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/...') }}{% endif %}"
)
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    + _TURN
    + _ALTERNATE
    + "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' "
    "+ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
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
QWEN_3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages[::-1] %}{% if m.role == 'user' and not ns.last %}"
    "{% set ns.last = messages | length - 1 - loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set said = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in said and loop.index0 < ns.last %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
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
MISTRAL = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}"
    + _ALTERNATE
    + "{% if m.role == 'user' %}{{ '[INST] ' + (s + '\n\n' if loop.last and s is defined else '') "
    "+ m.content + '[/INST]' }}{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)
GRANITE = (
    "{% for m in messages %}{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + m.content "
    "+ '<|end_of_text|>\n' }}{% if loop.last and add_generation_prompt %}"
    "{{ '<|start_of_role|>assistant' }}{% if controls %}{{ ' ' + controls | tojson }}{% endif %}"
    "{{ '<|end_of_role|>' }}{% endif %}{% endfor %}"
)
GLM_4 = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
OLMO_2 = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Family:
    """A template, and what it makes of a conversation of four messages."""

    template: str
    text: str
    """Without the system message where it is refused."""
    refuses: str = ""
    """What it says of a system message."""


FAMILIES = {
    "gemma2": Family(
        GEMMA_2,
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n<think>x</think>\n\nHello"
        "<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
        refuses="System role not supported",
    ),
    "gemma3": Family(
        GEMMA_3,
        "<s><start_of_turn>user\nBe brief. /no_think\n\nHi<end_of_turn>\n<start_of_turn>model\n"
        "<think>x</think>\n\nHello<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n"
        "<start_of_turn>model\n",
    ),
    "qwen3": Family(
        QWEN_3,
        "<|im_start|>system\nBe brief. /no_think<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "qwen3.8": Family(
        QWEN_3_8,
        "<|im_start|>system\nEffort: xhigh\n\nBe brief. /no_think<|im_end|>\n<|im_start|>user\n"
        "Hi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n<think>x</think>\n\nHello"
        "<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n",
    ),
    "smollm3": Family(
        SMOLLM_3,
        "<|im_start|>system\nReasoning Mode: /no_think\n\nBe brief.<|im_end|>\n<|im_start|>user\n"
        "Hi<|im_end|>\n<|im_start|>assistant\n<think>x</think>\n\nHello<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n",
    ),
    "gpt-oss": Family(
        HARMONY,
        "<|start|>system<|message|>Current date: 10\nReasoning: medium\n"
        "# Valid channels: analysis, commentary, final.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nBe brief. /no_think<|end|>"
        "<|start|>user<|message|>Hi<|end|>"
        "<|start|>assistant<|channel|>final<|message|><think>x</think>\n\nHello<|end|>"
        "<|start|>user<|message|>Bye<|end|><|start|>assistant",
    ),
    "mistral": Family(
        MISTRAL,
        "<s>[INST] Hi[/INST] <think>x</think>\n\nHello<|reserved|>"
        "[INST] Be brief. /no_think\n\nBye[/INST]",
    ),
    "phi4-mini": Family(
        PHI,
        "<|system|>Be brief. /no_think<|end|><|user|>Hi<|end|>"
        "<|assistant|><think>x</think>\n\nHello<|end|><|user|>Bye<|end|><|assistant|>",
    ),
    "granite": Family(
        GRANITE,
        "<|start_of_role|>system<|end_of_role|>Be brief. /no_think<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Hi<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|><think>x</think>\n\nHello<|end_of_text|>\n"
        "<|start_of_role|>user<|end_of_role|>Bye<|end_of_text|>\n"
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "glm4": Family(
        GLM_4,
        "[gMASK]<sop><|system|>\nBe brief. /no_think<|user|>\nHi<|assistant|>\n<think>x</think>"
        "\n\nHello<|user|>\nBye<|assistant|>\n",
    ),
    "olmo2": Family(
        OLMO_2,
        "<s><|system|>\nBe brief. /no_think\n<|user|>\nHi\n<|assistant|>\n<think>x</think>\n\n"
        "Hello<|reserved|>\n<|user|>\nBye\n<|assistant|>\n",
    ),
}
CHAT = [
    {"role": "system", "content": "Be brief. /no_think"},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>x</think>\n\nHello"},
    {"role": "user", "content": "Bye"},
]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_template_of_every_family_is_rendered(name: str) -> None:
    """To the text that its model was trained on, and as transformers does."""
    family = FAMILIES[name]
    tokenizer = with_template(family.template)
    given = CHAT[1:] if family.refuses else CHAT
    assert render_chat(tokenizer, given) == family.text
    theirs = tokenizer.apply_chat_template(given, add_generation_prompt=True, tokenize=False)
    assert theirs == family.text


def test_a_system_message_that_a_family_lacks_is_explained() -> None:
    tokenizer = with_template(GEMMA_2)
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
    """A model that also sees names them beside its ``text_config``."""
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
