"""Two clients with two keys: what either gets does not depend on what the other sends."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from infer.serve.command import served_model
from longspec_jax import LongSpec, TreeConfig
from longspec_jax.drafters.retrieval.hierarchy import RetrievalDraft, RetrievalOptions
from longspec_jax.drafters.suffix import SuffixDraft
from tests.infer.toys import toy_spec
from tests.serve.kit import Client, serving

MAX_LEN = 256
TREE = TreeConfig((8,) * 5, 8)
ASKED: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
PROMPT = [3, 4, 5, 6, 9, 3, 8, 7, 12, 4, 10, 11]


def suffix_spec(**options: Any) -> LongSpec:
    return replace(toy_spec(), draft=SuffixDraft(**options), tree=TREE)


@contextmanager
def two_clients(spec: LongSpec) -> Iterator[tuple[Client, Client]]:
    """A server, as the holders of two keys see it; the first key is the operator's."""
    engine = spec.engine(max_num_seqs=3, max_model_len=MAX_LEN, prefixes=True, return_trees=True)
    model = served_model(spec, engine, names=("toy",), max_len=MAX_LEN, most_rows=9)
    with serving(engine, model, levels=5, api_key="ours", other_keys=("theirs",)) as client:
        client.timeout = 300
        yield client, replace(client, key="theirs")


def told(client: Client, prompt: list[int]) -> dict[str, Any]:
    """All that an answer says, but for times."""
    more = {"longspec": {"rounds": True}}
    status, body = client.post("/v1/completions", prompt=prompt, **ASKED, **more)
    assert status == 200, body
    metrics = body["metrics"]["speculative_decoding"]
    return {**{name: body[name] for name in ("choices", "usage", "longspec")}, "metrics": metrics}


def told_beside(spec: LongSpec, secrets: list[list[int]]) -> dict[str, Any]:
    """What the second client is told after the first one has sent something, and while it runs."""
    with two_clients(spec) as (ours, theirs):
        for secret in secrets:
            told(ours, secret)
        beside = ours.connect(
            "POST",
            "/v1/completions",
            {"prompt": [*secrets[0], 3], "stream": True, **ASKED, "max_tokens": 150},
        )
        answer = told(theirs, PROMPT)
        beside.read()
        beside.connection.close()
        return answer


@pytest.fixture(scope="module")
def secret() -> list[int]:
    """The second client's prompt and the text that follows it: whoever sent it knew both."""
    [tokens] = suffix_spec().generate([PROMPT], max_new_tokens=24, eos_token_id=[]).sequences
    return [*PROMPT, *tokens]


def test_what_one_client_is_told_does_not_depend_on_the_others_text(secret: list[int]) -> None:
    """Text, tokens, draft tokens, acceptance and cached tokens are the same alongside any text."""
    with_it, without = (told_beside(suffix_spec(), [text] * 3) for text in (secret, [13, 14] * 18))
    assert with_it == without
    assert with_it["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert with_it["metrics"]["num_draft_tokens"] > 0


@pytest.mark.full
def test_an_operator_may_let_requests_share_and_rounds_then_show_only_accepted_tokens(
    secret: list[int],
) -> None:
    spec = suffix_spec(shared=True)
    with_it, without = (told_beside(spec, [text] * 3) for text in (secret, [13, 14] * 18))
    accepted = [one["metrics"]["num_accepted_draft_tokens"] for one in (with_it, without)]
    assert accepted[0] > accepted[1] + 5, "else this text shows nothing above either"
    assert with_it["choices"] == without["choices"]
    for answer in (with_it, without):
        for one in answer["longspec"][0]["rounds"]:
            tree = one["tree"]
            assert tree["path"] == [*range(len(tree["tokens"]))]
            assert tree["parents"] == [*range(-1, len(tree["tokens"]) - 1)]


def test_rows_of_one_call_share_and_those_of_an_engine_do_not() -> None:
    draft = SuffixDraft()
    assert not draft.drafter(TREE).own and draft.apart.drafter(TREE).own
    assert SuffixDraft(shared=False).drafter(TREE).own and not draft.apart.shares_texts
    shared = SuffixDraft(shared=True)
    assert not shared.apart.drafter(TREE).own and shared.apart.shares_texts
    for inner in (draft, shared):  # A draft that holds another one asks it.
        around = RetrievalDraft(inner, toy_spec().target_config, RetrievalOptions(2048))
        assert around.apart.inner == inner.apart
        assert around.apart.shares_texts is (inner is shared)


def test_prompts_are_found_again_only_by_the_same_key_and_salt() -> None:
    def cached(client: Client, **more: Any) -> int:
        _, body = client.post("/v1/completions", prompt=[3, 4, 5, 6] * 20, **ASKED, **more)
        return body["usage"]["prompt_tokens_details"]["cached_tokens"]

    with two_clients(toy_spec()) as (ours, theirs):
        assert [cached(ours), cached(theirs)] == [0, 0]
        assert cached(ours) == cached(theirs) == 64
        assert [cached(ours, cache_salt="a"), cached(ours, cache_salt="b")] == [0, 0]
        assert cached(ours, cache_salt="a") == 64 and cached(theirs, cache_salt="a") == 0


def test_what_tells_of_all_requests_is_the_operators() -> None:
    with two_clients(toy_spec()) as (ours, theirs):
        for path in ("/stats", "/metrics"):
            for client, status in ((ours, 200), (theirs, 403)):
                response, said = client.answer("GET", path)
                assert response.status == status, path
            assert json.loads(said)["error"]["type"] == "permission_error"
        assert theirs.ask("GET", "/v1/models")[0] == 200
        assert replace(ours, key="nobody's").ask("GET", "/v1/models")[0] == 401
