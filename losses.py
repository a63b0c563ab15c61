"""Target log-probabilities without logits, and the Tinker losses on top of them.

    hidden [T, D] -- target_logprobs --> logprobs [T] -- token_losses --> losses [T] -- sum --> what trainer.py derives
                     ^ head [V, D]                       ^ weights | sampling_logprobs, advantages

At a vocabulary of 248,320 the logits of 20,480 tokens are 19 GiB, made only to be reduced to 20,480 numbers.
`target_logprobs` walks the head once, block by block, under the running softmax of FlashAttention: log-probability AND
gradient come out of the same pass, so that the backward pass is one multiplication.

Invariants:
- Nothing of shape [T, V] exists and nothing is computed twice: two matmuls where a gradient is asked for, else one.
- A loss is a SUM over tokens, nothing is normalised: fb(A); fb(B); optim_step equals fb(A+B); optim_step.
- A token that is not live adds exactly 0 to loss and gradient, whatever its inputs hold (inf, NaN, -99999).
- The loss is data: its index and its numbers are traced, so that changing either compiles nothing.

Left out: a trainable head (LoRA freezes the unembedding here: its cotangent is None); gspo, whose ratio is a mean over
the sequence and so no function of one token; custom losses, which the SDK sends as the weights of cross_entropy.

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
CONFIG_KEYS = ("clip_low_threshold", "clip_high_threshold", "beta")  # and their places in the traced vector

PerToken = Float[Array, " T"]
Numbers = Float32[Array, " 3"]  # ordered as CONFIG_KEYS


# ---------------------------------------------------------------------------------------------------------------------
# Target log-probabilities in one pass over the head


def target_logprobs(
    hidden: Float[Array, "T D"],
    head: Float[Array, "V D"],
    targets: Int[Array, " T"],
    *,
    tile: int = 1024,
    block: int = 2048,
) -> Float32[Array, " T"]:
    """log p(targets[i] | hidden[i]) under the logits z_i = head @ hidden[i], differentiable in `hidden` alone.

        logprob_i           = z_i[target_i] - logsumexp(z_i)
        d logprob_i / d h_i = head[target_i] - softmax(z_i) @ head  =: u_i                            [D]

    softmax(z) @ head is attention with query h and key = value = head, so FlashAttention's running rescale gives the
    logprob and u together: 4TDV FLOPs. u, of the size of `hidden`, is all that is kept for the backward pass.

    Domain: T >= 1; 0 <= target < V, outside of which the logprob is -inf. The head is stored [V, D] (the gather of
    head[targets] would need a transposed copy of [D, V] on TPU) and frozen: asking for its gradient returns zeros.
    A larger `tile` reads the head less often, a larger `block` rescales u less often; a step holds a few [tile, block].
    Never wrap this in jax.checkpoint: the forward pass would run twice.

    Reference: FlashAttention, Dao et al. 2022 (arXiv:2205.14135), Algorithm 1. Its neighbour Cut Cross-Entropy,
    Wijmans et al. 2024 (arXiv:2411.09009), tiles alike but recomputes the logits in the backward pass.
    """
    tokens, width = hidden.shape
    tile = min(tile, tokens)
    padding = -tokens % tile
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, tile, width)
    targets = jnp.pad(targets, (0, padding)).reshape(-1, tile)
    return _tiled_logprobs(hidden, head, targets, block).reshape(-1)[:tokens]


# The head and the targets are arguments, not closed over: inside shard_map a closure raises UnexpectedTracerError.
# Seams: a count of live tiles would be the trip count of these maps, a head sharded on V collectives in `_tile_pass`.
@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _tiled_logprobs(
    hidden: Float[Array, "n tile D"], head: Float[Array, "V D"], targets: Int[Array, "n tile"], block: int
) -> Float32[Array, "n tile"]:
    return lax.map(lambda each: _tile_pass(each[0], head, each[1], block, with_u=False)[0], (hidden, targets))


def _forward(
    hidden: Float[Array, "n tile D"], head: Float[Array, "V D"], targets: Int[Array, "n tile"], block: int
) -> tuple[Float32[Array, "n tile"], Float[Array, "n tile D"]]:
    """The same log-probabilities, and u as the only residual."""
    return lax.map(lambda each: _tile_pass(each[0], head, each[1], block, with_u=True), (hidden, targets))


def _backward(
    block: int, u: Float[Array, "n tile D"], cotangent: Float32[Array, "n tile"]
) -> tuple[Float[Array, "n tile D"], None, None]:
    return (cotangent[..., None] * u).astype(u.dtype), None, None


_tiled_logprobs.defvjp(_forward, _backward)


def _tile_pass(
    hidden: Float[Array, "tile D"], head: Float[Array, "V D"], targets: Int[Array, " tile"], block: int, *, with_u: bool
) -> tuple[Float32[Array, " tile"], Float[Array, "tile D"] | None]:
    """Log-probabilities of one tile and, if asked for, their gradients u: one walk over the blocks of the head."""
    vocabulary = head.shape[0]
    block = vocabulary_block(vocabulary, block)
    exact = vocabulary % block == 0

    def visit(j, carry):
        largest, total, target_logit, mixture = carry
        # The last block of an inexact walk is moved back to end with the head: no padded copy, but columns seen before.
        start = j * block if exact else jnp.minimum(j * block, vocabulary - block)
        rows = lax.dynamic_slice_in_dim(head, start, block)  # [block, D]
        columns = start + jnp.arange(block)
        z = jnp.einsum("td,vd->tv", hidden, rows, preferred_element_type=jnp.float32)  # [tile, block]
        if not exact:
            z = jnp.where(columns >= j * block, z, -jnp.inf)
        hit = jnp.where(columns == targets[:, None], z, -jnp.inf).max(-1)

        larger = jnp.maximum(largest, z.max(-1))
        rescale = jnp.exp(largest - larger)
        e = jnp.exp(z - larger[:, None])
        block_total = e.sum(-1)
        if with_u:
            # The barrier has the second matmul read the narrow e; without it the TPU compiler computes exp again there.
            e, block_total = lax.optimization_barrier((e.astype(head.dtype), block_total))
            update = jnp.einsum("tv,vd->td", e, rows, preferred_element_type=jnp.float32)
            mixture = mixture * rescale[:, None] + update
        return larger, total * rescale + block_total, jnp.maximum(target_logit, hit), mixture

    lowest = jnp.full(targets.shape, -jnp.inf)
    carry = lowest, jnp.zeros_like(lowest), lowest, jnp.zeros(hidden.shape if with_u else ())
    largest, total, target_logit, mixture = lax.fori_loop(0, -(-vocabulary // block), visit, carry)
    u = (head[targets] - mixture / total[:, None]).astype(hidden.dtype) if with_u else None
    return target_logit - largest - jnp.log(total), u


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
# and the sign is that of a loss: minimising it maximises the objective of the paper.


class TokenInputs(NamedTuple):
    """A datum's loss_fn_inputs, token by token. A loss reads its own; the others may hold anything, say zeros."""

    weights: Float[Array | np.ndarray, " T"]
    sampling_logprobs: Float[Array | np.ndarray, " T"]  # `logprobs` on the wire
    advantages: Float[Array | np.ndarray, " T"]


def cross_entropy(logprobs: PerToken, inputs: TokenInputs, config: Numbers) -> PerToken:
    """-w lp: supervised learning, and the carrier of forward_backward_custom, whose weights are w = -dC/dlp.

    Domain: any finite w, negative ones included. d/dlp = -w.
    Unlike the others it asks nothing of the sampler: q and A are not read.
    """
    return -logprobs * inputs.weights


def importance_sampling(logprobs: PerToken, inputs: TokenInputs, config: Numbers) -> PerToken:
    """-r A: REINFORCE, corrected for tokens that another policy sampled; where r = 1 their gradients agree.

    Domain: q <= 0, any finite A. d/dlp = -r A.
    Reference: Schulman et al. 2017 (arXiv:1707.06347), eq. 6. Unlike in ppo and cispo nothing bounds r.
    """
    return -_ratio(logprobs, inputs) * inputs.advantages


def ppo(logprobs: PerToken, inputs: TokenInputs, config: Numbers) -> PerToken:
    """-min(r A, clip(r, low, high) A): a token stops pushing once it has moved far enough the way A points.

    Domain: q <= 0, any finite A; low <= high bound the ratio itself (0.8 and 1.2, not an epsilon of 0.2).
    d/dlp = -r A, but 0 where the clipped branch is the smaller: r > high with A > 0, r < low with A < 0.
    Reference: Schulman et al. 2017 (arXiv:1707.06347), eq. 7. Inside the band it is importance_sampling.
    """
    low, high, _ = config
    ratio = _ratio(logprobs, inputs)
    unclipped = ratio * inputs.advantages
    clipped = jnp.clip(ratio, low, high) * inputs.advantages
    # Not jnp.minimum: at r = low or r = high the branches tie, and there it would lose part of the gradient.
    return -jnp.where(clipped < unclipped, clipped, unclipped)


def cispo(logprobs: PerToken, inputs: TokenInputs, config: Numbers) -> PerToken:
    """-sg(clip(r, low, high)) lp A: REINFORCE under a bounded weight; sg, stop_gradient, keeps r out of the derivative.

    Domain: as ppo. d/dlp = -clip(r, low, high) A.
    Reference: MiniMax-M1 2025 (arXiv:2506.13585), eqs. 4 and 5. Unlike in ppo no token falls silent: the rare one whose
    ratio leaves the band goes on pushing.
    """
    low, high, _ = config
    weight = lax.stop_gradient(jnp.clip(_ratio(logprobs, inputs), low, high))
    return -weight * logprobs * inputs.advantages


def dro(logprobs: PerToken, inputs: TokenInputs, config: Numbers) -> PerToken:
    """-(lp A - beta/2 (lp - q)^2): policy gradient with a spring of stiffness beta that pulls lp back to q.

    Domain: q <= 0, any finite A, beta >= 0. d/dlp = -A + beta (lp - q), at rest where lp = q + A / beta.
    Reference: Direct Reward Optimisation, Richemond et al. 2024 (arXiv:2405.19107); its soft value is the client's to
    subtract in A. Unlike in the ratio losses there is no exp: stale tokens are held by a penalty and cannot overflow.
    """
    *_, beta = config
    return -(logprobs * inputs.advantages - 0.5 * beta * (logprobs - inputs.sampling_logprobs) ** 2)


def _ratio(logprobs: PerToken, inputs: TokenInputs) -> PerToken:
    return jnp.exp(logprobs - inputs.sampling_logprobs)


# ---------------------------------------------------------------------------------------------------------------------
# The table of losses, and its two ways in: a request's numbers -> traced vector, traced index -> loss


@dataclass(frozen=True)
class Loss:
    """One row: the function, and what a request must and may bring for it."""

    fn: Callable[[Array, TokenInputs, Array], Array]  # (logprobs, inputs, config) -> losses
    inputs: tuple[str, ...]  # required loss_fn_inputs besides target_tokens, by their names on the wire
    config: Mapping[str, float]  # accepted keys of loss_fn_config -> default


_SAMPLED = ("logprobs", "advantages")
_BAND = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}

# The order is the index that token_losses takes.
LOSSES: dict[str, Loss] = {
    "cross_entropy": Loss(cross_entropy, ("weights",), {}),
    "importance_sampling": Loss(importance_sampling, _SAMPLED, {}),
    "ppo": Loss(ppo, _SAMPLED, _BAND),
    "cispo": Loss(cispo, _SAMPLED, _BAND),
    "dro": Loss(dro, _SAMPLED, {"beta": 0.05}),
}


def config_vector(name: str, config: Mapping[str, float | int | str]) -> np.ndarray:
    """The numbers of loss `name`, float32 [3] ordered as CONFIG_KEYS: defaults filled in, 0 where it reads nothing.

    Raises ValueError for a loss or a key that does not exist, a value that is no finite number, and low > high.
    """
    if name not in LOSSES:
        raise ValueError(f"loss_fn: got {name!r}, allowed: {', '.join(LOSSES)}")
    accepted = LOSSES[name].config
    for key, value in config.items():
        if key not in accepted:
            allowed = ", ".join(accepted) or "none"
            raise ValueError(f"loss_fn_config: got key {key!r}, allowed for {name}: {allowed}; remove the key")
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:  # NaN included
            raise ValueError(f"loss_fn_config[{key!r}]: got {value!r}, allowed: a finite float32 number")
    numbers = {**accepted, **config}
    low, high, _ = vector = np.array([numbers.get(key, 0.0) for key in CONFIG_KEYS], np.float32)
    if low > high:
        got = f"got clip_low_threshold {low:g} > clip_high_threshold {high:g}"
        raise ValueError(f"loss_fn_config: {got}, allowed: low <= high; both bound the ratio itself, as 0.8 and 1.2 do")
    return vector


def token_losses(
    loss_index: Int[Array, ""], logprobs: PerToken, inputs: TokenInputs, live: Bool[Array, " T"], config: Numbers
) -> PerToken:
    """What each token adds to the sum under the loss at `loss_index` of LOSSES: exactly 0, gradient too, if not live.

    Two `where`s: behind the outer one alone a dead token's value would be 0 but its gradient 0 x inf = NaN, so the
    inner one puts zeros in the place of its numbers first. The five losses are 0 there by themselves; the outer one
    makes that a promise rather than a coincidence.
    """
    logprobs, inputs = jax.tree.map(lambda numbers: jnp.where(live, numbers, 0.0), (logprobs, inputs))
    losses = lax.switch(loss_index, [loss.fn for loss in LOSSES.values()], logprobs, inputs, config)
    return jnp.where(live, losses, 0.0)
