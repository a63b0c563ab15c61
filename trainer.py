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

Left out: a plan of the memory before anything is compiled, many hosts.
Run: `uv run server.py` drives it.    Read first: losses.py, then `Trainer.forward_backward`.
"""

import dataclasses
import functools
import gc
import itertools
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from losses import LARGEST, LOSSES, TokenInputs, loss_numbers, score, token_fields, token_losses
from model import ALPHA, Adapter, Model, check_rank

log = logging.getLogger("trainer")

ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
UNITS = 1024  # the packer rounds lengths up to this many parts of a row
ENOUGH = 8  # of which as many may stay free without a search for a better end
SENTINEL = -9e3  # engines report "no log-prob" as -9999 or -99999; no real one is below this
TARGETS = 32  # targets a position may have in one tile; a datum with more of them is scored in several
FILL, MOST_ROWS = 0.9, 16  # of the free memory; of the fewest rows: more in a tile gains little
RETRY_S = (0.1, 1.0)  # waits before an allocation that failed is tried again
PEAK_FLOPS = {  # of a device in bfloat16, by jax's device_kind (cloud.google.com/tpu/docs): what MFU is a fraction of
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU7x": 2307e12,
}


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
    stock = defaultdict(list)  # length in units, rounded up -> the sequences of that length
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


def tile_loss(
    model: Model, base, head, adapter: Adapter, scale, ints, floats, further, planes, loss, *, everything: bool
) -> tuple[Array, tuple[Array, Array]]:
    """(loss, ([3, B, T] of log-probs, losses and entropies, [K, B, T] log-probs of further targets)).

    Each device scores its own rows; the head stays where it is, sharded by its vocabulary, and logits never exist.
    """
    tokens, positions, segment_ids, *_ = ints
    hidden = model.hidden(base, model.scaled(adapter, scale), tokens, positions, segment_ids)
    sharded = model.vocab_size % model.fsdp == 0

    def local(hidden, head, ints, floats, further, planes, loss):
        shape = hidden.shape[:2]
        flat = lambda x: x.reshape(*x.shape[:-2], -1)
        (_, _, segment_ids, target, asked), floats, (targets, weights) = flat(ints), flat(floats), map(flat, further)
        rows = jnp.repeat(jnp.arange(shape[0]) * shape[1], shape[1])
        live = asked > 0
        scored = segment_ids > 0 if everything else live
        targets = jnp.concatenate([target[None], targets])
        axis = "fsdp" if sharded else None
        scores = score(hidden.reshape(-1, hidden.shape[-1]), head, targets, scored, planes, axis=axis)
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


def gradient_program(model: Model, base, head, adapter, gradients, *args):
    """Adds one tile's gradients to `gradients` (donated)."""
    run = lambda adapter: tile_loss(model, base, head, adapter, *args, everything=False)
    new, outputs = jax.grad(run, has_aux=True)(adapter)
    return jax.tree.map(jnp.add, gradients, new), outputs


def forward_program(model: Model, base, head, adapter, *args):
    return tile_loss(model, base, head, adapter, *args, everything=True)[1]


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


# ---- the trainer


class Trainer:
    def __init__(self, model: Model, config: TrainerConfig):
        self.model, self.config = model, config
        rows = config.rows if config.rows is not None else model.fsdp
        usual = 256 if jax.default_backend() == "cpu" else 512  # attention is quadratic: a CPU feels it that early
        self.row_len = config.row_len if config.row_len is not None else usual
        if rows < 1 or rows % model.fsdp:
            raise ValueError(f"--rows is {rows}; it must be a multiple of the {model.fsdp} devices of the fsdp axis")
        longest = model.hf_config["max_position_embeddings"]
        if not 1 < self.row_len <= longest:
            raise ValueError(f"--row-len is {self.row_len}; {model.name} takes 2..{longest} tokens")
        self.adapters: dict[str, AdapterState] = {}
        # Pinned, or XLA re-shards an adapter and the next call compiles.
        whole, planes_of = model.sharding(), model.sharding(None, "fsdp")
        self._place = lambda arrays: jax.device_put(arrays, planes_of)
        bound = lambda program: functools.partial(program, model)
        self._gradient = jax.jit(bound(gradient_program), donate_argnums=3, out_shardings=(whole, (whole, planes_of)))
        self._forward = jax.jit(bound(forward_program), out_shardings=(whole, planes_of))
        self._commit = jax.jit(commit_program, donate_argnums=1, out_shardings=whole)  # a failure costs no adapter
        self._adamw = jax.jit(adamw_program, donate_argnums=(0, 1, 2), out_shardings=whole)
        self._new: Adapter | None = None  # the gradients of the call that runs, zero between calls; None: to be made
        self._parameters = model.parameters  # counting them walks the whole tree
        self.alone = False  # one sequence a row?
        self._set_rows(rows)

    def _set_rows(self, rows: int) -> None:
        self.rows = rows
        zeros = lambda dtype: np.zeros((TARGETS - 1, rows, self.row_len), dtype)
        self._nothing_further = self._place((zeros(np.int32), zeros(np.float32)))  # kept on the devices: no transfer

    def warm_up(self) -> None:
        """Choose the rows, compile everything once on an adapter of its own, and see whether segments are isolated."""
        self.create("warm-up", seed=0, rank=1)
        for attn, mlp in ((True, False), (False, True)):
            self.model.new_adapter(seed=0, rank=1, attn=attn, mlp=mlp)
        if self.config.rows is None and (limit := _memory_limit(self.model)) is not None:
            self._set_rows(self.model.fsdp * self._multiple(limit))
        self.forward_backward("warm-up", [_Probe(0)], backward=True)
        same, other = (self.forward_backward("warm-up", [_Probe(first)], backward=False)[0] for first in (0, 1))
        self.alone = not np.array_equal(same[0][1], other[0][1])
        if self.alone:
            log.warning("%s sees across the segments of a row: every sequence gets a row of its own", self.model.name)
        self.optim_step("warm-up", dict.fromkeys(ADAM, 0.0) | {"eps": 1e-12})
        self.release("warm-up")

    def _multiple(self, limit: int) -> int:
        """How many times the fewest rows fit a device of `limit` bytes."""
        fixed, temp = self._used_bytes()
        return token_budget(limit - fixed, temp, rows=self.rows, row_len=self.row_len)

    def _used_bytes(self) -> tuple[int, int]:
        """Of a device, by the compiler's count: what stays (base, head, adapters) and what a tile's gradient takes."""
        tile = make_tiles(make_pieces([_Probe(0)]), rows=self.rows, row_len=self.row_len)[0]
        args = self._arguments(next(iter(self.adapters.values())), tile, "cross_entropy")
        analysis = self._gradient.lower(*args[:3], self.model.zeros(), *args[3:]).compile().memory_analysis()
        assert analysis is not None
        adapter = sum(4 * math.prod(shape) for shape in self.model.shapes.values())
        adapters = 4 * self.config.max_adapters * adapter  # weights, gradients, two moments
        return analysis.argument_size_in_bytes + adapters, analysis.temp_size_in_bytes

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
        started, state = time.perf_counter(), self.adapters[model_id]
        (loss_fn,) = {request.loss_fn for request in requests}
        pieces = make_pieces(requests)
        tiles = make_tiles(pieces, rows=self.rows, row_len=self.row_len, alone=self.alone)
        _patiently(functools.partial(self._run, state, tiles, pieces, loss_fn, backward), self._free)
        new, self._new = self._new, None  # until it has joined, nobody may add to it
        filled, elapsed = sum(len(piece.tokens) for piece in pieces), time.perf_counter() - started
        tokens = sum(len(piece.tokens) for piece in pieces if piece.first)
        shared = {
            "tile_fill:mean": filled / (len(tiles) * self.rows * self.row_len),
            "tokens_per_s:mean": tokens / elapsed,
            "tflops_per_s:mean": float(self._flops(pieces, backward)) / elapsed / 1e12,
        }
        if (peak := PEAK_FLOPS.get(jax.devices()[0].device_kind)) is not None:
            shared["mfu:mean"] = shared["tflops_per_s:mean"] * 1e12 / peak / self.model.mesh.size
        answers = []
        for r, group in itertools.groupby(pieces, key=lambda piece: piece.request):
            request, mine = requests[r], list(group)
            share = len(tiles) * sum(len(piece.tokens) for piece in mine) / filled
            metrics = request_metrics(request, mine, backward=backward) | shared | {"tiles:sum": share}
            answers.append((_by_datum(request, mine), metrics))
        if backward:  # the last thing that can fail
            state.gradients, new = self._commit(state.gradients, new)
            state.accumulated += len(requests)
        self._new = new
        return answers

    def _run(self, state: AdapterState, tiles: list[Tile], pieces: list[Piece], loss_fn: str, backward: bool) -> None:
        """All tiles, dispatched without waiting: the host packs and copies while the devices compute."""
        outputs = []
        self._new = self.model.zeros() if self._new is None else self._new
        for tile in tiles:
            args = self._arguments(state, tile, loss_fn)
            if backward:
                self._new, out = self._gradient(*args[:3], self._new, *args[3:])
            else:
                out = self._forward(*args)
            outputs.append(out)
        for tile, (first, more) in zip(tiles, outputs, strict=True):
            first, more = np.asarray(first), np.asarray(more) if tile.further is not None else None
            for i, (row, start) in tile.places.items():
                piece, here = pieces[i], np.s_[:, row, start : start + len(pieces[i].tokens)]
                piece.outputs, piece.logprobs = first[here], first[here][:1].T
                if more is not None:
                    further = more[: piece.targets.shape[1] - 1][here]
                    piece.logprobs = np.concatenate([piece.logprobs, further.T], axis=1)

    def _arguments(self, state: AdapterState, tile: Tile, loss_fn: str) -> tuple:
        further = self._place(tile.further) if tile.further is not None else self._nothing_further
        numbers = self._place((tile.ints, tile.floats))
        loss = np.int32(list(LOSSES).index(loss_fn))
        model = self.model.base, self.model.head, state.weights, state.scale
        return *model, *numbers, further, np.int32(tile.planes), loss

    def _free(self) -> None:
        """Drop what a failed call has left; the compiled programs and the adapters stay."""
        self._new = None
        gc.collect()

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
        return self.model.to_peft(weights, rank=state.rank), self.model.peft_config(rank=state.rank)

    def checkpoint(self, model_id: str) -> tuple[dict[str, np.ndarray], dict]:
        """(weights, both moments, cut to the adapter's rank; what `restore` needs besides)."""
        state = self.adapters[model_id]
        parts = jax.device_get({"weights": state.weights, "mu": state.moments[0], "nu": state.moments[1]})
        cut = lambda path, x: np.ascontiguousarray(_cut(path, x, state.rank))
        tensors = {f"{part}/{path}": cut(path, x) for part, arrays in parts.items() for path, x in arrays.items()}
        return tensors, dict(rank=state.rank, train_attn=state.train_attn, train_mlp=state.train_mlp, step=state.step)

    def export(self, tensors: Mapping[str, np.ndarray], meta: Mapping) -> tuple[dict[str, np.ndarray], dict]:
        """What `snapshot` would have answered when `checkpoint` gave these tensors; needs no device."""
        weights, rank = self._padded(tensors, meta, "weights"), meta["rank"]
        return self.model.to_peft(weights, rank=rank), self.model.peft_config(rank=rank)

    def restore(self, model_id: str, tensors: Mapping[str, np.ndarray], meta: Mapping, *, optimizer: bool) -> None:
        """An adapter from `checkpoint`'s answer; without `optimizer` moments and step start from zero. Replaces one of
        the same id.
        """
        zeros = self.model.zeros
        part = lambda name: jax.device_put(self._padded(tensors, meta, name), self.model.sharding())
        state = AdapterState(
            rank=meta["rank"],
            train_attn=meta["train_attn"],
            train_mlp=meta["train_mlp"],
            weights=part("weights"),
            gradients=zeros(),
            moments=(part("mu"), part("nu")) if optimizer else (zeros(), zeros()),
            step=meta["step"] if optimizer else 0,
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
    """The part of an adapter's array that is not padding: a's are (.., R), b's (R, ..)."""
    return array[..., :rank] if path.endswith("/a") else array[:rank]


class _Probe:
    """Three sequences that share a row: the middle one must not notice what its neighbours are."""

    loss_fn, loss_config = "cross_entropy", {}

    def __init__(self, neighbour: int):
        nothing = np.zeros(2, np.int32)
        inputs = {"target_tokens": nothing, "weights": np.zeros(2, np.float32)}
        self.data = [_ProbeDatum(np.full(2, token, np.int32), inputs) for token in (neighbour, 0, neighbour)]


@dataclasses.dataclass
class _ProbeDatum:
    tokens: np.ndarray
    inputs: dict[str, np.ndarray]


def _by_datum(request: Request, pieces: Sequence[Piece]) -> list[np.ndarray]:
    """The log-probs of each datum in the shape of its targets."""
    columns: list[list[np.ndarray]] = [[] for _ in request.data]
    for piece in pieces:
        columns[piece.datum].append(piece.logprobs)
    shapes = [datum.inputs["target_tokens"].shape for datum in request.data]
    return [np.concatenate(each, axis=1).reshape(shape) for each, shape in zip(columns, shapes, strict=True)]


def _patiently(run: Callable[[], None], free: Callable[[], None]) -> None:
    """Run it; where the device has no memory left, free what can be, wait, and try again before giving up."""
    for wait_s in (*RETRY_S, None):
        try:
            return run()
        except Exception as error:
            free()
            if wait_s is None or "RESOURCE_EXHAUSTED" not in str(error):
                raise
            log.warning("the device is out of memory; trying again in %g s", wait_s)
        time.sleep(wait_s)


def _memory_limit(model: Model) -> int | None:
    """Bytes of the smallest device of the mesh; None where the backend does not say (CPU)."""
    stats = [device.memory_stats() for device in model.mesh.local_devices]
    return min((s["bytes_limit"] for s in stats if s and "bytes_limit" in s), default=None)


def token_budget(free_bytes: int, temp_bytes: int, *, rows: int, row_len: int) -> int:
    """How many times `rows` fit; temp_bytes is what the step takes for them. ValueError where they do not fit once."""
    if temp_bytes > free_bytes:
        fits = max(row_len * free_bytes // temp_bytes, 0)
        raise ValueError(
            f"--row-len is {row_len}: a step of {rows} such rows takes {temp_bytes:,} bytes a device, of which "
            f"{free_bytes:,} are free; about {fits} tokens would fit, or take --remat full, or fewer --max-adapters"
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
