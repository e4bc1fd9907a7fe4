"""A speculative round: propose a tree, verify it, accept a path, commit it.

:func:`spec_step` is the whole algorithm. Two programs launch it: :func:`one_round` is a straight
line of operations, and :func:`many_rounds` loops on the device. Both return the rows and a report,
the one small array that the host reads. Target and drafter are callables over arrays; a round knows
no tokenizer, no checkpoint and no model family.

Rows are independent: each has its own length, seed, sampling, stop tokens and budget. A row that is
done neither advances nor reads its cache, and does not affect the others.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from longspec_jax.axes import Array, Lengths
from longspec_jax.config.tree import PLAIN
from longspec_jax.decoding.chooser import Watch
from longspec_jax.decoding.jit_cache import program
from longspec_jax.decoding.logprobs import packed_logprobs
from longspec_jax.decoding.report import (
    TOKENS,
    Contents,
    Emitted,
    foregone,
    packed,
    packed_columns,
    packed_tree,
)
from longspec_jax.decoding.round_noise import RoundNoise
from longspec_jax.decoding.rows import Rows
from longspec_jax.decoding.sampling import NO_TOKEN, SamplingKind
from longspec_jax.decoding.target import TargetModel, Verification
from longspec_jax.drafters.base import Committed, Drafter, Params, SamplingNoise, View
from longspec_jax.drafters.draft import with_tree
from longspec_jax.drafters.tree import (
    AcceptedPath,
    AcceptRule,
    Tree,
    accept,
    accept_unverified,
    node_depths,
    root_tree,
    tree_paths,
)
from longspec_jax.ops.partitioned import use_mesh
from longspec_jax.ops.slicing import along, last_along

MOST_ROUNDS = 256
"""Most rounds of one launch: its report has a static size."""


def spec_step(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    kind: SamplingKind = SamplingKind.ANY,
    rule: AcceptRule | None = None,
    contents: Contents = TOKENS,
) -> tuple[Rows, Emitted]:
    """One round for every row.

    Args:
      target: the target's static part.
      drafter: the drafter's static part.
      params: parameters of both.
      rows: the rows before the round.
      kind: what the live rows' sampling needs; static.
      rule: how a path is accepted; by the target's draws if absent, unless the drafter is lossy.
        Another rule serves to measure.
      contents: what its report holds; static.

    Returns:
      The rows after the round, and what it emitted.
    """
    with use_mesh(target.mesh):
        noise = sampling_noise(target, drafter, rows, kind)
        rows = refresh_selection(target, drafter, params, rows)
        tree = propose_tree(target, drafter, params, rows, noise)

        run = partial(verify_tree, target, drafter, params, rows, tree, noise)
        if params.costs is not None and weighs_trees(drafter, params):
            pays = worth_of(tree, rows.done) * params.costs[0] > params.costs[1]
            verified, draws = _verify_if(pays, run, target, drafter, params, rows, noise)
            # A tree that was not verified ends at its root.
            tree = replace(tree, parents=jnp.where(pays, tree.parents, -1))
        else:
            verified, draws = run()
        drawn = tree, verified, draws
        return accept_and_commit(target, drafter, params, rows, *drawn, kind, rule, contents)


def _verify_if(
    pays: Bool[Array, ""],
    run: Callable[[], tuple[Verification, Int[Array, "B T"]]],
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    noise: RoundNoise,
) -> tuple[Verification, Int[Array, "B T"]]:
    """Verify a tree if it pays, else only its root, with zeros for the other nodes.

    Rows only go into the branches: what comes out of one is copied, and caches are large.
    """
    shapes = jax.eval_shape(run)

    def run_root() -> Any:
        root = root_tree(rows.pending, PLAIN)
        ran = verify_tree(target, with_tree(drafter, PLAIN), params, rows, root, noise)
        return jax.tree.map(_padded, ran, shapes)

    return jax.lax.cond(pays, run, run_root)


def _padded(of_root: Array, like: jax.ShapeDtypeStruct) -> Array:
    sizes = zip(of_root.shape, like.shape, strict=True)
    return jnp.pad(of_root, [(0, whole - size) for size, whole in sizes])


def weighs_trees(drafter: Drafter, params: Params) -> bool:
    """Whether rounds verify a tree only where it is worth its seconds, and else only the root."""
    proposes = drafter.proposes_freely and drafter.tree.num_levels > 0
    return proposes and params.costs is not None


def worth_of(tree: Tree, done: Bool[Array, " B"]) -> Float[Array, ""]:
    """Tokens that a round is expected to emit, a mean over the rows that are not done.

    A node is emitted if the accepted path comes to it, and the target's draw after the path is.
    """
    assert tree.totals is not None, "a tree without totals cannot be weighed"
    expected = jnp.exp(tree.totals).sum(axis=1)  # The root's is the token after the path.
    return jnp.where(done, 0, expected).sum() / jnp.maximum((~done).sum(), 1)


def accept_and_commit(
    target: TargetModel,
    drafter: Drafter,
    params: Params,
    rows: Rows,
    tree: Tree,
    verified: Verification,
    draws: Int[Array, "B T"],
    kind: SamplingKind = SamplingKind.ANY,
    rule: AcceptRule | None = None,
    contents: Contents = TOKENS,
) -> tuple[Rows, Emitted]:
    """The end of a round: accept a path by the draws, and commit it.

    Arguments and result as in :func:`spec_step`.
    """
    path = (rule or accept_rule(drafter))(tree, draws, drafter.tree.num_levels)
    path = path._replace(count=jnp.where(rows.speculate, path.count, 1))
    reach = target.reach(rows.length)
    after, emitted = commit_accepted(drafter, params, rows, verified, path, reach, kind)
    sources = emitted.sources if tree.sources is None else _sources(tree.sources, path, emitted)
    more = _more(contents, tree, verified, draws, path)
    if contents.candidates:
        others = foregone(drafter, params, tree, path, emitted.count, contents.candidates)
        more = others, *more
    return after, replace(emitted, sources=sources, more=more)


def _sources(
    of_nodes: Int[Array, "B T"], path: AcceptedPath, emitted: Emitted
) -> Int[Array, "B h"]:
    """Who proposed each emitted token: a token is that of the next node of the path."""
    found = jnp.take_along_axis(of_nodes, path.path, axis=1)
    return jnp.where(emitted.sources > 0, jnp.pad(found[:, 1:], ((0, 0), (0, 1))), 0)


def _more(
    contents: Contents,
    tree: Tree,
    verified: Verification,
    draws: Int[Array, "B T"],
    path: AcceptedPath,
) -> tuple[Array, ...]:
    """What a report holds of a round besides tokens and counts."""
    more = []
    if contents.logprobs is not None:
        logits = along(path.path, verified.logits)
        packed = packed_logprobs(logits, path.tokens, contents.logprobs)
        more.append(packed.reshape(packed.shape[0], -1))
    if contents.trees:
        more.append(packed_tree(tree, draws, path))
    return tuple(more)


def accept_rule(drafter: Drafter) -> AcceptRule:
    """How a drafter's trees are accepted: by the target's draws, unless the drafter is lossy."""
    if drafter.unverified_levels:
        return partial(accept_unverified, unverified_levels=drafter.unverified_levels)
    return accept


def sampling_noise(
    target: TargetModel, drafter: Drafter, rows: Rows, kind: SamplingKind = SamplingKind.ANY
) -> RoundNoise:
    """The noise of the draws below every row's pending token."""
    levels, sampling = drafter.tree.num_levels, rows.sampling.of_kind(kind)
    vocabulary, adjustments = target.vocab_size, rows.adjustments
    return RoundNoise.of_round(sampling, rows.length, levels, vocabulary, adjustments)


def refresh_selection(target: TargetModel, drafter: Drafter, params: Params, rows: Rows) -> Rows:
    """The rows after the drafter took from the target's cache what it needs for the round."""
    view = _view(target, params, rows)
    return replace(rows, draft=drafter.before_round(params, rows.draft, view))


def propose_tree(
    target: TargetModel, drafter: Drafter, params: Params, rows: Rows, noise: SamplingNoise
) -> Tree:
    """The drafter's tree below every row's pending token."""
    return drafter.propose(params, rows.draft, _view(target, params, rows), noise)


def _view(target: TargetModel, params: Params, rows: Rows) -> View:
    at = rows.pending, rows.length, rows.attended, rows.done
    return View(target, params.target, rows.cache, *at)


def verify_tree(
    target: TargetModel, drafter: Drafter, params: Params, rows: Rows, tree: Tree, noise: RoundNoise
) -> tuple[Verification, Int[Array, "B T"]]:
    """One target forward over the tree, and the target's draw at every node."""
    verified = run_tree(target, drafter, params, rows, tree)
    return verified, draw_at_nodes(drafter, tree, verified.logits, noise)


def run_tree(
    target: TargetModel, drafter: Drafter, params: Params, rows: Rows, tree: Tree
) -> Verification:
    """One target forward over the tree."""
    positions = rows.length[:, None] + node_depths(tree, drafter.tree)
    return target.verify(
        params.target,
        rows.cache,
        tree.tokens,
        positions,
        tree.mask,
        rows.attended,
        drafter.tree.num_levels,
        drafter.needs,
    )


def draw_at_nodes(
    drafter: Drafter, tree: Tree, logits: Float[Array, "B T V"], noise: RoundNoise
) -> Int[Array, "B T"]:
    """The target's draw at every node, from its logits there."""
    paths = None
    if noise.adjustments is not None:
        paths = tree_paths(tree, drafter.tree.num_levels)
    return noise.draw(logits, node_depths(tree, drafter.tree), paths)


def commit_accepted(
    drafter: Drafter,
    params: Params,
    rows: Rows,
    verified: Verification,
    path: AcceptedPath,
    reach: Lengths | None = None,
    kind: SamplingKind = SamplingKind.ANY,
) -> tuple[Rows, Emitted]:
    """Append the accepted path to cache and draft state, up to the position ``reach`` if given."""
    length = rows.length
    within = path.count if reach is None else jnp.minimum(path.count, reach - length)
    count, stopped = _trim(path.tokens, within, rows)
    # A round that was cut may have emitted only accepted draft tokens, and no bonus.
    accepted = jnp.minimum(count, path.count - 1)
    block = jnp.concatenate([rows.pending[:, None], path.tokens[:, :-1]], axis=1)
    # No token is below -1, so this is the length; but it waits for the draws. Where a row has one
    # fresh slot, the compiler would append before it has read, and copy whole caches to be able to.
    end = jnp.maximum(length, -2 - path.tokens[:, 0])
    features = jax.tree.map(partial(along, path.path), verified.features)
    last = last_along(path.tokens, count)
    adjustments = rows.adjustments
    if adjustments is not None and kind is SamplingKind.ANY:
        adjustments = adjustments.after(path.tokens, count)
    after = replace(
        rows,
        cache=rows.cache.commit(
            verified.keys, verified.values, path.path, end, count, verified.rows
        ),
        draft=drafter.extend(params, rows.draft, Committed(block, length, count, features)),
        length=length + count,
        pending=jnp.where(count > 0, last, rows.pending),
        remaining=jnp.where(stopped, 0, rows.remaining - count),
        adjustments=adjustments,
    )
    # A single drafter has proposed all that was accepted.
    drafted = jnp.arange(path.tokens.shape[1]) < accepted[:, None]
    return after, Emitted(path.tokens, count, accepted, drafted.astype(jnp.int32))


def _trim(
    tokens: Int[Array, "B h"], count: Lengths, rows: Rows
) -> tuple[Lengths, Bool[Array, " B"]]:
    """Cut a round's tokens after the first stop token or NO_TOKEN, and at the row's budget.

    Returns:
      How many remain, none where the row was done; and which rows met a stop token.
    """
    step = jnp.arange(tokens.shape[1])
    stops = (tokens[:, :, None] == rows.stop_tokens[:, None, :]).any(axis=2)
    stops |= tokens == NO_TOKEN
    stops &= step < count[:, None]
    first_stop = jnp.where(stops.any(axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1] + 1)
    count = jnp.minimum(count, rows.remaining)
    return jnp.minimum(count, first_stop), first_stop <= count


@program(static_argnames=("target", "drafter", "kind", "contents"), donate_argnames=("rows",))
def one_round(
    target: TargetModel,
    drafter: Drafter,
    kind: SamplingKind,
    params: Params,
    rows: Rows,
    contents: Contents = TOKENS,
    slots: Lengths | None = None,
) -> tuple[Rows, Int[Array, "1 B n"]]:
    """One round and its report, with no branch and no loop; the rows are donated.

    A launch of it returns at once, so that the host can queue a round after a running one. If
    every row is done nothing is emitted or committed, but the round is computed all the same.
    The last argument is that of :func:`many_rounds`.
    """
    some = rows.gather(slots)
    after, emitted = spec_step(target, drafter, params, some, kind, contents=contents)
    return rows.scatter(slots, some, after), packed(emitted, after)[None]


@program(static_argnames=("target", "drafter", "kind", "contents"), donate_argnames=("rows",))
def many_rounds(
    target: TargetModel,
    drafter: Drafter,
    kind: SamplingKind,
    params: Params,
    rows: Rows,
    limit: Array | Watch,
    contents: Contents = TOKENS,
    slots: Lengths | None = None,
) -> tuple[Rows, Int[Array, "r B n"]]:
    """At most ``limit`` rounds, fewer if every row is done or another candidate leads.

    The rows are donated.

    On a GPU the loop asks the host after every round whether to go on, so that a launch returns
    only when its rounds are done.

    Args:
      target: the target's static part.
      drafter: the drafter's static part.
      kind: what the live rows' sampling needs; static.
      params: parameters of both.
      rows: the rows before the first round.
      limit: 1 to :data:`MOST_ROUNDS`; traced, so that every number of rounds is one program. With
        candidates it also says what is known of them.
      contents: of the report; static.
      slots: the rows that take part, whose order is the report's; all if absent.
    """
    whole, rows = rows, rows.gather(slots)
    before, batch = rows, rows.pending.shape[0]
    columns = packed_columns(drafter.tree, contents)
    empty = jnp.zeros((MOST_ROUNDS, batch, columns), jnp.int32)

    if isinstance(limit, Watch):
        watch, most, own = limit, limit.rounds, contents.candidates.index(drafter)
    else:
        watch, most, own = None, limit, 0

    def unfinished(carry: tuple[Array, Rows, Array, Watch | None]) -> Array:
        done, rows, _, watch = carry
        going = (done < most) & ~rows.done.all()
        if watch is None:
            return going
        return going & (watch.leads(own) | (done == 0))

    def advance(
        carry: tuple[Array, Rows, Array, Watch | None],
    ) -> tuple[Array, Rows, Array, Watch | None]:
        done, rows, report, watch = carry
        after, emitted = spec_step(target, drafter, params, rows, kind, contents=contents)
        report = jax.lax.dynamic_update_index_in_dim(report, packed(emitted, after), done, axis=0)
        return done + 1, after, report, watch and watch.after(own, emitted.more[0])

    begin = jnp.int32(0), rows, empty, watch
    _, rows, report, _ = jax.lax.while_loop(unfinished, advance, begin)
    return whole.scatter(slots, before, rows), report
