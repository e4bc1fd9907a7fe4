"""Chat messages to text: the text of transformers, with bounds on time and memory."""

import copy
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from longspec_jax.generation import template
from longspec_jax.generation.chat import VICUNA_TEMPLATE, plain_messages, render_chat
from longspec_jax.generation.template import render
from tests.generation.test_text import byte_level
from tests.kit import each_row

LLAMA_3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ "
    "message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
LLAMA_31 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "Today Date: " + date_string + "\n\n" + system_message }}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'ipython' %}{{ raise_exception("no tools") }}{% endif %}
    {{- '[' + message['role'] + ']\n\n'+ message['content'] | trim + '[eot]' }}
{%- endfor %}
"""
QWEN_2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_3 = """{%- set ns = namespace(multi_step=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step and message.role == "user" and message.content is string and
        not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
    {{- ns.last ~ '|' ~ loop.index0 ~ '|' ~ content }}
    {%- if loop.last or (not loop.last and loop.nextitem) %}{{- loop.length }}{%- endif %}
{%- endfor %}"""
ODDS_AND_ENDS = """{% macro turn(role, text='') -%}<{{ role }}>{{ text }}
    {{- caller() if caller }}{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{% continue %}{% endif %}
    {%- generation %}{{ turn(message.role, message.content) }}{% endgeneration %}
    {%- call turn('x') %} inner {% endcall %}
    {{ {'a': [1, 'é', none, true], 'b': ('<', "'")} | tojson(indent=2) }} {{ [1, none] }} {{ none }}
    {{ message | items | list }} {{ undefined }} {{ undefined is defined }}
    {{ "%s-%03d" % ('a', 7) }}
    {{ 'a,b'.split(',') | join('; ') }}
    {{ 'a' * 3 }} {{ 2 ** 3 }} {{ 'a' ~ 1 ~ none ~ [2] }}
    {{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join }}
    {{ messages | map(attribute='role') | unique | sort | list }} {{ range(3) | list + [4] }}
    {{ dict(a=1) }} {{ namespace(self=1, format=2).format }}
    {{ message.content | replace('a', 'bb') | indent(2) | upper }} {{ 7 // 2 % 2 }}
    {%- for a, b in [(1, 2), (3, 4)] if a > 1 recursive %}{{ a }}{{ b }}{% else %}none{% endfor %}
    {%- if loop.index > 2 %}{% break %}{% endif %}
{%- endfor %}
{%- set text %}set block {{ add_generation_prompt }}{% endset %}{{ text }}
"""
STYLES = dict(
    llama_3=LLAMA_3,
    llama_31=LLAMA_31,
    qwen_2=QWEN_2,
    qwen_3=QWEN_3,
    vicuna=VICUNA_TEMPLATE,
    odds_and_ends=ODDS_AND_ENDS,
)
MESSAGES = [
    {"role": "system", "content": "a é {{ no }} "},
    {"role": "user", "content": "hm? <s>"},
    {"role": "assistant", "content": "<think>a</think>\n b", "extra": {"a": [1]}},
    {"role": "user", "content": " 饕 \n"},
]


def with_template(template: str | None) -> Any:
    tokenizer = copy.copy(byte_level())
    tokenizer.eos_token = "<|reserved|>"
    tokenizer.chat_template = template
    return tokenizer


@each_row("style", STYLES)
@each_row("messages", [MESSAGES, MESSAGES[1:], MESSAGES[:2]])
def test_the_text_is_that_of_transformers(style, messages) -> None:
    tokenizer = with_template(STYLES[style])
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert render_chat(tokenizer, messages) == theirs
    assert render_chat(with_template(None), messages, STYLES[style]) == theirs


def test_a_field_of_a_message_that_is_none_is_absent() -> None:
    # So does transformers 5.23; 5.20 still hands such a field to the template.
    tokenizer = with_template(ODDS_AND_ENDS)
    given = [{**message, "name": None} for message in MESSAGES]
    assert render_chat(tokenizer, given) == render_chat(tokenizer, MESSAGES)


def test_templates_have_names() -> None:
    tokenizer = with_template(None)
    tokenizer.chat_template = {"default": QWEN_2, "other": "{{ messages[0].content }}"}
    assert render_chat(tokenizer, MESSAGES) == render_chat(tokenizer, MESSAGES, QWEN_2)
    assert render_chat(tokenizer, MESSAGES[3:], "other") == " 饕 \n"


LARGE = "{% set a = 'a' * 10**6 %}"


def many(body: str, loop: str = "for i in range(10**5)") -> str:
    return f"{{% {loop} %}}{body}{{% endfor %}}"


def growing(step: str, start: str = "'a'") -> str:
    """A value that is replaced a hundred times."""
    begin = f"{{% set n = namespace(s={start}) %}}"
    return begin + many(f"{{% set n.s = {step} %}}", "for i in range(100)")


def macro(body: str, call: str) -> str:
    return f"{{% macro m(n) %}}{body}{{% endmacro %}}{{{{ {call} }}}}"


ENDLESS = {
    "loops in loops": many(many("")),
    "nothing passes": many(many("", "for i in range(10**5) if 0")),
    "range": many("", "for i in range(10**12)"),
    "macros": macro("{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}", "m(60)"),
    "a macro of itself": macro("{{ m(n) }}", "m(1)"),
    "a loop of itself": many(
        "{% if i %}{{ loop([i-1, i-1]) }}{% endif %}", "for i in [60] recursive"
    ),
    "filters": many("{{ range(10**5) | sum }}"),
    "powers": "{{ 10 ** (10 ** 10) }}",
    "squares": growing("n.s * n.s", "7"),
    "text": "{{ 'a' * 10**12 }}",
    "list": "{{ [0] * 10**10 }}",
    "doubled": growing("n.s ~ n.s"),
    "added": growing("n.s + n.s"),
    "lists": growing("[n.s, n.s]") + "{{ n.s }}",
    "objects": growing("{1: n.s, 2: n.s}") + "{{ n.s | tojson }}",
    "blocks": LARGE + "{% set b %}" + many("{{ a }}") + "{% endset %}",
    "own text": "{% set b %}" + many("x" * 10**4) + "{% endset %}",
    "method": "{{ 'a'.ljust(10**10) }}",
    "filter": "{{ 'a' | center(10000000000) }}",
    "indent": r"{{ 'a\n' | indent(10000000000) }}",
    "indent of JSON": "{{ [1] | tojson(indent=10000000000) }}",
    "width": "{{ '{:9999999999}'.format(1) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "computed percent": "{{ '%*d' % (10000000000, 1) }}",
    "long": "x" * (2**26 + 1),
    "joined": "{{ range(10**5) | join('a' * 10**4) }}",
    "joined as they come": "{{ range(10**5) | map('string') | join('a' * 10**4) }}",
    "joined by a method": "{{ ('a' * 10**4).join(['b'] * 10**5) }}",
    "joined lists": "{% set a = ['a' * 10**6] * 60 %}{{ ([a] * 10**4) | join }}",
    "replaced": "{{ ('a' * 10**6) | replace('a', 'b' * 10**4) }}",
    "replaced nothing": "{{ ('a' * 10**6) | replace('', 'b' * 10**4) }}",
    "replaced by a method": "{{ ('a' * 10**6).replace(new='b' * 10**4, old='a') }}"
    "{{ ('a' * 10**6).replace('a', 'b' * 10**4) }}",
    "written": growing("[n.s, n.s]") + "{{ n.s | string }}",
    "written in capitals": growing("(n.s, n.s)") + "{{ n.s | upper }}",
    "hashed": growing("(n.s, n.s)") + "{{ {n.s: 1} }}",
    "flattened": "{{ ([[0]] * 10**5) | sum(start=[]) }}",
    "batch": "{{ [1] | batch(10**10, 0) | list }}",
    "letters": "{{ ('a' * 6 * 10**7) | list }}",
    "words": "{{ ('a ' * 3 * 10**7).split() }}",
    "defaults": "{{ range(10**5) | map(attribute='x', default='a' * 10**6) | sort }}",
    "found from the end": "{{ ('a' * 3 * 10**7).rfind('b' + 'a' * 10**7) }}",
    "stripped": "{{ ('a' * 3 * 10**7).strip('b' * 10**7 + 'a') }}",
    "divided": "{% set a = ('f' * 10**7) | int(base=16) %}"
    "{{ a // (('f' * 10**6) | int(base=16)) }}",
    "many fields": "{{ ('%9999d' * 10**5) % ((1,) * 10**5) }}",
    "control characters": LARGE + "{{ ['\\0' * 6 * 10**7] | string }}",
}


@contextmanager
def longest_wait() -> Iterator[list[float]]:
    """How long another thread of the process had to wait to run, each time."""
    waits, ended = [0.0], threading.Event()

    def wait() -> None:
        while not ended.is_set():
            begin = time.monotonic()
            time.sleep(0.001)
            waits.append(time.monotonic() - begin)

    waiting = threading.Thread(target=wait)
    waiting.start()
    try:
        yield waits
    finally:
        ended.set()
        waiting.join()


@each_row("case", ENDLESS)
def test_endless_templates_are_stopped(case, monkeypatch) -> None:
    monkeypatch.setattr(template, "SECONDS", 0.2)
    begin = time.monotonic()
    with longest_wait() as waits:
        with pytest.raises(ValueError, match="the chat template cannot render .*; pass another"):
            render_chat(with_template(ENDLESS[case]), MESSAGES)
    assert time.monotonic() - begin < 5
    assert max(waits) < 3, "other threads go on"


def test_messages_larger_than_any_prompt_are_refused_before_they_are_rendered(monkeypatch) -> None:
    monkeypatch.setattr(template, "CHARACTERS", 100)
    assert render("{{ messages[0].content }}", {"messages": [{"content": "a" * 75}]}) == "a" * 75
    with pytest.raises(ValueError, match="stopped at a text beyond 100 characters"):
        render_chat(with_template("{% if 0 %}{% endif %}"), [{"role": "user", "content": "a" * 99}])


def test_other_threads_have_their_own_time(monkeypatch) -> None:
    """A template that is stopped in one thread stops none in another."""
    monkeypatch.setattr(template, "SECONDS", 0.3)
    failed = []

    def endless() -> None:
        try:
            render(ENDLESS["loops in loops"], {})
        except template.TemplateError as error:
            failed.append(str(error))

    thread = threading.Thread(target=endless)
    thread.start()
    while thread.is_alive():
        assert render("{{ 1 + 1 }}", {}) == "2"
    assert failed == ["it was stopped after 0.3 seconds"]


@each_row(
    ("template", "text"),
    [
        ("{{ '%d %% %5d%%' % (1, 2024) }} {{ 1234567 % 1000 }}", "1 %  2024% 567"),
        (r"{{ 'a\nb' | indent(2) }} {{ 'a\nb' | indent('> ', first=true) }}", "a\n  b > a\n> b"),
        ("{{ {'a': [1]} | tojson(indent=1) }}", '{\n "a": [\n  1\n ]\n}'),
        ("{{ range(3) | map('string') | join('-') }} {{ ', '.join(['a', 'b']) }}", "0-1-2 a, b"),
        ("{{ 'abcabc' | replace('b', 'xy', 1) }} {{ 'abc'.replace('c', '') }}", "axycabc ab"),
        ("{{ [[1, 'a']] | string }} {{ (1, {'b': none}) }}", "[[1, 'a']] (1, {'b': None})"),
        ("{{ 'a</t>b'.split('</t>')[-1] | trim }} {{ 'x a'.rsplit(' ', 1) }}", "b ['x', 'a']"),
        (
            "{{ [1, 2] | batch(3, 0) | list }} {{ [[1], [2]] | sum(start=[]) }}",
            "[[1, 2, 0]] [1, 2]",
        ),
        ("{{ ns is defined }} {{ {'b': 2, 'a': 1} | dictsort }}", "False [('a', 1), ('b', 2)]"),
        (
            "{{ 'FF' | int(base=16) }} {{ ' a ' | upper | length }} {{ [2, 1] | sort }}",
            "255 3 [1, 2]",
        ),
    ],
)
def test_bounded_operations_are_those_of_python(template, text) -> None:
    assert render(template, {}) == text


@each_row(
    ("template", "message"),
    [
        ("{{ foo.bar }}", "'foo' is undefined"),
        ("{% for %}", "Expected an expression"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ namespace(__class__=1) }}", "underscored name '__class__'"),
        ("{{ messages.append(1) }}", "unsafe"),
        (None, r"none; pass chat_template= .* longspec_jax\.generation\.chat\.VICUNA_TEMPLATE\)"),
    ],
)
def test_broken_templates_are_explained(template, message) -> None:
    with pytest.raises(ValueError, match=message):
        render_chat(with_template(template), MESSAGES)


def test_a_template_is_text() -> None:
    with pytest.raises(ValueError, match="chat_template must be a Jinja template as text, got 3"):
        render_chat(with_template(QWEN_2), MESSAGES, 3)  # pyright: ignore[reportArgumentType]


def test_a_long_conversation_is_no_endless_one() -> None:
    """Twenty megabytes of text, or two thousand turns, are rendered."""
    tokenizer = with_template(QWEN_3)
    turns = [{"role": "user", "content": "a" * 10_000}] * 2000
    assert len(render_chat(tokenizer, turns)) > 20_000_000


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": " c"}]
    assert plain_messages([{"role": "user", "content": parts}]) == [
        {"role": "user", "content": "ab c"}
    ]


@each_row(
    ("messages", "message"),
    [
        ([], "at least one"),
        ("a", "list of objects with role and content"),
        ({"role": "user", "content": "a"}, "list of objects"),
        ([{"role": "user"}], "message 0 must have role and content"),
        ([{"role": "user", "content": "a"}, 3], "message 1 must have role and content, got 3"),
        ([{"role": None, "content": "a"}], "message 0: the role must be text, got None"),
        ([{"role": "user", "content": None}], "message 0: the content must be text, .* got None"),
        ([{"role": "user", "content": 3}], "the content must be text, .* got 3"),
        ([{"role": "user", "content": []}], r"the content must be text, .* got \[\]"),
        ([{"role": "user", "content": {"a": 1}}], "the content must be text"),
        ([{"role": "user", "content": b"a"}], "the content must be text"),
        ([{"role": "user", "content": ["a"]}], "a part of the content must be .* got 'a'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "a part of the content must be"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "a part of the content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": ""}]}], "image"),
    ],
)
def test_messages_that_are_none(messages, message) -> None:
    with pytest.raises(ValueError, match=message):
        render_chat(with_template(QWEN_2), messages)
