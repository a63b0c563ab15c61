"""Target log-probabilities on an FSDP mesh: what each device holds, computes and sends, in four forms.

Tokens and head are both sharded over the mesh's n devices, as fully sharded data parallelism keeps them, so to score a
token something must travel: the head, the hidden states, or, where the compiler is left to choose, the logits.

    plain GSPMD    a scan of tiles, head [D, V] sharded by D. Every device has a part of each SUM of products, so the
                   logits of a tile are summed over the mesh. And reshaping [T] -> [n, tile] hands the sharding of the
                   tokens to n: the devices own whole tiles, which all must then work on together
    constrained    the same with the head constrained to be whole: nothing else tells the compiler to share the tiles
                   out, and every device computes every one
    gather once    shard_map: each device gathers the head [V, D] and scores its own tokens in one pass
    ours           losses.score(axis=...): the head [V, D] stays sharded by V. A tile's hidden states are gathered, each
                   device scores all of them against its rows of the head, and the sums are merged

What is measured, of value_and_grad by the hidden states, on the program of one device:
- temp MiB: what it needs besides arguments and results.
- FLOPs of the matrix products, read off the compiled HLO: 2 x (shape of the result) x (contracted axes), times how
  often the loops around it run. The unit is a device's share of one product of hidden states and head, 2TDV/n: two are
  the least, logits and gradient.
- MiB moved: what a device sends for each collective in a ring, by kind, times how often.
- whether a collective inside a loop carries an axis of the vocabulary, V or V/n: the tensor that tiles were to avoid.

Nothing is executed, so all this repeats exactly. A loop over live tokens has a traced trip count; here every token is
live. The aims: at most 30 MiB, two products, no axis of the vocabulary in a loop.

Left out: time, which four virtual devices of one CPU say nothing about; what the TPU's compiler makes of the same.
Run: `uv run bench/mesh.py`
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"

import dataclasses
import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from report import finish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from losses import score
from trainer import Instruction, bytes_in, shapes_in, walk_hlo

MIB, DEVICES = 2**20, 4
SCORE_TILE = 512  # tokens of a tile of losses.score, its default
# What a device sends in a ring, as a multiple of the bytes of the collective's result.
RING = {
    "all-gather": (DEVICES - 1) / DEVICES,
    "all-reduce": 2 * (DEVICES - 1) / DEVICES,  # a reduce-scatter, then an all-gather
    "all-to-all": (DEVICES - 1) / DEVICES,
    "collective-permute": 1,
    "reduce-scatter": DEVICES - 1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    tokens: int = 8192  # T, a multiple of tile times the 4 devices
    width: int = 1024  # D
    vocabulary: int = 32_768  # V
    tile: int = 1024  # tokens of a tile where the form has one to choose
    most_mib: float = 30.0  # the aim


# ---- the forms: (hidden [T, D], head, targets [T], tile, mesh) -> log-probs [T]


def tiles(hidden, head, targets, tile, mesh):
    def body(carry, each):
        z = jnp.dot(each[0], head, preferred_element_type=jnp.float32)  # [tile, V]
        return carry, jnp.take_along_axis(z, each[1][:, None], 1)[:, 0] - jax.nn.logsumexp(z, 1)

    cut = hidden.reshape(-1, tile, hidden.shape[1]), targets.reshape(-1, tile)
    return lax.scan(jax.checkpoint(body), None, cut)[1].reshape(-1)


def constrained(hidden, head, targets, tile, mesh):
    whole = lax.with_sharding_constraint(head, NamedSharding(mesh, PartitionSpec()))
    return tiles(hidden, whole, targets, tile, mesh)


def _mapped(local: Callable, hidden, head, targets, mesh):
    own = PartitionSpec("fsdp")
    return jax.shard_map(local, mesh=mesh, in_specs=(own, own, own), out_specs=own, check_vma=False)(
        hidden, head, targets
    )


def gather_once(hidden, head, targets, tile, mesh):
    def local(hidden, head, targets):
        whole = lax.all_gather(head, "fsdp", tiled=True)
        return score(hidden, whole, targets[None]).logprobs[0]

    return _mapped(local, hidden, head, targets, mesh)


def ours(hidden, head, targets, tile, mesh):
    local = lambda hidden, head, targets: score(hidden, head, targets[None], axis="fsdp").logprobs[0]
    return _mapped(local, hidden, head, targets, mesh)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    logprobs: Callable
    head: str  # the axes of the head, the sharded one first or last
    visits: Callable[[int], int] = lambda tokens: 0  # T -> what a loop with a traced trip count comes to


FORMS = {
    "plain GSPMD": Form(logprobs=tiles, head="DV"),
    "constrained": Form(logprobs=constrained, head="DV"),
    "gather once": Form(logprobs=gather_once, head="VD", visits=lambda tokens: tokens // DEVICES // SCORE_TILE),
    "ours": Form(logprobs=ours, head="VD", visits=lambda tokens: tokens // SCORE_TILE),
}


def compiled(form: Form, config: Config, mesh: Mesh) -> Any:
    def total(hidden, head, targets, cotangents):
        return (form.logprobs(hidden, head, targets, config.tile, mesh) * cotangents).sum()

    def array(dtype, *shape):  # its first axis sharded
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))

    size = {"D": config.width, "V": config.vocabulary}
    hidden, head = (
        array(jnp.float32, config.tokens, config.width),
        array(jnp.float32, *(size[axis] for axis in form.head)),
    )
    targets, cotangents = array(jnp.int32, config.tokens), array(jnp.float32, config.tokens)
    return jax.jit(jax.value_and_grad(total)).lower(hidden, head, targets, cotangents).compile()


# ---- the report


def flops(dot: Instruction, around: dict[str, Instruction]) -> int:
    found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", dot.attributes)
    assert found is not None
    ((_, left),), ((_, result),) = shapes_in(around[dot.operands[0]].shape), shapes_in(dot.shape)
    return 2 * math.prod(result) * math.prod(left[int(dim)] for dim in found[1].split(","))


def measure(form: Form, config: Config, mesh: Mesh) -> dict[str, Any]:
    program = compiled(form, config, mesh)
    products, collectives, large = 0, Counter(), {config.vocabulary, config.vocabulary // DEVICES}
    in_loop = False
    for instruction, around, times, looped in walk_hlo(program.as_text(), {"tiles": form.visits(config.tokens)}):
        if instruction.kind == "dot":
            products += times * flops(instruction, around)
        assert "custom-call" not in instruction.kind, f"{instruction.name} may hide a product"
        if instruction.kind in RING:
            shape = re.sub(r"\{[\d,]*\}|/\*.*?\*/", "", instruction.shape)
            collectives[instruction.kind, shape, looped] += times
            in_loop |= looped and any(large & set(sizes) for _, sizes in shapes_in(shape))
    share = 2 * config.tokens * config.width * config.vocabulary / DEVICES
    moved = [(RING[kind] * bytes_in(shape) * n / MIB, kind, shape, n) for (kind, shape, _), n in collectives.items()]
    return {
        "temp_mib": round(program.memory_analysis().temp_size_in_bytes / MIB, 1),
        "products": round(products / share, 3),
        "moved_mib": round(sum(each[0] for each in moved), 1),
        "vocabulary_in_loop": in_loop,
        "collectives": [
            {"kind": kind, "shape": shape, "bytes": bytes_in(shape), "times": n, "moved_mib": round(mib, 3)}
            for mib, kind, shape, n in sorted(moved, reverse=True)
        ],
    }


def main(config: Config) -> None:
    mesh = Mesh(jax.devices(), ("fsdp",))
    forms = {name: measure(form, config, mesh) for name, form in FORMS.items()}
    print(f"a device of {DEVICES}: T={config.tokens} D={config.width} V={config.vocabulary} float32")
    print(f"{'':>12} {'temp MiB':>9} {'x 2TDV/n':>9} {'MiB moved':>10} {'V in a loop':>12}")
    for name, each in forms.items():
        numbers = f"{each['temp_mib']:>9,.0f} {each['products']:>9.2f} {each['moved_mib']:>10,.0f}"
        print(f"{name:>12} {numbers} {'yes' if each['vocabulary_in_loop'] else 'no':>12}")
    for name, each in forms.items():
        print(f"\n{name}")
        for c in each["collectives"]:
            print(
                f"{c['times']:>12} x {c['kind']:<15} {c['bytes']:>13,} bytes {c['moved_mib']:>9,.2f} MiB  {c['shape']}"
            )
    mine = forms["ours"]
    goals = {
        f"ours: {mine['temp_mib']:.0f} MiB <= {config.most_mib:g}": mine["temp_mib"] <= config.most_mib,
        f"ours: {mine['products']:.2f} products <= 2": mine["products"] <= 2,
        "ours: no axis of the vocabulary in a loop's collectives": not mine["vocabulary_in_loop"],
    }
    print()
    finish({"bench": "mesh", **dataclasses.asdict(config), "forms": forms}, goals, ("jax",))


if __name__ == "__main__":
    main(
        tyro.cli(Config, description="Target log-probabilities on a mesh: memory, FLOPs and collectives of four forms.")
    )
