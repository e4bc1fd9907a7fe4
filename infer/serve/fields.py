"""The fields of every request that the server takes.

Each is supported, or accepted at values without effect, or refused with a remedy. The parser reads
by these tables, and the OpenAPI document is made of them.
"""

from longspec_jax.checks import Real, Whole
from longspec_jax.config.sampling import rule

from .rules import (
    AnyObject,
    Biases,
    Either,
    Field,
    Flag,
    ListOf,
    Neutral,
    Number,
    Object,
    OneOf,
    Rule,
    Text,
    Tokens,
)

MOST_CHOICES = 128
"""Of ``n``."""
MOST_STOPS, LONGEST_STOP = 16, 256
"""Stop strings of a request, and characters of each."""
MOST_STOP_TOKENS = 8
"""The model's own included."""
MOST_BIASES = 1024
MOST_ALTERNATIVES = 20
"""Of ``top_logprobs``."""
MOST_MESSAGES, MOST_PARTS = 4096, 1024
"""Of a request, and of each message."""

_PART = Object(
    {
        "type": Field(OneOf(("text",), "images and sound are not supported"), "text", True),
        "text": Field(Text(), "the text of the part", True),
    }
)
_CONTENT = Either(
    (Text(), ListOf(_PART, MOST_PARTS, 1)),
    'must be text, or a list of parts {"type": "text", "text": ...}; images and sound are not '
    "supported",
)
_NO_TOOLS = "put what the model must know into its messages"
_MESSAGE = Object(
    {
        "role": Field(
            OneOf(
                ("system", "developer", "user", "assistant"),
                f"tools are not supported; {_NO_TOOLS}",
            ),
            "who speaks; developer is another name of system",
            True,
        ),
        "content": Field(_CONTENT, "the text", True),
        "name": Field(Text(256), "given to the chat template, which may use it"),
        "refusal": Field(Neutral((), "leave it out")),
        "annotations": Field(Neutral(([],), "leave it out")),
        "audio": Field(Neutral((), "send text")),
        "tool_calls": Field(Neutral(([],), _NO_TOOLS)),
        "function_call": Field(Neutral((), _NO_TOOLS)),
    }
)
MESSAGES = Field(ListOf(_MESSAGE, MOST_MESSAGES, 1), "the turns so far", True)

LONGSPEC = {
    "speculation": Field(Flag(), "false: decode without a draft; the text is the same"),
    "rounds": Field(Flag(), "true: the answer says what every round drafted and accepted"),
    "tree": Field(Text(64), "the tree to draft: one of those in /v1/models, or none"),
    "drafter": Field(Text(256), "the draft; must be the server's own"),
}
"""Fields of the object ``longspec``."""
_STREAM = {
    "include_usage": Field(Flag(), "end with a chunk that has the usage and no choices"),
    "continuous_usage_stats": Field(Flag(), "every chunk has the usage so far"),
    "include_obfuscation": Field(Neutral((False,))),
}


_BIAS = Number(Real(-100.0, 100.0, "from -100 to 100"))
_NEW = Number(rule("max_new_tokens"))
_STOP: Rule = Text(LONGEST_STOP, 1)
LONGEST_PATTERN = 16_384
"""Characters of a regular expression."""
_SCHEMA = Object(
    {
        "name": Field(Text(64), "has no effect"),
        "description": Field(Text(), "has no effect; say it in the messages"),
        "schema": Field(AnyObject(), "the JSON schema that the text satisfies", True),
        "strict": Field(Flag(), "has no effect: the schema always binds"),
    }
)
_FORMAT = Object(
    {
        "type": Field(
            OneOf(("text", "json_object", "json_schema", "regex")), "what the text is", True
        ),
        "json_schema": Field(_SCHEMA, "of the type json_schema"),
        "regex": Field(Text(LONGEST_PATTERN, 1), "what matches the whole text, of the type regex"),
    }
)
SHARED = {
    "model": Field(Text(512), "as in /v1/models; the only one if absent"),
    "stream": Field(Flag(), "answer in server-sent events"),
    "stream_options": Field(Object(_STREAM), "only with stream"),
    "temperature": Field(Number(rule("temperature")), "0 is greedy; 1 if absent"),
    "top_p": Field(Number(rule("top_p")), "1 keeps all tokens"),
    "top_k": Field(Number(Whole(-1, note=" (0 and -1 keep all tokens)")), "0 keeps all tokens"),
    "min_p": Field(
        Number(rule("min_p")),
        "least probability of a drawn token, as a share of the likeliest's",
    ),
    "seed": Field(Number(rule("seed")), "of the draws; a new one if absent"),
    "n": Field(Number(Whole(1, MOST_CHOICES)), "choices of each prompt; choice i has seed + i"),
    "stop": Field(
        Either((_STOP, ListOf(_STOP, MOST_STOPS)), "must be text, or a list of texts, none empty"),
        "the text ends before the first of these",
    ),
    "stop_token_ids": Field(
        ListOf(Number(Whole(0)), MOST_STOP_TOKENS), "tokens that end the text, as the model's own"
    ),
    "ignore_eos": Field(Flag(), "go on past the model's own stop tokens"),
    "logit_bias": Field(Biases(_BIAS, MOST_BIASES), "what is added to the logits of tokens"),
    "presence_penalty": Field(
        Number(rule("presence_penalty")), "taken from tokens that were emitted"
    ),
    "frequency_penalty": Field(
        Number(rule("frequency_penalty")), "taken as often as a token was emitted"
    ),
    "repetition_penalty": Field(
        Number(rule("repetition_penalty")),
        "divides the logits of tokens of the prompt and the text; 1 has no effect",
    ),
    "priority": Field(Number(Whole(-(2**31), 2**31 - 1)), "lower goes first; 0 if absent"),
    "longspec": Field(Object(LONGSPEC), "about speculation"),
    "user": Field(Text(), "has no effect"),
    "safety_identifier": Field(Text(), "has no effect"),
    "prompt_cache_key": Field(Text(), "has no effect: prompts are met again by their tokens"),
    "cache_salt": Field(Text(256, 1), "prompts of different ones are not reused for each other"),
    "response_format": Field(_FORMAT, "tokens that would break the form are never drawn"),
    "min_tokens": Field(Neutral((0,))),
    "length_penalty": Field(Neutral((1.0,))),
    "use_beam_search": Field(Neutral((False,))),
    "skip_special_tokens": Field(Neutral((True,))),
    "spaces_between_special_tokens": Field(Neutral((True,))),
    "include_stop_str_in_output": Field(Neutral((False,))),
    "truncate_prompt_tokens": Field(Neutral((), "shorten the prompt before you send it")),
}
"""Fields of both kinds of completions."""
COMPLETIONS = {
    "prompt": Field(
        Either(
            (Text(), Tokens(), ListOf(Text(), least=1), ListOf(Tokens(), least=1)),
            "must be text, token ids, or a list of one of these, none empty",
        ),
        "what to continue",
        True,
    ),
    **SHARED,
    "max_tokens": Field(
        Number(Whole(0, note=" (0 only with echo)")),
        "most tokens to generate; what the context leaves if absent",
    ),
    "echo": Field(Flag(), "begin the text with the prompt"),
    "logprobs": Field(
        Number(Whole(0, MOST_ALTERNATIVES)),
        "log-probabilities of the tokens, and of this number of alternatives",
    ),
    "add_special_tokens": Field(Flag(), "false: add no beginning-of-text token to a text"),
    "best_of": Field(Number(Whole(1, MOST_CHOICES)), "must be n: nothing is ranked"),
    "suffix": Field(Neutral(("",), "put everything into prompt")),
}
CHAT = {
    "messages": MESSAGES,
    **SHARED,
    "max_completion_tokens": Field(
        _NEW, "most tokens to generate; what the context leaves if absent"
    ),
    "max_tokens": Field(_NEW, "an older name of max_completion_tokens"),
    "logprobs": Field(Flag(), "log-probabilities of the tokens"),
    "top_logprobs": Field(
        Number(Whole(0, MOST_ALTERNATIVES)), "alternatives of each token; needs logprobs"
    ),
    "tools": Field(Neutral(([],), _NO_TOOLS)),
    "tool_choice": Field(Neutral(("none",), _NO_TOOLS)),
    "parallel_tool_calls": Field(Neutral((True, False), _NO_TOOLS)),
    "functions": Field(Neutral(([],), _NO_TOOLS)),
    "function_call": Field(Neutral(("none",), _NO_TOOLS)),
    "modalities": Field(Neutral((["text"],), "answers are text")),
    "audio": Field(Neutral((), "answers are text")),
    "prediction": Field(Neutral((), "the draft predicts on its own")),
    "reasoning_effort": Field(Neutral((), "say in the messages how to reason")),
    "verbosity": Field(Neutral((), "say in the messages how much to write")),
    "web_search_options": Field(Neutral((), "the server has no access to the web")),
    "store": Field(Neutral((False,), "nothing is stored")),
    "metadata": Field(Neutral(({},), "nothing is stored")),
    "service_tier": Field(Neutral(("auto", "default"), "use priority")),
    "chat_template": Field(Neutral((), "start the server with --chat_template=FILE")),
    "chat_template_kwargs": Field(Neutral(({},), "start the server with --chat_template=FILE")),
    "add_generation_prompt": Field(Neutral((True,))),
    "continue_final_message": Field(Neutral((False,), "use /v1/completions")),
}
TOKENIZE = {
    "model": SHARED["model"],
    "prompt": Field(Text(), "the text; or messages"),
    "messages": Field(MESSAGES.rule, "of a chat, by the model's template"),
    "add_special_tokens": Field(Flag(), "of a text; true if absent"),
    "return_token_strs": Field(Flag(), "the tokens' texts too"),
}
DETOKENIZE = {"model": SHARED["model"], "tokens": Field(Tokens(), "token ids", True)}
