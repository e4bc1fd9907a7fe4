"""The acceptance rule, exactly: enumerate what a verification rule emits and compare distributions.

``walk`` is enumerated over every possible outcome of the target's draws. The rules of published
systems that are not lossless are restated here as negative controls: the same comparison must
catch them.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
import pytest

from longspec_jax.drafters.tree import Tree, accept

Distribution = dict[tuple[int, ...], float]
Conditional = Callable[[tuple[int, ...]], np.ndarray]


def random_conditional(seed: int, vocabulary: int) -> Conditional:
    """A distribution of the next token for every context, peaked enough to tell rules apart."""

    def probabilities(context: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(context), *context])
        weights = rng.gamma(0.6, size=vocabulary) + 0.02
        return weights / weights.sum()

    return probabilities


def target_distribution(target: Conditional, vocabulary: int, length: int) -> Distribution:
    """The target's own distribution of the next ``length`` tokens."""
    return {
        tokens: float(np.prod([target(tokens[:i])[t] for i, t in enumerate(tokens)]))
        for tokens in itertools.product(range(vocabulary), repeat=length)
    }


def completed(emitted: Distribution, target: Conditional, vocabulary: int, length: int):
    """Continue shorter emissions by the target, cut longer ones: a law of exactly ``length``."""
    result: Distribution = defaultdict(float)
    for tokens, probability in emitted.items():
        for rest in itertools.product(range(vocabulary), repeat=max(0, length - len(tokens))):
            whole, weight = tokens, probability
            for token in rest:
                weight *= target(whole)[token]
                whole = (*whole, token)
            result[whole[:length]] += weight
    return result


def total_variation(a: Distribution, b: Distribution) -> float:
    return 0.5 * sum(abs(a.get(key, 0.0) - b.get(key, 0.0)) for key in {*a, *b})


def make_tree(parents: list[int], tokens: list[int]) -> Tree:
    """A one-row tree."""
    mask = np.eye(len(parents), dtype=bool)
    for node, parent in enumerate(parents):
        mask[node] |= mask[parent] if parent >= 0 else False
    return Tree(
        jnp.asarray([tokens], jnp.int32), jnp.asarray([parents], jnp.int32), jnp.asarray([mask])
    )


def contexts_of(parents: list[int], tokens: list[int]) -> list[tuple[int, ...]]:
    """The tokens on the path to every node, the root's own not included."""
    contexts: list[tuple[int, ...]] = [()]
    for parent, token in zip(parents[1:], tokens[1:], strict=True):
        contexts.append((*contexts[parent], token))
    return contexts


def enumerate_walk(parents: list[int], tokens: list[int], target: Conditional, vocabulary: int):
    """Law of what ``walk`` emits, over all joint outcomes of the draws.

    A draw belongs to a context: duplicate siblings share it. All outcomes are walked in one batch.
    """
    contexts = contexts_of(parents, tokens)
    distinct = sorted(set(contexts))
    outcomes = np.array(list(itertools.product(range(vocabulary), repeat=len(distinct))))
    draws = outcomes[:, [distinct.index(context) for context in contexts]]
    tree = make_tree(parents, tokens)
    batch = Tree(
        *(jnp.repeat(leaf, len(draws), axis=0) for leaf in (tree.tokens, tree.parents, tree.mask))
    )
    accepted_path = accept(batch, jnp.asarray(draws, jnp.int32), levels=max(map(len, contexts)))
    law: Distribution = defaultdict(float)
    for outcome, emitted, count in zip(
        outcomes, np.asarray(accepted_path.tokens), np.asarray(accepted_path.count), strict=True
    ):
        weight = np.prod([target(c)[t] for c, t in zip(distinct, outcome, strict=True)])
        law[tuple(int(t) for t in emitted[:count])] += float(weight)
    return law


TREES = {
    "chain": ([-1, 0, 1, 2], [0, 1, 1, 0]),
    "two children": ([-1, 0, 0], [2, 0, 2]),
    "bushy": ([-1, 0, 0, 1, 1, 2], [1, 0, 2, 1, 2, 0]),
    "duplicate siblings": ([-1, 0, 0, 1, 2], [0, 1, 1, 2, 0]),
    "a branch that got no children": ([-1, 0, 0, 0, 2, 2], [0, 0, 1, 2, 1, 0]),
    "empty": ([-1], [1]),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("seed", range(3))
def test_the_walk_emits_the_target_distribution(name: str, seed: int) -> None:
    vocabulary, length = 3, 3
    parents, tokens = TREES[name]
    target = random_conditional(seed, vocabulary)
    emitted = enumerate_walk(parents, tokens, target, vocabulary)
    law = completed(emitted, target, vocabulary, length)
    assert total_variation(law, target_distribution(target, vocabulary, length)) < 1e-6


def first_token_law(rule: Callable[..., Iterator[tuple[float, int]]], *args) -> np.ndarray:
    """Law of the first emitted token under a rule that yields (probability, token) branches."""
    law = np.zeros(len(args[0]))
    for probability, token in rule(*args):
        law[token] += probability
    assert abs(law.sum() - 1) < 1e-9
    return law


def leviathan(target: np.ndarray, draft: np.ndarray) -> Iterator[tuple[float, int]]:
    """Lossless positive control: a sampled proposal, accept by min(1, ratio), else residual."""
    residual = np.maximum(target - draft, 0)
    residual = residual / residual.sum() if residual.sum() else target
    for token, proposed in enumerate(draft):
        accept = min(1.0, target[token] / proposed)
        yield proposed * accept, token
        for other, probability in enumerate(residual):
            yield proposed * (1 - accept) * probability, other


def argmax_chain(target: np.ndarray, draft: np.ndarray) -> Iterator[tuple[float, int]]:
    """Wrong: an argmax proposal accepted by the ratio, redrawn from the full target."""
    proposed = int(np.argmax(draft))
    accept = min(1.0, target[proposed] / draft[proposed])
    yield accept, proposed
    for other, probability in enumerate(target):
        yield (1 - accept) * probability, other


def top_k_ratio(
    target: np.ndarray, draft: np.ndarray, children: int = 3, by_node: bool = False
) -> Iterator[tuple[float, int]]:
    """Wrong: deterministic top-k children tested by the ratio in random order, draft subtracted.

    With ``by_node`` the probabilities are looked up by the node's number instead of its token.
    """
    proposed = [int(token) for token in np.argsort(-draft)[:children]]
    orders = list(itertools.permutations(range(children)))
    for order in orders:
        left, remaining = 1.0 / len(orders), target.copy()
        for node in order:
            index = node + 1 if by_node else proposed[node]
            accept = min(1.0, remaining[index] / draft[index])
            yield left * accept, proposed[node]
            left *= 1 - accept
            remaining = np.maximum(remaining - draft, 0)
            remaining = remaining / remaining.sum() if remaining.sum() else target
        for other, probability in enumerate(remaining):
            yield left * probability, other


def mean_error(rule: Callable[..., Iterator[tuple[float, int]]], **options) -> float:
    """Mean total variation from the target over random pairs of distributions."""
    errors = []
    for seed in range(50):
        target = random_conditional(seed, 8)(())
        draft = random_conditional(seed + 1000, 8)(())

        def chosen(t: np.ndarray, d: np.ndarray) -> Iterator[tuple[float, int]]:
            return rule(t, d, **options)

        errors.append(0.5 * np.abs(first_token_law(chosen, target, draft) - target).sum())
    return float(np.mean(errors))


def test_the_comparison_passes_a_lossless_rule() -> None:
    assert mean_error(leviathan) < 1e-9


@pytest.mark.parametrize(
    ("rule", "options"),
    [(argmax_chain, {}), (top_k_ratio, {}), (top_k_ratio, {"by_node": True})],
    ids=["argmax chain", "top-k by ratio", "top-k by node number"],
)
def test_the_comparison_catches_the_wrong_rules(rule, options) -> None:
    assert mean_error(rule, **options) > 0.05


def test_walk_by_hand() -> None:
    """Perfect match, mismatch below the first level, and a row that accepts nothing."""
    parents, tokens = [-1, 0, 0, 1, 2], [9, 4, 5, 6, 7]
    tree = make_tree(parents, tokens)
    batch = Tree(*(jnp.repeat(leaf, 3, axis=0) for leaf in (tree.tokens, tree.parents, tree.mask)))
    draws = jnp.asarray([[5, 0, 7, 0, 8], [4, 5, 0, 0, 0], [6, 1, 1, 1, 1]], jnp.int32)
    accepted_path = accept(batch, draws, levels=2)
    np.testing.assert_array_equal(accepted_path.count, [3, 2, 1])
    np.testing.assert_array_equal(accepted_path.path[0], [0, 2, 4])
    np.testing.assert_array_equal(accepted_path.tokens[0], [5, 7, 8])
    np.testing.assert_array_equal(accepted_path.path[1, :2], [0, 1])
    np.testing.assert_array_equal(accepted_path.tokens[1, :2], [4, 5])
    np.testing.assert_array_equal(accepted_path.tokens[2, :1], [6])
