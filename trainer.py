"""The trainer: many LoRA adapters over one frozen base, every request through the same compiled tile.

    forward_backward -> [pack -> tiles -> gradient program, gradients accumulate] -> log-probs, loss
    optim_step       -> [AdamW on one adapter, gradients back to zero]            -> gradient norm
    save_weights     -> [adapter + moments + step on the host]                    -> cache

Invariants
  1. One shape: a tile is [rows, row_len]. Loss, its numbers, rank, adapter and learning rate are traced, so nothing
     compiles after `warm_up`.
  2. Sums: a loss is a sum over tokens and datums, so A then B leaves the gradients of A + B.
  3. An adapter owns its weights, gradients, moments and step; no program sees two. Forward-only touches no gradient.
  4. A step whose gradient is not finite, or that follows no forward_backward, changes nothing and says so.

Methods take and return plain numpy and scalars, so that process 0 of many can broadcast each call; one thread calls.

Left out: sharing tiles between requests, planning of memory, many hosts.
Run: `uv run server.py` drives it.    Read first: losses.py, then `Trainer.forward_backward`.
"""

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int, Int32

from losses import LOSSES, TokenInputs, config_vector, target_logprobs, token_losses
from model import ALPHA, Adapter, Model, check_rank

ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
TOKEN_INPUTS = ("weights", "logprobs", "advantages")  # loss_fn_inputs in the order of a tile's floats
SENTINEL = -9e3  # engines report "no log-prob" as -9999 or -99999; no real one is below this


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig:
    rows: int | None = None  # rows of a tile, a multiple of the fsdp size; unset: the fsdp size
    row_len: int = 512  # tokens of a row: the longest datum a client may send
    max_adapters: int = 8  # adapters in training at a time; each takes weights, gradients and two moments in float32


@runtime_checkable
class Datum(Protocol):
    tokens: np.ndarray  # int32 [n]
    inputs: dict[str, np.ndarray]  # target_tokens int [n] and the float [n] inputs of the loss


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


# ---- packing: pure, on the host


def pack(lengths: Sequence[int], row_len: int) -> list[list[int]]:
    """Best-fit decreasing: rows of indices into `lengths`, no row longer than `row_len`. O(n log n) searches over the
    free space.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (space left, row), ascending
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        k = bisect.bisect_left(free, (lengths[i], 0))  # the fullest row that still takes it
        if k == len(free):
            rows.append([])
            free.insert(k, (row_len, len(rows) - 1))
        space, row = free.pop(k)
        rows[row].append(i)
        bisect.insort(free, (space - lengths[i], row))
    return rows


@dataclasses.dataclass
class Tile:
    """One [B, T] batch; places[i] = (row, start) of datum i."""

    ints: Int32[np.ndarray, "4 B T"]  # tokens, positions, segment_ids (0 = padding), targets
    floats: Float32[np.ndarray, "3 B T"]  # TOKEN_INPUTS
    places: dict[int, tuple[int, int]]


def make_tiles(data: Sequence[Datum], *, rows: int, row_len: int) -> list[Tile]:
    packed, tiles = pack([len(d.tokens) for d in data], row_len), []
    for first in range(0, len(packed), rows):
        tile = Tile(np.zeros((4, rows, row_len), np.int32), np.zeros((3, rows, row_len), np.float32), {})
        for row, members in enumerate(packed[first : first + rows]):
            start = 0
            for segment, i in enumerate(members, 1):
                n = len(data[i].tokens)
                here = np.s_[row, start : start + n]
                for plane, value in zip(
                    tile.ints, (data[i].tokens, np.arange(n), segment, data[i].inputs["target_tokens"]), strict=True
                ):
                    plane[here] = value
                for plane, name in zip(tile.floats, TOKEN_INPUTS, strict=True):
                    plane[here] = data[i].inputs.get(name, 0)
                tile.places[i] = (row, start)
                start += n
        tiles.append(tile)
    return tiles


# ---- the programs: pure, compiled once


def tile_logprobs(model: Model, base, head, adapter: Adapter, ints: Int[Array, "4 B T"]) -> Float[Array, "B T"]:
    """Log-probabilities of a tile's targets. Each device scores its own rows; the head is gathered once, logits never
    exist.
    """
    tokens, positions, segment_ids, targets = ints
    hidden = model.hidden(base, adapter, tokens, positions, segment_ids)

    def local(hidden, head, targets):
        return target_logprobs(hidden.reshape(-1, hidden.shape[-1]), head, targets.reshape(-1)).reshape(targets.shape)

    rows, whole = PartitionSpec("fsdp"), PartitionSpec()
    return jax.shard_map(local, mesh=model.mesh, in_specs=(rows, whole, rows), out_specs=rows, check_vma=False)(
        hidden, head, targets
    )


def tile_loss(model: Model, base, head, adapter: Adapter, scale, ints, floats, loss, config) -> tuple[Array, Array]:
    """(loss, [2, B, T] of log-probs and per-token losses). Padding and tokens with unusable inputs count for
    nothing.
    """
    logprobs = tile_logprobs(model, base, head, model.scaled(adapter, scale), ints)
    inputs = TokenInputs(*floats)
    usable = jnp.isfinite(floats).all(0) & (inputs.sampling_logprobs > SENTINEL)
    flat = lambda x: x.reshape(-1)
    live = flat((ints[2] > 0) & usable)
    losses = token_losses(loss, flat(logprobs), TokenInputs(*map(flat, inputs)), live, config)
    return losses.sum(), jnp.stack([logprobs, losses.reshape(logprobs.shape)])


def gradient_program(model: Model, base, head, adapter, gradients, scale, ints, floats, loss, config):
    """Adds one tile's gradients to `gradients` (donated)."""
    run = lambda adapter: tile_loss(model, base, head, adapter, scale, ints, floats, loss, config)
    new, outputs = jax.grad(run, has_aux=True)(adapter)
    return jax.tree.map(jnp.add, gradients, new), outputs


def forward_program(model: Model, base, head, adapter, scale, ints, floats, loss, config):
    return tile_loss(model, base, head, adapter, scale, ints, floats, loss, config)[1]


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
        self.rows, self.row_len = config.rows if config.rows is not None else model.fsdp, config.row_len
        if self.rows < 1 or self.rows % model.fsdp:
            raise ValueError(
                f"--rows is {self.rows}; it must be a multiple of the {model.fsdp} devices of the fsdp axis"
            )
        longest = model.hf_config["max_position_embeddings"]
        if not 1 < self.row_len <= longest:
            raise ValueError(f"--row-len is {self.row_len}; {model.name} takes 2..{longest} tokens")
        self.adapters: dict[str, AdapterState] = {}
        replicated, rows = model.sharding(), model.sharding(None, "fsdp")
        pinned = functools.partial(
            jax.jit, out_shardings=replicated
        )  # or XLA re-shards the adapter and the next call compiles
        self._place = lambda tile: jax.device_put((tile.ints, tile.floats), rows)
        self._gradient = pinned(functools.partial(gradient_program, model), donate_argnums=3)
        self._forward = pinned(functools.partial(forward_program, model))
        self._adamw = pinned(adamw_program, donate_argnums=(0, 1, 2))

    def warm_up(self) -> None:
        """Compile everything once, on an adapter of its own."""
        self.create("warm-up", seed=0, rank=1)
        for attn, mlp in ((True, False), (False, True)):
            self.model.new_adapter(seed=0, rank=1, attn=attn, mlp=mlp)
        datum = _WarmUp(
            np.zeros(2, np.int32), {name: np.zeros(2, np.float32) for name in ("target_tokens", *TOKEN_INPUTS)}
        )
        for backward in (False, True):
            self.forward_backward("warm-up", [datum], "cross_entropy", {}, backward=backward)
        self.optim_step(
            "warm-up", dict(learning_rate=0.0, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0)
        )
        self.release("warm-up")

    def create(self, model_id: str, *, seed: int, rank: int, train_attn: bool = True, train_mlp: bool = True) -> None:
        """A fresh adapter. RuntimeError when all places are taken."""
        weights = self.model.new_adapter(seed=seed, rank=rank, attn=train_attn, mlp=train_mlp)
        zeros = self.model.zeros
        self._admit(
            model_id,
            AdapterState(
                rank=rank,
                train_attn=train_attn,
                train_mlp=train_mlp,
                weights=weights,
                gradients=zeros(),
                moments=(zeros(), zeros()),
            ),
        )

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

    def forward_backward(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss_fn: str,
        loss_config: Mapping[str, float | str],
        *,
        backward: bool,
    ) -> tuple[list[np.ndarray], dict[str, float]]:
        """Log-probs of each datum's targets (float32 [n], in the given order) and metrics; gradients accumulate if
        `backward`.
        """
        state, config = self.adapters[model_id], config_vector(loss_fn, loss_config)
        tiles = make_tiles(data, rows=self.rows, row_len=self.row_len)
        shared = (self.model.base, self.model.head, state.weights)
        loss, outputs = np.int32(list(LOSSES).index(loss_fn)), []
        for tile in tiles:  # dispatched without waiting: the host packs and copies while the device computes
            args = (state.scale, *self._place(tile), loss, config)
            if backward:
                state.gradients, out = self._gradient(*shared, state.gradients, *args)
            else:
                out = self._forward(*shared, *args)
            outputs.append(out)
        state.accumulated += backward
        logprobs, loss_sum = [np.empty(0, np.float32)] * len(data), 0.0
        for tile, out in zip(tiles, map(np.asarray, outputs), strict=True):
            loss_sum += float(out[1].sum(dtype=np.float64))
            for i, (row, start) in tile.places.items():
                logprobs[i] = out[0, row, start : start + len(data[i].tokens)]
        tokens = sum(len(d.tokens) for d in data)
        fill = tokens / (len(tiles) * self.rows * self.row_len)
        return logprobs, {"loss:sum": loss_sum, "tokens:sum": tokens, "tiles:sum": len(tiles), "tile_fill:mean": fill}

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
        return self.model.to_peft(jax.device_get(state.weights), rank=state.rank), self.model.peft_config(
            rank=state.rank
        )

    def checkpoint(self, model_id: str) -> tuple[dict[str, np.ndarray], dict]:
        """(weights, both moments, cut to the adapter's rank; what `restore` needs besides)."""
        state = self.adapters[model_id]
        parts = jax.device_get({"weights": state.weights, "mu": state.moments[0], "nu": state.moments[1]})
        cut = lambda path, x: np.ascontiguousarray(_cut(path, x, state.rank))
        tensors = {f"{part}/{path}": cut(path, x) for part, arrays in parts.items() for path, x in arrays.items()}
        return tensors, dict(rank=state.rank, train_attn=state.train_attn, train_mlp=state.train_mlp, step=state.step)

    def export(self, tensors: Mapping[str, np.ndarray], meta: Mapping) -> tuple[dict[str, np.ndarray], dict]:
        """What `snapshot` would have answered when `checkpoint` gave these tensors; needs no device."""
        return self.model.to_peft(self._padded(tensors, meta, "weights"), rank=meta["rank"]), self.model.peft_config(
            rank=meta["rank"]
        )

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


@dataclasses.dataclass
class _WarmUp:
    tokens: np.ndarray
    inputs: dict[str, np.ndarray]


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
