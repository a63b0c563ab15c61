"""Target log-probabilities without logits, and the Tinker losses on top of them.

    hidden [T, D] -- score --> logprobs [T] -- token_losses --> losses [T] -- sum --> what trainer.py differentiates
                     ^ head [V, D]             ^ weights | sampling_logprobs, advantages

At a vocabulary of 248,320 the logits of 20,480 tokens are 19 GiB, made only to be reduced to 20,480 numbers.
`score` walks the head once, block by block, under the running softmax of FlashAttention: log-probability AND
gradient come out of the same pass, so that the backward pass is one multiplication.

Invariants:
- Nothing of shape [T, V] exists and nothing is computed twice: two matmuls where a gradient is asked for, else one.
- A loss is a SUM over tokens, nothing is normalised: fb(A); fb(B); optim_step equals fb(A+B); optim_step.
- A token that is not live adds exactly 0 to loss and gradient, whatever its inputs hold (inf, NaN, -99999), and is
  not even scored: prompts and padding cost no head.
- The loss is data: its index is traced, its numbers are given per token, so that changing either compiles nothing.
- On a mesh the head stays sharded; no collective carries an axis of its vocabulary.

Left out: a trainable head (LoRA freezes the unembedding here: its cotangent is None); custom losses, which the SDK
sends as the weights of cross_entropy.

Run:        uv run pytest tests/test_losses.py
Read first: Milakov & Gimelshein 2018, "Online normalizer calculation for softmax" (arXiv:1805.02867), Algorithm 3.

Shapes: T tokens, V vocab, D model; n tiles of `tile` tokens; a block is `block` rows of the head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int

LANES = 128  # the TPU's vector width: a block of the head should be a multiple of it
LARGEST = float(np.finfo(np.float32).max)  # the largest number a loss can be given
MOST_NATS = 80.0  # of a log-ratio; exp of 88 is infinite in float32, and times 0 NaN. Beyond it r stands still
LOWEST = -1e30  # a logit of probability 0 that may still be multiplied by it

PerToken = Float[Array, " T"]


# ---------------------------------------------------------------------------------------------------------------------
# Target log-probabilities in one pass over the head


class Scores(NamedTuple):
    logprobs: Float32[Array, "K T"]
    entropy: Float32[Array, " T"]  # of the whole next-token distribution, in nats


def target_logprobs(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    *,
    tile: int = 512,
    block: int = 1280,
) -> Float32[Array, " T"]:
    """log p(targets[i] | hidden[i]): `score` at its plainest, one target a token, every token live, one device."""
    return score(hidden, head, targets[None], tile=tile, block=block).logprobs[0]


def score(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "K T"],
    live: Bool[Array, " T"] | None = None,
    planes: Int[Array, ""] | int | None = None,
    *,
    axis: str | None = None,
    tile: int = 512,
    block: int = 1280,
) -> Scores:
    """log p(targets[k, i] | hidden[i]) under the logits z_i = head @ hidden[i], differentiable in `hidden` alone.

        logprob_i           = z_i[target_i] - logsumexp(z_i)
        d logprob_i / d h_i = head[target_i] - softmax(z_i) @ head  =: u_i      [D]
        entropy_i           = logsumexp(z_i) - softmax(z_i) . z_i               a number to report, without derivative

    softmax(z) @ head is attention with query h and key = value = head, so FlashAttention's running rescale gives the
    logprob and u together: 4TDV FLOPs. u, of the size of `hidden`, is all that is kept for the backward pass. Further
    targets of a token (soft labels, K > 1) share the walk: each is one logit more, 2D FLOPs instead of 4DV.

    `live`: only these tokens are scored, sorted into as few tiles as hold them; the others get 0 and cost nothing,
    for the number of tiles is traced. `planes`, traced too: how many of the K targets are in use; the others get 0.

    `axis`: inside shard_map, the mesh axis over which both the tokens and the rows of the head are sharded. The n
    devices bring tile / n tokens each, all score all of them against their own part of the head, and the parts are
    merged: a tile moves [tile, D] twice (all-gather of hidden, reduce-scatter of u) and a few numbers a token. The
    head stays where it is, which is less traffic than gathering it once while about 2T < V.

    Domain: T >= 1; 0 <= target < V, outside of which the logprob is -inf. The head is stored [V, D] (the gather of
    head[targets] would need a transposed copy of [D, V] on TPU) and frozen: asking for its gradient returns zeros.
    A larger `tile` reads the head less often, a larger `block` rescales u less often; a step holds a few [tile, block].
    Never wrap this in jax.checkpoint: the forward pass would run twice.

    Reference: FlashAttention, Dao et al. 2022 (arXiv:2205.14135), Algorithm 1. Its neighbour Cut Cross-Entropy,
    Wijmans et al. 2024 (arXiv:2411.09009), tiles alike but recomputes the logits in the backward pass.
    """
    tokens = hidden.shape[0]
    live = jnp.ones(tokens, bool) if live is None else live
    size = min(max(tile // (lax.axis_size(axis) if axis else 1), 1), tokens)  # what one device adds to a tile
    order = jnp.argsort(~live)  # stable
    count = -(-live.sum() // size)
    walk = _Walk(
        # Padding gets numbers of its own past the end: reads are clipped, writes dropped, and no two are the same.
        order=jnp.concatenate([order, jnp.arange(tokens, tokens + -tokens % size)]).reshape(-1, size),
        count=lax.pmax(count, axis) if axis else count,  # the collectives of a tile want every device
        planes=jnp.asarray(targets.shape[0] if planes is None else planes),
    )
    logprobs, entropy = _score(hidden, head, targets, walk, axis, block)
    used = live & (jnp.arange(targets.shape[0])[:, None] < walk.planes)  # [K, T]
    return Scores(jnp.where(used, logprobs, 0.0), jnp.where(live, entropy, 0.0))


class _Walk(NamedTuple):
    """Which tokens make up which tile."""

    order: Int[Array, "n size"]  # tokens in the order they are scored, padded with T, T + 1, ...
    count: Int[Array, ""]  # tiles with a live token
    planes: Int[Array, ""]  # targets in use


# The head and the targets are arguments, not closed over: inside shard_map a closure raises UnexpectedTracerError.
@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _score(hidden: Array, head: Array, targets: Array, walk: _Walk, axis: str | None, block: int):
    return _visit_tiles(hidden, head, targets, walk, axis, block, with_u=False)[0]


def _forward(hidden: Array, head: Array, targets: Array, walk: _Walk, axis: str | None, block: int):
    scores, u = _visit_tiles(hidden, head, targets, walk, axis, block, with_u=True)
    return scores, (u, head, targets, walk)


def _backward(axis: str | None, block: int, kept, cotangents):
    """dh = sum_k cotangent_k (head[target_k] - p @ head): u once for all k, and what further targets differ by."""
    (u, head, targets, walk), (cotangent, _) = kept, cotangents
    gradient = (cotangent.sum(0)[:, None] * u).astype(u.dtype)  # [T, D]

    def visit(i, gradient):
        here, rows = walk.order[i], partial(_rows, head, axis=axis)
        mine = cotangent.at[:, here].get(mode="fill", fill_value=0)  # [K, size]
        target, weight = _gather(targets.at[:, here].get(mode="clip"), axis, 1), _gather(mine, axis, 1)  # [K, tile]
        first = rows(target[0])
        add = lambda k, total: total + weight[k][:, None] * (rows(target[k]) - first)
        further = _scatter(lax.fori_loop(1, walk.planes, add, jnp.zeros_like(first)), axis)
        of_u = mine.sum(0)[:, None] * u.at[here].get(mode="clip")
        return gradient.at[here].set((of_u + further).astype(u.dtype), mode="drop", unique_indices=True)

    if targets.shape[0] > 1:
        with jax.named_scope("further"):
            gradient = lax.fori_loop(0, jnp.where(walk.planes > 1, walk.count, 0), visit, gradient)
    return gradient, None, None, None


_score.defvjp(_forward, _backward)


def _visit_tiles(
    hidden: Array, head: Array, targets: Array, walk: _Walk, axis: str | None, block: int, *, with_u: bool
):
    """((logprobs [K, T], entropy [T]), u [T, D] if asked for); 0 for what no tile has."""

    def visit(i, carry):
        here, (logprobs, entropy, u) = walk.order[i], carry
        tokens, of = hidden.at[here].get(mode="clip"), targets.at[:, here].get(mode="clip")
        parts = _visit_tile(tokens, head, of, walk.planes, axis, block, with_u=with_u)
        put = lambda all, part: all.set(part, mode="drop", unique_indices=True)
        u = put(u.at[here], parts[2]) if with_u else u
        return put(logprobs.at[:, here], parts[0]), put(entropy.at[here], parts[1]), u

    zeros = lambda *shape: jnp.zeros(shape, jnp.float32)
    u = jnp.zeros(hidden.shape if with_u else (0, hidden.shape[1]), hidden.dtype)
    carry = zeros(targets.shape[0], hidden.shape[0]), zeros(hidden.shape[0]), u
    with jax.named_scope("tiles"):  # the name by which a reader of the compiled program knows what the count is of
        logprobs, entropy, u = lax.fori_loop(0, walk.count, visit, carry)
    return (logprobs, entropy), u


def _visit_tile(
    hidden: Float[Array, "size D"],
    head: Float[Array, "V D"],
    targets: Int[Array, "K size"],
    planes: Int[Array, ""],
    axis: str | None,
    block: int,
    *,
    with_u: bool,
) -> tuple[Float32[Array, "K size"], Float32[Array, " size"], Float[Array, "_ D"]]:
    """(logprobs, entropy, u) of one tile: this device's part of the vocabulary for all, then all parts for its own."""
    hidden, targets = _gather(hidden, axis, 0), _gather(targets, axis, 1)
    largest, total, mixture = _visit_blocks(hidden, head, block, with_u=with_u)
    most = lax.pmax(largest, axis) if axis else largest
    factor = jnp.exp(largest - most)
    total = _sum(total * factor, axis)
    normaliser = most + jnp.log(total)
    mixture = mixture * (factor / total).reshape(-1, *[1] * (mixture.ndim - 1))  # this part of p @ head, or of p . z
    mean_logit = (hidden * mixture).sum(-1) if with_u else mixture  # p . (head @ h) = (p @ head) . h
    first = _rows(head, targets[0], axis)

    def logprob(rows, target):
        """The target's row is in one part of the head only; the logit of no part is -inf."""
        part = jnp.where(_inside(head, target, axis)[1], (hidden.astype(jnp.float32) * rows).sum(-1), -jnp.inf)
        return jnp.minimum((lax.pmax(part, axis) if axis else part) - normaliser, 0.0)  # rounding, not p > 1

    further = lambda k, all: all.at[k].set(logprob(_rows(head, targets[k], axis), targets[k]))
    logprobs = jnp.zeros(targets.shape, jnp.float32).at[0].set(logprob(first, targets[0]))
    if targets.shape[0] > 1:
        with jax.named_scope("further"):
            logprobs = lax.fori_loop(1, planes, further, logprobs)
    u = _scatter((first - mixture).astype(hidden.dtype), axis) if with_u else jnp.zeros((0, hidden.shape[1]))
    return _own(logprobs, axis, 1), _own(normaliser - _sum(mean_logit, axis), axis, 0), u


def _visit_blocks(
    hidden: Float[Array, "tile D"], head: Float[Array, "V D"], block: int, *, with_u: bool
) -> tuple[Float32[Array, " tile"], Float32[Array, " tile"], Float32[Array, "tile *D"]]:
    """(max z, sum of e, sum of e * rows of the head, or of e * z) with e = exp(z - max z): one walk over the head."""
    vocabulary = head.shape[0]
    block = vocabulary_block(vocabulary, block)
    exact = vocabulary % block == 0
    # Without "highest" a TPU multiplies float32 in one bfloat16 pass; products of bfloat16 are exact either way.
    dot = partial(jnp.einsum, preferred_element_type=jnp.float32, precision="highest")

    def visit(j, carry):
        largest, total, mixture = carry
        # The last block of an inexact walk is moved back to end with the head: no padded copy, but columns seen before.
        start = j * block if exact else jnp.minimum(j * block, vocabulary - block)
        rows = lax.dynamic_slice_in_dim(head, start, block)  # [block, D]
        z = dot("td,vd->tv", hidden, rows)  # [tile, block]
        if not exact:
            z = jnp.where(start + jnp.arange(block) >= j * block, z, LOWEST)

        larger = jnp.maximum(largest, z.max(-1))
        rescale = jnp.exp(largest - larger)
        e = jnp.exp(z - larger[:, None])
        block_total = e.sum(-1)
        if with_u:
            # The barrier has the second matmul read the narrow e; without it the TPU compiler computes exp again there.
            e, block_total = lax.optimization_barrier((e.astype(head.dtype), block_total))
            mixture = mixture * rescale[:, None] + dot("tv,vd->td", e, rows)
        else:
            mixture = mixture * rescale + (e * z).sum(-1)
        return larger, total * rescale + block_total, mixture

    zeros = jnp.zeros(hidden.shape[0], jnp.float32)
    carry = jnp.full_like(zeros, LOWEST), zeros, jnp.zeros(hidden.shape if with_u else zeros.shape, jnp.float32)
    return lax.fori_loop(0, -(-vocabulary // block), visit, carry)


def _inside(head: Array, targets: Array, axis: str | None) -> tuple[Array, Array]:
    """(row of this device's part of the head, whether the target is in that part)."""
    local = targets - (lax.axis_index(axis) * head.shape[0] if axis else 0)
    return jnp.clip(local, 0, head.shape[0] - 1), (local >= 0) & (local < head.shape[0])


def _rows(head: Array, targets: Array, axis: str | None) -> Float32[Array, "tile D"]:
    """head[targets], 0 where another device has the row."""
    local, inside = _inside(head, targets, axis)
    return jnp.where(inside[:, None], head[local], 0).astype(jnp.float32)


# The collectives of a tile, each the identity on one device.


def _gather(x: Array, axis: str | None, dim: int) -> Array:
    return lax.all_gather(x, axis, axis=dim, tiled=True) if axis else x


def _scatter(x: Array, axis: str | None) -> Array:
    return lax.psum_scatter(x, axis, scatter_dimension=0, tiled=True) if axis else x


def _sum(x: Array, axis: str | None) -> Array:
    return lax.psum(x, axis) if axis else x


def _own(x: Array, axis: str | None, dim: int) -> Array:
    """This device's tokens of a gathered tile."""
    size = x.shape[dim] // lax.axis_size(axis) if axis else 0
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim) if axis else x


def vocabulary_block(vocabulary: int, block: int) -> int:
    """The block size to walk the vocabulary with: a divisor of it, which needs no mask, where there is a good one.

    Good is a multiple of LANES from block / 4 to block. Every block rescales all of u, so a tiny divisor is no bargain:
    Qwen3's 151,936 = 128 x 1,187 has none but 128, that is 1,187 rescalings a tile instead of 75 with a mask. The
    quarter is a judgement, not a measurement.
    """
    if vocabulary <= block:
        return vocabulary
    divisors = [size for size in range(LANES, block + 1, LANES) if vocabulary % size == 0 and 4 * size >= block]
    return max(divisors, default=block)


# ---------------------------------------------------------------------------------------------------------------------
# The losses: what one token adds to the sum. In all of them
#     lp = logprobs, the trainer's    q = sampling_logprobs, the sampler's    r = exp(lp - q)    A = advantages
#     [low, high] = clip_low, clip_high, bounds of the ratio itself (0.8 and 1.2, not an epsilon of 0.2)
# and the sign is that of a loss: minimising it maximises the objective of the paper.


class TokenInputs(NamedTuple):
    """What a datum says of each token. A loss reads its own; the others may hold anything, say zeros."""

    weights: Float[Array | np.ndarray, " T"]
    sampling_logprobs: Float[Array | np.ndarray, " T"]  # `logprobs` on the wire
    advantages: Float[Array | np.ndarray, " T"]
    ratio_mask: Float[Array | np.ndarray, " T"]  # `sequence_ratio_mask`: not 0 where the token is in gspo's mean
    clip_low: Float[Array | np.ndarray, " T"]
    clip_high: Float[Array | np.ndarray, " T"]
    penalty: Float[Array | np.ndarray, " T"]  # dro's `beta`, stable_reinforce's `kl_coeff`


Segments = Int[Array, " T"]  # which sequence a token belongs to, 0 <= segment < T: only gspo asks


def cross_entropy(logprobs: PerToken, inputs: TokenInputs, segments: Segments) -> PerToken:
    """-w lp: supervised learning, and the carrier of forward_backward_custom, whose weights are w = -dC/dlp.

    Domain: any finite w, negative ones included. d/dlp = -w. With K targets a token (distillation), the trainer adds
    the terms of the others: the loss is linear in them.
    Unlike the others it asks nothing of the sampler: q and A are not read.
    """
    return -logprobs * inputs.weights


def importance_sampling(logprobs: PerToken, inputs: TokenInputs, segments: Segments) -> PerToken:
    """-r A: REINFORCE, corrected for tokens that another policy sampled; where r = 1 their gradients agree.

    Domain: q <= 0, any finite A. d/dlp = -r A.
    Reference: Schulman et al. 2017 (arXiv:1707.06347), eq. 6. Unlike in ppo and cispo nothing bounds r.
    """
    return -_ratio(logprobs, inputs) * inputs.advantages


def ppo(logprobs: PerToken, inputs: TokenInputs, segments: Segments) -> PerToken:
    """-min(r A, clip(r, low, high) A): a token stops pushing once it has moved far enough the way A points.

    Domain: q <= 0, any finite A; low <= high.
    d/dlp = -r A, but 0 where the clipped branch is the smaller: r > high with A > 0, r < low with A < 0.
    Reference: Schulman et al. 2017 (arXiv:1707.06347), eq. 7. Inside the band it is importance_sampling.
    """
    return _clipped_surrogate(_ratio(logprobs, inputs), inputs)


def cispo(logprobs: PerToken, inputs: TokenInputs, segments: Segments) -> PerToken:
    """-sg(clip(r, low, high)) lp A: REINFORCE under a bounded weight; sg, stop_gradient, keeps r out of the derivative.

    Domain: as ppo. d/dlp = -clip(r, low, high) A.
    Reference: MiniMax-M1 2025 (arXiv:2506.13585), eqs. 4 and 5. Unlike in ppo no token falls silent: the rare one whose
    ratio leaves the band goes on pushing.
    """
    weight = lax.stop_gradient(jnp.clip(_ratio(logprobs, inputs), inputs.clip_low, inputs.clip_high))
    return -weight * logprobs * inputs.advantages


def dro(logprobs: PerToken, inputs: TokenInputs, segments: Segments) -> PerToken:
    """-(lp A - beta/2 (lp - q)^2): policy gradient with a spring of stiffness beta that pulls lp back to q.

    Domain: q <= 0, any finite A, beta >= 0. d/dlp = -A + beta (lp - q), at rest where lp = q + A / beta.
    Reference: Direct Reward Optimisation, Richemond et al. 2024 (arXiv:2405.19107); its soft value is the client's to
    subtract in A. Unlike in the ratio losses there is no exp: stale tokens are held by a penalty and cannot overflow.
    """
    return -logprobs * inputs.advantages + _spring(logprobs, inputs)


def gspo(logprobs: PerToken, inputs: TokenInputs, segments: Segments) -> PerToken:
    """-min(s_t A, clip(s_t, low, high) A): ppo under ONE ratio for the whole sequence, the geometric mean of its r.

        s = exp(mean over the masked tokens of lp - q),    s_t = sg(s) exp(lp - sg(lp)), of value s and derivative s

    Domain: as ppo, with a band of ten-thousandths, since a mean moves little; ratio_mask says which tokens the mean is
    over (the sampled ones); of none at all it is 0 and s = 1. d/dlp = -s A or, where the clipped branch is smaller, 0.
    Reference: Group Sequence Policy Optimization, Zheng et al. 2025 (arXiv:2507.18071), eqs. 5 and 13 (GSPO-token).
    Unlike in ppo a sequence is clipped whole or not at all, and s A has the unit of a token: the sum stays a sum.
    """
    masked = (inputs.ratio_mask != 0).astype(jnp.float32)
    gap = lax.stop_gradient(logprobs - inputs.sampling_logprobs)
    over = partial(jax.ops.segment_sum, segment_ids=segments, num_segments=segments.shape[0])
    log_ratio = over(gap * masked) / jnp.maximum(over(masked), 1)
    log_ratio = jnp.minimum(log_ratio, MOST_NATS)[segments]
    return _clipped_surrogate(jnp.exp(log_ratio + logprobs - lax.stop_gradient(logprobs)), inputs)


def stable_reinforce(logprobs: PerToken, inputs: TokenInputs, segments: Segments) -> PerToken:
    """-sg(min(r, high)) lp A + kl_coeff/2 (lp - q)^2: REINFORCE under a truncated weight, on a leash. OUR definition.

    Tinker has a loss of this name whose formula is not public (it reads what the server recorded while it sampled).
    This one keeps the promise of the name with known parts, so that recipes which ask for it run; it is not that loss.
    Domain: q <= 0, any finite A, kl_coeff >= 0. d/dlp = -min(r, high) A + kl_coeff (lp - q).
    Reference: truncated importance sampling, Ionides 2008 (doi:10.1198/106186008X320456), as V-trace does it, Espeholt
    et al. 2018 (arXiv:1802.01561); the leash is dro's. Unlike cispo it has no lower bound: what the policy has left
    behind fades instead of pushing on.
    """
    weight = lax.stop_gradient(jnp.minimum(_ratio(logprobs, inputs), inputs.clip_high))
    return -weight * logprobs * inputs.advantages + _spring(logprobs, inputs)


def _ratio(logprobs: PerToken, inputs: TokenInputs) -> PerToken:
    return jnp.exp(jnp.minimum(logprobs - inputs.sampling_logprobs, MOST_NATS))


def _clipped_surrogate(ratio: PerToken, inputs: TokenInputs) -> PerToken:
    unclipped = ratio * inputs.advantages
    clipped = jnp.clip(ratio, inputs.clip_low, inputs.clip_high) * inputs.advantages
    # Not jnp.minimum: at r = low or r = high the branches tie, and there it would lose part of the gradient.
    return -jnp.where(clipped < unclipped, clipped, unclipped)


def _spring(logprobs: PerToken, inputs: TokenInputs) -> PerToken:
    return (logprobs - inputs.sampling_logprobs) ** 2 * (0.5 * inputs.penalty)


# ---------------------------------------------------------------------------------------------------------------------
# The table of losses, and its two ways in: a request's names -> numbers a token, traced index -> loss


@dataclass(frozen=True)
class Loss:
    """One row: the function, what a request must bring for it, and the numbers that it may set, with their defaults."""

    fn: Callable[[Array, TokenInputs, Array], Array]  # (logprobs, inputs, segments) -> losses
    inputs: tuple[str, ...]  # required loss_fn_inputs besides target_tokens, by their names on the wire
    config: Mapping[str, float]  # keys of loss_fn_config -> default; clip_* may come per token too, as loss_fn_inputs


_SAMPLED = ("logprobs", "advantages")
_BAND = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_NARROW = {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}  # the 3e-4 and 4e-4 of the GSPO paper

# The order is the index that token_losses takes.
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",), {}),
    "importance_sampling": Loss(importance_sampling, _SAMPLED, {}),
    "ppo": Loss(ppo, _SAMPLED, _BAND),
    "cispo": Loss(cispo, _SAMPLED, _BAND),
    "dro": Loss(dro, _SAMPLED, {"beta": 0.05}),
    "gspo": Loss(
        gspo, (*_SAMPLED, "sequence_ratio_mask"), {"clip_low_threshold": 0.9997, "clip_high_threshold": 1.0004}
    ),
    "stable_reinforce": Loss(stable_reinforce, _SAMPLED, {"clip_high_threshold": 2.0, "kl_coeff": 0.0}),
}

# Names on the wire, of loss_fn_inputs or loss_fn_config -> field of TokenInputs.
FIELDS = {
    "weights": "weights",
    "logprobs": "sampling_logprobs",
    "advantages": "advantages",
    "sequence_ratio_mask": "ratio_mask",
    "clip_low_threshold": "clip_low",
    "clip_high_threshold": "clip_high",
    "beta": "penalty",
    "kl_coeff": "penalty",
}


def loss_numbers(name: str, config: Mapping[str, float | int | str]) -> dict[str, float]:
    """The numbers of loss `name`, defaults filled in, by their names on the wire.

    Raises ValueError for a loss or a key that does not exist, a value that is no finite number, and low > high.
    """
    if name not in LOSSES:
        raise ValueError(f"loss_fn: got {name!r}, allowed: {', '.join(LOSSES)}")
    defaults = LOSSES[name].config
    for key, value in config.items():
        if key not in defaults:
            allowed = ", ".join(defaults) or "none"
            raise ValueError(f"loss_fn_config: got key {key!r}, allowed for {name}: {allowed}; remove the key")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:  # NaN included
            raise ValueError(f"loss_fn_config[{key!r}]: got {value!r}, allowed: a finite float32 number")
        if key in ("beta", "kl_coeff") and value < 0:
            raise ValueError(f"loss_fn_config[{key!r}]: got {value!r}, allowed: 0 or more")
    numbers = {key: float(config.get(key, default)) for key, default in defaults.items()}
    _check_band(numbers, "loss_fn_config")
    return numbers


def token_fields(
    name: str, numbers: Mapping[str, float], inputs: Mapping[str, np.ndarray]
) -> dict[str, float | np.ndarray]:
    """Field of TokenInputs -> number or array a token: what loss `name` reads, the datum's own before the request's.

    `numbers`: from loss_numbers. Raises ValueError for an input that no loss has, and where low > high.
    """
    loss, own = LOSSES[name], {}
    for key, values in inputs.items():
        if key not in FIELDS and key != "target_tokens":
            allowed = ", ".join(["target_tokens", *FIELDS])
            raise ValueError(f'loss_fn_inputs: got "{key:.64}", allowed: {allowed}; leave it out')
        if key in (*loss.inputs, *loss.config):
            own[key] = values
    merged = {**numbers, **own}
    _check_band(merged, "loss_fn_inputs")
    return {FIELDS[key]: values for key, values in merged.items()}


def _check_band(numbers: Mapping[str, float | np.ndarray], where: str) -> None:
    band = numbers.get("clip_low_threshold", -LARGEST), numbers.get("clip_high_threshold", LARGEST)
    low, high = np.broadcast_arrays(*map(np.atleast_1d, band))
    if (wrong := np.flatnonzero(low > high)).size:
        at = "" if where == "loss_fn_config" else f" at position {wrong[0]}"
        got = f"got clip_low_threshold {low[wrong[0]]:g} > clip_high_threshold {high[wrong[0]]:g}{at}"
        raise ValueError(f"{where}: {got}, allowed: low <= high; both bound the ratio itself, as 0.8 and 1.2 do")


def token_losses(
    loss_index: Int[Array, ""],
    logprobs: PerToken,
    inputs: TokenInputs,
    live: Bool[Array, " T"],
    segments: Int[Array, " T"] | None = None,
) -> PerToken:
    """What each token adds to the sum under the loss at `loss_index` of LOSSES: exactly 0, gradient too, if not live.

    Two `where`s: behind the outer one alone a dead token's value would be 0 but its gradient 0 x inf = NaN, so the
    inner one puts zeros in the place of its numbers first. The losses are 0 there by themselves; the outer one makes
    that a promise rather than a coincidence.
    """
    segments = jnp.zeros(logprobs.shape, jnp.int32) if segments is None else segments
    logprobs, inputs = jax.tree.map(lambda numbers: jnp.where(live, numbers, 0.0), (logprobs, inputs))
    losses = lax.switch(loss_index, [loss.fn for loss in LOSSES.values()], logprobs, inputs, segments)
    return jnp.where(live, losses, 0.0)
