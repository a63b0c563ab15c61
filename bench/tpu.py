"""What the TPU's compiler says, on a machine without one: memory and estimated time for real topologies.

- ladder: value_and_grad of the target log-probabilities by the hidden states, T = 20,480, D = 5,120, V = 248,320 in
  bfloat16 on one chip, up the ladder of bench/logprobs.py. temp MiB is what it needs besides arguments and results.
  The roofline is two matrix products, 4TDV FLOPs, at the chip's peak.
- steps: the whole gradient program, rank 32 over attention and MLP, the base laid out as the compiler likes it; last,
  the peak of the unoptimised program, which the search and the tests ask in its place, as a multiple of it.
- fits: the longest row, one a chip, that fits beside 8 adapters in training; searched for (`trainer.largest`), and
  written to bench/fits.json, from which README.md's table is generated.
- cpu: the same plan for the CPU it runs on, against what the process really took during a step: the rise of its peak
  resident memory above the arrays that it held already. A model of 8 layers, D = 512, V = 32,768 with random weights.

ms is the compiler's own estimate, cycles per fusion times trip counts. It leaves out collectives and Pallas kernels
(attention), so only ratios mean anything. Nothing is executed but in `cpu`, and every other number repeats exactly.

Left out: what a chip would really do; tests marked `tpu` ask one.
Run: `uv run --group topology bench/tpu.py` (an hour; --no-fits and the like leave sections out)
"""

import dataclasses
import functools
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from report import finish

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from losses import target_logprobs
from model import ModelConfig, abstract, load
from trainer import (
    CHIPS,
    GIB,
    Blocks,
    Trainer,
    TrainerConfig,
    choose_blocks,
    largest,
    longest_asked,
    make_plan,
    read_hlo,
    topology,
)

ROOT, MIB = Path(__file__).resolve().parent, 2**20
TOPOLOGIES = ("v5p:2x2x1", "v5e:2x2", "v6e:2x2")  # four chips each
T, D, V = 20_480, 5120, 248_320
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-32b")
FITS = ROOT / "fits.json"
LARGEST = Blocks(2048, 16_384)  # of the walks over the head that a server chooses from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    ladder: bool = True  # --no-ladder leaves a section out, likewise the others
    steps: bool = True
    fits: bool = True
    cpu: bool = True
    topologies: tuple[str, ...] = TOPOLOGIES
    models: tuple[str, ...] = MODELS
    row_len: int = 8192  # of the whole steps, one row a chip


# ---- the ladder


def logsumexp(hidden, head, targets):
    logits = jnp.einsum("td,vd->tv", hidden, head, preferred_element_type=jnp.float32)
    return jnp.take_along_axis(logits, targets[:, None], 1)[:, 0] - jax.nn.logsumexp(logits, axis=-1)


def tiles(hidden, head, targets):
    """jax.checkpoint ON the body of a scan over 2,048 tokens: the form usually published."""
    body = jax.checkpoint(lambda _, part: (None, logsumexp(part[0], head, part[1])))
    parts = hidden.reshape(-1, 2048, hidden.shape[1]), targets.reshape(-1, 2048)
    return jax.lax.scan(body, None, parts)[1].reshape(-1)


def ours(hidden, head, targets):
    return target_logprobs(hidden, head, targets, tile=2048, block=4096)


LADDER: dict[str, Callable] = {"logsumexp": logsumexp, "tiles": tiles, "ours": ours}


def ladder(config: Config, goals: dict[str, bool]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    print(f"log-probs and gradient, T={T} D={D} V={V} bfloat16, one chip")
    print(f"{'':>10} {'':>10} {'temp MiB':>9} {'ms':>6} {'x roofline':>11}")
    for name in config.topologies:
        device = topology(name)[0]
        sharding = NamedSharding(Mesh(np.array([device]), ("fsdp",)), PartitionSpec())
        shape = lambda dtype, *sizes, sharding=sharding: jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)
        arguments = (
            *(shape(jnp.bfloat16, sizes, D) for sizes in (T, V)),
            shape(np.int32, T),
            shape(np.float32, T),
        )
        chip = CHIPS[device.device_kind]
        for form, logprobs in LADDER.items():
            loss = lambda hidden, head, targets, c, logprobs=logprobs: (logprobs(hidden, head, targets) * c).sum()
            try:
                compiled = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
            except jax.errors.JaxRuntimeError as error:
                assert "RESOURCE_EXHAUSTED" in str(error)
                print(f"{name:>10} {form:>10} {'does not fit':>16}")
                continue
            temp = compiled.memory_analysis().temp_size_in_bytes / MIB
            seconds = read_hlo(compiled.as_text(), {"tiles": T // 2048})[0] / chip.hz
            record[f"{name} {form}"] = {"temp_mib": temp, "ms": 1e3 * seconds}
            of_roofline = seconds * chip.flops / (4 * T * D * V)
            print(f"{name:>10} {form:>10} {temp:>9,.0f} {1e3 * seconds:>6.0f} {of_roofline:>11.2f}", flush=True)
    if mine := record.get("v5p:2x2x1 ours"):
        goals[f"log-probs, v5p: {mine['temp_mib']:.0f} MiB <= 370"] = mine["temp_mib"] <= 370
        goals[f"log-probs, v5p: {mine['ms']:.1f} ms <= 275"] = mine["ms"] <= 275
    return record


# ---- whole steps


def steps(config: Config) -> dict[str, Any]:
    record: dict[str, Any] = {}
    print(f"\nthe gradient of one row of {config.row_len} tokens a chip, rank 32, 4 chips; GiB a chip")
    print(f"{'':>10} {'':>11} {'arguments':>10} {'temp':>6} {'peak':>6} {'ms':>7} {'MFU at most':>12} {'quick':>7}")
    for name in config.topologies:
        for size in config.models:
            model = abstract(ModelConfig(model=size, remat="full"), devices=topology(name))
            try:
                make = functools.partial(make_plan, model, choose_blocks(model), rows=4, row_len=config.row_len)
                plan, quick = make(max_adapters=8), make(max_adapters=8, quick=True)
            except ValueError as error:
                print(f"{name:>10} {size:>11}  {error}", flush=True)
                continue
            assert plan.seconds is not None and plan.mfu is not None
            report = " ".join(
                f"{plan.report[part] / GIB:>{width}.1f}"
                for part, width in (("arguments", 10), ("temp", 6), ("peak", 6))
            )
            ms, blocks, more = 1e3 * plan.seconds, plan.blocks._asdict(), quick.report["peak"] / plan.report["peak"]
            print(f"{name:>10} {size:>11} {report} {ms:>7,.0f} {plan.mfu:>12.2f} {more:>7.3f}", flush=True)
            record[f"{name} {size}"] = {**plan.report, "ms": ms, "quick_peak": quick.report["peak"], "blocks": blocks}
    return record


def fits(config: Config) -> dict[str, dict[str, int]]:
    """{model: {topology: tokens of the longest row, 0 where not even 512 fit}}."""
    found = json.loads(FITS.read_text()) if FITS.is_file() else {}
    print("\nthe longest row that fits, one a chip, beside 8 adapters of rank 32")
    for size in config.models:
        for name in config.topologies:
            model = abstract(ModelConfig(model=size, remat="full"), devices=topology(name))
            options: dict[str, Any] = dict(rows=model.fsdp, max_adapters=8, quick=True)
            make = lambda row_len, model=model, options=options: make_plan(model, LARGEST, row_len=row_len, **options)
            try:
                first = make(4096)
                best = largest(make, first, lambda plan: plan.row_len, unit=512, most=longest_asked(model))
                longest = best.row_len if best.total_bytes <= (best.limit_bytes or 0) else 0
            except ValueError:
                longest = 0
            found.setdefault(size, {})[name] = longest
            print(f"{size:>12} {name:>10} {longest:>9,}", flush=True)
            FITS.write_text(json.dumps(found, indent=1) + "\n")
    return found


# ---- the CPU's plan


def resident(kind: str) -> int:
    """VmRSS or VmHWM of this process in bytes."""
    found = re.search(rf"{kind}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def measure_cpu(folder: str) -> None:
    """In a process of its own: the plan's bytes and the measured ones, as JSON."""
    from step import datums, request_of, write_model

    directory = write_model(Path(folder))
    trainer = Trainer(
        load(ModelConfig(model=str(directory)), state_dir=directory),
        TrainerConfig(rows=4, row_len=1024, max_adapters=1),
    )
    trainer.create("a", seed=0, rank=32)
    data = request_of(datums(4, 1000, 1024, vocab_size=32_768))
    run = lambda: trainer.forward_backward("a", [data], backward=True)
    run()
    plan = trainer.plan()
    gc.collect()
    held = sum(array.nbytes for array in jax.live_arrays())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    run()
    print(json.dumps({"planned": plan.total_bytes, "measured": held + resident("VmHWM") - before, "held": held}))


def cpu(goals: dict[str, bool]) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", f"import tpu; tpu.measure_cpu({folder!r})"]
        out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    record = json.loads(out.splitlines()[-1])
    planned, measured = record["planned"], record["measured"]
    print(f"\nCPU: planned {planned / MIB:,.0f} MiB, measured {measured / MIB:,.0f}")
    goals[f"CPU: the plan is {planned / measured:.3f} of the measured peak, within 10 %"] = (
        abs(planned / measured - 1) <= 0.1
    )
    return record


def main(config: Config) -> None:
    goals: dict[str, bool] = {}
    record: dict[str, Any] = {"bench": "tpu", "config": dataclasses.asdict(config)}
    if config.ladder:
        record["ladder"] = ladder(config, goals)
    if config.steps:
        record["steps"] = steps(config)
    if config.fits:
        record["fits"] = fits(config)
    if config.cpu:
        record["cpu"] = cpu(goals)
    print()
    finish(record, goals, ("jax", "maxtext"))


if __name__ == "__main__":
    main(tyro.cli(Config, description="What the TPU's compiler says of log-probabilities and whole steps."))
