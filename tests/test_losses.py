"""The losses against numbers worked out by hand, against float64 numpy, and against what they promise about memory.

Run: uv run pytest tests/test_losses.py
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import losses
from losses import (
    FIELDS,
    LOSSES,
    Scores,
    TokenInputs,
    loss_numbers,
    score,
    target_logprobs,
    token_losses,
    vocabulary_block,
)

# ---------------------------------------------------------------------------------------------------------------------
# Target log-probabilities


@partial(jax.jit, static_argnames=("tile", "block"))
def logprobs_and_gradient(hidden, head, targets, cotangent, **sizes):
    """What a training step asks for: the log-probabilities, and d sum(cotangent * logprobs) / d hidden."""
    logprobs, pullback = jax.vjp(lambda hidden: target_logprobs(hidden, head, targets, **sizes), hidden)
    return logprobs, pullback(cotangent)[0]


def oracle(hidden, head, targets, cotangent):
    """The same in float64 with every logit in memory."""
    hidden, head, cotangent = (np.asarray(each, np.float64) for each in (hidden, head, cotangent))
    logits = hidden @ head.T
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    p = exponentials / exponentials.sum(-1, keepdims=True)
    logprobs = np.log(p[np.arange(len(targets)), targets])
    return logprobs, cotangent[:, None] * (head[targets] - p @ head)


def problem(tokens, vocabulary, width=32, dtype=jnp.float32, scale=1.0):
    draw = np.random.default_rng(tokens * vocabulary).standard_normal
    hidden = jnp.asarray(scale * draw((tokens, width)), dtype)
    head = jnp.asarray(draw((vocabulary, width)) / np.sqrt(width), dtype)
    targets = jnp.asarray(np.random.default_rng(1).integers(0, vocabulary, tokens), jnp.int32)
    targets = targets.at[:2].set(jnp.array([0, vocabulary - 1]))  # both ends of the head, the moved-back block included
    return hidden, head, targets, jnp.asarray(draw(tokens), jnp.float32)


def test_two_logits_of_odds_three_to_one_give_log_three_quarters():
    hidden, head = jnp.array([[1.0], [1.0], [0.0]]), jnp.array([[0.0], [np.log(3.0)]])
    logprobs, gradient = logprobs_and_gradient(hidden, head, jnp.array([1, 0, 1]), jnp.array([1.0, 2.0, 1.0]))
    np.testing.assert_allclose(logprobs, np.log([3 / 4, 1 / 4, 1 / 2]), rtol=1e-6)
    # u = head[target] - sum p head: (1 - 3/4) ln 3, (0 - 3/4) ln 3 (times its cotangent 2), (1 - 1/2) ln 3
    np.testing.assert_allclose(gradient[:, 0], np.log(3.0) * np.array([1 / 4, -3 / 2, 1 / 2]), rtol=1e-6)


VOCABULARIES = pytest.mark.parametrize(
    "vocabulary, block",
    [(2048, 512), (1920, 512), (1408, 512), (1000, 256), (257, 256), (151, 512)],
    ids=["divided by the block", "by a smaller one", "only by 128", "not at all", "by one too many", "below the block"],
)


@VOCABULARIES
@pytest.mark.parametrize(
    "tokens, tile", [(48, 16), (37, 16), (5, 16)], ids=["full tiles", "a ragged tile", "below a tile"]
)
def test_float32_agrees_with_float64_to_1e_5(vocabulary, block, tokens, tile):
    arrays = problem(tokens, vocabulary)
    for got, expected in zip(logprobs_and_gradient(*arrays, tile=tile, block=block), oracle(*arrays), strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


@VOCABULARIES
def test_bfloat16_inputs_keep_float32_logprobs_and_round_only_the_gradient(vocabulary, block):
    arrays = problem(37, vocabulary, dtype=jnp.bfloat16)
    logprobs, gradient = logprobs_and_gradient(*arrays, tile=16, block=block)
    expected_logprobs, expected_gradient = oracle(*arrays)
    assert (logprobs.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0, atol=1e-5)
    error = np.abs(np.asarray(gradient, np.float64) - expected_gradient).max()
    assert error <= 2**-7 * np.abs(expected_gradient).max()  # u and dh each round to 8 bits


def test_logits_in_the_hundreds_neither_overflow_nor_lose_the_tail():
    arrays = problem(32, 1000, scale=200.0)
    logprobs, gradient = logprobs_and_gradient(*arrays, tile=16, block=256)
    expected_logits = np.asarray(arrays[0], np.float64) @ np.asarray(arrays[1], np.float64).T
    assert np.abs(expected_logits).max() > 500
    top = expected_logits.max(-1)
    normaliser = top + np.log(np.exp(expected_logits - top[:, None]).sum(-1))
    np.testing.assert_allclose(logprobs, expected_logits[np.arange(32), arrays[2]] - normaliser, rtol=1e-6, atol=1e-3)
    assert np.isfinite(gradient).all()


def test_without_a_gradient_the_logprobs_are_bitwise_the_same():
    hidden, head, targets, cotangent = problem(37, 1000)
    with_gradient, _ = logprobs_and_gradient(hidden, head, targets, cotangent, tile=16, block=256)
    np.testing.assert_array_equal(target_logprobs(hidden, head, targets, tile=16, block=256), with_gradient)


@settings(max_examples=8, deadline=None)
@given(tile=st.integers(1, 40), block=st.sampled_from([1, 7, 128, 300, 999, 1000, 5000]))
def test_tile_and_block_are_a_matter_of_speed_only(tile, block):
    arrays = problem(23, 1000, width=8)
    for got, expected in zip(logprobs_and_gradient(*arrays, tile=tile, block=block), oracle(*arrays), strict=True):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)


def test_a_target_outside_the_vocabulary_has_probability_zero():
    hidden, head, _, _ = problem(2, 300)
    assert target_logprobs(hidden, head, jnp.array([300, -1]), block=128).tolist() == [-np.inf, -np.inf]


def test_the_head_is_frozen():
    hidden, head, targets, _ = problem(8, 300)
    assert not jax.grad(lambda head: target_logprobs(hidden, head, targets).sum())(head).any()


def test_vocabulary_block_is_the_largest_lane_aligned_divisor_unless_that_is_tiny():
    assert vocabulary_block(248_320, 2048) == 1280  # 128 x 1,940
    assert vocabulary_block(248_320, 4096) == 2560
    assert vocabulary_block(32_768, 2048) == 2048
    assert vocabulary_block(151_936, 2048) == 2048  # 128 x 1,187, a prime: masked
    assert vocabulary_block(50_257, 2048) == 2048  # no multiple of 128: masked
    assert vocabulary_block(260, 2048) == 260  # one block


# The promises about memory and work, read off the program without running it.


def abstract(tokens=2048, width=64, vocabulary=32_768):
    shapes = (tokens, width), (vocabulary, width), (tokens,)
    return [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, (jnp.float32, jnp.float32, jnp.int32), strict=True)]


def squared_gradient(hidden, head, targets):
    """With a cotangent that varies: under a plain sum XLA lets u be the result, and the memory of u goes uncounted."""
    return jax.value_and_grad(lambda hidden: (target_logprobs(hidden, head, targets) ** 2).sum())(hidden)


def test_the_backward_pass_is_handed_u_and_nothing_else():
    def residuals(hidden, head, targets):
        return jax.vjp(lambda hidden: target_logprobs(hidden, head, targets), hidden)[1]

    leaves = jax.tree.leaves(jax.eval_shape(residuals, *abstract()))
    shapes = Counter(leaf.shape for leaf in leaves if leaf.dtype == jnp.float32)
    assert shapes[32_768, 64] == shapes[2048, 64] == 1  # the head itself, and u: as many numbers as hidden
    assert all(shape in ((32_768, 64), (2048, 64)) or np.prod(shape) <= 2048 for shape in shapes)


def test_temporary_memory_is_a_few_blocks_and_does_not_grow_with_the_vocabulary():
    def temp_bytes(vocabulary):
        analysis = jax.jit(squared_gradient).lower(*abstract(vocabulary=vocabulary)).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    small, large = temp_bytes(32_768), temp_bytes(131_072)
    assert small < 2048 * 32_768 * 4 / 8
    assert large <= 1.05 * small


@pytest.mark.parametrize("vocabulary", [32_768, 50_257], ids=["exact blocks", "a masked block"])
def test_one_matmul_a_block_without_gradient_and_two_with_it(vocabulary):
    def matmuls(function):
        return str(jax.make_jaxpr(function)(*abstract(vocabulary=vocabulary))).count("dot_general[")

    assert (matmuls(target_logprobs), matmuls(squared_gradient)) == (1, 2)


# Live tokens, several targets, entropy, and the same on a mesh.

MESH = jax.make_mesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS, PLANES, WHOLE = P("fsdp"), P(None, "fsdp"), P()


def on_mesh(hidden, head, targets, live, planes, **sizes):
    run = jax.shard_map(
        lambda *args: score(*args, axis="fsdp", **sizes),
        mesh=MESH,
        in_specs=(ROWS, ROWS, PLANES, ROWS, WHOLE),
        out_specs=Scores(PLANES, ROWS),
        check_vma=False,
    )
    return run(hidden, head, targets, live, planes)


def full_oracle(hidden, head, targets, cotangent):
    """(logprobs [K, T], entropy [T], gradient [T, D]) in float64 with every logit in memory."""
    planes = [oracle(hidden, head, target, weight) for target, weight in zip(targets, cotangent, strict=True)]
    logits = np.asarray(hidden, np.float64) @ np.asarray(head, np.float64).T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.stack([lp for lp, _ in planes]), -(p * np.log(p)).sum(-1), sum(gradient for _, gradient in planes)


@pytest.mark.parametrize("where", ["one device", "four devices"])
@pytest.mark.parametrize("planes, used", [(1, 1), (3, 3), (8, 2)])
@pytest.mark.parametrize("alive", [1.0, 0.4, 0.0])
def test_live_tokens_and_targets_in_use_agree_with_float64_and_the_rest_is_zero(where, planes, used, alive):
    hidden, head, _, _ = problem(64, 1000)
    random = np.random.default_rng(planes)
    targets = jnp.asarray(random.integers(0, 1000, (planes, 64)), jnp.int32)
    cotangent = jnp.asarray(random.normal(size=(planes, 64)), jnp.float32)
    live = jnp.asarray(random.random(64) < alive)
    run = on_mesh if where == "four devices" else score

    @jax.jit
    def step(hidden):
        scores, pull = jax.vjp(lambda hidden: run(hidden, head, targets, live, used, tile=16, block=128), hidden)
        return scores, pull(Scores(cotangent, jnp.ones(64)))[0], run(hidden, head, targets, live, used, tile=16)

    scores, gradient, without = step(hidden)
    logprobs, entropy, expected = full_oracle(hidden, head, targets[:used], cotangent[:used])
    for got in (scores, without):
        np.testing.assert_allclose(got.logprobs[:used], logprobs * live, atol=1e-5)
        np.testing.assert_allclose(got.entropy, entropy * live, atol=1e-5)
        assert not got.logprobs[used:].any()
    np.testing.assert_allclose(gradient, expected * live[:, None], atol=1e-5)


def test_a_log_probability_is_never_positive():
    """The target's logit is summed apart from the others: of p = 1 it may come out the larger, by a rounding."""
    random = np.random.default_rng(0)
    hidden = jnp.asarray(random.normal(size=(256, 512)), jnp.float32)
    head = hidden * 3  # each token's own row is hundreds of nats above the rest
    assert (target_logprobs(hidden, head, jnp.arange(256)) <= 0).all()


def test_prompt_tokens_cost_no_tile(monkeypatch):
    """The trip count is traced: the same program, fewer turns. Counted on the host, from inside the loop."""
    turns, visit = [], losses._visit_tile

    def counting(*args, **kwargs):
        jax.debug.callback(lambda: turns.append(1))
        return visit(*args, **kwargs)

    monkeypatch.setattr(losses, "_visit_tile", counting)
    hidden, head, targets, _ = problem(64, 300)
    run = jax.jit(lambda live: score(hidden, head, targets[None], live, tile=8).logprobs)
    for alive, expected in ((64, 8), (17, 3), (0, 0)):
        turns.clear()
        jax.block_until_ready(run(jnp.arange(64) < alive))
        jax.effects_barrier()
        assert len(turns) == expected


@pytest.mark.parametrize("planes", [1, 4])
def test_no_collective_on_the_mesh_carries_an_axis_of_the_vocabulary(planes):
    shapes = (8192, 64), (32_768, 64), (planes, 8192), (8192,)
    kinds, specs = (jnp.float32, jnp.float32, jnp.int32, jnp.bool), (ROWS, ROWS, PLANES, ROWS)
    arguments = [
        jax.ShapeDtypeStruct(shape, kind, sharding=NamedSharding(MESH, spec))
        for shape, kind, spec in zip(shapes, kinds, specs, strict=True)
    ]
    loss = lambda hidden, *rest: (on_mesh(hidden, *rest, planes).logprobs ** 2).sum()
    compiled = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
    collectives = re.findall(
        r"= (.*?) (?:all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)", compiled.as_text()
    )
    moved = {int(size) for shape in collectives for size in re.findall(r"\d+", shape)}
    assert collectives and max(moved) <= 512  # tokens of a tile; a quarter of the head would be 8,192 rows
    assert compiled.memory_analysis().temp_size_in_bytes < 8192 * 32_768 // 4


# ---------------------------------------------------------------------------------------------------------------------
# The losses


@jax.jit
def losses_and_gradient(index, logprobs, inputs, live, segments):
    """Per-token losses, and the gradient of their sum by the log-probabilities. One program for every loss."""

    def total(logprobs):
        losses = token_losses(index, logprobs, inputs, live, segments)
        return losses.sum(), losses

    (_, losses), gradient = jax.value_and_grad(total, has_aux=True)(logprobs)
    return losses, gradient


def evaluate(name, logprobs, inputs, live=None, segments=None, **config):
    """losses_and_gradient by the loss's name, on plain numbers; `config` holds numbers or arrays, one a token."""
    logprobs = np.asarray(logprobs, np.float32)
    numbers = loss_numbers(name, {key: value for key, value in config.items() if np.ndim(value) == 0}) | config
    given = {FIELDS[key]: np.broadcast_to(value, logprobs.shape) for key, value in numbers.items()}
    inputs = TokenInputs(*(np.asarray(each, np.float32) for each in inputs._replace(**given)))
    live = np.ones(logprobs.shape, bool) if live is None else np.asarray(live)
    segments = np.zeros(logprobs.shape, np.int32) if segments is None else np.asarray(segments, np.int32)
    return losses_and_gradient(np.int32(list(LOSSES).index(name)), logprobs, inputs, live, segments)


def token_inputs(weights, sampling_logprobs, advantages):
    """The numbers of a datum; evaluate fills in what belongs to the loss."""
    weights, *given = (np.asarray(numbers, float) for numbers in (weights, sampling_logprobs, advantages))
    zeros = np.zeros(len(weights))
    return TokenInputs(weights, *given, np.ones(len(weights)), zeros, zeros, zeros)


def sampled(gaps, advantages):
    """Tokens whose ratio is exp(gap): lp = -1 and q = lp - gap."""
    return np.full(len(gaps), -1.0), token_inputs(np.zeros(len(gaps)), -1.0 - np.asarray(gaps), advantages)


def test_the_table_names_every_field_by_its_name_on_the_wire():
    assert list(LOSSES)[:5] == ["cross_entropy", "importance_sampling", "ppo", "cispo", "dro"]
    assert {name for loss in LOSSES.values() for name in (*loss.inputs, *loss.config)} == set(FIELDS)
    assert set(FIELDS.values()) == set(TokenInputs._fields)


def test_cross_entropy_by_hand():
    inputs = token_inputs([1.0, 0.0, -2.0], np.full(3, np.nan), np.full(3, np.inf))  # it reads weights only
    losses, gradient = evaluate("cross_entropy", [-0.5, -3.0, -0.25], inputs)
    np.testing.assert_array_equal(losses, [0.5, 0.0, -0.5])
    np.testing.assert_array_equal(gradient, [-1.0, 0.0, 2.0])


def test_importance_sampling_by_hand():
    losses, gradient = evaluate("importance_sampling", *sampled(np.log([1, 2, 0.5, 8]), [1.0, 3.0, -4.0, 0.0]))
    np.testing.assert_allclose(losses, [-1.0, -6.0, 2.0, 0.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, losses, rtol=1e-6)  # d exp = exp


def test_ppo_by_hand_in_the_band_and_in_all_four_corners():
    ratios, advantages = np.log([1.1, 2.0, 2.0, 0.5, 0.5]), [1.0, 1.0, -1.0, 1.0, -1.0]
    losses, gradient = evaluate("ppo", *sampled(ratios, advantages))
    # in the band; clipped above; too high and bad: pulled back; too low and good: pulled up; clipped below
    np.testing.assert_allclose(losses, [-1.1, -1.2, 2.0, -0.5, 0.8], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1.1, 0.0, 2.0, -0.5, 0.0], rtol=1e-6)


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo", "stable_reinforce"])
def test_a_ratio_beyond_float32_has_a_finite_value_and_no_gradient_but_the_clipped_one(name):
    losses, gradient = evaluate(name, *sampled([9000.0], [1.0]))
    assert np.isfinite(losses).all() and np.isfinite(gradient).all()
    assert not evaluate(name, *sampled([9000.0], [0.0]))[1].any()


def test_ppo_on_the_very_edge_of_its_band_keeps_the_whole_gradient():
    losses, gradient = evaluate("ppo", *sampled([0.0, 0.0], [1.0, -1.0]), clip_low_threshold=1, clip_high_threshold=1)
    np.testing.assert_array_equal(losses, [-1.0, 1.0])
    np.testing.assert_array_equal(gradient, [-1.0, 1.0])


def test_cispo_by_hand():
    losses, gradient = evaluate("cispo", *sampled(np.log([1.1, 2.0, 0.5]), [1.0, 3.0, -1.0]))
    np.testing.assert_allclose(losses, [1.1, 3.6, -0.8], rtol=1e-6)  # lp = -1
    np.testing.assert_allclose(gradient, [-1.1, -3.6, 0.8], rtol=1e-6)


def test_dro_by_hand():
    losses, gradient = evaluate("dro", *sampled([0.0, 2.0, -2.0], [1.0, 1.0, 0.0]), beta=0.5)
    np.testing.assert_array_equal(losses, [1.0, 2.0, 1.0])  # lp = -1: -(lp A) + 0.25 gap^2
    np.testing.assert_array_equal(gradient, [-1.0, 0.0, -1.0])  # the second rests: gap = A / beta


def test_gspo_by_hand():
    """Two sequences of ratios (2, 1/2, and 8 outside the mask) and (4, 1): geometric means 1 and 2."""
    logprobs, inputs = sampled(np.log([2, 0.5, 8, 4, 1]), [1.0, -1.0, 1.0, 1.0, -1.0])
    inputs = inputs._replace(ratio_mask=np.array([1, 1, 0, 5, 1]))
    losses, gradient = evaluate("gspo", logprobs, inputs, segments=[0, 0, 0, 3, 3], clip_high_threshold=1.5)
    np.testing.assert_allclose(losses, [-1.0, 1.0, -1.0, -1.5, 2.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-1.0, 1.0, -1.0, 0.0, 2.0], rtol=1e-6)


def test_stable_reinforce_by_hand():
    logprobs, inputs = sampled(np.log([0.5, 1.0, 8.0]), [1.0, -2.0, 1.0])
    losses, gradient = evaluate("stable_reinforce", logprobs, inputs)  # lp = -1, ratios truncated at 2
    np.testing.assert_allclose(losses, [0.5, -2.0, 2.0], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.5, 2.0, -2.0], rtol=1e-6)
    leashed, pulled = evaluate("stable_reinforce", logprobs, inputs, kl_coeff=2.0)
    np.testing.assert_allclose(leashed - losses, np.log([0.5, 1.0, 8.0]) ** 2, rtol=1e-5)
    np.testing.assert_allclose(pulled - gradient, 2 * np.log([0.5, 1.0, 8.0]), rtol=1e-5, atol=1e-6)


def test_a_threshold_of_a_token_goes_before_that_of_the_request():
    logprobs, inputs = sampled(np.log([2.0, 2.0]), [1.0, 1.0])
    losses, _ = evaluate("ppo", logprobs, inputs, clip_high_threshold=np.array([1.5, 3.0]))
    np.testing.assert_allclose(losses, [-1.5, -2.0], rtol=1e-6)


def float64_gspo(lp, q, w, a, low, high, penalty):
    s = np.exp((lp - q).mean())
    return -np.minimum(s * a, np.clip(s, low, high) * a), np.where(np.where(a > 0, s > high, s < low), 0.0, -s * a)


# Float64 losses (lp, q, w, A, low, high, beta) -> (losses, gradient by lp), written without the module's helpers.
ORACLES = {
    "cross_entropy": lambda lp, q, w, a, low, high, beta: (-w * lp, -w),
    "importance_sampling": lambda lp, q, w, a, low, high, beta: (-np.exp(lp - q) * a, -np.exp(lp - q) * a),
    "ppo": lambda lp, q, w, a, low, high, beta: (
        -np.minimum(np.exp(lp - q) * a, np.clip(np.exp(lp - q), low, high) * a),
        np.where(np.where(a > 0, np.exp(lp - q) > high, np.exp(lp - q) < low), 0.0, -np.exp(lp - q) * a),
    ),
    "cispo": lambda lp, q, w, a, low, high, beta: (
        -np.clip(np.exp(lp - q), low, high) * lp * a,
        -np.clip(np.exp(lp - q), low, high) * a,
    ),
    "dro": lambda lp, q, w, a, low, high, beta: (-lp * a + 0.5 * beta * (lp - q) ** 2, -a + beta * (lp - q)),
    "gspo": float64_gspo,
    "stable_reinforce": lambda lp, q, w, a, low, high, kl: (
        -np.minimum(np.exp(lp - q), high) * lp * a + 0.5 * kl * (lp - q) ** 2,
        -np.minimum(np.exp(lp - q), high) * a + kl * (lp - q),
    ),
}

CONFIGS = {
    "cross_entropy": [{}],
    "importance_sampling": [{}],
    "ppo": [{}, {"clip_high_threshold": 1.28}, {"clip_low_threshold": 0.0, "clip_high_threshold": 5}],
    "cispo": [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}],
    "dro": [{}, {"beta": 1.5}, {"beta": 0}],
    "gspo": [{}, {"clip_low_threshold": 0.5, "clip_high_threshold": 2.0}],
    "stable_reinforce": [{}, {"kl_coeff": 0.5, "clip_high_threshold": 1.1}],
}
EVERY_LOSS_AND_CONFIG = [(name, config) for name, configs in CONFIGS.items() for config in configs]


def random_tokens(seed, tokens=512):
    random = np.random.default_rng(seed)
    logprobs = -random.exponential(2.0, tokens)
    gaps = random.normal(0.0, 0.5, tokens)
    return logprobs, token_inputs(random.normal(size=tokens), logprobs - gaps, random.normal(size=tokens))


@pytest.mark.parametrize("name, config", EVERY_LOSS_AND_CONFIG)
def test_every_loss_agrees_with_float64_in_value_and_gradient(name, config):
    logprobs, inputs = random_tokens(seed=0)
    fields = {FIELDS[key]: value for key, value in loss_numbers(name, config).items()}
    numbers = [fields.get(field, 0.0) for field in ("clip_low", "clip_high", "penalty")]
    expected = ORACLES[name](logprobs, inputs.sampling_logprobs, inputs.weights, inputs.advantages, *numbers)
    for got, wanted in zip(evaluate(name, logprobs, inputs, **config), expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


@contextmanager
def counting_compilations() -> Iterator[list[str]]:
    names: list[str] = []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event.endswith("backend_compile_duration"):
            names.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_no_loss_and_no_number_compiles_anything_anew():
    with counting_compilations() as compilations:
        jax.jit(lambda x: x * 3.0)(np.float32(2.0))
    assert compilations  # the counter counts
    evaluate("cross_entropy", *random_tokens(seed=1))
    with counting_compilations() as compilations:
        for seed, (name, config) in enumerate(EVERY_LOSS_AND_CONFIG):
            logprobs, inputs = random_tokens(seed)
            evaluate(name, logprobs, inputs, live=logprobs > -2.0, **config)
    assert not compilations


# Properties, on eight tokens.

TOKENS = 8
each = partial(st.lists, min_size=TOKENS, max_size=TOKENS)
numbers = partial(st.floats, width=32, allow_nan=False)
names = st.sampled_from(list(LOSSES))
masks = each(st.booleans()).map(np.array)


@st.composite
def some_tokens(draw, gap=3.0):
    logprobs = np.array(draw(each(numbers(-20, 0))))
    gaps = np.array(draw(each(numbers(-gap, gap))))
    weights, advantages = (np.array(draw(each(numbers(-4, 4)))) for _ in range(2))
    return logprobs, token_inputs(weights, logprobs - gaps, advantages)


def take(inputs, where):
    return TokenInputs(*(numbers[where] for numbers in inputs))


@settings(max_examples=40, deadline=None)
@given(name=names, tokens=some_tokens(), live=masks)
def test_masked_equals_filtered(name, tokens, live):
    logprobs, inputs = tokens
    masked = evaluate(name, logprobs, inputs, live)
    filtered = evaluate(name, logprobs[live], take(inputs, live))
    for of_all, of_live in zip(masked, filtered, strict=True):
        np.testing.assert_allclose(np.asarray(of_all)[live], of_live, rtol=1e-6, atol=1e-30)
        assert not np.asarray(of_all)[~live].any()


@settings(max_examples=60, deadline=None)
@given(
    name=names,
    tokens=some_tokens(),
    live=masks,
    garbage=st.lists(
        each(st.sampled_from([np.inf, -np.inf, np.nan, -1e30, -99999.0, 3e38])), min_size=8, max_size=8
    ).map(np.array),
)
def test_garbage_in_dead_tokens_is_exactly_zero_and_touches_no_live_one(name, tokens, live, garbage):
    logprobs, inputs = tokens
    clean = evaluate(name, logprobs, inputs, live)
    dirty_logprobs, *dirty_inputs = np.where(live, np.stack([logprobs, *inputs]), garbage)
    dirty = evaluate(name, dirty_logprobs, TokenInputs(*dirty_inputs), live)
    for of_clean, of_dirty in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(of_clean, of_dirty)
        assert not np.asarray(of_dirty)[~live].any()


@settings(max_examples=40, deadline=None)
@given(name=names.filter("gspo".__ne__), tokens=some_tokens(), cut=st.integers(0, TOKENS))
def test_the_sum_over_a_split_is_the_sum_of_its_parts(name, tokens, cut):
    logprobs, inputs = tokens
    whole = np.asarray(evaluate(name, logprobs, inputs)[0], np.float64).sum()
    parts = [evaluate(name, logprobs[part], take(inputs, part))[0] for part in (slice(0, cut), slice(cut, None))]
    np.testing.assert_allclose(whole, sum(np.asarray(part, np.float64).sum() for part in parts), rtol=1e-6, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(tokens=some_tokens(gap=0.125))
def test_ppo_is_importance_sampling_inside_the_band(tokens):
    for of_ppo, unclipped in zip(evaluate("ppo", *tokens), evaluate("importance_sampling", *tokens), strict=True):
        np.testing.assert_allclose(of_ppo, unclipped, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(tokens=some_tokens(), low=numbers(0, 1), high=numbers(1, 8))
def test_the_gradient_of_cispo_is_the_clipped_ratio_times_the_advantage(tokens, low, high):
    logprobs, inputs = tokens
    _, gradient = evaluate("cispo", logprobs, inputs, clip_low_threshold=low, clip_high_threshold=high)
    ratio = np.exp(np.float32(logprobs) - np.float32(inputs.sampling_logprobs))
    np.testing.assert_allclose(gradient, -np.clip(ratio, low, high) * inputs.advantages, rtol=1e-5, atol=1e-30)


# ---------------------------------------------------------------------------------------------------------------------
# The numbers of a request


def test_loss_numbers_fills_in_the_defaults_of_its_loss():
    assert loss_numbers("cross_entropy", {}) == {}
    assert loss_numbers("cispo", {"clip_high_threshold": 5}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 5}
    assert loss_numbers("dro", {}) == {"beta": 0.05}


@pytest.mark.parametrize(
    "name, config, message",
    [
        (
            "grpo",
            {},
            "loss_fn: got 'grpo', allowed: cross_entropy, importance_sampling, ppo, cispo, dro, gspo, stable_reinforce",
        ),
        ("dro", {"bta": 0.1}, "loss_fn_config: got key 'bta', allowed for dro: beta"),
        ("cross_entropy", {"beta": 0.1}, "loss_fn_config: got key 'beta', allowed for cross_entropy: none"),
        ("dro", {"beta": "soft"}, r"loss_fn_config\['beta'\]: got 'soft', allowed: a finite float32 number"),
        ("dro", {"beta": -1}, r"loss_fn_config\['beta'\]: got -1, allowed: 0 or more"),
        ("dro", {"beta": True}, r"loss_fn_config\['beta'\]: got True"),
        ("dro", {"beta": float("nan")}, r"loss_fn_config\['beta'\]: got nan"),
        ("dro", {"beta": float("-inf")}, r"loss_fn_config\['beta'\]: got -inf"),
        ("dro", {"beta": 1e39}, r"loss_fn_config\['beta'\]: got 1e\+39"),
        ("ppo", {"clip_low_threshold": 1.5}, "got clip_low_threshold 1.5 > clip_high_threshold 1.2"),
    ],
)
def test_loss_numbers_says_what_it_got_and_what_it_accepts(name, config, message):
    with pytest.raises(ValueError, match=message):
        loss_numbers(name, config)


def test_token_fields_takes_what_the_loss_reads_and_the_datums_own_first():
    inputs = {"target_tokens": np.zeros(2), "weights": np.ones(2), "advantages": np.ones(2), "logprobs": np.ones(2)}
    given = inputs | {"clip_high_threshold": np.array([2.0, 3.0])}
    assert set(losses.token_fields("cross_entropy", {}, given)) == {"weights"}
    fields = losses.token_fields("ppo", loss_numbers("ppo", {}), given)
    assert fields["clip_low"] == 0.8 and fields["clip_high"].tolist() == [2, 3] and "weights" not in fields
    with pytest.raises(ValueError, match='loss_fn_inputs: got "clip_hihg", allowed: target_tokens, weights'):
        losses.token_fields("ppo", {}, given | {"clip_hihg": np.ones(2)})
    low = {"clip_low_threshold": np.array([0.5, 2.5])}
    with pytest.raises(ValueError, match="got clip_low_threshold 2.5 > clip_high_threshold 1.2 at position 1"):
        losses.token_fields("ppo", loss_numbers("ppo", {}), inputs | low)
