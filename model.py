"""A Hugging Face directory becomes a frozen MaxText model on a mesh, a LoRA adapter a dict of arrays and a PEFT folder.

    config.json, *.safetensors -> [model] -> hidden states -> losses   trainer: one adapter, whole tiles
                                          -> hidden states -> logits   sampler: an adapter a slot, one token at a time
    adapter -> to_peft -> adapter_model.safetensors -> from_peft -> adapter   where trainer and sampler meet

Invariants
  1. The base is built abstractly and filled leaf by leaf, each straight into its shards: no second copy of it.
  2. The head is kept [V, D], apart from the model: nothing here ever forms logits over a whole tile.
  3. An adapter is `dict[path, float32 array]`, all of the same shapes: zeros beyond its rank, zero matrices in modules
     that it does not train. Their gradients are zero too, so they stay so: no mask is needed anywhere.
  4. Names, transposes, head layouts and pre-scaled kernels are read off MaxText's import hooks, not written again.
     `check_peft` holds what comes of them against the weight files alone.
  5. What MaxText makes of a configuration is kept as plain data, and the programs as executables: a process that finds
     both neither imports it nor traces anything, and is ready in 8 s of CPU instead of 52 (the demo model).

Left out: mixture of experts, multimodal inputs, training of the unembedding.
Run: `uv run model.py demo` writes the demo model as a Hugging Face directory; `uv run model.py parity MODEL` says at
which layer a model, or an adapter on it (--adapter FOLDER), departs from Hugging Face + PEFT.
Read first: maxtext/checkpoint_conversion/utils/param_mapping.py (names), qwix's LoraProvider (what it intercepts).
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import logging
import math
import os
import pickle
import re
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

log = logging.getLogger("model")

ALPHA = 32.0  # every Tinker adapter's lora_alpha; its effect is scaled by ALPHA / rank
DEMO = "demo"
PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")  # what is fetched from the hub
ATTENTION, MLP = ("query", "key", "value", "out"), ("wi_0", "wi_1", "wo")
# Hugging Face architecture -> the MaxText family whose decoder block and weight names it has, and what that family
# needs said.
FAMILIES = {
    "Qwen3ForCausalLM": ("qwen3-0.6b", {}),
    "LlamaForCausalLM": ("llama3.1-8b", {"rope_type": "llama3.1", "rope_use_scale": False}),
}
LLAMA31_ROPE = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
PEFT_KEY = re.compile(r"base_model\.model\.(.+\.(?:[qkvo]|gate|up|down)_proj)\.lora_[AB]\.weight")
EMBEDDING = "token_embedder/embedding"
CHOOSY = ("tpu",)  # platforms whose compiler makes second copies of stacked weights, in the layout that it wants
ONE_AT_A_TIME = threading.Lock()  # for a setting of the whole process
PACKAGES = ("jax", "jaxlib", "flax", "maxtext", "optax", "qwix", "tokamax")  # what the traced programs come from
PEFT_FREE = ("r", "target_modules", "task_type", "lora_dropout", "base_model_name_or_path", "inference_mode")
ENGINE = Path(__file__).resolve().with_name(".engine")  # the environment with vLLM, torch and PEFT
# "layers_0/self_attention/query/a" -> (R, in), ".../b" -> (out, R), as PEFT has them; scanned: (L, R, in), (L, out, R)
Adapter = dict[str, Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    model: str = DEMO  # a Hugging Face directory, a hub name (org/name), or "demo", which is written on first use
    dtype: str | None = None  # float32 or bfloat16; unset: bfloat16 on TPU, float32 elsewhere
    max_rank: int = 32  # the largest LoRA rank a client may ask for; every adapter takes the room of this one
    scan_layers: bool | None = None  # one compiled layer for all; unset: from 9 layers on (fewer step faster without)
    remat: str = "none"  # none, minimal or full (MaxText's remat_policy); scanned layers are always rematerialised

    def __post_init__(self):
        if self.max_rank < 1:
            raise ValueError(f"--max-rank is {self.max_rank}; it must be at least 1")
        for name, accepted in {"dtype": ("float32", "bfloat16", None), "remat": ("none", "minimal", "full")}.items():
            if getattr(self, name) not in accepted:
                raise ValueError(f"--{name} is {getattr(self, name)}; accepted: {', '.join(filter(None, accepted))}")


class Hidden(nnx.Module):
    """Token ids -> normalised hidden states. qwix intercepts only the module it was applied to: this wraps the base."""

    def __init__(self, base: Any):  # maxtext's Transformer
        self.base = base
        base.decoder.apply_output_head = _no_logits

    def __call__(self, tokens, positions, segment_ids):
        decoder, ids = self.base.decoder, dict(decoder_positions=positions, decoder_segment_ids=segment_ids)
        _, hidden, _ = decoder(self.base.token_embedder, tokens, **ids, deterministic=True, model_mode="train")
        return decoder.decoder_norm(hidden)


def _no_logits(shared_embedding, hidden, *_, **__):
    return hidden


@dataclasses.dataclass(frozen=True)
class Kernel:
    """Where one adapted matrix stands in the Hugging Face model, whose rows are w[perm] = kernel.T / scale."""

    path: str  # "layers_0/self_attention/query"
    hf_names: tuple[str, ...]  # one a layer that the path stacks; "model.layers.0.self_attn.q_proj"
    stacked: bool
    perm: np.ndarray  # [out]
    scale: float

    @property
    def module(self) -> str:
        return self.path.rsplit("/", 1)[1]

    @property
    def moved(self) -> bool:
        return self.scale != 1 or not np.array_equal(self.perm, np.arange(len(self.perm)))


class Leaf(NamedTuple):
    """One array of the base: its shape, its place on the mesh, and the Hugging Face tensors that it is made of."""

    shape: tuple[int, ...]
    spec: PartitionSpec
    names: tuple[str, ...]  # one a layer, where it stacks them
    axis: int | None  # of the layers; None: not stacked


class Layout(NamedTuple):
    """What MaxText makes of a configuration, as plain data: enough to fill a model and to run compiled programs."""

    mesh: dict[str, int]  # its axes
    devices: list[int]  # their ids in its order
    base: dict[str, Leaf]  # "decoder/layers_0/mlp/wi_0/kernel"
    shapes: dict[str, tuple[int, ...]]  # of an adapter's arrays
    kernels: tuple[Kernel, ...]


class Architecture(NamedTuple):
    """The model as code: only what traces a program needs it. MaxText is imported for it, which takes 11 s of CPU."""

    graph: nnx.GraphDef
    base: Any  # a PyTreeDef
    lora: Any  # a PyTreeDef
    rules: tuple  # MaxText's logical axis rules


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """One frozen base on a mesh; everything a trainer or a sampler needs to run it under any adapter."""

    name: str  # as clients ask for it
    directory: Path
    hf_config: dict
    config: ModelConfig
    mesh: Mesh
    architecture: Callable[[], Architecture]
    base: dict[str, Any]  # frozen, sharded over fsdp
    head: Any  # [V, D]; the embedding itself where the two are tied
    kernels: tuple[Kernel, ...]
    hf_shapes: dict[str, tuple[int, ...]]  # of the tensors in the weight files, by their names there
    shapes: dict[str, tuple[int, ...]]  # of an adapter's arrays

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @property
    def tied(self) -> bool:
        return self.base[EMBEDDING] is self.head

    @property
    def parameters(self) -> int:
        """Those that multiply every token: neither the embedding, which is looked up, nor the head."""
        return sum(math.prod(leaf.shape) for path, leaf in self.base.items() if path != EMBEDDING)

    @property
    def fsdp(self) -> int:
        return self.mesh.shape["fsdp"]

    @property
    def scanned(self) -> bool:
        """Whether one compiled layer stands for all: its arrays are stacked."""
        return any(path.startswith("layers/") for path in self.shapes)

    @property
    def dtype(self) -> jnp.dtype:
        return self.head.dtype

    @property
    def choosy(self) -> bool:
        return self.mesh.devices.flat[0].platform in CHOOSY

    def sharding(self, *spec: str | None) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec(*spec))

    def module(self, base: dict[str, Array], adapter: Adapter) -> Hidden:
        """The callable model for use inside jit; copy=True because merging shared variables inside grad raises."""
        return nnx.merge(self.architecture().graph, *self.states(base, adapter), copy=True)

    def states(self, base: dict[str, Array], adapter: Adapter) -> tuple[nnx.State, nnx.State]:
        """(qwix's parameters, (in, [L,] R) and (R, [L,] out); MaxText's)."""
        turned = [jnp.moveaxis(adapter[path], -1, 0) for path in self.shapes]  # XLA folds it into the product
        in_order, trees = [base[path] for path in self.base], self.architecture()
        return jax.tree.unflatten(trees.lora, turned), jax.tree.unflatten(trees.base, in_order)

    def hidden(
        self,
        base: dict[str, Array],
        adapter: Adapter,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
    ) -> Float[Array, "B T D"]:
        """Final normalised hidden states of packed rows; segments of a row do not see each other."""
        with self.tracing():
            return self.module(base, adapter)(tokens, positions, segment_ids)

    def tracing(self):
        from flax.core.spmd import logical_axis_rules

        return logical_axis_rules(self.architecture().rules)

    def scaled(self, adapter: Adapter, scale: Float[Array, ""]) -> Adapter:
        """The adapter as the model applies it: b times alpha / rank, in the base's dtype, whole on every device. The
        masters stay float32, and spread.
        """
        cast = {k: (v * scale if k.endswith("/b") else v).astype(self.dtype) for k, v in adapter.items()}
        return jax.lax.with_sharding_constraint(cast, self.sharding())

    @property
    def spread(self) -> dict[str, NamedSharding]:
        """How an adapter, its gradients and its moments lie on the devices: in parts of `in` or `out`, if it divides.

        Eight of rank 32 in training take 10.4 GiB beside the 15.3 of Qwen3-8B's weights.
        """
        return {path: self._spread(path, shape) for path, shape in self.shapes.items()}

    def _spread(self, path: str, shape: tuple[int, ...]) -> NamedSharding:
        long = len(shape) - (1 if path.endswith("/a") else 2)  # a's are (.., R, in), b's (.., out, R)
        return self.sharding(*[None] * long, "fsdp") if shape[long] % self.fsdp == 0 else self.sharding()

    def new_adapter(self, *, seed: int, rank: int, attn: bool = True, mlp: bool = True) -> Adapter:
        """a ~ U(-1/sqrt(in), 1/sqrt(in)) in the first `rank` rows (torch's and PEFT's default), b = 0.

        The rank is the leading axis of each draw, so a seed gives the same adapter whatever the server's max_rank is.
        """
        check_rank(rank, self.config.max_rank)
        trained = {*(ATTENTION if attn else ()), *(MLP if mlp else ())}
        state = np.random.SeedSequence(seed % 2**63).generate_state(1)[0]  # a client's seed may have 63 bits
        return _new_adapter(self, tuple(k.path for k in self.kernels if k.module in trained), state, rank)

    def zeros(self) -> Adapter:
        """The adapter that changes nothing: the base model itself, and the start of every gradient and moment."""
        return _zeros(self)

    def to_peft(self, adapter: Mapping[str, np.ndarray], *, rank: int) -> dict[str, np.ndarray]:
        """Host arrays -> PEFT's tensors, lora_A (rank, in) and lora_B (out, rank), for the modules that are trained;
        views of the arrays, where the two are the same.
        """
        tensors = {}
        for kernel in self.kernels:
            a, b = np.asarray(adapter[f"{kernel.path}/a"]), np.asarray(adapter[f"{kernel.path}/b"])
            if not a.any() and not b.any():
                continue  # not trained
            for layer, name in enumerate(kernel.hf_names):
                a_layer, b_layer = (a[layer], b[layer]) if kernel.stacked else (a, b)
                if kernel.moved:
                    b_layer, b_ours = np.empty_like(b_layer), b_layer
                    b_layer[kernel.perm] = b_ours / kernel.scale
                tensors[f"base_model.model.{name}.lora_A.weight"] = a_layer[:rank]
                tensors[f"base_model.model.{name}.lora_B.weight"] = np.ascontiguousarray(b_layer[:, :rank])
        return tensors

    def from_peft(self, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The inverse of `to_peft`, padded with zeros to max_rank. ValueError names what is foreign."""
        left, adapter = dict(tensors), {path: np.zeros(shape, np.float32) for path, shape in self.shapes.items()}
        for kernel in self.kernels:
            a, b = adapter[f"{kernel.path}/a"], adapter[f"{kernel.path}/b"]
            for layer, name in enumerate(kernel.hf_names):
                a_layer, b_layer = (a[layer], b[layer]) if kernel.stacked else (a, b)
                keys = [f"base_model.model.{name}.lora_{part}.weight" for part in "AB"]
                if not any(key in left for key in keys):
                    continue
                a_hf, b_hf = (left.pop(key, np.empty(0)) for key in keys)
                rank = a_hf.shape[0] if a_hf.ndim else 0
                (limit, inner), out = a_layer.shape, b_layer.shape[0]
                if (a_hf.shape, b_hf.shape) != ((rank, inner), (out, rank)) or rank > limit:
                    found = f"{keys[0]} and lora_B have shapes {a_hf.shape} and {b_hf.shape}"
                    raise ValueError(f"{found}; this base takes ({limit} at most, {inner}) and ({out}, the same rank)")
                a_layer[:rank], b_layer[:, :rank] = a_hf, b_hf[kernel.perm] * kernel.scale
        if left:
            raise ValueError(f"adapter tensor {min(left)} matches no module of {self.name}")
        return adapter

    def peft_config(self, tensors: Iterable[str], *, rank: int) -> dict:
        """adapter_config.json of an adapter with the tensors of these names."""
        return dict(
            peft_type="LORA",
            task_type="CAUSAL_LM",
            r=rank,
            lora_alpha=ALPHA,
            lora_dropout=0.0,
            bias="none",
            fan_in_fan_out=False,
            target_modules=sorted({name.split(".")[-3] for name in tensors}),
            base_model_name_or_path=self.name,
            inference_mode=True,
        )

    def check_peft(self, folder: Path) -> None:
        """ValueError, naming the key, unless the folder's adapter fits the base's weight files.

        vLLM answers 200 to wrong shapes and unknown names, and then samples wrong text. This reads headers alone, and
        nothing that `to_peft` goes by.
        """
        config, path = _read_json(folder / "adapter_config.json"), folder / "adapter_model.safetensors"
        usual: dict[str, Any] = {"peft_type": "LORA", "lora_alpha": ALPHA, "bias": "none"}
        for key, value in (dict.fromkeys(usual) | config).items():
            if key not in PEFT_FREE and (value or None) != usual.get(key):  # what is unknown must be off
                raise ValueError(f"{folder}: {key} is {value!r}; {self.name} takes {usual.get(key)!r}")
        rank, targets = config.get("r"), set(config.get("target_modules") or ())
        if not isinstance(rank, int) or not 1 <= rank <= self.config.max_rank:
            raise ValueError(f"{folder}: r is {rank!r}; {self.name} takes 1..{self.config.max_rank}")
        with open_tensors(path) as file:
            parts = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118 - it is no dict
            has = {key: (part.get_dtype(), tuple(part.get_shape())) for key, part in parts.items()}
        matrices = {name.removesuffix(".weight"): shape for name, shape in self.hf_shapes.items() if len(shape) == 2}
        modules = {match[1] for key in has if (match := PEFT_KEY.fullmatch(key))} & matrices.keys()
        takes = {}
        for module in modules:
            rows, columns = matrices[module]
            takes[f"base_model.model.{module}.lora_A.weight"] = (rank, columns)
            takes[f"base_model.model.{module}.lora_B.weight"] = (rows, rank)
        for key in sorted(has.keys() | takes.keys()):
            if has.get(key) not in [(dtype, takes.get(key)) for dtype in ("F32", "BF16")]:
                found = "{} {}".format(*has[key]) if key in has else "missing"
                wanted = f"F32 or BF16 {takes[key]}" if key in takes else "no such tensor"
                raise ValueError(f"{path}: {key} is {found}; {self.name} takes {wanted}")
        if not has:
            raise ValueError(f"{path} has no tensor")
        last = lambda module: module.rsplit(".", 1)[-1]
        if wrong := {m for m in matrices if last(m) in targets} ^ modules or targets - {last(m) for m in modules}:
            raise ValueError(f"{folder}: target_modules and the tensors differ in {min(wrong)}")

    def read_peft(self, folder: Path) -> tuple[Adapter, Array]:
        """What `scaled` takes: the folder's adapter, spread over the devices, and alpha / rank."""
        config = _read_json(folder / "adapter_config.json")
        adapter = self.from_peft(load_file(folder / "adapter_model.safetensors"))
        return jax.device_put(adapter, self.spread), jnp.float32(config["lora_alpha"] / config["r"])


def check_rank(rank: int, max_rank: int) -> None:
    if not 1 <= rank <= max_rank:
        raise ValueError(f"lora_config.rank is {rank}; this server takes 1..{max_rank} (its --max-rank)")


@functools.partial(jax.jit, static_argnums=(0, 1))
def _new_adapter(model: Model, trained: tuple[str, ...], seed, rank) -> Adapter:
    """One compilation a choice of modules; seed and rank are traced."""
    adapter, kept = model.zeros(), jnp.arange(model.config.max_rank) < rank
    for i, kernel in enumerate(model.kernels):
        if kernel.path in trained:
            *layers, most, inner = model.shapes[f"{kernel.path}/a"]
            key = jax.random.fold_in(jax.random.key(seed), i)
            draw = jax.random.uniform(key, (most, *layers, inner), minval=-1, maxval=1) / math.sqrt(inner)
            adapter[f"{kernel.path}/a"] = jnp.where(kept[:, None], jnp.moveaxis(draw, 0, -2), 0)
    return jax.lax.with_sharding_constraint(adapter, model.spread)


@functools.partial(jax.jit, static_argnums=0)
def _zeros(model: Model) -> Adapter:
    zeros = {path: jnp.zeros(shape, jnp.float32) for path, shape in model.shapes.items()}
    return jax.lax.with_sharding_constraint(zeros, model.spread)


# ---- what one process leaves to the next


@functools.cache
def _ground() -> tuple:
    """What decides besides its arguments how a program is traced and compiled: the code, the packages, the machine."""
    code = [Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("losses", "model", "sampler", "trainer")]
    versions = [importlib.metadata.version(name) for name in PACKAGES]
    flags = sorted(item for item in os.environ.items() if item[0].startswith(("JAX_", "XLA_", "LIBTPU_")))
    machine: list[Any] = [jax.devices()[0].client.platform_version]
    if jax.default_backend() == "cpu" and (info := Path("/proc/cpuinfo")).is_file():  # which compiles for this very one
        machine += re.findall(r"^(?:flags|Features)\s*:(.*)$", info.read_text(), re.M)[:1]
    return code, versions, flags, machine, jax.config.jax_enable_x64


def described(devices: Iterable[Any]) -> list[tuple]:
    """Devices, as far as a program that was compiled for them is concerned."""
    return [(device.id, device.platform, device.device_kind) for device in devices]


def kept[T](
    kind: str,
    facts: Any,
    make: Callable[[], T],
    *,
    pack: Callable[[T], Any] = lambda x: x,
    unpack: Callable = lambda x: x,
) -> T:
    """`make()`, or what a process with the same facts has left beside the compiled programs; pickled as `pack` has it.

    It is read as code is: the folder, and the mirror that it may come from, must be nobody else's to write.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder is None:
        return make()
    path = Path(folder) / f"{kind}-{hashlib.sha256(repr((facts, _ground())).encode()).hexdigest()[:32]}"
    if path.is_file():
        try:
            return unpack(pickle.loads(path.read_bytes()))
        except Exception as error:  # a pickle may raise anything
            log.warning("%s cannot be read, and is made again: %s", path, error)
    made, aside = make(), path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_bytes(pickle.dumps(pack(made)))
        aside.replace(path)
    except Exception as error:
        log.warning("%s cannot be kept, and the next start will take as long as this one: %s", path, error)
    return made


@contextlib.contextmanager
def configured(**settings: Any) -> Iterator[None]:
    """JAX's settings of these names, for all threads."""
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


class Kept:
    """A jitted program that later processes run without tracing it: compiled for its first arguments, of which shapes
    are enough, and for no others.
    """

    def __init__(self, kind: str, program: Any, model: Model, *facts: Any):
        self.kind, self.program, self.devices = kind, program, list(model.mesh.devices.flat)
        config = dataclasses.replace(model.config, model="")
        self.facts = type(model).__qualname__, model.hf_config, config, described(self.devices), facts
        self.executable: jax.stages.Compiled | None = None

    def __call__(self, *args):
        return (self.executable or self.compiled(*args))(*args)

    def compiled(self, *args) -> jax.stages.Compiled:
        if self.executable is None:
            leaves, tree = jax.tree.flatten((args, {}))
            shapes = [(x.shape, str(x.dtype), str(getattr(x, "format", None))) for x in leaves]
            where: dict[str, Any] = dict(backend=self.devices[0].client, execution_devices=self.devices)
            self.executable = kept(
                self.kind,
                (self.facts, str(tree), shapes),
                lambda: self.compile(*args),
                pack=lambda compiled: serialize_executable.serialize(compiled)[::2],
                unpack=lambda packed: serialize_executable.deserialize_and_load(packed[0], tree, packed[1], **where),
            )
        return self.executable

    def compile(self, *args, quick: bool = False) -> jax.stages.Compiled:
        """Neither kept nor looked for, in JAX's cache either: an executable of a CPU that was read loses functions when
        it is written again. What it is compiled for need not be here. `quick`: unoptimised, for its memory: on TPUs
        the peak is the same where rows are long, and more, never less, where they or the model are small.
        """
        lowered = self.program.lower(*args)
        settings = {"jax_enable_compilation_cache": False} | ({"jax_optimization_level": "O0"} if quick else {})
        with ONE_AT_A_TIME:
            try:
                with configured(**settings):
                    compilation_cache.reset_cache()  # or it would not look at the setting
                    return lowered.compile()
            finally:
                compilation_cache.reset_cache()


# ---- from a directory to a Model


def load(config: ModelConfig, *, state_dir: Path, devices: list | None = None) -> Model:
    """Read `config.model` onto a mesh of all devices (fsdp). ValueError, one line, for what cannot be served."""
    directory = resolve(config.model, state_dir)
    model, layout = _abstract(config, read_config(directory), directory, devices or jax.devices())
    kernels, tensors = {f"decoder/{kernel.path}/kernel": kernel for kernel in model.kernels}, Tensors(directory)
    base = {
        path: _place(tensors, leaf, model.base[path].sharding, model.dtype, kernels.get(path))
        for path, leaf in layout.base.items()
    }
    head = base[EMBEDDING]
    if not model.hf_config["tie_word_embeddings"]:
        leaf = Leaf(model.head.shape, model.head.sharding.spec, ("lm_head.weight",), None)
        head = _place(tensors, leaf, model.head.sharding, model.dtype)
    tensors.check_all_read()
    matrices = [array for path, array in base.items() if not path.endswith("/scale")]
    norms = [array for path, array in base.items() if path.endswith("/scale")]
    _check_sharding([*matrices, head], model, norms)
    return dataclasses.replace(model, base=base, head=head, hf_shapes=tensors.shapes)


def abstract(config: ModelConfig, *, devices: list) -> Model:
    """The model in shapes and shardings alone: no weights are read and nothing is allocated, so that `devices` may be
    those of a topology that is not here. It can be compiled, and its adapters exported. ValueError as `load`.
    """
    hf_config, directory = describe(config.model)
    return _abstract(config, hf_config, directory, devices)[0]


def describe(name: str) -> tuple[dict, Path]:
    """(config.json as `read_config` gives it, its directory) of a directory, a hub name or one of MaxText's models."""
    from maxtext.configs import pyconfig

    known = Path(pyconfig.__file__).parent / "models" / f"{name}.yml"
    if known.is_file():
        return _from_maxtext(known), known.parent
    if name == DEMO:
        return complete(dict(DEMO_CONFIG), DEMO), Path(DEMO)
    directory = Path(name)
    if not directory.is_dir():
        directory = resolve(name, directory, patterns=("config.json",))
    return read_config(directory), directory


def _from_maxtext(path: Path) -> dict:
    """Hugging Face's names for what MaxText's model file says."""
    import yaml

    known = yaml.safe_load(path.read_text())
    architectures = {"qwen3": "Qwen3ForCausalLM", "llama2": "LlamaForCausalLM"}  # by decoder block
    names = {
        "hidden_size": "base_emb_dim",
        "intermediate_size": "base_mlp_dim",
        "num_hidden_layers": "base_num_decoder_layers",
        "num_attention_heads": "base_num_query_heads",
        "num_key_value_heads": "base_num_kv_heads",
        "head_dim": "head_dim",
        "vocab_size": "vocab_size",
        "rms_norm_eps": "normalization_layer_epsilon",
        "rope_theta": "rope_max_timescale",
        "tie_word_embeddings": "logits_via_embedding",
    }
    config: dict[str, Any] = {theirs: known[ours] for theirs, ours in names.items() if ours in known}
    config["architectures"] = [architectures.get(known.get("decoder_block", ""), known.get("decoder_block"))]
    config["max_position_embeddings"] = 2**20  # it names none
    return complete(config, path.stem)


def resolve(name: str, state_dir: Path, *, patterns: Sequence[str] = PATTERNS) -> Path:
    """`demo`, a directory or a hub name -> a local Hugging Face directory with the files of these patterns."""
    if name == DEMO:
        return write_demo(state_dir / "models" / DEMO)
    if Path(name).is_dir():
        return Path(name).resolve()
    if name.count("/") != 1 or name.startswith((".", "/")):
        raise ValueError(
            f"no such model directory: {name} "
            f"(accepted: a Hugging Face directory, a hub name such as Qwen/Qwen3-0.6B, or {DEMO})"
        )
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the hub raises a dozen types, none common; the last line is the one a person wants
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"{name} is neither a directory nor could it be fetched from the hub: {reason}") from error


def read_config(directory: Path) -> dict:
    """config.json, complete; ValueError as `complete`."""
    path = directory / "config.json"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.json: not a Hugging Face model directory")
    return complete(_read_json(path), str(path))


def complete(config: dict, path: str) -> dict:
    """The config with what an older one leaves out; ValueError, naming `path`, where this server would compute
    something else than the model's authors.
    """
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in FAMILIES:
        raise ValueError(f"{path}: architecture {architecture} is not served (accepted: {', '.join(FAMILIES)})")
    for key, accepted in {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "use_sliding_window": False,
        "quantization_config": None,
    }.items():
        if config.get(key, accepted) != accepted:
            raise ValueError(f"{path}: {key} is {config[key]!r}; this server computes only {accepted!r}")
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    if missing := [key for key in sizes if not isinstance(config.get(key), int) or config[key] < 1]:
        raise ValueError(f"{path}: {missing[0]} is {config.get(missing[0])!r}; a positive number is needed")
    qwen3, heads = architecture == "Qwen3ForCausalLM", config["num_attention_heads"]
    absent = {  # what transformers takes for what an older config leaves out
        "num_key_value_heads": heads,
        "head_dim": 128 if qwen3 else config["hidden_size"] // heads,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32_768 if qwen3 else 2048,
        "tie_word_embeddings": False,
    }
    config |= {key: value for key, value in absent.items() if config.get(key) is None}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    config["rope_theta"] = config.get("rope_theta", rope.get("rope_theta", 10_000.0))
    config["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    if config["rope_type"] == "llama3" and any(rope.get(k) != v for k, v in LLAMA31_ROPE.items()):
        raise ValueError(f"{path}: rope parameters {rope} are not Llama 3.1's {LLAMA31_ROPE}, the only scaling served")
    ropes = ("default",) if qwen3 else ("default", "llama3")  # MaxText's Qwen3 never scales
    if config["rope_type"] not in ropes:
        raise ValueError(f"{path}: rope_type {config['rope_type']!r} is not served (accepted: {', '.join(ropes)})")
    return config


def _abstract(config: ModelConfig, hf_config: dict, directory: Path, devices: list) -> tuple[Model, Layout]:
    scan = config.scan_layers if config.scan_layers is not None else hf_config["num_hidden_layers"] > 8
    dtype = config.dtype or ("bfloat16" if devices[0].platform == "tpu" else "float32")
    options: dict[str, Any] = dict(scan=scan, dtype=dtype, remat=config.remat)

    @functools.cache
    def configured():
        return _maxtext_config(hf_config, **options, devices=devices)

    @functools.cache
    def shaped():
        return _shapes(*configured(), config.max_rank)

    def architecture() -> Architecture:
        graph, lora, base = shaped()
        rules = tuple(configured()[0].logical_axis_rules)
        return Architecture(graph, jax.tree.structure(base), jax.tree.structure(lora), rules)

    facts = (hf_config, options, config.max_rank, described(devices))
    layout = kept("layout", facts, lambda: _layout(hf_config, *configured(), *shaped()[1:]))
    by_id = {device.id: device for device in devices}
    grid = np.array([by_id[i] for i in layout.devices]).reshape(*layout.mesh.values())
    mesh = Mesh(grid, tuple(layout.mesh))
    # Rows of the head on each device, so that losses.score leaves them there; tied, the embedding is the head.
    sizes = hf_config["vocab_size"], hf_config["hidden_size"]
    spec = PartitionSpec("fsdp") if sizes[0] % mesh.shape["fsdp"] == 0 else PartitionSpec(None, "fsdp")
    place = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=NamedSharding(mesh, spec))
    head, base = place(sizes, spec), {path: place(leaf.shape, leaf.spec) for path, leaf in layout.base.items()}
    model = Model(
        name=config.model,
        directory=directory,
        hf_config=hf_config,
        config=config,
        mesh=mesh,
        architecture=functools.cache(architecture),
        base=base | ({EMBEDDING: head} if hf_config["tie_word_embeddings"] else {}),
        head=head,
        kernels=layout.kernels,
        hf_shapes={},
        shapes=layout.shapes,
    )
    return model, layout


def _layout(hf_config: dict, cfg, mesh: Mesh, lora: nnx.State, base: nnx.State) -> Layout:
    sources, hooks = _sources(hf_config, cfg)
    shapes = {_adapter_path(path): (*leaf.shape[1:], leaf.shape[0]) for path, leaf in nnx.to_flat_state(lora)}
    leaves = {}
    for path, leaf in nnx.to_flat_state(base):
        key = "-".join(["params", *map(str, path[1:])])  # path[0] is the wrapper's `base`
        names, axis = sources[key], cfg.param_scan_axis if isinstance(sources[key], list) else None
        assert leaf.dtype == jnp.dtype(cfg.weight_dtype)
        if "/".join(map(str, path[2:-1])) + "/a" not in shapes:
            _check_idle(hooks.get(key), leaf.shape[0], key)
        several = tuple(names) if axis is not None else (names,)
        leaves["/".join(map(str, path[1:]))] = Leaf(leaf.shape, leaf.sharding.spec, several, axis)
    kernels = _kernels(sources, hooks, shapes, base, cfg.scan_layers)
    return Layout(dict(mesh.shape), [device.id for device in mesh.devices.flat], leaves, shapes, kernels)


def _maxtext_config(hf: dict, *, scan: bool, dtype: str, remat: str, devices: list):
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils

    family, extra = FAMILIES[hf["architectures"][0]]
    options: dict[str, Any] = dict(
        model_name=family,
        override_model_config=True,
        base_emb_dim=hf["hidden_size"],
        base_num_query_heads=hf["num_attention_heads"],
        base_num_kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        base_mlp_dim=hf["intermediate_size"],
        base_num_decoder_layers=hf["num_hidden_layers"],
        vocab_size=hf["vocab_size"],
        rope_max_timescale=int(hf["rope_theta"]),
        normalization_layer_epsilon=hf["rms_norm_eps"],
        logits_via_embedding=hf["tie_word_embeddings"],
        **extra | ({"rope_use_scale": True} if hf["rope_type"] == "llama3" else {}),
        dtype=dtype,
        weight_dtype=dtype,
        scan_layers=scan,
        remat_policy=remat,
        attention="autoselected",  # splash attention on TPU, plain on CPU
        ici_fsdp_parallelism=len(devices),
        per_device_batch_size=1,
        max_target_length=hf["max_position_embeddings"],
        skip_jax_distributed_system=True,
        enable_checkpointing=False,
        log_config=False,
        run_name="tinker",
        base_output_directory="unused",
        jax_cache_dir=jax.config.jax_compilation_cache_dir or "",  # it would set its own otherwise
    )
    try:
        with mock.patch.dict(os.environ):  # it leaves XLA_FLAGS there, and by these the compiled programs are found
            cfg = pyconfig.initialize(["", str(Path(pyconfig.__file__).with_name("base.yml"))], **options)
    except SystemExit as error:  # it prints 9 KB and exits on a key it does not know
        raise RuntimeError("MaxText refused the configuration printed above") from error
    cfg.get_keys()["remat_policy"] = remat  # it reads "none" as None, and takes None for full
    return cfg, maxtext_utils.get_mesh_from_config(cfg, devices)


def _shapes(cfg, mesh: Mesh, rank: int) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The wrapped model as shapes and shardings: (graph, adapter, frozen parameters); nothing is allocated."""
    import qwix
    from flax.core.spmd import logical_axis_rules
    from maxtext.utils import model_creation_utils, sharding

    targets = rf"self_attention/({'|'.join(ATTENTION)})|mlp/({'|'.join(MLP)})"
    provider = qwix.LoraProvider(module_path=rf".*decoder/layers(?:_\d+)?/(?:{targets})", rank=rank, alpha=float(rank))
    create = model_creation_utils.get_nnx_create_model_fn(cfg, mesh)

    def build():
        ids = jnp.zeros((mesh.size, 1), jnp.int32)
        model: Any = qwix.apply_lora_to_model(Hidden(create()), provider, ids, ids, ids + 1, rngs=nnx.Rngs(0))
        for _, node in list(nnx.iter_graph(model)):
            for name in ("qwix_rngs", "rngs"):  # nothing random is left: no dropout, and new_adapter makes adapters
                if isinstance(getattr(node, name, None), nnx.Rngs):
                    delattr(node, name)
            if isinstance(node, nnx.LoRAParam):  # replicated; its inherited axes are the kernel's
                node.set_metadata(sharding=None, out_sharding=None, sharding_names=None)
        vars(model.base.decoder).pop("logits_dense", None)
        return model

    with logical_axis_rules(cfg.logical_axis_rules):
        graph, lora, params, rest = nnx.split(nnx.eval_shape(build), nnx.LoRAParam, nnx.Param, ...)
        assert not jax.tree.leaves(rest), f"state that is neither weights nor LoRA: {rest}"
        shardings = sharding.nnx_construct_named_sharding(params, mesh)
    place = lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, s.spec))
    return graph, lora, jax.tree.map(place, params, shardings)


def _adapter_path(path: tuple) -> str:
    """('base', 'decoder', 'layers_0', 'mlp', 'wo', 'kernel_lora_a') -> 'layers_0/mlp/wo/a'"""
    return "/".join([*map(str, path[2:-1]), path[-1][-1]])


def _sources(hf_config: dict, cfg) -> tuple[dict, dict]:
    """(Hugging Face's name, or its names layer by layer, of each of MaxText's arrays; what is done to a tensor)."""
    from maxtext.checkpoint_conversion.utils import param_mapping

    family, scan = FAMILIES[hf_config["architectures"][0]][0], cfg.scan_layers
    hooks = param_mapping.HOOK_FNS[family](hf_config, cfg, scan_layers=scan, saving_to_hf=False)
    return param_mapping.PARAM_MAPPING[family](hf_config, cfg, scan_layers=scan), hooks


def _kernels(sources: dict, hooks: dict, shapes: dict, params: nnx.State, scan: bool) -> tuple[Kernel, ...]:
    """Where every adapted matrix stands in the Hugging Face model; layers share what their module's hook does."""
    kernels, flat, memo = [], {path[2:-1]: leaf.shape for path, leaf in nnx.to_flat_state(params)}, {}
    for path in (key.removesuffix("/a") for key in shapes if key.endswith("/a")):
        parts = tuple(path.split("/"))
        key = "-".join(["params", "decoder", *parts, "kernel"])
        if parts[-1] not in memo:
            shape = flat[parts][:1] + flat[parts][2:] if scan else flat[parts]  # of one layer
            sizes = dict(rows=shapes[f"{path}/b"][-2], columns=shapes[f"{path}/a"][-1])
            memo[parts[-1]] = _probe(hooks.get(key), shape, **sizes)
        names = sources[key] if scan else [sources[key]]
        kernels.append(Kernel(path, tuple(name.removesuffix(".weight") for name in names), scan, *memo[parts[-1]]))
    return tuple(kernels)


def _probe(hook, shape: tuple[int, ...], *, rows: int, columns: int) -> tuple[np.ndarray, float]:
    """What MaxText's import hook does to a matrix: fed ones it answers its scale, fed row numbers its permutation."""

    def hooked(values: np.ndarray) -> np.ndarray:
        matrix = np.broadcast_to(values.astype(np.float32), (rows, columns))
        return _hooked(matrix, shape, hook).reshape(columns, rows)

    scale = float(hooked(np.ones(1))[0, 0])
    of_rows, of_columns = (np.rint(hooked(n) / scale) for n in (np.arange(rows)[:, None], np.arange(columns)))
    assert (of_rows == of_rows[0]).all() and (of_columns == np.arange(columns)[:, None]).all()
    return of_rows[0].astype(np.int64), scale


def _check_idle(hook: Callable | list | None, size: int, key: str) -> None:
    """`Kernel` has what is done to the adapted matrices; nothing may be done to the rest."""
    column = np.arange(size, dtype=np.float32)[:, None]
    if not np.array_equal(_hooked(column, column.shape, hook), column):
        raise RuntimeError(f"MaxText changes {key} as it reads it, which this server does not")


def _hooked(tensor: np.ndarray, shape: tuple[int, ...], hook: Callable | list | None) -> np.ndarray:
    from maxtext.checkpoint_conversion.utils.tensor_handling import apply_hook_fns

    return np.asarray(apply_hook_fns(tensor, shape, hook))


def _place(
    tensors: "Tensors", leaf: Leaf, sharding: NamedSharding, dtype: jnp.dtype, kernel: Kernel | None = None
) -> Array:
    """One array of the base, from its tensors to its shards; the host holds one at a time."""
    axis = leaf.axis if leaf.axis is not None else len(leaf.shape)
    shape, parts = leaf.shape[:axis] + leaf.shape[axis + 1 :], []
    for name in leaf.names:
        part, rows = tensors[name], len(kernel.perm) if kernel is not None else 0
        expected = (rows, math.prod(shape) // rows) if kernel is not None else shape
        if part.shape != expected:
            raise ValueError(f"{tensors.directory}: {name} has shape {part.shape}, config.json implies {expected}")
        if kernel is not None:
            part = part[kernel.perm] if kernel.moved else part
            part = (part.astype(np.float32) * np.float32(kernel.scale) if kernel.scale != 1 else part).T  # round once
        parts.append(part.reshape(shape).astype(dtype))
    value = np.stack(parts, axis=axis) if leaf.axis is not None else parts[0]
    return jax.make_array_from_callback(leaf.shape, sharding, lambda index: value[index])


def _read_json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def open_tensors(path: Path):
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from error


class Tensors:
    """The tensors of a Hugging Face directory by name, one file or many, read as they are asked for."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.open = functools.cache(lambda file: open_tensors(directory / file))
        self.shapes: dict[str, tuple[int, ...]] = {}  # of those read, as they stand in their files
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self.files: dict[str, str] = _read_json(index).get("weight_map", {})
        else:
            self.files = {
                name: path.name
                for path in sorted(directory.glob("*.safetensors"))
                for name in self.open(path.name).keys()  # noqa: SIM118 - it is no dict
            }
        missing = sorted({file for file in self.files.values() if not (directory / file).is_file()})
        if missing:
            raise ValueError(
                f"{directory}: weight file {missing[0]} is missing "
                f"({len(missing)} of {len(set(self.files.values()))} named by the index)"
            )
        if not self.files:
            raise ValueError(f"{directory} has no *.safetensors file (other weight formats are not read)")

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self.files:
            raise ValueError(f"{self.directory}: tensor {name} is in none of its weight files")
        try:
            tensor = self.open(self.files[name]).get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{self.directory / self.files[name]} has no whole tensor {name}: {error}") from error
        self.shapes[name] = tensor.shape
        return tensor

    def check_all_read(self) -> None:
        """A tensor that nothing asked for (a bias, a layer too many): this server would compute another model."""
        known = ("rotary_emb.inv_freq", "lm_head.weight")  # derived; the embedding again where the two are tied
        if unread := sorted(name for name in self.files.keys() - self.shapes.keys() if not name.endswith(known)):
            raise ValueError(
                f"{self.directory}: tensor {unread[0]} ({len(unread)} in all) is not part of the model served"
            )


def _check_sharding(matrices: list[Array], model: Model, norms: Sequence[Array] = ()) -> None:
    """FSDP must really shard: a device holds 1/n of the matrices (within 2 %) and all of the norms, which are small."""
    unique = list({id(array): array for array in matrices}.values())  # a tied head is the embedding
    whole, small = (sum(array.nbytes for array in arrays) for arrays in (unique, norms))
    held = sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in unique)
    mb = (whole + small) / 1e6, (held + small) / 1e6
    log.info("base: %.1f MB, %.1f MB on each of %d devices (%.1f %%)", *mb, model.mesh.size, 100 * mb[1] / mb[0])
    if held > 1.02 * whole / model.mesh.size:
        raise RuntimeError(f"a device holds {held:,} of {whole:,} bytes: not sharded over {model.mesh.size} devices")


# ---- the demo model

DEMO_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>", *(f"<|extra_{i}|>" for i in range(4)))
DEMO_CONFIG = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=256 + len(DEMO_SPECIAL),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    rope_theta=10_000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    attention_bias=False,
    use_sliding_window=False,
    torch_dtype="float32",
    bos_token_id=256,
    eos_token_id=258,
    initializer_range=0.02,
)
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_demo(directory: Path) -> Path:
    """A tiny Qwen3 with fixed random weights and a byte-level tokenizer of equal vocabulary, as a real directory."""
    if (directory / "config.json").is_file():
        return directory.resolve()
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    aside = directory.with_name(f"{directory.name}.{os.getpid()}")
    aside.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())  # ByteLevel writes a byte as a printable character
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in DEMO_SPECIAL])
    tokenizer.save(str(aside / "tokenizer.json"))
    names = dict(bos_token="<|endoftext|>", eos_token="<|im_end|>", pad_token="<|pad|>", model_max_length=2048)
    files = {
        "config.json": DEMO_CONFIG,
        "tokenizer_config.json": dict(tokenizer_class="PreTrainedTokenizerFast", chat_template=CHAT_TEMPLATE, **names),
        "generation_config.json": dict(bos_token_id=256, eos_token_id=[258, 256], pad_token_id=259),
    }
    save_file(random_weights(DEMO_CONFIG, seed=0), aside / "model.safetensors", metadata={"format": "pt"})
    for name, content in files.items():
        (aside / name).write_text(json.dumps(content, indent=2))
    try:
        aside.rename(directory)
    except OSError:  # another process wrote it first; its content is the same
        if not (directory / "config.json").is_file():
            raise
    return directory.resolve()


def random_weights(config: Mapping, *, seed: int, dtype=np.float32) -> dict[str, np.ndarray]:
    """Tensors of a Qwen3 or Llama config by their names: kernels N(0, 1/in), embeddings N(0, 1), norms one."""
    rng, c = np.random.default_rng(seed), config
    q, kv = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
    dim, inner = c["hidden_size"], c["intermediate_size"]
    layer = {
        "self_attn.q_proj": (q, dim),
        "self_attn.k_proj": (kv, dim),
        "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, q),
        "mlp.gate_proj": (inner, dim),
        "mlp.up_proj": (inner, dim),
        "mlp.down_proj": (dim, inner),
        "input_layernorm": (dim,),
        "post_attention_layernorm": (dim,),
    }
    if c["model_type"] == "qwen3":
        layer |= {"self_attn.q_norm": (c["head_dim"],), "self_attn.k_norm": (c["head_dim"],)}
    shapes = {
        f"model.layers.{i}.{name}.weight": shape for i in range(c["num_hidden_layers"]) for name, shape in layer.items()
    }
    shapes |= {"model.norm.weight": (dim,), "model.embed_tokens.weight": (c["vocab_size"], dim)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (c["vocab_size"], dim)

    def draw(name: str, shape: tuple[int, ...]) -> np.ndarray:
        if len(shape) == 1:
            return np.ones(shape, dtype)
        scale = 1.0 if "embed" in name and "lm_head.weight" in shapes else shape[-1] ** -0.5
        return (rng.standard_normal(shape) * scale).astype(dtype)

    return {name: draw(name, shape) for name, shape in shapes.items()}


# ---- parity: where a model departs from Hugging Face

PARITY = 1e-4  # of a hidden state's norm; nats of a log-prob
HUGGING_FACE = """
import json, sys, numpy, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

arrays = {}
for i, (directory, adapter, tokens) in enumerate(json.load(sys.stdin)):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    states, inner, tokens = [], model.model, torch.tensor(tokens)
    for module in (inner.embed_tokens, *inner.layers, inner.norm):
        module.register_forward_hook(lambda _, __, out: states.append(out[0] if isinstance(out, tuple) else out))
    if adapter:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.inference_mode():
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1)
    arrays[f"states {i}"] = torch.cat(states).numpy()
    arrays[f"logprobs {i}"] = logprobs.gather(1, tokens[1:, None])[:, 0].numpy()
numpy.savez(sys.argv[1], **arrays)
"""
# Hidden states [L + 2, n, D] after the embedding, each layer and the final norm; log-probs [n - 1] of tokens[1:].
Forward = tuple[np.ndarray, np.ndarray]


def hugging_face(jobs: Sequence[tuple[Path, Path | None, np.ndarray]]) -> list[Forward]:
    """(model's directory, adapter's folder, tokens) each -> what Hugging Face and PEFT compute, in a process apart."""
    python = ENGINE / "bin" / "python"
    if not python.is_file():
        raise ValueError(f"{python} is missing: `uv run sampler.py install` makes the engine's environment")
    asked = json.dumps([(str(base), folder and str(folder), tokens.tolist()) for base, folder, tokens in jobs])
    with tempfile.TemporaryDirectory() as aside:
        answers = Path(aside) / "answers.npz"
        done = subprocess.run([python, "-c", HUGGING_FACE, answers], input=asked, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"Hugging Face's forward failed: {done.stderr.strip().splitlines()[-1]}")
        with np.load(answers) as arrays:
            return [(arrays[f"states {i}"], arrays[f"logprobs {i}"]) for i in range(len(jobs))]


def forward(model: Model, adapter: Adapter, tokens: Int[np.ndarray, " n"]) -> Forward:
    """What an unscanned model computes under a scaled adapter."""

    @jax.jit
    def run(base, head, adapter, tokens):
        kept: list[Array] = []
        with model.tracing():
            module: Any = model.module(base, adapter)
            layer, ids = type(module.base.decoder.layers_0), tokens[None]
            call = layer.__call__

            def keeping(self, inputs, *args, **kwargs):
                kept.append(inputs)
                return call(self, inputs, *args, **kwargs)

            module.base.decoder.apply_output_head = lambda _, hidden, *args, **kwargs: kept.append(hidden) or hidden
            with mock.patch.object(layer, "__call__", keeping):
                hidden = module(ids, jnp.arange(len(tokens))[None], jnp.ones_like(ids))
        logprobs = jax.nn.log_softmax(hidden[0, :-1] @ head.T)
        return jnp.concatenate([*kept, hidden]), jnp.take_along_axis(logprobs, tokens[1:, None], 1)[:, 0]

    return jax.device_get(run(model.base, model.head, adapter, tokens))


def parity(model: str, /, *, adapter: Path | None = None) -> None:
    """Compare a model, and an adapter on it, with Hugging Face + PEFT in float32, and say where they part."""
    jax.config.update("jax_platforms", "cpu")  # float32 that is; and a server may hold the chips
    directory, folders = resolve(model, Path("state")), [None, adapter] if adapter else [None]
    tokens = np.random.default_rng(0).integers(0, read_config(directory)["vocab_size"], 64).astype(np.int32)
    reference = hugging_face([(directory, folder, tokens) for folder in folders])
    rank = _read_json(adapter / "adapter_config.json")["r"] if adapter else 1
    config = ModelConfig(model=str(directory), dtype="float32", scan_layers=False, max_rank=rank)
    ours = load(config, state_dir=directory, devices=jax.devices()[:1])
    departure, worst = "", 0.0
    for folder, theirs in zip(folders, reference, strict=True):
        states, logprobs = forward(ours, ours.scaled(*ours.read_peft(folder)) if folder else ours.zeros(), tokens)
        names = ["embedding", *(f"layer {i}" for i in range(len(states) - 2)), "final norm", "log-probs"]
        pairs = zip([*states, logprobs[:, None]], [*theirs[0], theirs[1][:, None]], strict=True)
        print(f"{folder or 'base'}: max |difference|, relative")
        for name, (a, b) in zip(names, pairs, strict=True):
            size = np.linalg.norm(b, axis=-1) if name != "log-probs" else 1  # of a token; nats are not relative
            relative = float((np.linalg.norm(a - b, axis=-1) / size).max())
            print(f"  {name:<10} {np.abs(a - b).max():8.1e} {relative:8.1e}")
            if not departure and not relative <= PARITY:  # NaN departs too
                departure = f"first departure: {name} of {folder or 'the base'}, relative {relative:.1e}"
        worst = max(worst, relative)
    if departure:
        sys.exit(departure)
    print(f"parity: largest log-prob difference {worst:.1e} nats")


def demo() -> None:
    """Write the demo model as a Hugging Face directory and print where."""
    print(write_demo(Path("state") / "models" / DEMO))


if __name__ == "__main__":
    import tyro

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it would say that there is no torch
    warnings.simplefilter("ignore", DeprecationWarning)  # shown of the main module alone: maxtext's use of flax
    try:
        tyro.extras.subcommand_cli_from_dict({"demo": demo, "parity": parity})
    except (ValueError, RuntimeError) as error:
        sys.exit(f"model.py: {error}")
