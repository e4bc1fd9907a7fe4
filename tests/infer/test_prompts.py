"""Prompts: what is read, what is refused with its option, file and line, and chat styles."""

import io
import json
import sys
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from infer import prompts
from infer.prompts import Prompt
from longspec_jax.checks import Each, Whole
from longspec_jax.config.sampling import OPTIONS, TOKEN
from longspec_jax.generation.options import GenerateOptions
from tests.kit import each_row
from tests.refusals import wrong

CHAT = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
]


def byte_tokenizer(*special: str, bos: str | None = None) -> PreTrainedTokenizerFast:
    """All bytes and some special tokens; a beginning token is added as Llama's tokenizers do."""
    symbols = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {symbol: index for index, symbol in enumerate([*sorted(symbols), *special])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        backend.post_processor = TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])]
        )
    roles = dict(bos_token=bos, eos_token="</s>" if "</s>" in special else None)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=list(special),
        **{name: token for name, token in roles.items() if token},
    )


LLAMA = byte_tokenizer("<s>", "</s>", bos="<s>")


def test_vicuna() -> None:
    system = {"role": "system", "content": "Be brief."}
    found = LLAMA.decode(prompts.STYLES["vicuna"](LLAMA, [system, *CHAT]))
    assert found == "<s>Be brief. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:"
    found = LLAMA.decode(prompts.STYLES["vicuna"](LLAMA, CHAT))
    assert found.startswith("<s>A chat between a curious user and an artificial intelligence")
    assert found.endswith(
        "answers to the user's questions. USER: Hi ASSISTANT: Hello</s>USER: Bye ASSISTANT:"
    )


def test_release_style_begins_every_turn_afresh() -> None:
    found = LLAMA.decode(prompts.encode_release(LLAMA, CHAT[:1]))
    assert found == (
        "<s><s>system\nYou are a helpful assistant</s>\n<s><s>user\nHi</s>\n<s><s>assistant\n"
    )


def test_release_style_is_chatml_for_qwen() -> None:
    qwen = byte_tokenizer("<|im_start|>", "<|im_end|>")
    found = qwen.decode(prompts.encode_release(qwen, CHAT[:1]))
    assert found == (
        "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_text_stays_text_unless_a_style_is_chosen() -> None:
    assert LLAMA.decode(prompts.encode(LLAMA, 999, "Hi")) == "<s>Hi"
    assert prompts.encode(LLAMA, 999, "Hi", "longspec") == prompts.encode_release(LLAMA, CHAT[:1])
    assert prompts.encode(LLAMA, 999, [3, 4]) == [3, 4]
    with pytest.raises(ValueError, match="one prompt is needed here"):
        prompts.encode(LLAMA, 999, [[3, 4], [5]])
    with pytest.raises(ValueError, match="a prompt of 801 characters cannot fit: .*_positions=100"):
        prompts.encode(LLAMA, 999, "a" * 801, max_positions=100)


def test_native_template() -> None:
    with pytest.raises(ValueError, match="no chat template; choose --prompt_style vicuna"):
        prompts.encode(LLAMA, 999, CHAT)
    templated = byte_tokenizer()
    templated.chat_template = "{% for m in messages %}[{{ m['content'] }}]{% endfor %}"
    assert templated.decode(prompts.encode(templated, 999, CHAT)) == "[Hi][Hello][Bye]"


@each_row(
    ("messages", "message"),
    [
        ([{"role": "robot", "content": "x"}], "roles are system, user, assistant"),
        (CHAT[:2], "last message must be the user's"),
        (
            [{"role": "user", "content": None}],
            "message 0: the content must be text, or .* got null",
        ),
        ([{"role": "user", "content": "\ud800"}], "message 0 is not UTF-8 text: character 1"),
    ],
)
def test_bad_messages(messages, message) -> None:
    with pytest.raises(ValueError, match=message):
        prompts.check_messages(messages)


def test_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]
    [found] = prompts.check_messages([{"role": "user", "content": parts}])
    assert found == {"role": "user", "content": "Hi there"}


def test_messages_inline_or_in_a_file(tmp_path) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps({"messages": CHAT}))
    inline = prompts.read_messages(json.dumps(CHAT))
    assert prompts.read_messages(str(path)) == CHAT == inline
    with pytest.raises(ValueError, match="not valid JSON"):
        prompts.read_messages("[{]")
    with pytest.raises(ValueError, match="^--messages must be a list of objects .* got {}$"):
        prompts.read_messages("{}")
    with pytest.raises(ValueError, match="^--messages is nested too deeply"):
        prompts.read_messages("[" * 50_000)
    with pytest.raises(FileNotFoundError, match="--messages: .*absent.json cannot be read"):
        prompts.read_messages(str(tmp_path / "absent.json"))


def test_batch_file(tmp_path) -> None:
    path = tmp_path / "batch.jsonl"
    rows = ["ab", {"prompt": "cd", "seed": 3}, {"input_ids": [1, 2], "eos_token_id": 5}]
    path.write_text("\n\n".join(map(json.dumps, rows)))
    assert prompts.read_batch(str(path)) == [
        Prompt("batch.jsonl, line 1", "ab", {}),
        Prompt("batch.jsonl, line 3", "cd", {"seed": 3}),
        Prompt("batch.jsonl, line 5", [1, 2], {"eos_token_id": [5]}),
    ]


def test_lines_of_a_batch_end_only_with_a_line_feed(tmp_path) -> None:
    """Unicode's other line ends may stand in a JSON string; a carriage return is white space."""
    path = tmp_path / "batch.jsonl"
    texts = ["a\u2028b", "c\u0085d", "e\u2029f\x1cg"]
    path.write_bytes(
        "\r\n".join(json.dumps(text, ensure_ascii=False) for text in texts[:2]).encode()
    )
    assert [row.item for row in prompts.read_batch(str(path))] == texts[:2]
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(texts[2][:3], ensure_ascii=False).encode())
    assert [row.item for row in prompts.read_batch(str(path))] == [texts[2][:3]]


@each_row(
    ("line", "message"),
    [
        (
            '{"prompt": "a", "tempreature": 1}',
            "batch.jsonl, line 1: unknown key 'tempreature'; did you mean",
        ),
        ('{"prompt": "a", "messages": []}', "exactly one of prompt, messages, input_ids"),
        ("{", "line 1 is not valid JSON"),
        ("", "holds no prompts"),
        ('"ok"\n\n7', "batch.jsonl, line 3: a row needs exactly one of"),
        (
            '{"prompt": ["a", "b"]}',
            r"line 1: prompt \['a', 'b'\] must be text; a row is one prompt",
        ),
        ('{"prompt": null}', "prompt null must be text"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        ('""', "line 1: the prompt is empty"),
        ('"\\ud800"', "line 1 is not UTF-8 text: character 1 is half of one"),
        ('{"input_ids": [[1, 2], [3]]}', "holds lists; a row is one prompt, a list of ids"),
        ('{"messages": []}', "line 1 must be a list of objects with role and content"),
        ('{"prompt": "a", "max_new_tokens": null}', "max_new_tokens is null; leave it out"),
        ('{"prompt": "a", "max_new_tokens": Infinity}', "Infinity is no JSON number"),
        ('{"prompt": "a", "max_new_tokens": 1e999}', "inf must be a whole number"),
        ('{"prompt": "a", "temperature": NaN}', "NaN is no JSON number"),
        ('{"prompt": "a", "eos_token_id": null}', r"eos_token_id is null; .*\(\[\] never stops\)"),
        ('{"prompt": "a", "do_sample": true}', "unknown key 'do_sample'"),
        (
            '{"prompt": "a", "seed": 1, "seed": 2}',
            "line 1 is not valid JSON: the key 'seed' is given",
        ),
        ("[" * 100_000, "line 1 is nested too deeply"),
    ],
)
def test_bad_batch_file(tmp_path, line, message) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text(line)
    with pytest.raises(ValueError, match=message):
        prompts.read_batch(str(path))


@each_row("key", ["input_ids", *prompts.ROW_OPTIONS])
def test_a_row_with_a_value_that_breaks_its_rule(key) -> None:
    """Refused with the line and the key; JSON has one kind of numbers."""
    where = "batch.jsonl, line 1"
    rule = Each(TOKEN, 1) if key == "input_ids" else OPTIONS[key].rule
    source = {} if key == "input_ids" else {"prompt": "a"}
    for value in wrong(rule):
        if rule.refusal(rule.of_json(value)) and rule.refusal([value]):
            with pytest.raises(
                ValueError, match=f"^{where}: {key}( is null|=.* must be| .* lists)"
            ):
                prompts._row({**source, key: value}, where)
    for value in (4.0, 4):
        if isinstance(rule, Whole):
            assert prompts._row({**source, key: value}, where).options == {key: 4}


def test_rows_take_the_options_of_the_library() -> None:
    """But for whether to sample, which is a row's temperature, and for how many rows it is.

    And for biases and log-probabilities, which the command has not.
    """
    others = {"do_sample", "num_return_sequences", "logit_bias", "logprobs", "prompt_logprobs"}
    assert set(prompts.ROW_OPTIONS) == set(GenerateOptions.__annotations__) - others


def test_prompt_files_must_be_text(tmp_path) -> None:
    (tmp_path / "image").write_bytes(b"\x89PNG\xff")
    with pytest.raises(ValueError, match="is not UTF-8 text"):
        prompts.read_text(tmp_path / "image")


@each_row("option", ["--prompt_file", "--messages", "--batch"])
def test_a_file_that_cannot_be_read_names_its_option(tmp_path, option) -> None:
    for path, error in ((tmp_path / "absent", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error, match=f"{option}: {path} cannot be read"):
            prompts.read_text(path, option)


def test_files_as_they_are(tmp_path, monkeypatch) -> None:
    """Line ends stay, ``~`` is the home, ``-`` is standard input."""
    (tmp_path / "dos.txt").write_bytes("é\r\n".encode())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert prompts.read_prompt_file("~/dos.txt") == Prompt("dos.txt", "é\r\n")
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("ü".encode())))
    assert prompts.read_prompt_file("-") == Prompt("standard input", "ü")
    (tmp_path / "empty").write_bytes(b"")
    with pytest.raises(ValueError, match="empty: the prompt is empty"):
        prompts.read_prompt_file(str(tmp_path / "empty"))


def test_an_endless_file_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(prompts, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="--prompt_file: /dev/zero holds more than 0 MB"):
        prompts.read_prompt_file("/dev/zero")
