"""The trainer: many LoRA adapters over one frozen base, every request through the same compiled tile.

    forward_backward -> [pack -> tiles -> gradient program, gradients accumulate] -> log-probs, metrics
    optim_step       -> [AdamW on one adapter, gradients back to zero]            -> gradient norm
    save_weights     -> [adapter + moments + step on the host]                    -> cache

Invariants
  1. One shape: a tile is [rows, row_len]. Loss, its numbers, rank, adapter and learning rate are traced, so nothing
     compiles after `warm_up`.
  2. Sums: a loss is a sum over tokens and datums, so A then B leaves the gradients of A + B.
  3. An adapter owns its weights, gradients, moments and step; no program sees two. Forward-only touches no gradient.
  4. All or nothing: the tiles of a call add up apart and join the adapter's gradients at the end, so that a call which
     fails leaves them as they were. A step whose gradient is not finite changes nothing and says so.

Methods take and return plain numpy and scalars, so that process 0 of many can broadcast each call; one thread calls.

Left out: many hosts.
Run: `uv run server.py` drives it; `uv run --group topology trainer.py plan --help`.
Read first: losses.py, then `Trainer.forward_backward`.
"""

import collections
import dataclasses
import functools
import gc
import importlib.util
import itertools
import logging
import math
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.layout import Format, Layout
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from losses import LARGEST, LOSSES, TokenInputs, loss_numbers, score, token_fields, token_losses
from model import ALPHA, EMBEDDING, Adapter, Kept, Model, ModelConfig, abstract, check_rank, kept

log = logging.getLogger("trainer")

ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
UNITS = 1024  # the packer rounds lengths up to this many parts of a row
ENOUGH = 8  # of which as many may stay free without a search for a better end
SENTINEL = -9e3  # engines report "no log-prob" as -9999 or -99999; no real one is below this
TARGETS = 32  # targets a position may have in one tile; a datum with more of them is scored in several
FILL, MOST_ROWS = 0.9, 16  # of the free memory; of the fewest rows: more in a tile gains little
RETRY_S = (0.1, 1.0)  # waits before an allocation that failed is tried again
CALLS = 2  # that may take turns on the devices, each with a gradient of its own; a third waits for one to end


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    rows: int | None = None  # rows of a tile, a multiple of the fsdp size; unset: as many as the device's memory takes
    row_len: int | None = None  # tokens of a row: the longest datum a client may send; unset: 512, on CPU 256
    max_adapters: int = 8  # adapters in training at a time; each takes weights, gradients and two moments in float32


@runtime_checkable
class Datum(Protocol):
    tokens: np.ndarray  # int32 [n]
    inputs: dict[str, np.ndarray]  # target_tokens int [n] or [n, K] and the float inputs of the loss, [n] or [n, K]


@runtime_checkable
class Request(Protocol):
    @property
    def data(self) -> Sequence[Datum]: ...
    @property
    def loss_fn(self) -> str: ...
    @property
    def loss_config(self) -> Mapping[str, float | str]: ...


Answer = tuple[list[np.ndarray], dict[str, float]]  # log-probs of each datum's targets, and metrics
Turns = Generator[None, None, tuple[Adapter | None, float]]


@dataclasses.dataclass(kw_only=True)
class AdapterState:
    """One client's adapter: what is trained, and how far."""

    rank: int
    train_attn: bool
    train_mlp: bool
    weights: Adapter
    gradients: Adapter
    moments: tuple[Adapter, Adapter]
    step: int = 0  # optimizer steps taken
    accumulated: int = 0  # forward_backward calls since the last of them

    @property
    def scale(self) -> np.float32:
        return np.float32(ALPHA / self.rank)


# ---- from requests to tiles: pure, on the host


@dataclasses.dataclass(eq=False)
class Piece:
    """One datum, or some of its columns where it has more than TARGETS targets a position; then what it came to."""

    request: int
    datum: int
    tokens: Int[np.ndarray, " n"]
    targets: Int[np.ndarray, "n K"]
    weights: Float[np.ndarray, "n K"]
    inputs: Float32[np.ndarray, "7 n"]  # TokenInputs; their weights are the first column
    asked: Bool[np.ndarray, " n"]  # tokens that a loss is asked of: not the prompt, where all that is given is 0
    first: bool  # holds the datum's first column: counts for its tokens
    logprobs: Float32[np.ndarray, "n K"] = dataclasses.field(default_factory=lambda: np.empty((0, 0), np.float32))
    outputs: Float32[np.ndarray, "3 n"] = dataclasses.field(default_factory=lambda: np.empty((3, 0), np.float32))


def make_pieces(requests: Sequence[Request]) -> list[Piece]:
    pieces = []
    for r, request in enumerate(requests):
        numbers = loss_numbers(request.loss_fn, request.loss_config)
        for i, datum in enumerate(request.data):
            n = len(datum.tokens)
            fields = token_fields(request.loss_fn, numbers, datum.inputs)
            targets = datum.inputs["target_tokens"].reshape(n, -1)
            weights = np.reshape(fields.pop("weights", np.zeros(targets.shape, np.float32)), targets.shape)
            given = (np.broadcast_to(fields.get(field, 0), n) != 0 for field in TokenInputs._fields[1:4])
            asked = np.logical_or.reduce([*given, (weights != 0).any(1)])
            for first in range(0, targets.shape[1], TARGETS):
                columns, inputs = slice(first, first + TARGETS), np.zeros((len(TokenInputs._fields), n), np.float32)
                for field, value in {**fields, "weights": weights[:, first]}.items():
                    inputs[TokenInputs._fields.index(field)] = value
                several = targets[:, columns], weights[:, columns]
                pieces.append(Piece(r, i, datum.tokens, *several, inputs, asked, first == 0))
    return pieces


def usable(inputs: Float[np.ndarray | Array, "7 *shape"]) -> Any:
    """Tokens whose numbers can be computed with; the others get weight and value zero, and are counted."""
    return (abs(inputs) <= LARGEST).all(0) & (TokenInputs(*inputs).sampling_logprobs > SENTINEL)


# ---- packing: pure, on the host


def pack(lengths: Sequence[int], row_len: int) -> list[list[int]]:
    """Rows of indices into `lengths`, none longer than `row_len`, and about as few as can be.

    Like best-fit decreasing it takes the longest sequence that fits, again and again. But where that would leave a
    gap it looks one step ahead, for two sequences that fill the row together: of all such pairs the most even one,
    which keeps the short sequences for the rows that nothing else can fill. 3 ms for 1,024 sequences, and linear.
    """
    unit = -(-row_len // UNITS)
    units = -(-row_len // unit)
    stock = collections.defaultdict(list)  # length in units, rounded up -> the sequences of that length
    for i, length in enumerate(lengths):
        stock[-(-length // unit)].append(i)
    # Two sets of lengths as the bits of one int: bit n of the first, bit units - n of the second says "n is in stock".
    have, mirror = sum(1 << n for n in stock), sum(1 << units - n for n in stock)
    rows = []
    while have:
        row, space, n = [], row_len, have.bit_length() - 1
        while n >= 0:
            row.append(stock[n].pop())
            space -= lengths[row[-1]]
            if not stock[n]:
                have, mirror = have ^ 1 << n, mirror ^ 1 << units - n
            n = _next_length(stock, have, mirror, space // unit, units)
        rows.append(row)
    return rows


def _next_length(stock: Mapping[int, list[int]], have: int, mirror: int, space: int, units: int) -> int:
    """The length to take for a row with `space` units left; -1 where nothing fits."""
    longest = (have & (2 << space) - 1).bit_length() - 1
    if longest < 0 or space - longest <= ENOUGH:
        return longest
    for total in range(space, max(space - ENOUGH, 0), -1):
        half = -(-total // 2)
        pairs = (have & mirror >> units - total) >> half  # bit k: half + k and total - half - k are both in stock
        if pairs:
            longer = half + (pairs & -pairs).bit_length() - 1  # the lowest bit: the most even pair
            if 2 * longer != total or len(stock[longer]) > 1:
                return longer
    return longest


@dataclasses.dataclass(eq=False)
class Tile:
    """One [B, T] batch; places[i] = (row, start) of piece i."""

    ints: Int32[np.ndarray, "5 B T"]  # tokens, positions, segment_ids (0 = padding), targets, whether a loss is asked
    floats: Float32[np.ndarray, "7 B T"]  # TokenInputs
    further: tuple[Int32[np.ndarray, "K B T"], Float32[np.ndarray, "K B T"]] | None  # the other targets and weights
    planes: int  # targets a position, at most
    places: dict[int, tuple[int, int]]


def make_tiles(pieces: Sequence[Piece], *, rows: int, row_len: int, alone: bool = False) -> list[Tile]:
    """`alone`: one sequence a row, for models whose layers see across segments."""
    lengths = [len(piece.tokens) for piece in pieces]
    packed, tiles = [[i] for i in range(len(pieces))] if alone else pack(lengths, row_len), []
    for first in range(0, len(packed), rows):
        members = packed[first : first + rows]
        planes = max(pieces[i].targets.shape[1] for row in members for i in row)
        zeros = lambda n, dtype: np.zeros((n, rows, row_len), dtype)
        further = (zeros(TARGETS - 1, np.int32), zeros(TARGETS - 1, np.float32)) if planes > 1 else None
        tile = Tile(zeros(5, np.int32), zeros(len(TokenInputs._fields), np.float32), further, planes, {})
        for row, indices in enumerate(members):
            start = 0
            for segment, i in enumerate(indices, 1):
                piece, n = pieces[i], lengths[i]
                here = np.s_[:, row, start : start + n]
                tile.ints[here] = piece.tokens, np.arange(n), np.full(n, segment), piece.targets[:, 0], piece.asked
                tile.floats[here] = piece.inputs
                if further is not None and piece.targets.shape[1] > 1:
                    for planes_of, values in zip(further, (piece.targets, piece.weights), strict=True):
                        planes_of[: values.shape[1] - 1, row, start : start + n] = values[:, 1:].T
                tile.places[i] = (row, start)
                start += n
        tiles.append(tile)
    return tiles


def request_metrics(request: Request, pieces: Sequence[Piece], *, backward: bool) -> dict[str, float]:
    """What a request is told of its own tokens, in float64."""
    loss_sum = sum(float(piece.outputs[1].sum(dtype=np.float64)) for piece in pieces)
    pieces = [piece for piece in pieces if piece.first]
    joined = lambda part: np.concatenate([part(piece) for piece in pieces], axis=-1)
    inputs, outputs = joined(lambda p: p.inputs).astype(np.float64), joined(lambda p: p.outputs).astype(np.float64)
    asked = joined(lambda p: p.asked)
    scored = asked if backward else np.ones_like(asked)
    (logprobs, _, entropy), good, loss = outputs, usable(inputs), LOSSES[request.loss_fn]
    metrics = {
        "loss:sum": loss_sum,
        "tokens:sum": float(inputs.shape[1]),
        "scored_tokens:sum": float(scored.sum()),
        "unusable_tokens:sum": float((~good).sum()),
    }
    if scored.any():
        metrics["entropy:mean"] = float(entropy[scored].mean())
    if request.loss_fn == "stable_reinforce":
        metrics["stable_reinforce_is_not_tinkers:max"] = 1.0  # the formula of Tinker's is not public
    of = TokenInputs(*inputs)
    sampled = good & asked & ((of.sampling_logprobs != 0) | (of.advantages != 0))
    if "logprobs" in loss.inputs and sampled.any():
        gap = of.sampling_logprobs[sampled] - logprobs[sampled]
        metrics |= {"kl_sample_train:mean": float(gap.mean()), "max_logprob_gap:max": float(abs(gap).max())}
        if "clip_high_threshold" in loss.config:
            log_ratio = joined(lambda p: _log_ratio(p, request.loss_fn == "gspo"))[sampled]
            ratio = np.exp(np.minimum(log_ratio, 80))  # no overflow, and beyond any threshold
            low = of.clip_low[sampled] if "clip_low_threshold" in loss.config else 0
            metrics["clipped_fraction:mean"] = float(((ratio < low) | (ratio > of.clip_high[sampled])).mean())
    return metrics


def _log_ratio(piece: Piece, of_sequence: bool) -> Float[np.ndarray, " n"]:
    """lp - q of each token, or their mean over gspo's mask."""
    gap = (piece.outputs[0] - piece.inputs[1]).astype(np.float64)
    masked = usable(piece.inputs) & (TokenInputs(*piece.inputs).ratio_mask != 0)
    return np.full_like(gap, gap[masked].mean() if masked.any() else 0.0) if of_sequence else gap


# ---- the programs: pure, compiled once


class Blocks(NamedTuple):
    """How losses.score walks the tokens and the vocabulary."""

    tile: int = 512  # tokens of all devices together
    block: int = 1280  # rows of a device's part of the head, at most


def tile_loss(
    model: Model, blocks: Blocks, base, head, adapter: Adapter, scale, ints, floats, *args, everything: bool
) -> tuple[Array, tuple[Array, Array]]:
    """(loss, ([3, B, T] of log-probs, losses and entropies, [K, B, T] log-probs of further targets))."""
    tokens, positions, segment_ids, *_ = ints
    hidden = model.hidden(base, model.scaled(adapter, scale), tokens, positions, segment_ids)
    return hidden_loss(model, blocks, hidden, head, ints, floats, *args, everything=everything)


def hidden_loss(model: Model, blocks: Blocks, hidden, head, ints, floats, further, planes, loss, *, everything: bool):
    """`tile_loss` from the hidden states [B, T, D] on.

    Each device scores its own rows; the head stays where it is, sharded by its vocabulary, and logits never exist.
    """
    sharded = model.vocab_size % model.fsdp == 0

    def local(hidden, head, ints, floats, further, planes, loss):
        shape = hidden.shape[:2]
        flat = lambda x: x.reshape(*x.shape[:-2], -1)
        (_, _, segment_ids, target, asked), floats, (targets, weights) = flat(ints), flat(floats), map(flat, further)
        rows = jnp.repeat(jnp.arange(shape[0]) * shape[1], shape[1])
        live = asked > 0
        scored = segment_ids > 0 if everything else live
        targets = jnp.concatenate([target[None], targets])
        walk: dict[str, Any] = dict(axis="fsdp" if sharded else None, tile=blocks.tile, block=blocks.block)
        scores = score(hidden.reshape(-1, hidden.shape[-1]), head, targets, scored, planes, **walk)
        first, *_ = scores.logprobs
        # The first segment of a row is 1 and a row has as many as tokens at most: a number below B * T for each.
        segments = rows + jnp.maximum(segment_ids - 1, 0)
        losses = token_losses(loss, first, TokenInputs(*floats), live & usable(floats), segments)
        losses -= (weights * scores.logprobs[1:]).sum(0)  # cross_entropy alone has these; 0 where not asked
        unflat = lambda x: x.reshape(*x.shape[:-1], *shape)
        return unflat(jnp.stack([first, losses, scores.entropy])), unflat(scores.logprobs[1:])

    rows, planes_of, whole = PartitionSpec("fsdp"), PartitionSpec(None, "fsdp"), PartitionSpec()
    specs = (rows, rows if sharded else whole, planes_of, planes_of, planes_of, whole, whole)
    run = jax.shard_map(local, mesh=model.mesh, in_specs=specs, out_specs=planes_of, check_vma=False)
    outputs, more = run(hidden, head, ints, floats, further, planes, loss)
    return outputs[1].sum(), (outputs, more)


def gradient_program(model: Model, blocks: Blocks, base, head, adapter, gradients, *args):
    """Adds one tile's gradients to `gradients` (donated)."""
    run = lambda adapter: tile_loss(model, blocks, base, head, adapter, *args, everything=False)
    new, outputs = jax.grad(run, has_aux=True)(adapter)
    return jax.tree.map(jnp.add, gradients, new), outputs


def forward_program(model: Model, blocks: Blocks, base, head, adapter, *args):
    return tile_loss(model, blocks, base, head, adapter, *args, everything=True)[1]


def commit_program(gradients: Adapter, new: Adapter) -> tuple[Adapter, Adapter]:
    """(their sum, zeros in the place of `new`, which is donated)."""
    return jax.tree.map(jnp.add, gradients, new), jax.tree.map(jnp.zeros_like, new)


def adamw_program(weights: Adapter, gradients: Adapter, moments, step, adam: Float[Array, "6"]):
    """AdamW, decoupled weight decay, global-norm clipping when its bound is positive. All three states are donated.

    -> weights, gradients (zero), moments, [gradient norm before clipping, 1 if the update was applied else 0]
    Reference: Loshchilov & Hutter 2019 (arXiv 1711.05101), algorithm 2, with optax's bias-corrected moments.
    """
    learning_rate, beta1, beta2, eps, weight_decay, clip = adam
    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(norm)
    factor = jnp.where((clip > 0) & (norm > clip), clip / norm, 1.0)
    clipped = jax.tree.map(lambda g: jnp.where(finite, g * factor, 0.0), gradients)
    rule = optax.scale_by_adam(beta1, beta2, eps)
    direction, state = rule.update(clipped, optax.ScaleByAdamState(step, *moments))
    updated = jax.tree.map(lambda w, d: w - learning_rate * (d + weight_decay * w), weights, direction)
    assert isinstance(state, optax.ScaleByAdamState)
    finite &= jnp.isfinite(optax.tree.norm(updated))  # an absurd learning rate must not destroy the adapter either
    keep = lambda new, old: jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
    return (
        keep(updated, weights),
        jax.tree.map(jnp.zeros_like, gradients),
        keep((state.mu, state.nu), moments),
        jnp.stack([norm, finite]),
    )


class Programs(NamedTuple):
    """The four of them, jitted. What leaves them is pinned, or XLA re-shards an adapter and the next call compiles."""

    gradient: Any
    forward: Any
    commit: Any  # donates nothing that a failure would cost
    adamw: Any


def programs(model: Model, blocks: Blocks) -> Programs:
    whole, spread, planes_of = model.sharding(), model.spread, model.sharding(None, "fsdp")
    pinned: dict[str, Any] = dict(out_shardings=(spread, (whole, planes_of)))
    if chooses := model.choosy:
        formats = jax.tree.map(lambda leaf: Format(Layout.AUTO, leaf.sharding), model.base)
        pinned["in_shardings"] = (formats, *[None] * 9)
    bound = lambda program: functools.partial(program, model, blocks)
    gradient = jax.jit(bound(gradient_program), donate_argnums=3, **pinned)
    forward = jax.jit(bound(forward_program), out_shardings=(whole, planes_of))
    return Programs(
        Kept("gradient", gradient, model, blocks, chooses),
        Kept("forward", forward, model, blocks),
        jax.jit(commit_program, donate_argnums=1, out_shardings=(spread, spread)),
        jax.jit(adamw_program, donate_argnums=(0, 1, 2), out_shardings=(spread, spread, (spread, spread), whole)),
    )


# ---- the plan: what the compiler says of a step before there is one


class Chip(NamedTuple):
    """A TPU device by jax's device_kind: what MFU is a fraction of, and what a topology that is not here cannot say."""

    flops: float  # a second, in bfloat16 (cloud.google.com/tpu/docs)
    hz: float  # flops / (2 * 128 * 128 * matrix units)
    hbm_bytes: int  # as its compiler counts


GIB = 2**30
CHIPS = {
    "TPU v5": Chip(459e12, 1.75e9, int(95.73 * GIB)),  # v5p
    "TPU v5p": Chip(459e12, 1.75e9, int(95.73 * GIB)),
    "TPU v5 lite": Chip(197e12, 1.5e9, int(15.75 * GIB)),  # v5e
    "TPU v6 lite": Chip(918e12, 1.75e9, int(31.24 * GIB)),  # v6e
}
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
COMPUTATION = re.compile(r"(ENTRY )?%(\S+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z-]+)\((.*?)\)(.*)")
CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%([^\s,})]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One of an optimised program, as HLO writes it."""

    name: str
    shape: str  # of the result, "f32[512,1024]{1,0}"; of a tuple all of them
    kind: str
    operands: tuple[str, ...]
    attributes: str


def walk_hlo(text: str, trips: Mapping[str, int]) -> Iterator[tuple[Instruction, dict[str, Instruction], int, bool]]:
    """Every instruction, the others of its computation by name, how often it runs, and whether inside a loop.

    A traced trip count is looked up in `trips` by the named scope of its loop; any other is read off the program.
    Branches of a conditional are left out: they do not all run.
    """
    computations: dict[str, dict[str, Instruction]] = {}
    constants: dict[str, list[int]] = collections.defaultdict(list)  # of a computation
    entry = here = ""
    for line in text.splitlines():
        if start := COMPUTATION.match(line):
            here = start[2]
            computations[here] = {}
            entry = here if start[1] else entry
        elif found := INSTRUCTION.match(line):
            result, shape, kind, operands, attributes = found.groups()
            names = tuple(re.findall(r"%([^\s,)]+)", operands))
            computations[here][result] = Instruction(result, shape, kind, names, attributes)
            if kind == "constant" and operands.isdigit():
                constants[here].append(int(operands))

    def trip_count(loop: Instruction) -> int:
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        scope = re.search(r'op_name="([^"]*)"', loop.attributes)
        for name, count in trips.items():
            if scope and re.search(rf"\b{name}\b\)*/while{'$' if count else ''}", scope[1]):  # 0: what is in it, too
                return count
        (condition,) = re.findall(r"condition=%([^\s,})]+)", loop.attributes)
        called = [name for one in computations[condition].values() for name in CALLED.findall(one.attributes)]
        bounds = [bound for name in (condition, *called) for bound in constants[name]]
        assert bounds, f"{loop.name} ({scope and scope[1]}): how often does it run?"
        return max(bounds)

    def visit(name: str, times: int, looped: bool) -> Iterator:
        for one in computations[name].values():
            yield one, computations[name], times, looped
            loop = one.kind == "while"
            often = times * trip_count(one) if loop else times
            for called in CALLED.findall(one.attributes) if often else ():
                yield from visit(called, often, looped or loop)

    return visit(entry, 1, False)


def shapes_in(text: str) -> list[tuple[str, tuple[int, ...]]]:
    """[(dtype, sizes)] of a result as HLO writes it."""
    found = re.findall(r"(pred|[a-z]+\d+)\[([\d,]*)\]", text)
    return [(dtype, tuple(map(int, filter(None, sizes.split(","))))) for dtype, sizes in found]


def bytes_in(text: str) -> int:
    width = lambda dtype: 1 if dtype == "pred" else int(re.sub(r"\D", "", dtype)) // 8
    return sum(width(dtype) * math.prod(sizes) for dtype, sizes in shapes_in(text))


class Collective(NamedTuple):
    kind: str
    shape: str  # of its result on a device
    bytes: int  # of that
    times: int  # a step
    looped: bool


def read_hlo(text: str, trips: Mapping[str, int]) -> tuple[int, list[Collective]]:
    """(the compiler's estimate in cycles, the collectives) of an optimised program; `trips` as in `walk_hlo`.

    Only the TPU's compiler estimates, and neither collectives nor Pallas kernels.
    """
    cycles, found = 0, collections.Counter()
    for one, _, times, looped in walk_hlo(text, trips):
        if estimate := re.search(r'"estimated_cycles":"(\d+)"', one.attributes):
            cycles += times * int(estimate[1]) * (int(estimate[1]) < 10**15)  # beyond: it does not know
        if (kind := one.kind.removesuffix("-start")) in COLLECTIVES:
            shape = re.sub(r"\{.*?\}|/\*.*?\*/|[()]", "", re.sub(r"\([\d,]*\)", "", one.shape))
            found[kind, shape, looped] += times
    return cycles, [Collective(kind, shape, bytes_in(shape), n, looped) for (kind, shape, looped), n in found.items()]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What a device holds, moves and does while one tile's gradient is computed, by its compiler's count."""

    rows: int
    row_len: int
    blocks: Blocks
    held: dict[str, int]  # bytes by what they are: there all the time
    temp: dict[str, int]  # bytes during the step
    report: dict[str, int]  # the compiled program's own: arguments, temp, peak
    limit_bytes: int | None
    collectives: list[Collective]
    seconds: float | None  # of a tile, without collectives and Pallas kernels (attention); None: no estimate
    mfu: float | None  # what that would be
    formats: Any  # how the program wants the base to be laid out

    @property
    def total_bytes(self) -> int:
        return sum(self.held.values()) + sum(self.temp.values())


def make_plan(
    model: Model,
    blocks: Blocks,
    *,
    rows: int,
    row_len: int,
    max_adapters: int,
    beside: Mapping[str, int] = MappingProxyType({}),
    gradient: Kept | None = None,
    quick: bool = False,
) -> Plan:
    """Compile the gradient program for [rows, row_len] and read what the compiler says; `model` may be abstract.

    `beside`: bytes a device that others hold, by what they are.
    `gradient`: one of `programs`, whose executable the plan's is then, and of which it reads the memory alone.
    `quick`: unoptimised, in a third of the time: without an estimate of time, and what XLA would move in the base's
    dtype may be moved in float32.
    ValueError where the compiler itself finds that it cannot fit.
    """
    tile, spread = tile_shapes(model, rows=rows, row_len=row_len), model.spread
    adapter = {path: jax.ShapeDtypeStruct(of, np.float32, sharding=spread[path]) for path, of in model.shapes.items()}
    device, tokens = model.mesh.devices.flat[0], rows * row_len
    # An array has a layout already: only a shape leaves the choice.
    base = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), model.base)
    args = (base, model.head, adapter, adapter, np.float32(1), *tile, np.int32(1), np.int32(0))
    log.info("compiling a step of %d x %d tokens", rows, row_len)
    try:
        if gradient is not None:
            compiled = gradient.compiled(*args)
        else:
            compiled = programs(model, blocks).gradient.compile(*args, quick=quick)
    except Exception as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = str(error).split("Oom:")[-1].split(" HLO module")[0].strip()
        raise ValueError(f"{rows} rows of {row_len} tokens do not fit {device.device_kind}: {reason}") from error
    cycles, collectives = 0, []
    if gradient is None:
        cycles, collectives = read_hlo(compiled.as_text() or "", trip_counts(blocks, tokens))
    chip = CHIPS.get(device.device_kind)
    seconds = cycles / chip.hz if chip and cycles and not quick else None
    flops = 4 * tokens * (model.parameters + model.head.size) / model.mesh.size  # without attention: nor has the time
    report, one = _report(compiled), lambda *leaves: sum(_bytes_a_device(leaf) for leaf in jax.tree.leaves(leaves))
    return Plan(
        rows=rows,
        row_len=row_len,
        blocks=blocks,
        held={
            "base": one(model.base),
            "head": 0 if model.tied else one(model.head),
            f"{max_adapters} adapters": max_adapters * one(adapter),
            "their moments": 2 * max_adapters * one(adapter),
            "their gradients, and the calls'": (max_adapters + CALLS) * one(adapter),
            "a tile's tokens": one(tile),
            **beside,
        },
        temp=_temp(model, report, tokens),
        report=report,
        limit_bytes=_memory_limit(model),
        collectives=collectives,
        seconds=seconds,
        mfu=flops / seconds / chip.flops if seconds and chip else None,
        formats=compiled.input_formats[0][0] if model.choosy else None,
    )


def tile_shapes(model: Model, *, rows: int, row_len: int) -> tuple:
    """A tile as the programs take it, in shapes: (ints, floats, further)."""
    planes_of = model.sharding(None, "fsdp")
    shape = lambda dtype, n: jax.ShapeDtypeStruct((n, rows, row_len), dtype, sharding=planes_of)
    further = tuple(shape(dtype, TARGETS - 1) for dtype in (np.int32, np.float32))
    return shape(np.int32, 5), shape(np.float32, len(TokenInputs._fields)), further


def trip_counts(blocks: Blocks, tokens: int) -> dict[str, int]:
    """Of the loss's loops, which are traced: every token is scored, of one target each."""
    return {"tiles": -(-tokens // blocks.tile), "further": 0}


def _report(compiled: Any) -> dict[str, int]:
    analysis = compiled.memory_analysis()
    return {
        "arguments": analysis.argument_size_in_bytes,
        "temp": analysis.temp_size_in_bytes,
        "peak": analysis.peak_memory_in_bytes,
    }


def _temp(model: Model, report: Mapping[str, int], tokens: int) -> dict[str, int]:
    """What comes and goes during a step of so many tokens, of which the layers' inputs are known."""
    # What the TPU's compiler holds against its memory is the peak; its temp counts gaps: it passes 113 of 95 GiB so.
    tpu = model.mesh.devices.flat[0].platform == "tpu"
    temp = report["peak"] - report["arguments"] if tpu else report["temp"]
    kept = model.config.remat == "full" or model.scanned
    layers = model.hf_config["num_hidden_layers"] if kept else 0
    inputs = layers * tokens * model.head.shape[1] * model.dtype.itemsize // model.mesh.size
    return {
        "activations kept between layers": min(inputs, temp),
        "a layer, a tile of the loss": max(temp - inputs, 0),
    }


@functools.cache
def choose_blocks(model: Model) -> Blocks:
    """The walk over the head that the TPU's compiler expects to be fastest; elsewhere what was measured on CPUs."""
    if (device := model.mesh.devices.flat[0]).platform != "tpu":
        return Blocks()

    def ask() -> Blocks:
        asked = [Blocks(tile, block) for tile in (1024, 2048) for block in (4096, 16384)]
        cycles = {blocks: _loss_cycles(model, blocks) for blocks in asked}
        log.info("cycles of the loss: %s", cycles)
        return min(cycles, key=cycles.__getitem__)

    return kept("blocks", (device.device_kind, model.mesh.size, model.head.shape, str(model.dtype)), ask)


def _loss_cycles(model: Model, blocks: Blocks) -> int:
    """What the compiler expects of the loss alone and its gradient, for 4,096 tokens of hidden states a device."""
    rows, row_len = model.mesh.size, 4096
    sizes = (rows, row_len, model.head.shape[1])
    hidden, whole = jax.ShapeDtypeStruct(sizes, model.dtype, sharding=model.sharding("fsdp")), np.int32(1)
    ints, floats, further = tile_shapes(model, rows=rows, row_len=row_len)
    run = lambda *args: hidden_loss(model, blocks, *args, everything=False)
    gradient = jax.jit(jax.grad(run, has_aux=True))
    compiled = gradient.lower(hidden, model.head, ints, floats, further, whole, whole).compile()
    return read_hlo(compiled.as_text() or "", trip_counts(blocks, rows * row_len))[0]


def size_of(count: int) -> str:
    return f"{count / GIB:.2f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"


def summary(plan: Plan) -> str:
    """One line."""
    held, temp, limit = sum(plan.held.values()), sum(plan.temp.values()), plan.limit_bytes
    of = f" of {size_of(limit)}" if limit is not None else ""
    return f"a step of {plan.rows} x {plan.row_len} tokens takes {size_of(held)} + {size_of(temp)}{of} a device"


def table(plan: Plan) -> str:
    """All of it, as `trainer.py plan` prints it."""
    lines = [f"a device, {plan.rows} x {plan.row_len} tokens, {plan.blocks}", ""]
    row = lambda name, size: f"{name:>34} {size_of(size):>12}"
    lines += [row(name, size) for name, size in {**plan.held, **plan.temp, "total": plan.total_bytes}.items()]
    if plan.limit_bytes is not None:
        lines += [row("of", plan.limit_bytes), row("spare", plan.limit_bytes - plan.total_bytes)]
    lines.append("")
    for one in sorted(plan.collectives, key=lambda one: -one.bytes * one.times):
        moved = one.bytes * one.times
        if moved >= 2**20:
            shape = one.shape if len(one.shape) < 60 else f"{one.shape[:56]} ..."
            lines.append(f"{one.times:>6} x {one.kind:<18} {size_of(moved):>12}  {shape}")
    if plan.seconds is not None and plan.mfu is not None:
        lines += [
            "",
            f"{plan.seconds:.2f} s by the compiler's estimate, without collectives and attention: MFU at most",
        ]
        lines[-1] += f" {100 * plan.mfu:.0f} %"
    return "\n".join(lines)


def laid_out(model: Model, formats: Any) -> Model:
    """The model with its base as `formats` say. Each array is given up as it is copied: the old model is of no use."""
    base = {path: jax.device_put(leaf, formats[path], donate=True) for path, leaf in model.base.items()}
    return dataclasses.replace(model, base=base, head=base[EMBEDDING] if model.tied else model.head)


def _bytes_a_device(leaf: Any) -> int:
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize


# ---- the trainer


class Trainer:
    def __init__(self, model: Model, config: TrainerConfig, *, beside: Mapping[str, int] = MappingProxyType({})):
        """`beside`: as in `make_plan`."""
        self.model, self.config, self.beside = model, config, beside
        rows = config.rows if config.rows is not None else model.fsdp
        usual = 256 if jax.default_backend() == "cpu" else 512  # attention is quadratic: a CPU feels it that early
        self.row_len = config.row_len if config.row_len is not None else usual
        check_shape(model, rows=rows, row_len=self.row_len)
        self.adapters: dict[str, AdapterState] = {}
        self._place = lambda arrays: jax.device_put(arrays, model.sharding(None, "fsdp"))
        self.blocks = choose_blocks(model)
        self._spare: Adapter | None = None  # zeros, for the next call's gradient; None: to be made
        self._parameters = model.parameters  # counting them walks the whole tree
        self.alone = False  # one sequence a row?
        self._set_rows(rows)

    def _set_rows(self, rows: int) -> None:
        self.rows = rows
        self._gradient, self._forward, self._commit, self._adamw = programs(self.model, self.blocks)
        zeros = lambda dtype: np.zeros((TARGETS - 1, rows, self.row_len), dtype)
        self._nothing_further = self._place((zeros(np.int32), zeros(np.float32)))  # kept on the devices: no transfer

    def warm_up(self) -> None:
        """Choose the rows, compile everything once on an adapter of its own, and see whether segments are isolated."""
        self.create("warm-up", seed=0, rank=1)
        for attn, mlp in ((True, False), (False, True)):
            self.model.new_adapter(seed=0, rank=1, attn=attn, mlp=mlp)
        self._fit()
        self.forward_backward("warm-up", [_probe(0)], backward=True)
        same, other = (self.forward_backward("warm-up", [_probe(first)], backward=False)[0] for first in (0, 1))
        self.alone = not np.array_equal(same[0][1], other[0][1])
        if self.alone:
            log.warning("%s sees across the segments of a row: every sequence gets a row of its own", self.model.name)
        self.optim_step("warm-up", dict.fromkeys(ADAM, 0.0) | {"eps": 1e-12})
        self.release("warm-up")

    def plan(self) -> Plan:
        sizes: dict[str, Any] = dict(rows=self.rows, row_len=self.row_len, max_adapters=self.config.max_adapters)
        options: dict[str, Any] = dict(beside=self.beside, gradient=self._gradient)
        return make_plan(self.model, self.blocks, **sizes, **options)

    def affordable(self, plan: Plan) -> int:
        """How many times its rows fit; ValueError where they do not."""
        if plan.limit_bytes is None:
            return 1
        free, temp = plan.limit_bytes - sum(plan.held.values()), sum(plan.temp.values())
        return token_budget(free, temp, rows=plan.rows, row_len=plan.row_len)

    def _fit(self) -> None:
        """As many rows as the memory takes, where none were asked for, and the base as the step wants it."""
        plan = self.plan()
        log.info("%s", summary(plan))
        times = self.affordable(plan)  # ValueError, whoever has chosen the rows
        if self.config.rows is None and times > 1 and jax.default_backend() != "cpu":  # which gains nothing by more
            self._set_rows(times * self.rows)
            plan = self.plan()
        if plan.formats is not None:
            self.model = laid_out(self.model, plan.formats)

    def create(self, model_id: str, *, seed: int, rank: int, train_attn: bool = True, train_mlp: bool = True) -> None:
        """A fresh adapter. ValueError when all places are taken."""
        weights, zeros = self.model.new_adapter(seed=seed, rank=rank, attn=train_attn, mlp=train_mlp), self.model.zeros
        trained: dict[str, Any] = dict(rank=rank, train_attn=train_attn, train_mlp=train_mlp)
        state = AdapterState(**trained, weights=weights, gradients=zeros(), moments=(zeros(), zeros()))
        self._admit(model_id, state)

    def _admit(self, model_id: str, state: AdapterState) -> None:
        assert model_id not in self.adapters
        if len(self.adapters) >= self.config.max_adapters:
            raise ValueError(
                f"{len(self.adapters)} adapters are in training, the limit of this server (--max-adapters); "
                "finish a session (ServiceClient.close) or wait for one to end"
            )
        self.adapters[model_id] = state

    def release(self, model_id: str) -> None:
        self.adapters.pop(model_id, None)

    def forward_backward(self, model_id: str, requests: Sequence[Request], *, backward: bool) -> list[Answer]:
        """Requests of one model and one loss, sharing tiles; gradients accumulate if `backward`.

        -> for each request the log-probs of each datum's targets (float32, of the targets' shape, in the given order;
        with `backward` 0 where nothing was asked: the prompt) and its metrics.
        """
        *_, answers = self.turns(model_id, requests, backward=backward)
        return answers

    def turns(self, model_id: str, requests: Sequence[Request], *, backward: bool) -> Iterator[Any]:
        """`forward_backward` with the devices given back after each tile: None where more follow, then the answers.

        CALLS of these may run at the same time: each has a gradient of its own, which joins the adapter's at the end.
        """
        state = self.adapters[model_id]
        (loss_fn,) = {request.loss_fn for request in requests}
        pieces, tiles = self._pack(requests)
        new, elapsed = yield from self._patiently(state.weights, state.scale, tiles, pieces, loss_fn, backward)
        filled = sum(len(piece.tokens) for piece in pieces)
        tokens = sum(len(piece.tokens) for piece in pieces if piece.first)
        shared = {
            "tile_fill:mean": filled / (len(tiles) * self.rows * self.row_len),
            "tokens_per_s:mean": tokens / elapsed,
            "tflops_per_s:mean": float(self._flops(pieces, backward)) / elapsed / 1e12,
        }
        if (chip := CHIPS.get(jax.devices()[0].device_kind)) is not None:
            shared["mfu:mean"] = shared["tflops_per_s:mean"] * 1e12 / chip.flops / self.model.mesh.size
        answers = []
        for r, group in itertools.groupby(pieces, key=lambda piece: piece.request):
            request, mine = requests[r], list(group)
            share = len(tiles) * sum(len(piece.tokens) for piece in mine) / filled
            metrics = request_metrics(request, mine, backward=backward) | shared | {"tiles:sum": share}
            answers.append((_by_datum(request, mine), metrics))
        if backward:  # the last thing that can fail
            state.gradients, self._spare = self._commit(state.gradients, new)
            state.accumulated += len(requests)
        yield answers

    def score(self, prompts: Sequence[np.ndarray], folder: Path | None) -> list[np.ndarray]:
        """The log-prob of each token (float32 [n], NaN at 0) of prompts of 2..row_len + 1 tokens, which share tiles,
        under a published adapter; None: the base.
        """
        *_, scores = self.score_turns(prompts, folder)
        return scores

    def score_turns(self, prompts: Sequence[np.ndarray], folder: Path | None) -> Iterator[Any]:
        """`score`, as `turns` is forward_backward."""
        weights, scale = self.model.read_peft(folder) if folder is not None else (self.model.zeros(), 1)
        request = _scoring([tokens[:-1] for tokens in prompts], [tokens[1:] for tokens in prompts])
        pieces, tiles = self._pack([request])
        yield from self._patiently(weights, np.float32(scale), tiles, pieces, request.loss_fn, backward=False)
        yield [np.concatenate([np.full(1, np.nan, np.float32), scores]) for scores in _by_datum(request, pieces)]

    def _pack(self, requests: Sequence[Request]) -> tuple[list[Piece], list[Tile]]:
        pieces = make_pieces(requests)
        return pieces, make_tiles(pieces, rows=self.rows, row_len=self.row_len, alone=self.alone)

    def _patiently(self, *args, **kwargs) -> Turns:
        """`_run` from its beginning again, after a while, where the device has no memory left; then it gives up.

        What a failed one has left is dropped; the compiled programs and the adapters stay.
        """
        waits = list(RETRY_S)
        while True:
            try:
                return (yield from self._run(*args, **kwargs))
            except Exception as error:
                self._spare = None
                if not waits or "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                log.warning("the device is out of memory; trying again in %g s", waits[0])
            gc.collect()
            time.sleep(waits.pop(0))
            yield

    def _run(
        self, weights: Adapter, scale: Any, tiles: list[Tile], pieces: list[Piece], loss_fn: str, backward: bool
    ) -> Turns:
        """A tile a turn; the host prepares the next one's numbers while the devices compute. `pieces` are filled in.

        -> the gradient and the seconds that it took, without those of others' turns.
        """
        new, elapsed, started = None, 0.0, time.perf_counter()
        if backward:
            new, self._spare = self._spare or self.model.zeros(), None
        args = self._arguments(weights, scale, tiles[0], loss_fn)
        for tile, following in itertools.zip_longest(tiles, tiles[1:]):
            if backward:
                new, out = self._gradient(*args[:3], new, *args[3:])
            else:
                out = self._forward(*args)
            if following is not None:
                args = self._arguments(weights, scale, following, loss_fn)
            self._read(tile, pieces, *out)
            elapsed += time.perf_counter() - started
            if following is not None:
                yield
                started = time.perf_counter()
        return new, elapsed

    def _read(self, tile: Tile, pieces: list[Piece], first: Any, more: Any) -> None:
        first, more = np.asarray(first), np.asarray(more) if tile.further is not None else None
        for i, (row, start) in tile.places.items():
            piece, here = pieces[i], np.s_[:, row, start : start + len(pieces[i].tokens)]
            piece.outputs, piece.logprobs = first[here], first[here][:1].T
            if more is not None:
                further = more[: piece.targets.shape[1] - 1][here]
                piece.logprobs = np.concatenate([piece.logprobs, further.T], axis=1)

    def _arguments(self, weights: Adapter, scale: Any, tile: Tile, loss_fn: str) -> tuple:
        further = self._place(tile.further) if tile.further is not None else self._nothing_further
        numbers = self._place((tile.ints, tile.floats))
        loss = np.int32(list(LOSSES).index(loss_fn))
        model = self.model.base, self.model.head, weights, scale
        return *model, *numbers, further, np.int32(tile.planes), loss

    def _flops(self, pieces: Sequence[Piece], backward: bool) -> float:
        """What the model itself takes, without rematerialisation: 2 a parameter and token, as often again for the
        gradient of the activations, and attention over the causal half of each sequence.
        """
        config, times = self.model.hf_config, 2 if backward else 1
        lengths = np.array([len(piece.tokens) for piece in pieces], np.float64)
        heads = config["num_attention_heads"] * config["head_dim"] * config["num_hidden_layers"]
        scored = sum(piece.asked.sum() if backward else len(piece.tokens) for piece in pieces)
        matrices = 2 * lengths.sum() * self._parameters
        return times * (matrices + 2 * scored * self.model.head.size) + (2 * times - 1) * 2 * heads * (lengths**2).sum()

    def optim_step(self, model_id: str, adam: Mapping[str, float]) -> dict[str, float]:
        """One AdamW step on what has accumulated; `adam` holds the six numbers of ADAM."""
        state, numbers = self.adapters[model_id], check_adam(adam)
        if not state.accumulated:
            return {"optim/grad_norm": 0.0, "optim/skipped": 1.0, "optim/step": float(state.step)}
        states = (state.weights, state.gradients, state.moments)
        state.weights, state.gradients, state.moments, out = self._adamw(*states, np.int32(state.step), numbers)
        norm, applied = map(float, np.asarray(out))
        state.step, state.accumulated = state.step + int(applied), 0
        metrics = {"optim/skipped": 1.0 - applied, "optim/step": float(state.step)}
        return metrics | ({"optim/grad_norm": norm} if math.isfinite(norm) else {})  # JSON has no NaN

    def snapshot(self, model_id: str) -> tuple[dict[str, np.ndarray], dict]:
        """The adapter as PEFT tensors and adapter_config.json, copied to the host: later steps cannot reach it."""
        state = self.adapters[model_id]
        weights = jax.device_get(state.weights)
        tensors = self.model.to_peft(weights, rank=state.rank)
        return tensors, self.model.peft_config(tensors, rank=state.rank)

    def checkpoint(self, model_id: str, *, gradients: bool = False) -> tuple[dict[str, np.ndarray], dict]:
        """(weights, both moments, cut to the adapter's rank; what `restore` needs besides), and on demand what has
        accumulated since the last step.
        """
        state = self.adapters[model_id]
        parts = {"weights": state.weights, "mu": state.moments[0], "nu": state.moments[1]}
        meta = dict(rank=state.rank, train_attn=state.train_attn, train_mlp=state.train_mlp, step=state.step)
        if gradients and state.accumulated:
            parts["gradients"], meta["accumulated"] = state.gradients, state.accumulated
        cut = lambda path, x: np.ascontiguousarray(_cut(path, x, state.rank))
        arrays = jax.device_get(parts)
        return {f"{part}/{path}": cut(path, x) for part in arrays for path, x in arrays[part].items()}, meta

    def export(self, tensors: Mapping[str, np.ndarray], meta: Mapping) -> tuple[dict[str, np.ndarray], dict]:
        """What `snapshot` would have answered when `checkpoint` gave these tensors; needs no device."""
        rank = meta["rank"]
        exported = self.model.to_peft(self._padded(tensors, meta, "weights"), rank=rank)
        return exported, self.model.peft_config(exported, rank=rank)

    def restore(self, model_id: str, tensors: Mapping[str, np.ndarray], meta: Mapping, *, optimizer: bool) -> None:
        """An adapter from `checkpoint`'s answer; without `optimizer` moments and step start from zero. Replaces one of
        the same id.
        """
        zeros, accumulated = self.model.zeros, meta.get("accumulated", 0)
        part = lambda name: jax.device_put(self._padded(tensors, meta, name), self.model.spread)
        state = AdapterState(
            rank=meta["rank"],
            train_attn=meta["train_attn"],
            train_mlp=meta["train_mlp"],
            weights=part("weights"),
            gradients=part("gradients") if accumulated else zeros(),
            moments=(part("mu"), part("nu")) if optimizer else (zeros(), zeros()),
            step=meta["step"] if optimizer else 0,
            accumulated=accumulated,
        )
        self.release(model_id)
        self._admit(model_id, state)

    def _padded(self, tensors: Mapping[str, np.ndarray], meta: Mapping, part: str) -> dict[str, np.ndarray]:
        """One part of a checkpoint at this server's max_rank; every tensor must be there and fit."""
        check_rank(meta["rank"], self.model.config.max_rank)
        padded = {path: np.zeros(shape, np.float32) for path, shape in self.model.shapes.items()}
        for path, whole in padded.items():
            saved, room = tensors.get(f"{part}/{path}"), _cut(path, whole, meta["rank"])
            if saved is None or saved.shape != room.shape:
                got = "missing" if saved is None else f"of shape {saved.shape}"
                raise ValueError(f"checkpoint tensor {part}/{path} is {got}; {self.model.name} needs {room.shape}")
            room[...] = saved
        return padded


def _cut(path: str, array: np.ndarray, rank: int) -> np.ndarray:
    """The part of an adapter's array that is not padding: a's are (.., R, in), b's (.., out, R)."""
    return array[..., :rank, :] if path.endswith("/a") else array[..., :rank]


@dataclasses.dataclass
class _OwnDatum:
    tokens: np.ndarray
    inputs: dict[str, np.ndarray]


@dataclasses.dataclass
class _OwnRequest:
    """The trainer's own question: the log-probs of targets."""

    data: list[_OwnDatum]
    loss_fn: str = "cross_entropy"
    loss_config: dict = dataclasses.field(default_factory=dict)


def _scoring(tokens: Sequence[np.ndarray], targets: Sequence[np.ndarray]) -> _OwnRequest:
    inputs = [{"target_tokens": each, "weights": np.zeros(len(each), np.float32)} for each in targets]
    return _OwnRequest(list(map(_OwnDatum, tokens, inputs)))


def _probe(neighbour: int) -> _OwnRequest:
    """Three sequences that share a row: the middle one must not notice what its neighbours are."""
    tokens = [np.full(2, token, np.int32) for token in (neighbour, 0, neighbour)]
    return _scoring(tokens, 3 * [np.zeros(2, np.int32)])


def _by_datum(request: Request, pieces: Sequence[Piece]) -> list[np.ndarray]:
    """The log-probs of each datum in the shape of its targets."""
    columns: list[list[np.ndarray]] = [[] for _ in request.data]
    for piece in pieces:
        columns[piece.datum].append(piece.logprobs)
    shapes = [datum.inputs["target_tokens"].shape for datum in request.data]
    return [np.concatenate(each, axis=1).reshape(shape) for each, shape in zip(columns, shapes, strict=True)]


def check_shape(model: Model, *, rows: int, row_len: int) -> None:
    if rows < 1 or rows % model.fsdp:
        raise ValueError(f"--rows is {rows}; it must be a multiple of the {model.fsdp} devices of the fsdp axis")
    if not 1 < row_len <= longest_row(model):
        raise ValueError(f"--row-len is {row_len}; {model.name} takes 2..{longest_row(model)} tokens")


def longest_row(model: Model) -> int:
    """Tokens of the longest sequence that the model is made for."""
    return model.hf_config["max_position_embeddings"]


def longest_asked(model: Model) -> int:
    """Where a search ends if memory does not end it: the attention's mask takes a minute there, and it is square."""
    return min(longest_row(model), 131_072)


def _memory_limit(model: Model) -> int | None:
    """Bytes of the smallest device of the mesh; None where nothing says so. CPU devices share the machine's memory."""
    first = model.mesh.devices.flat[0]
    if first.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // model.mesh.size
    try:
        stats = [device.memory_stats() for device in model.mesh.local_devices]
    except jax.errors.JaxRuntimeError:  # a device of a topology that is not here
        return CHIPS[first.device_kind].hbm_bytes if first.device_kind in CHIPS else None
    return min((s["bytes_limit"] for s in stats if s and "bytes_limit" in s), default=None)


def token_budget(free_bytes: int, temp_bytes: int, *, rows: int, row_len: int) -> int:
    """How many times `rows` fit; temp_bytes is what the step takes for them. ValueError where they do not fit once."""
    if temp_bytes > free_bytes:
        free_bytes = max(free_bytes, 0)
        raise ValueError(
            f"--row-len is {row_len}: a step of {rows} such rows takes {temp_bytes:,} bytes a device, of which "
            f"{free_bytes:,} are free; about {row_len * free_bytes // temp_bytes} tokens would fit, or take --remat "
            "full, fewer --max-adapters, or a sampler on other chips (--sampler vllm --replica URL)"
        )
    return min(int(FILL * free_bytes // max(temp_bytes, 1)), MOST_ROWS)


def check_adam(adam: Mapping[str, float]) -> Float32[np.ndarray, "6"]:
    """The six numbers in the order of ADAM; ValueError names the first outside its domain in float32."""
    with np.errstate(over="ignore"):
        numbers = np.array([adam[name] for name in ADAM], np.float32)
    for name, number in zip(ADAM, numbers, strict=True):
        high = 1 if name.startswith("beta") else math.inf
        low = np.finfo(np.float32).tiny if name == "eps" else 0  # eps = 0 would make 0 / 0 of a zero gradient
        if not low <= number < high:
            bracket = "(" if name == "eps" else "["
            raise ValueError(f"adam_params.{name} is {adam[name]}; allowed: {bracket}0, {high}) in float32")
    return numbers


# ---- `trainer.py plan`


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What fits on a topology whose sampler is elsewhere, by its compiler: neither weights nor a device are needed."""

    model: str  # a Hugging Face directory or hub name, of which config.json is read, or one of MaxText's own names
    topology: str | None = None  # v5p:2x2x1 (4 chips), v5e:2x2, v6e:2x2, ...; unset: the devices of this machine
    rows: int | None = None  # of a tile; unset: one a device
    row_len: int = 4096  # tokens of a row
    rank: int = 32  # --max-rank of the server
    adapters: int = 8  # --max-adapters of the server
    remat: str = "full"  # --remat of the server
    search: bool = False  # compile for more, until nothing more fits: the longest row, and the most rows

    def __post_init__(self):  # before MaxText is loaded
        for name, least in {"rows": 1, "row_len": 2, "rank": 1, "adapters": 1}.items():
            if (got := getattr(self, name)) is not None and got < least:
                raise ValueError(f"--{name.replace('_', '-')} is {got}; it must be at least {least}")


# What keeps the TPU's compiler from looking for a TPU, and two of them from shutting each other out.
COMPILER = {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


@functools.cache  # the devices of two topologies of one name do not go together
def topology(name: str) -> list:
    """The devices of a TPU topology that is not here: programs can be compiled for them. ValueError names what is
    missing.
    """
    from jax.experimental import topologies

    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("the TPU compiler is not installed: `uv run --group topology trainer.py plan ...`")
    os.environ |= COMPILER
    jax.config.update("jax_platforms", "cpu")
    try:
        return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology is {name}: {str(error).splitlines()[0]} (such as v5p:2x2x1)") from error


def largest(make: Callable[[int], Plan], known: Plan, size: Callable[[Plan], int], *, unit: int, most: int) -> Plan:
    """The largest plan that fits, `known` where even that does not.

    Memory grows with the tokens, nearly along a line: the next size asked for is where it would meet the limit.
    make: size, a multiple of `unit` and at most `most` -> its plan.
    """
    limit = known.limit_bytes
    assert limit is not None
    below, slope = known, sum(known.temp.values()) / size(known)
    above: int | None = None  # the smallest size known not to fit
    while below.total_bytes <= limit:
        guess = size(below) + int((limit - below.total_bytes) / slope)
        if above is not None:
            guess = min(max(guess, size(below) + unit), above - unit)
        guess = min(guess, most) // unit * unit
        if guess <= size(below):
            break
        try:
            plan = make(guess)
        except ValueError:  # the compiler has refused it, so that there is no point for a line
            above, slope = guess, 2 * (limit - below.total_bytes) / (guess - size(below))
            continue
        slope = max((plan.total_bytes - below.total_bytes) / (guess - size(below)), 1)
        if plan.total_bytes <= limit:
            below = plan
        else:
            above = guess
    return below


def main(config: PlanConfig) -> None:
    devices = topology(config.topology) if config.topology else jax.devices()
    options = ModelConfig(model=config.model, max_rank=config.rank, remat=config.remat)
    model = abstract(options, devices=devices)
    rows = config.rows if config.rows is not None else model.fsdp
    check_shape(model, rows=rows, row_len=config.row_len)
    blocks = choose_blocks(model)
    make = functools.partial(make_plan, model, blocks, max_adapters=config.adapters)
    plan = make(rows=rows, row_len=config.row_len)
    print(table(plan))
    flags = f"--model {config.model} --max-rank {config.rank} --max-adapters {config.adapters} --remat {config.remat}"
    if config.search and plan.limit_bytes is not None:
        make, row_len = functools.partial(make, quick=True), config.row_len
        by_length = lambda row_len: make(rows=rows, row_len=row_len)
        longest = largest(by_length, plan, lambda plan: plan.row_len, unit=512, most=longest_asked(model))
        by_rows, limits = lambda rows: make(rows=rows, row_len=row_len), dict(unit=model.fsdp, most=MOST_ROWS * rows)
        most = largest(by_rows, plan, lambda plan: plan.rows, **limits)
        print(f"\nlongest that fits: {rows} x {longest.row_len}; most rows: {most.rows} x {config.row_len}")
        plan = longest
    print(f"\nuv run server.py --sampler vllm --replica URL {flags} --rows {plan.rows} --row-len {plan.row_len}")


if __name__ == "__main__":
    import tyro

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s", datefmt="%H:%M:%S")
    try:
        main(tyro.extras.subcommand_cli_from_dict({"plan": PlanConfig}))
    except ValueError as error:
        raise SystemExit(str(error)) from None
