"""From the end of optim_step to the first token under the new weights, and where the time goes.

    optim_step -> export: the adapter leaves the devices, in PEFT's form -> write: a folder, by a rename
               -> load: every replica serves it -> first token

Two adapters. The demo model's takes the whole way, to a real vLLM started here. A rank-32 adapter of a 27B-class model
(64 layers, D = 5,120, all attention and MLP projections: 0.8 GB) is only exported and written; the peer is
`safetensors.numpy.save_file` of the same tensors, ready made, on the same disk: no export can be faster.

Times are the medians of several swaps; the two 27B forms take turns. The engine decodes on CPUs here, and shares them
with the trainer: a TPU's numbers are others, the shares of export and write are not.

Left out: the transfer to hosts that do not share the disk.
Run: `uv run bench/swap.py` (needs `uv run sampler.py install`; --no-engine does without)
"""

import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np
import tyro
from report import finish
from safetensors.numpy import save_file

import model as models
from cache import Store, check_run_id
from model import Model, ModelConfig
from sampler import Fleet, SamplerConfig
from server import peft_files
from trainer import ADAM, Trainer, TrainerConfig
from wire import Datum, SampleRequest, SamplingParams

RUN = check_run_id("s" + 12 * "0" + ":train:0")
DENSE = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    hidden_size=5120,
    intermediate_size=17_408,
    num_hidden_layers=64,
    num_attention_heads=40,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=248_320,
    tie_word_embeddings=False,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    swaps: int = 9  # of the demo model's adapter; the median counts
    rounds: int = 5  # of export + write and of the peer, in turns
    engine: bool = True  # start a vLLM and swap for real
    most_ratio: float = 1.5  # the aim: export + write over the peer
    most_ms: float = 100.0  # the aim: load + first token


def dense(directory: Path) -> Model:
    """The 27B-class model without its weights: what an adapter's shapes and names follow from."""
    (directory / "config.json").write_text(json.dumps(DENSE))
    return models.abstract(ModelConfig(model=str(directory)), devices=jax.devices()[:1])


def snapshot(trainer: Trainer, store: Store) -> tuple[Path, float, float]:
    """(the folder of what "a" is now, seconds of export and of write), as the server does it."""
    started = time.perf_counter()
    exported = trainer.snapshot("a")
    between = time.perf_counter()
    folder = store.write_snapshot(RUN, peft_files(*exported), meta={}).folder
    return folder, between - started, time.perf_counter() - between


def bare(tensors: dict[str, np.ndarray], file: Path) -> float:
    started = time.perf_counter()
    save_file(tensors, file)
    return time.perf_counter() - started


def large(config: Config, root: Path) -> dict[str, float]:
    """The 27B-shaped adapter: export, write, and the peer, in seconds."""
    model = dense(root)
    trainer = Trainer(model, TrainerConfig(rows=1, row_len=512))
    trainer.create("a", seed=0, rank=model.config.max_rank)
    state, rng = trainer.adapters["a"], np.random.default_rng(0)
    fill = lambda path, a: a if path.endswith("/a") else jax.device_put(rng.standard_normal(a.shape, np.float32))
    state.weights = {path: fill(path, array) for path, array in state.weights.items()}
    tensors = {name: array.copy() for name, array in trainer.snapshot("a")[0].items()}
    rounds = []
    with Store(root / "store") as store:
        for _ in range(config.rounds):
            folder, export_s, write_s = snapshot(trainer, store)
            (folder / "adapter_model.safetensors").unlink()
            rounds.append((export_s, write_s, bare(tensors, root / "peer.safetensors")))
            (root / "peer.safetensors").unlink()
    export_s, write_s, peer_s = map(statistics.median, zip(*rounds, strict=True))
    size = sum(array.nbytes for array in tensors.values())
    return dict(gb=size / 1e9, export_s=export_s, write_s=write_s, peer_s=peer_s, ratio=(export_s + write_s) / peer_s)


def small(config: Config, root: Path) -> dict[str, float]:
    """The demo model's adapter, all the way to a token that vLLM has sampled under it; milliseconds."""
    model = models.load(ModelConfig(), state_dir=root, devices=jax.devices()[:1])
    fleet = Fleet(model, SamplerConfig(sampler="vllm"), root)
    trainer = Trainer(model, TrainerConfig(rows=1, row_len=64))
    trainer.warm_up()
    fleet.warm_up()
    trainer.create("a", seed=0, rank=32)
    rng, rows = np.random.default_rng(0), []
    adam = dict(zip(ADAM, (1e-3, 0.9, 0.95, 1e-12, 0.0, 0.0), strict=True))
    params = SamplingParams(1, 1.0, 0, 1.0, 0, (), (), False)
    first = SampleRequest("s", 0, 1, np.arange(20, dtype=np.int32), params, False, None, 0, 0)
    with Store(root / "store") as store:
        for _ in range(config.swaps + 1):
            tokens = rng.integers(0, 256, 40).astype(np.int32)
            inputs = {"target_tokens": tokens, "weights": np.ones(40, np.float32)}
            request = SimpleNamespace(data=[Datum(tokens, inputs)], loss_fn="cross_entropy", loss_config={})
            trainer.forward_backward("a", [request], backward=True)
            trainer.optim_step("a", adam)
            folder, export_s, write_s = snapshot(trainer, store)
            started = time.perf_counter()
            fleet.publish(folder).result()
            loaded = time.perf_counter()
            fleet.submit(first, folder).result()
            rows.append((export_s, write_s, loaded - started, time.perf_counter() - loaded))
    fleet.close()
    names = ("export_ms", "write_ms", "load_ms", "first_token_ms")
    medians = [1e3 * statistics.median(times) for times in zip(*rows[1:], strict=True)]  # the first compiles
    return dict(zip(names, medians, strict=True))


def main(config: Config) -> None:
    record, goals = {}, {}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        root = Path(folder).resolve()
        record["27b"] = big = large(config, root)
        print(f"{big['gb']:.2f} GB: export {big['export_s']:.2f} s, write {big['write_s']:.2f} s;", end=" ")
        print(f"safetensors alone {big['peer_s']:.2f} s: {big['ratio']:.2f} x")
        goals[f"export + write is at most {config.most_ratio} x safetensors alone"] = big["ratio"] <= config.most_ratio
        if config.engine:
            record["demo"] = times = small(config, root)
            print("demo model, ms: " + ", ".join(f"{name[:-3]} {value:.1f}" for name, value in times.items()))
            total = times["load_ms"] + times["first_token_ms"]
            goals[f"load + first token take at most {config.most_ms:g} ms"] = total <= config.most_ms
    finish(record, goals, ("jax", "safetensors"))


if __name__ == "__main__":
    main(tyro.cli(Config, description="Weight swap: from optim_step to the first token, and what an export costs."))
