"""Target log-probabilities up a ladder of forms: the memory, the time and the accuracy of each.

All compute lp_i = z_i[target_i] - logsumexp(z_i), z = hidden @ head, and the gradient of their sum by `hidden`. The
logits z [T, V] are the trouble: at T = 20,480 and V = 248,320 they are 19 GiB, made to be reduced to T numbers.

    log_softmax         three arrays of [T, V], the textbook's form
    logsumexp           z[target] - logsumexp(z): the normalised copy is gone
    optax               softmax_cross_entropy_with_integer_labels: the same, from the library
    tiles               a scan of tiles, jax.checkpoint ON its body: [tile, V], for a third matmul. The form usually
                        published; around the scan, or left away, the checkpoint keeps every tile's logits instead
    maxtext             vocab_tiling_nnx_loss: tiles as well, by a custom_vjp; returns only the sum
    tokamax             chunked_xla: tiles of tokens and blocks of the vocabulary, for a third matmul, and for a fourth:
                        the head's gradient, which nobody asks for here but XLA does not see to be dead. z in bfloat16
                        where the head is
    ours                losses.target_logprobs: blocks too, but gradient and log-prob come out of one walk, two matmuls

What is measured:
- memory: temp + results of the compiled value_and_grad in MiB, all that it needs besides its arguments. Nothing is
  executed, so the number repeats exactly. The gradient [T, D] is among the results: that is everyone's floor, and
  ours makes it in place of u, the gradient of each lp. The tile is 1,024 tokens (2,048 at D = 5,120) where a form
  has one to choose; ours and tokamax keep their defaults.
- time: CPU seconds of all threads, as ratios to two bare matmuls hidden @ head -> z, z @ head.T, z in memory. No form
  does with less arithmetic; below 1 it is because its blocks of z stay in the CPU's cache. All forms in turn, again
  and again: what disturbs the machine disturbs all alike.
- accuracy: the largest error against numpy in float64 on the same rounded inputs: of lp in nats, of the gradient
  relative to its largest entry. A ratio exp(lp - q) of two policies is as good as lp.

Left out: devices other than the CPU; the TPU's compiler has its own opinion of all this.
Run: `uv run bench/logprobs.py`
"""

import dataclasses
import logging
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx
from jax import lax
from maxtext.common.common_types import ShardMode
from maxtext.utils.vocabulary_tiling import vocab_tiling_nnx_loss
from report import finish
from tokamax import linear_softmax_cross_entropy_loss

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from losses import target_logprobs

MIB = 2**20
SMALL_V, LARGE_V = 32_768, 248_320  # Qwen3.5's vocabulary is the large one


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    rounds: int = 5  # runs of each form; the median counts
    memory: bool = True  # --no-memory leaves a section out, likewise the others
    time: bool = True
    accuracy: bool = True


# ---- the ladder: (hidden [T, D], head, targets [T], tile) -> log-probs [T], or their sum


def _logits(hidden, head):
    return jnp.dot(hidden, head, preferred_element_type=jnp.float32)  # [T, V]


def log_softmax(hidden, head, targets, tile):
    return jnp.take_along_axis(jax.nn.log_softmax(_logits(hidden, head)), targets[:, None], 1)[:, 0]


def logsumexp(hidden, head, targets, tile):
    logits = _logits(hidden, head)
    return jnp.take_along_axis(logits, targets[:, None], 1)[:, 0] - jax.nn.logsumexp(logits, 1)


def optax_integer_labels(hidden, head, targets, tile):
    return -optax.softmax_cross_entropy_with_integer_labels(_logits(hidden, head), targets)


def tiles(hidden, head, targets, tile):
    body = jax.checkpoint(lambda carry, each: (carry, logsumexp(each[0], head, each[1], tile)))
    return lax.scan(body, None, (hidden.reshape(-1, tile, hidden.shape[1]), targets.reshape(-1, tile)))[1].reshape(-1)


class _MaxTextHead(nnx.Module):
    """As much of a MaxText model as its loss asks for; the logits as its defaults have them (cast_logits_to_fp32)."""

    def __init__(self, head):
        self.logits_dense = nnx.Param(head)
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("data",))

    def logits_from_hidden_states_for_vocab_tiling(self, hidden, deterministic, model_mode):
        return jnp.dot(hidden, self.logits_dense[...]).astype(jnp.float32)


def maxtext(hidden, head, targets, tile):
    config = types.SimpleNamespace(
        num_vocab_tiling=len(targets) // tile,  # it counts tiles of tokens, whatever its name says
        vocab_size=head.shape[1],
        z_loss_multiplier=0.0,
        enable_dropout=False,
        shard_mode=ShardMode.AUTO,
        debug_sharding=False,
        vocab_tiling_ag_once=False,
    )
    data = {"targets": targets[None], "targets_segmentation": jnp.ones_like(targets)[None]}
    return -vocab_tiling_nnx_loss(_MaxTextHead(head), hidden[None], data, config, True)[0]


def tokamax(hidden, head, targets, tile):
    return -linear_softmax_cross_entropy_loss(hidden, targets, head, reduction="none", implementation="chunked_xla")


def ours(hidden, head, targets, tile):
    return target_logprobs(hidden, head, targets)


def two_matmuls(hidden, head, targets, cotangents):
    """No log-prob at all: the two products that no form can do without."""
    return jnp.dot(lax.optimization_barrier(_logits(hidden, head)), head.T)


LADDER: dict[str, Callable] = {
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "optax": optax_integer_labels,
    "tiles": tiles,
    "maxtext": maxtext,
    "tokamax": tokamax,
    "ours": ours,
}


def shape_of_head(name: str, vocabulary: int, width: int) -> tuple[int, int]:
    """Each form gets the head as it wants it: nobody pays for a transposed copy."""
    return (vocabulary, width) if name == "ours" else (width, vocabulary)


def value_and_grad(name: str, tile: int) -> Callable:
    """(hidden, head, targets, cotangents [T]) -> ((sum of cotangent x log-prob, log-probs), gradient by hidden).

    The cotangents are an argument, as a loss's derivatives are.
    """

    def total(hidden, head, targets, cotangents):
        logprobs = LADDER[name](hidden, head, targets, tile)
        return (logprobs * (cotangents if logprobs.ndim else cotangents[0])).sum(), logprobs

    return jax.value_and_grad(total, has_aux=True)


# ---- (a) memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    tokens: int = 20480
    width: int = 1024
    vocabulary: int = LARGE_V
    dtype: str = "float32"
    tile: int = 1024

    def __str__(self) -> str:
        return f"D={self.width} V={self.vocabulary // 1000}k {self.dtype}"


SHAPES = [
    *(
        Shape(vocabulary=vocabulary, dtype=dtype)
        for dtype in ("float32", "bfloat16")
        for vocabulary in (SMALL_V, LARGE_V)
    ),
    Shape(width=5120, dtype="bfloat16", tile=2048),
]


def needed_mib(name: str, shape: Shape) -> float:
    dtype = jnp.dtype(shape.dtype)
    hidden = jax.ShapeDtypeStruct((shape.tokens, shape.width), dtype)
    head = jax.ShapeDtypeStruct(shape_of_head(name, shape.vocabulary, shape.width), dtype)
    targets = jax.ShapeDtypeStruct((shape.tokens,), jnp.int32)
    cotangents = jax.ShapeDtypeStruct((shape.tokens,), jnp.float32)
    compiled = jax.jit(value_and_grad(name, shape.tile)).lower(hidden, head, targets, cotangents).compile()
    analysis = compiled.memory_analysis()
    return (analysis.temp_size_in_bytes + analysis.output_size_in_bytes) / MIB


def memory(goals: dict[str, bool]) -> dict[str, dict[str, float]]:
    needed = {str(shape): {name: needed_mib(name, shape) for name in LADDER} for shape in SHAPES}
    table(f"temp + results MiB, T={SHAPES[0].tokens}", needed, ",.0f")
    for dtype in ("float32", "bfloat16"):
        small, large = (needed[str(Shape(vocabulary=v, dtype=dtype))]["ours"] for v in (SMALL_V, LARGE_V))
        u = Shape.tokens * Shape.width * jnp.dtype(dtype).itemsize / MIB
        goals[f"memory, {dtype}: {large:.0f} MiB <= u + 64 = {u + 64:.0f}"] = large <= u + 64
        goals[f"memory, {dtype}: V=32k {small:.0f} and V=248k {large:.0f} MiB within 5 %"] = (
            abs(large / small - 1) <= 0.05
        )
    wide = needed[str(SHAPES[-1])]["ours"]
    goals[f"memory, D=5120: {wide:.0f} MiB <= 400"] = wide <= 400
    return needed


# ---- (b) time


def inputs_of(
    tokens: int, width: int, vocabulary: int, dtype: str
) -> tuple[dict[tuple[int, int], jax.Array], jax.Array, jax.Array]:
    """({shape: head}, hidden, targets) with logits of standard deviation 2."""
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((tokens, width)), dtype)
    head = jnp.asarray(2 / np.sqrt(width) * rng.standard_normal((vocabulary, width), np.float32), dtype)
    return (
        {head.shape: head, head.shape[::-1]: jnp.array(head.T)},
        hidden,
        jnp.asarray(rng.integers(0, vocabulary, tokens)),
    )


def cpu_time(goals: dict[str, bool], rounds: int) -> dict[str, dict[str, float]]:
    heads, hidden, targets = inputs_of(tokens := 2048, width := 256, SMALL_V, "float32")
    ones = jnp.ones(tokens)
    runs = {name: jax.jit(value_and_grad(name, 1024)) for name in LADDER}
    runs["two matmuls"] = jax.jit(two_matmuls)
    seconds = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            head = heads[shape_of_head(name, SMALL_V, width)]
            started = time.process_time()
            jax.block_until_ready(run(hidden, head, targets, ones))
            if number:  # the first compiles
                seconds[name].append(time.process_time() - started)
    median = {name: float(np.median(each)) for name, each in seconds.items()}
    ratios = {name: each / median["two matmuls"] for name, each in median.items()}
    title = f"time, T={tokens} D={width} V=32k float32"
    table(title, {"CPU s": median, "/ two matmuls": ratios}, ".2f")
    goals[f"time: ours {ratios['ours']:.2f} <= 1.05 x two matmuls"] = ratios["ours"] <= 1.05
    for peer, aim in (("tiles", 1.4), ("tokamax", 1.8)):
        factor = ratios[peer] / ratios["ours"]
        goals[f"time: {factor:.2f} >= {aim} x faster than {peer}"] = factor >= aim
    return {"seconds": median, "ratio": ratios}


# ---- (c) accuracy


def accuracy(goals: dict[str, bool]) -> dict[str, dict[str, float]]:
    errors = {}
    for dtype in ("float32", "bfloat16"):
        heads, hidden, targets = inputs_of(256, width := 1024, SMALL_V, dtype)
        exact_logprobs, exact_gradient = in_float64(hidden, heads[SMALL_V, width], targets)
        of_logprobs, of_gradient = errors[f"{dtype} lp"], errors[f"{dtype} grad"] = {}, {}
        for name in LADDER:
            head = heads[shape_of_head(name, SMALL_V, width)]
            (_, logprobs), gradient = jax.jit(value_and_grad(name, 128))(hidden, head, targets, jnp.ones(256))
            if logprobs.ndim:  # maxtext: the sum only
                of_logprobs[name] = float(np.abs(np.asarray(logprobs, np.float64) - exact_logprobs).max())
            error = np.abs(np.asarray(gradient, np.float64) - exact_gradient).max()
            of_gradient[name] = float(error / np.abs(exact_gradient).max())
    table("largest error, T=256 D=1024 V=32k", errors, ".1e")
    worst = errors["bfloat16 lp"]["ours"]
    goals[f"accuracy, bfloat16: lp within {worst:.1e} <= 1e-5 nats"] = worst <= 1e-5
    return errors


def in_float64(hidden: jax.Array, head: jax.Array, targets: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """(log-probs [T], gradients [T, D]) as the textbook has them."""
    h, w, targets_of = np.asarray(hidden, np.float64), np.asarray(head, np.float64), np.asarray(targets)
    logits = h @ w.T
    logits -= logits.max(1, keepdims=True)
    e = np.exp(logits)
    total = e.sum(1)
    logprobs = logits[np.arange(len(targets_of)), targets_of] - np.log(total)
    return logprobs, w[targets_of] - (e / total[:, None]) @ w


# ---- (d) live fraction: what tokens cost that need no head. To come; main prints it after accuracy.


# ---- the report


def table(title: str, columns: dict[str, dict[str, float]], form: str) -> None:
    """One row a form; a column is {form: number}, and a form may lack it."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    widths = {heading: max(len(heading), 9) for heading in columns}
    print(f"\n{title}\n{'':>12}  " + "  ".join(f"{heading:>{width}}" for heading, width in widths.items()))
    for name in names:
        cells = [format(column[name], form) if name in column else "-" for column in columns.values()]
        print(f"{name:>12}  " + "  ".join(f"{cell:>{w}}" for cell, w in zip(cells, widths.values(), strict=True)))


def main(config: Config) -> None:
    logging.getLogger("absl").setLevel(logging.ERROR)  # tokamax: that nobody tuned it for this machine
    goals: dict[str, bool] = {}
    record: dict[str, Any] = {"bench": "logprobs"}
    if config.memory:
        record["mib"] = memory(goals)
    if config.time:
        record["cpu_time"] = cpu_time(goals, config.rounds)
    if config.accuracy:
        record["errors"] = accuracy(goals)
    print()
    finish(record, goals, ("jax", "optax", "maxtext", "tokamax", "numpy"))


if __name__ == "__main__":
    main(tyro.cli(Config, description="Forms of target log-probabilities side by side."))
