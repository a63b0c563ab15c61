"""model.py against two models that share no code with it: a float64 numpy forward (below) and tunix's Qwen3."""

import dataclasses
import functools
import json
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jax.sharding import Mesh
from ml_dtypes import bfloat16
from safetensors.numpy import load_file, save_file

import model
from model import ALPHA, ATTENTION, MLP, Kept, Model, ModelConfig, load, random_weights, write_demo

RANK, MAX_RANK = 3, 8
SHAPE = (4, 24)  # [B, T] of every forward here
CONFIG = dict(
    vocab_size=96, hidden_size=48, intermediate_size=72, num_hidden_layers=2, num_attention_heads=3,
    num_key_value_heads=1, head_dim=16, hidden_act="silu", rms_norm_eps=1e-5, rope_theta=10_000.0,
    max_position_embeddings=2048, tie_word_embeddings=False,
)  # fmt: skip
LLAMA = CONFIG | dict(architectures=["LlamaForCausalLM"], model_type="llama")
QWEN3 = CONFIG | dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    rope_theta=1_000_000.0,  # tunix computes no other
)
LLAMA3_SCALING = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
LLAMA3_ROPE = dict(rope_theta=500_000.0, rope_scaling=LLAMA3_SCALING)


def weights(config: Mapping, seed: int = 1, dtype=np.float32) -> dict[str, np.ndarray]:
    """Random weights whose norms are random too: ones would hide a norm that is left out or misplaced."""
    rng = np.random.default_rng(seed)
    draw = lambda w: rng.uniform(0.5, 1.5, w.shape) if w.ndim == 1 else w
    return {name: draw(w).astype(dtype) for name, w in random_weights(config, seed=seed).items()}


def write(directory, config: Mapping, tensors: Mapping[str, np.ndarray]):
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def base(root):
    """A function from a config (and how to load it) to a Model, which is built once."""

    @functools.cache
    def build(config: str, devices: int, options: str) -> Model:
        directory = root / str(len(list(root.iterdir())))
        write(directory, json.loads(config), weights(json.loads(config)))
        return load_from(directory, devices, **json.loads(options))

    def cached(config: Mapping, devices: int = 1, scan_layers: bool = False, max_rank: int = MAX_RANK, **options):
        options |= dict(scan_layers=scan_layers, max_rank=max_rank)
        return build(json.dumps(config), devices, json.dumps(options))

    return cached


def load_from(directory, devices: int = 1, **options) -> Model:
    config = ModelConfig(**{"model": str(directory), "max_rank": MAX_RANK} | options)
    return load(config, state_dir=directory, devices=jax.devices()[:devices])


@functools.partial(jax.jit, static_argnums=0)
def forward(m: Model, base, adapter, tokens, positions, segment_ids):
    return m.hidden(base, adapter, tokens, positions, segment_ids)


def hidden(m: Model, adapter, tokens, positions=None, segment_ids=None) -> np.ndarray:
    positions = positions if positions is not None else np.tile(np.arange(SHAPE[1]), (len(tokens), 1))
    segment_ids = segment_ids if segment_ids is not None else np.ones_like(tokens)
    ids = (jnp.asarray(x, jnp.int32) for x in (tokens, positions, segment_ids))
    return np.asarray(forward(m, m.base, jax.device_put(adapter, m.sharding()), *ids))


def logprobs(m: Model, adapter, tokens, positions=None) -> np.ndarray:
    """log p of every token of the vocabulary, [B, T, V]; only the head is applied in float64 here."""
    return log_softmax(hidden(m, adapter, tokens, positions).astype(float) @ np.asarray(m.head).astype(float).T)


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def random_tokens(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CONFIG["vocab_size"], SHAPE)


def random_adapter(m: Model, seed: int = 0, rank: int = RANK) -> dict[str, np.ndarray]:
    """Both a and b random in the first `rank` columns, so large that log-probs move by whole units."""
    rng = np.random.default_rng(seed)
    adapter = {path: np.zeros(shape, np.float32) for path, shape in m.shapes.items()}
    for path, array in adapter.items():
        part = array[..., :rank, :] if path.endswith("/a") else array[..., :rank]
        part[:] = rng.standard_normal(part.shape) * (array.shape[-1] ** -0.5 if path.endswith("/a") else 0.03)
    return adapter


def applied(m: Model, adapter: Mapping[str, np.ndarray], rank: int = RANK):
    return m.scaled({path: jnp.asarray(array) for path, array in adapter.items()}, jnp.float32(ALPHA / rank))


def merged(tensors: Mapping[str, np.ndarray], peft: Mapping[str, np.ndarray], rank: int) -> dict[str, np.ndarray]:
    """W + alpha/rank B A, in float64."""
    out = {name: w.astype(np.float64) for name, w in tensors.items()}
    for key in (key for key in peft if key.endswith("lora_A.weight")):
        a, b = (peft[key.replace("lora_A", part)].astype(np.float64) for part in ("lora_A", "lora_B"))
        out[key.removeprefix("base_model.model.").replace("lora_A.", "")] += ALPHA / rank * b @ a
    return out


# ---- the slow-path oracle


def oracle(config: Mapping, tensors: Mapping[str, np.ndarray], tokens: np.ndarray, positions=None) -> np.ndarray:
    """Log-probs [B, T, V] of a Llama or a Qwen3 in float64, one head at a time."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    heads, groups, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    length = tokens.shape[1]
    angles = np.outer(np.arange(length) if positions is None else positions, frequencies(config))  # [t, dim/2]
    sin, cos = np.sin(angles), np.cos(angles)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def rope(x):  # the two halves are the real and the imaginary part
        re, im = x[..., : dim // 2], x[..., dim // 2 :]
        return np.concatenate([re * cos - im * sin, im * cos + re * sin], -1)

    def attention(x, at):
        outputs = []
        for head in range(heads):
            q, k, v = (
                x @ w[f"{at}.{name}_proj.weight"][i * dim : (i + 1) * dim].T
                for name, i in (("q", head), ("k", head * groups // heads), ("v", head * groups // heads))
            )
            if config["model_type"] == "qwen3":
                q, k = norm(q, f"{at}.q_norm"), norm(k, f"{at}.k_norm")
            scores = rope(q) @ rope(k).swapaxes(-1, -2) / np.sqrt(dim)
            scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
            outputs.append(np.exp(log_softmax(scores)) @ v)
        return np.concatenate(outputs, -1) @ w[f"{at}.o_proj.weight"].T

    x = w["model.embed_tokens.weight"][tokens]  # [b, t, d]
    for layer in (f"model.layers.{i}" for i in range(config["num_hidden_layers"])):
        x = x + attention(norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
        y = norm(x, f"{layer}.post_attention_layernorm")
        gate, up = (y @ w[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return log_softmax(norm(x, "model.norm") @ head.T)


def frequencies(config: Mapping) -> np.ndarray:
    """Radians a position, [dim/2]; llama3 divides those of long waves by `factor` and blends between."""
    f = config["rope_theta"] ** (-np.arange(0, config["head_dim"], 2) / config["head_dim"])
    s = config.get("rope_scaling")
    if not s:
        return f
    turns = s["original_max_position_embeddings"] * f / (2 * np.pi)  # in the original context
    kept = np.clip((turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"]), 0, 1)
    return f * (kept + (1 - kept) / s["factor"])


HEADS_OF_32 = dict(head_dim=32, num_attention_heads=4, num_key_value_heads=2)
HEADS_OF_64 = dict(head_dim=64, num_attention_heads=2, num_key_value_heads=2, hidden_size=64)
ODD = dict(vocab_size=97, hidden_size=36, intermediate_size=50, num_hidden_layers=3, num_attention_heads=5)
TIED = dict(tie_word_embeddings=True)
SCAN = pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
FAMILY = pytest.mark.parametrize("family", [LLAMA, QWEN3], ids=["llama", "qwen3"])
FOUR = pytest.mark.parametrize(
    ("config", "scan"), [(LLAMA, False), (LLAMA, True), (QWEN3, False), (QWEN3, True)],
    ids=["llama-unrolled", "llama-scanned", "qwen3-unrolled", "qwen3-scanned"],
)  # fmt: skip
TWO = pytest.mark.parametrize(
    ("config", "scan"), [(LLAMA, False), (QWEN3, True)], ids=["llama-unrolled", "qwen3-scanned"]
)


@FAMILY
@pytest.mark.parametrize(
    ("sizes", "scan"),
    [
        pytest.param({}, False, id="untied-unrolled-16"),
        pytest.param(TIED | ODD, False, id="tied-unrolled-odd"),
        pytest.param(HEADS_OF_64, True, id="untied-scanned-64"),
        pytest.param(TIED | HEADS_OF_32, True, id="tied-scanned-32"),
    ],
)
def test_log_probs_match_a_float64_forward_with_and_without_an_adapter(base, family, sizes, scan):
    config = family | sizes
    m, tokens, tensors = base(config, scan_layers=scan), random_tokens(), weights(config)
    adapter = random_adapter(m)
    plain = oracle(config, tensors, tokens)
    adapted = oracle(config, merged(tensors, m.to_peft(adapter, rank=RANK), RANK), tokens)
    np.testing.assert_allclose(logprobs(m, m.zeros(), tokens), plain, atol=1e-4, rtol=0)
    np.testing.assert_allclose(logprobs(m, applied(m, adapter), tokens), adapted, atol=1e-4, rtol=0)
    assert np.abs(adapted - plain).max() > 0.3  # else the second comparison says nothing


def tunix_logprobs(directory, tokens: np.ndarray) -> np.ndarray:
    """tunix's own Qwen3, read by its own loader."""
    with warnings.catch_warnings():  # what it says of itself and of flax is not ours to mend
        warnings.simplefilter("ignore")
        from tunix.models.qwen3 import model as qwen3
        from tunix.models.qwen3.params import create_model_from_safe_tensors

        c = json.loads((directory / "config.json").read_text())
        config = qwen3.ModelConfig(
            num_layers=c["num_hidden_layers"], vocab_size=c["vocab_size"], embed_dim=c["hidden_size"],
            hidden_dim=c["intermediate_size"], num_heads=c["num_attention_heads"], head_dim=c["head_dim"],
            num_kv_heads=c["num_key_value_heads"], rope_theta=int(c["rope_theta"]), norm_eps=c["rms_norm_eps"],
            use_tied_embedding=c["tie_word_embeddings"],
        )  # fmt: skip
        mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
        qwen = create_model_from_safe_tensors(str(directory), config, mesh, dtype=jnp.float32)
        positions, causal = np.tile(np.arange(SHAPE[1]), (len(tokens), 1)), np.tri(SHAPE[1], dtype=bool)
        logits, _ = qwen(jnp.asarray(tokens), jnp.asarray(positions), None, jnp.tile(causal, (len(tokens), 1, 1)))
    return log_softmax(np.asarray(logits).astype(float))


@SCAN
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_log_probs_match_those_of_tunix_with_and_without_an_adapter(base, tmp_path, tied, scan):
    config = QWEN3 | dict(tie_word_embeddings=tied)
    m, tokens = base(config, scan_layers=scan), random_tokens()
    adapter = random_adapter(m)
    np.testing.assert_allclose(logprobs(m, m.zeros(), tokens), tunix_logprobs(m.directory, tokens), atol=1e-4, rtol=0)
    tensors = merged(load_file(m.directory / "model.safetensors"), m.to_peft(adapter, rank=RANK), RANK)
    write(tmp_path, config, {name: w.astype(np.float32) for name, w in tensors.items()})
    got = logprobs(m, applied(m, adapter), tokens)
    np.testing.assert_allclose(got, tunix_logprobs(tmp_path, tokens), atol=1e-4, rtol=0)


def test_llama_3_rope_scaling_matches_the_float64_forward(base):
    config, tokens = LLAMA | LLAMA3_ROPE, random_tokens()
    m, positions = base(config), 64 * np.arange(SHAPE[1])  # wide steps, so that long waves turn
    got = logprobs(m, m.zeros(), tokens, np.tile(positions, (len(tokens), 1)))
    np.testing.assert_allclose(got, oracle(config, weights(config), tokens, positions), atol=2e-4, rtol=0)
    unscaled = oracle(config | {"rope_scaling": None}, weights(config), tokens, positions)
    assert np.abs(got - unscaled).max() > 0.1


# ---- files


@pytest.mark.parametrize("config", [LLAMA | HEADS_OF_32, QWEN3], ids=["llama", "qwen3"])
def test_bfloat16_weights_load_exactly_into_a_float32_model(tmp_path, config):
    tensors, tokens = weights(config, dtype=bfloat16), random_tokens()
    m = load_from(write(tmp_path, config, tensors))
    assert m.dtype == jnp.float32
    np.testing.assert_allclose(logprobs(m, m.zeros(), tokens), oracle(config, tensors, tokens), atol=1e-4, rtol=0)


@TWO
def test_a_bfloat16_model_is_near_the_float64_forward(base, config, scan):
    m, tokens = base(config, dtype="bfloat16", scan_layers=scan), random_tokens()
    adapter = applied(m, random_adapter(m))
    assert {a.dtype for a in [*jax.tree.leaves(m.base), m.head, *adapter.values()]} == {jnp.dtype(jnp.bfloat16)}
    want = oracle(config, merged(weights(config), m.to_peft(random_adapter(m), rank=RANK), RANK), tokens)
    error = np.abs(logprobs(m, adapter, tokens) - want)
    assert error.mean() < 0.03 and error.max() < 0.3  # 8 bits of mantissa: 0.4 % a rounding


def test_a_checkpoint_of_two_files_equals_the_single_file_bit_for_bit(base, tmp_path):
    one = base(LLAMA)
    split_checkpoint(write(tmp_path, LLAMA, weights(LLAMA)))
    two = load_from(tmp_path)
    assert one.hf_shapes == two.hf_shapes == {name: w.shape for name, w in weights(LLAMA).items()}
    for a, b in zip([*jax.tree.leaves(one.base), one.head], [*jax.tree.leaves(two.base), two.head], strict=True):
        np.testing.assert_array_equal(a, b)


def split_checkpoint(directory):
    """model.safetensors -> two files and their index, as large models are published."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: w for name, w in tensors.items() if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


# ---- packing and the mesh


@FOUR
def test_a_packed_segment_sees_only_itself(base, config, scan):
    """Row 0 packs three segments and padding; rows 1 to 3 hold one of them each, at its beginning."""
    m, pieces = base(config, scan_layers=scan), [(0, 5), (5, 14), (14, 20)]
    tokens, positions, segments = random_tokens(), np.zeros(SHAPE, int), np.zeros(SHAPE, int)
    for i, (start, end) in enumerate(pieces, 1):
        tokens[i, : end - start] = tokens[0, start:end]
        positions[0, start:end] = positions[i, : end - start] = np.arange(end - start)
        segments[0, start:end], segments[i, : end - start] = i, 1
    adapter = applied(m, random_adapter(m))
    got = hidden(m, adapter, tokens, positions, segments)
    for i, (start, end) in enumerate(pieces, 1):
        np.testing.assert_allclose(got[0, start:end], got[i, : end - start], atol=2e-6, rtol=0)
    other = tokens.copy()
    for changed in (slice(5, 14), slice(20, None)):  # the second segment and the padding
        other[0, changed] = random_tokens(1)[0, changed]
    changed = hidden(m, adapter, other, positions, segments)
    np.testing.assert_array_equal(changed[0, [*range(5), *range(14, 20)]], got[0, [*range(5), *range(14, 20)]])
    assert np.abs(changed[0, 5:14] - got[0, 5:14]).max() > 0.1


@pytest.mark.parametrize(
    ("config", "scan"), [(LLAMA | TIED, True), (QWEN3, False)], ids=["llama-tied-scanned", "qwen3-untied-unrolled"]
)
def test_four_devices_hold_a_quarter_each_and_compute_what_one_does(base, config, scan):
    one, four = base(config, scan_layers=scan), base(config, devices=4, scan_layers=scan)
    adapter = random_adapter(one)
    a, b = (hidden(m, applied(m, adapter), random_tokens()) for m in (one, four))
    np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)
    assert_sharded(four, weights(config))


def assert_sharded(m: Model, tensors: Mapping[str, np.ndarray]):
    """Every device holds 1/n of the matrices and all of the norms, to 2 %; nothing is held twice."""
    arrays = list({id(a): a for a in [*jax.tree.leaves(m.base), m.head]}.values())  # a tied head is the embedding
    norms = sum(w.nbytes for w in tensors.values() if w.ndim == 1)
    whole = sum(w.nbytes for w in tensors.values())
    assert sum(a.nbytes for a in arrays) == whole
    for device in m.mesh.devices.flat:
        held = sum(shard.data.nbytes for a in arrays for shard in a.addressable_shards if shard.device == device)
        assert held == pytest.approx((whole - norms) / m.mesh.size + norms, rel=0.02)


def test_a_head_of_odd_vocabulary_is_sharded_too(base):
    config = QWEN3 | dict(vocab_size=97)
    assert_sharded(base(config, devices=4), weights(config))


@pytest.mark.parametrize("where", ["one device", "every device"])
def test_a_base_that_is_not_sharded_is_refused(sharded_demo, where):
    everywhere = sharded_demo.sharding()
    matrix = jax.device_put(jnp.zeros((64, 64)), everywhere if where == "every device" else jax.devices()[0])
    with pytest.raises(RuntimeError, match="not sharded over 4 devices"):
        model._check_sharding([matrix], sharded_demo)


# ---- adapters


@functools.partial(jax.jit, static_argnums=0)
def gradient(m: Model, base, head, adapter, tokens, targets):
    """d (sum of the targets' log-probs) / d (the float32 adapter), at RANK's scale."""
    at = jnp.tile(jnp.arange(tokens.shape[1]), (len(tokens), 1))

    def total(adapter):
        logits = m.hidden(base, m.scaled(adapter, jnp.float32(ALPHA / RANK)), tokens, at, at * 0 + 1) @ head.T
        return jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1).sum()

    return jax.grad(total)(adapter)


def gradients(m: Model, adapter) -> dict[str, np.ndarray]:
    adapter = jax.device_put({path: jnp.asarray(array) for path, array in adapter.items()}, m.sharding())
    tokens, targets = (jnp.asarray(random_tokens(seed), jnp.int32) for seed in (0, 1))
    return jax.device_get(gradient(m, m.base, m.head, adapter, tokens, targets))


def beyond(path: str, array, rank: int) -> np.ndarray:
    """The part of an adapter's array that a smaller rank leaves unused."""
    return np.asarray(array)[..., rank:, :] if path.endswith("/a") else np.asarray(array)[..., rank:]


@TWO
def test_every_layer_of_every_kernel_gets_a_gradient_and_its_unused_columns_none(base, config, scan):
    m = base(config, scan_layers=scan)
    assert {k.module for k in m.kernels} == {*ATTENTION, *MLP}
    assert sum(len(k.hf_names) for k in m.kernels) == 7 * config["num_hidden_layers"]
    adapter = random_adapter(m)
    fresh = {path: array * path.endswith("/a") for path, array in adapter.items()}  # b = 0, as every adapter begins
    for path, g in gradients(m, fresh).items():
        layers = g if scan else g[None]
        assert all(layer.any() == path.endswith("/b") for layer in layers), path  # b = 0: nothing reaches a
        assert not beyond(path, g, RANK).any(), path
    for path, g in gradients(m, adapter).items():
        assert g.any() and not beyond(path, g, RANK).any(), path


def test_an_adapter_is_spread_over_the_devices_until_it_is_applied(sharded_demo):
    adapter = sharded_demo.new_adapter(seed=0, rank=4)
    whole = sum(array.nbytes for array in adapter.values())
    held = lambda arrays: sum(array.addressable_shards[0].data.nbytes for array in arrays.values())
    assert held(adapter) == held(sharded_demo.zeros()) == whole / 4
    assert held(jax.jit(sharded_demo.scaled)(adapter, 1.0)) == whole
    assert sharded_demo._spread("odd/a", (4, 6)) == sharded_demo.sharding()  # every device has all of it


@TWO
def test_gradients_match_differences_of_the_float64_forward(base, config, scan):
    """Along one random direction in all of (a, b) at once."""
    m, tokens, targets = base(config, scan_layers=scan), random_tokens(), random_tokens(1)
    adapter, direction = random_adapter(m), random_adapter(m, seed=1)

    def total(t: float) -> float:
        moved = {path: adapter[path] + t * direction[path].astype(float) for path in adapter}
        lp = oracle(config, merged(weights(config), m.to_peft(moved, rank=RANK), RANK), tokens)
        return np.take_along_axis(lp, targets[..., None], -1).sum()

    slope = sum((g * direction[path]).sum() for path, g in gradients(m, adapter).items())
    assert slope == pytest.approx((total(1e-4) - total(-1e-4)) / 2e-4, rel=1e-4)


@pytest.mark.parametrize(
    ("config", "scan", "flags", "out"),
    [(LLAMA, False, dict(attn=False), ATTENTION), (QWEN3, True, dict(mlp=False), MLP)],
    ids=["mlp only", "attention only"],
)
def test_modules_that_are_not_trained_are_zero_and_get_zero_gradients(base, config, scan, flags, out):
    m = base(config, scan_layers=scan)
    adapter = jax.device_get(m.new_adapter(seed=0, rank=RANK, **flags))
    moved = {path: random_adapter(m)[path] if path.split("/")[-2] not in out else a for path, a in adapter.items()}
    for path, g in gradients(m, moved).items():
        trained = path.split("/")[-2] not in out
        assert bool(moved[path].any()) == bool(g.any()) == trained, path
        assert bool(adapter[path].any()) == (trained and path.endswith("/a")), path
    modules = {key.split(".")[-3] for key in m.to_peft(adapter, rank=RANK)}
    attention, mlp = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
    assert modules == (attention if out == MLP else mlp)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (dict(), dict(max_rank=32)),
        (dict(), dict(devices=4)),
        (dict(scan_layers=True), dict(scan_layers=True, max_rank=32)),
    ],
    ids=["max_rank", "mesh", "max_rank scanned"],
)
def test_a_seed_gives_the_same_adapter_whatever_the_servers_largest_rank_and_mesh(base, ours, theirs):
    one, other = base(QWEN3, **ours), base(QWEN3, **theirs)
    a, b, wider = (
        m.to_peft(jax.device_get(m.new_adapter(seed=7, rank=rank)), rank=5)
        for m, rank in ((one, 5), (other, 5), (one, MAX_RANK))
    )
    assert a.keys() == b.keys() == wider.keys()
    for key, tensor in a.items():
        np.testing.assert_array_equal(tensor, b[key])
        np.testing.assert_array_equal(tensor, wider[key])  # a smaller rank is the first rows of a larger


def test_a_fresh_adapter_is_uniform_in_a_and_zero_in_b(base):
    m = base(QWEN3, max_rank=32)
    adapter = jax.device_get(m.new_adapter(seed=3, rank=32))
    for path, array in adapter.items():
        limit = array.shape[-1] ** -0.5
        if path.endswith("/b"):
            assert not array.any()
        else:
            assert array.dtype == np.float32 and 0.98 * limit < np.abs(array).max() <= limit
            assert array.std() == pytest.approx(limit / 3**0.5, rel=0.05)
    drawn = [a.tobytes() for path, a in adapter.items() if path.endswith("/a")]
    assert len(set(drawn)) == len(drawn)  # no two matrices are alike
    other = jax.device_get(m.new_adapter(seed=4, rank=32))
    assert all(not np.array_equal(adapter[path], other[path]) for path in adapter if path.endswith("/a"))


def test_ranks_and_seeds_compile_nothing_after_the_first_adapter(base, compilations):
    m = base(QWEN3)
    jax.block_until_ready(m.new_adapter(seed=0, rank=1))
    before = compilations()
    jax.block_until_ready([m.new_adapter(seed=seed, rank=rank) for seed, rank in ((1, 2), (2**31 - 1, MAX_RANK))])
    assert compilations() == before


def test_large_and_negative_seeds_are_seeds_too(base):
    m = base(QWEN3)
    a, b, c = (jax.device_get(m.new_adapter(seed=seed, rank=1)) for seed in (2**31, -1, 2**40))
    path = next(path for path in m.shapes if path.endswith("/a"))
    assert len({a[path].tobytes(), b[path].tobytes(), c[path].tobytes()}) == 3


def doubled(m: Model, offset: float = 0.0, code: tuple = ()) -> Kept:
    return Kept("doubled", jax.jit(lambda x: {"twice": 2 * x["one"] + offset}), m, *code)


def test_a_program_is_kept_for_the_next_process(base, nothing_kept):
    m, x = base(QWEN3), {"one": np.arange(3, dtype=np.float32)}
    assert doubled(m)(x)["twice"].tolist() == [0, 2, 4]
    assert doubled(m, offset=1)(x)["twice"].tolist() == [0, 2, 4]  # it cannot be told from the first: it is not traced
    assert doubled(m, offset=1, code=(1,))(x)["twice"].tolist() == [1, 3, 5]
    longer = {"one": np.arange(2, dtype=np.float32)}
    assert doubled(m, offset=1)(longer)["twice"].tolist() == [1, 3]
    assert doubled(load_from(m.directory, devices=4), offset=1)(x)["twice"].tolist() == [1, 3, 5]
    with pytest.raises(TypeError):
        (program := doubled(m))(x), program(longer)


def test_a_kept_program_that_is_damaged_or_cannot_be_written_is_compiled_again(base, nothing_kept, caplog):
    m, x = base(QWEN3), {"one": np.arange(3, dtype=np.float32)}
    doubled(m)(x)
    (path,) = nothing_kept.glob("doubled-*")
    whole = path.read_bytes()
    for damaged in (b"", whole[: len(whole) // 2], b"no pickle"):
        path.write_bytes(damaged)
        assert doubled(m)(x)["twice"].tolist() == [0, 2, 4]
        assert path.read_bytes() == whole or len(path.read_bytes()) > len(whole) / 2
    assert caplog.text.count("cannot be read, and is made again") == 3
    path.unlink()
    path.mkdir()
    assert doubled(m)(x)["twice"].tolist() == [0, 2, 4]
    assert "cannot be kept" in caplog.text


def test_a_program_that_jax_has_in_its_own_cache_is_compiled_anew_and_kept_whole(base, nothing_kept):
    """XLA's CPU executables that were read and are written again have lost functions, and fail when they are run."""
    m, x = base(QWEN3), np.random.default_rng(0).random((64, 64), np.float32)
    program = lambda: jax.jit(lambda x: jax.nn.softmax(jnp.tanh(x) @ x.T, -1) * jnp.cumsum(x, 0)[:, :1])
    expected = program()(x)
    assert list(nothing_kept.glob("jit__lambda*")), "JAX has not kept it"
    for _ in range(2):
        np.testing.assert_array_equal(Kept("program", program(), m)(x), expected)


def test_what_is_kept_belongs_to_this_code_and_these_packages(base, nothing_kept, monkeypatch):
    m, x = base(QWEN3), {"one": np.arange(3, dtype=np.float32)}
    doubled(m)(x)
    monkeypatch.setattr(model, "_ground", lambda: "another version")
    assert doubled(m, offset=1)(x)["twice"].tolist() == [1, 3, 5]


@pytest.mark.parametrize("rank", [0, -1, MAX_RANK + 1])
def test_a_rank_outside_the_servers_range_is_refused(base, rank):
    with pytest.raises(ValueError, match=re.escape(f"lora_config.rank is {rank}; this server takes 1..{MAX_RANK}")):
        base(QWEN3).new_adapter(seed=0, rank=rank)


@FOUR
def test_peft_tensors_read_back_as_the_adapter_they_were_written_from(base, config, scan):
    m = base(config | HEADS_OF_32, scan_layers=scan)
    adapter = random_adapter(m)
    tensors = m.to_peft(adapter, rank=RANK)
    q = "base_model.model.model.layers.1.self_attn.q_proj.lora"
    assert tensors[f"{q}_A.weight"].shape == (RANK, 48) and tensors[f"{q}_B.weight"].shape == (128, RANK)
    assert len(tensors) == 2 * 7 * config["num_hidden_layers"]
    assert {(t.dtype, t.flags.c_contiguous) for t in tensors.values()} == {(np.dtype(np.float32), True)}
    back = m.from_peft(tensors)
    for path, array in adapter.items():
        # Llama's query is scaled by 1/sqrt(head_dim) and back, which costs an ulp; everything else is only moved.
        np.testing.assert_allclose(back[path], array, rtol=2e-7 if config is LLAMA and "query" in path else 0, atol=0)


def test_a_peft_adapter_of_some_modules_leaves_the_others_zero(base):
    m = base(QWEN3)
    tensors = {k: v for k, v in m.to_peft(random_adapter(m), rank=RANK).items() if "layers.1.mlp.up_proj" in k}
    back = m.from_peft(tensors)
    assert {path for path, array in back.items() if array.any()} == {"layers_1/mlp/wi_1/a", "layers_1/mlp/wi_1/b"}


MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def export(m: Model, folder: Path, tensors: Mapping[str, np.ndarray] | None = None, **changed) -> Path:
    """A PEFT folder of a random adapter, or of these tensors."""
    tensors = m.to_peft(random_adapter(m), rank=RANK) if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / "adapter_model.safetensors")
    config = m.peft_config(tensors, rank=RANK) | changed
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not ...}))
    return folder


@FOUR
@pytest.mark.parametrize(
    ("flags", "modules"),
    [
        (dict(), MODULES),
        (dict(mlp=False), MODULES[:4]),
        (dict(attn=False), MODULES[4:]),
    ],
    ids=["all", "attention only", "mlp only"],
)
def test_an_export_names_its_rank_its_scale_and_its_modules_and_passes_the_check(
    base, tmp_path, config, scan, flags, modules
):
    m = base(config | HEADS_OF_32 | TIED, scan_layers=scan)
    tensors = m.to_peft(jax.device_get(m.new_adapter(seed=0, rank=RANK, **flags)), rank=RANK)
    written = m.peft_config(tensors, rank=RANK)
    assert (written["peft_type"], written["r"], written["lora_alpha"]) == ("LORA", RANK, ALPHA)
    assert sorted(written["target_modules"]) == sorted(modules)
    m.check_peft(export(m, tmp_path / "float32", tensors))
    m.check_peft(export(m, tmp_path / "bfloat16", {key: tensor.astype(bfloat16) for key, tensor in tensors.items()}))


UP = "base_model.model.model.layers.0.mlp.up_proj"
A, B = f"{UP}.lora_A.weight", f"{UP}.lora_B.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model.model.lm_head.lora_A.weight": np.zeros((3, 48))}, "lm_head.lora_A.weight matches no module"),
        ({A.replace("layers.0", "layers.2"): np.zeros((3, 48))}, "layers.2.mlp.up_proj.lora_A.weight matches"),
        ({f"{UP}.lora_magnitude_vector": np.zeros(72)}, "up_proj.lora_magnitude_vector matches no module"),
        ({A: np.zeros((3, 47))}, f"{A} and lora_B have shapes (3, 47) and (72, 3)"),
        ({B: np.zeros((3, 72))}, f"{A} and lora_B have shapes (3, 48) and (3, 72)"),
        ({B: np.zeros((72, 2))}, f"{A} and lora_B have shapes (3, 48) and (72, 2)"),
        ({A: np.zeros((9, 48)), B: np.zeros((72, 9))}, "(8 at most, 48) and (72, the same rank)"),
        ({B: None}, f"{A} and lora_B have shapes (3, 48) and (0,)"),
        ({A: None}, f"{A} and lora_B have shapes (0,) and (72, 3)"),
        ({A: np.zeros(())}, f"{A} and lora_B have shapes () and (72, 3)"),
    ],
    ids=["head", "layer", "part", "in", "transposed", "two ranks", "rank", "no b", "no a", "scalar"],
)  # fmt: skip
def test_foreign_peft_tensors_are_refused_by_name(base, change, message):
    m = base(QWEN3)
    tensors = m.to_peft(random_adapter(m), rank=RANK) | change
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        m.from_peft({key: tensor for key, tensor in tensors.items() if tensor is not None})
    assert "\n" not in str(error.value)


F = np.float32
BAD_TENSORS = {
    "head": ({"base_model.model.lm_head.lora_A.weight": np.zeros((3, 48), F)}, "lm_head.lora_A.weight is F32 (3, 48); BASE takes no such tensor"),
    "embedding": ({f"base_model.model.model.embed_tokens.lora_{p}.weight": np.zeros(s, F) for p, s in (("A", (3, 48)), ("B", (96, 3)))}, "embed_tokens.lora_A.weight is F32 (3, 48); BASE takes no"),
    "norm": ({"base_model.model.model.norm.lora_A.weight": np.zeros((3, 48), F)}, "model.norm.lora_A.weight is F32"),
    "layer": ({A.replace("layers.0", "layers.2"): np.zeros((3, 48), F)}, "layers.2.mlp.up_proj.lora_A.weight is F32 (3, 48); BASE takes no"),
    "prefix": ({A.removeprefix("base_model.model."): np.zeros((3, 48), F)}, "model.layers.0.mlp.up_proj.lora_A.weight is F32 (3, 48); BASE takes no"),
    "suffix": ({A: None, A.replace(".weight", ".default.weight"): np.zeros((3, 48), F)}, "up_proj.lora_A.default.weight is F32"),
    "part": ({f"{UP}.lora_magnitude_vector": np.zeros(72, F)}, "up_proj.lora_magnitude_vector is F32 (72,); BASE takes no"),
    "in": ({A: np.zeros((3, 47), F)}, f"{A} is F32 (3, 47); BASE takes F32 or BF16 (3, 48)"),
    "out": ({B: np.zeros((48, 3), F)}, f"{B} is F32 (48, 3); BASE takes F32 or BF16 (72, 3)"),
    "transposed": ({B: np.zeros((3, 72), F)}, f"{B} is F32 (3, 72); BASE takes F32 or BF16 (72, 3)"),
    "a of another rank": ({A: np.zeros((2, 48), F)}, f"{A} is F32 (2, 48); BASE takes F32 or BF16 (3, 48)"),
    "b of another rank": ({B: np.zeros((72, 8), F)}, f"{B} is F32 (72, 8); BASE takes F32 or BF16 (72, 3)"),
    "scalar": ({A: np.zeros((), F)}, f"{A} is F32 (); BASE takes F32 or BF16 (3, 48)"),
    "no a": ({A: None}, f"{A} is missing; BASE takes F32 or BF16 (3, 48)"),
    "no b": ({B: None}, f"{B} is missing; BASE takes F32 or BF16 (72, 3)"),
    "no layer": ({A: None, B: None}, "target_modules and the tensors differ in model.layers.0.mlp.up_proj"),
    "float16": ({A: np.zeros((3, 48), np.float16)}, f"{A} is F16 (3, 48); BASE takes F32 or BF16 (3, 48)"),
    "float64": ({B: np.zeros((72, 3))}, f"{B} is F64 (72, 3); BASE takes F32 or BF16 (72, 3)"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_an_export_with_a_wrong_tensor_is_refused_by_name(base, tmp_path, change, message):
    m = base(QWEN3)
    tensors = m.to_peft(random_adapter(m), rank=RANK)
    config = dict(target_modules=m.peft_config(tensors, rank=RANK)["target_modules"])
    changed = {key: tensor for key, tensor in (tensors | change).items() if tensor is not None}
    assert message in export_refusal(m, export(m, tmp_path, changed, **config))


def export_refusal(m: Model, folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        m.check_peft(folder)
    assert "\n" not in str(error.value) and str(folder) in str(error.value)
    return str(error.value).replace(m.name, "BASE")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(r=2), "lora_A.weight is F32 (3, "),
        (dict(r=0), f"r is 0; BASE takes 1..{MAX_RANK}"),
        (dict(r=MAX_RANK + 1), f"r is {MAX_RANK + 1}; BASE takes 1..{MAX_RANK}"),
        (dict(r=...), f"r is None; BASE takes 1..{MAX_RANK}"),
        (dict(lora_alpha=16), f"lora_alpha is 16; BASE takes {ALPHA}"),
        (dict(lora_alpha=...), f"lora_alpha is None; BASE takes {ALPHA}"),
        (dict(peft_type="LOHA"), "peft_type is 'LOHA'; BASE takes 'LORA'"),
        (dict(bias="lora_only"), "bias is 'lora_only'; BASE takes 'none'"),
        (dict(use_dora=True), "use_dora is True"),
        (dict(use_rslora=True), "use_rslora is True"),
        (dict(fan_in_fan_out=True), "fan_in_fan_out is True"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save is ['lm_head']"),
        (dict(rank_pattern={"q_proj": 8}), "rank_pattern is {'q_proj': 8}"),
        (dict(alpha_pattern={"q_proj": 8}), "alpha_pattern is {'q_proj': 8}"),
        (dict(layers_to_transform=[0]), "layers_to_transform is [0]"),
        (dict(target_modules=["q_proj"]), "target_modules and the tensors differ in model.layers.0.mlp.down_proj"),
        (dict(target_modules=["lm_head", *MODULES]), "differ in lm_head"),
        (dict(target_modules=["nothing", *MODULES]), "differ in nothing"),
        (dict(target_modules="all-linear"), "target_modules and the tensors differ in model.layers.0.mlp.down_proj"),
        (dict(target_modules=...), "target_modules and the tensors differ in model.layers.0.mlp.down_proj"),
    ],
    ids=lambda x: "-".join(f"{k}={v if v is not ... else 'absent'}" for k, v in x.items()) if isinstance(x, dict) else "",
)  # fmt: skip
def test_an_export_whose_config_says_something_else_is_refused_by_key(base, tmp_path, changed, message):
    m = base(QWEN3)
    assert message in export_refusal(m, export(m, tmp_path, **changed))


def test_an_export_without_tensors_or_cut_short_is_refused(base, tmp_path):
    m = base(QWEN3)
    assert export_refusal(m, export(m, tmp_path / "empty", {})).endswith("adapter_model.safetensors has no tensor")
    file = export(m, tmp_path / "cut") / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert f"{file} is not a whole safetensors file" in export_refusal(m, file.parent)


def test_an_export_is_checked_against_the_weight_files_and_not_what_it_was_made_by(base, tmp_path):
    """A wrong table of kernels exports gate_proj as down_proj: consistent in itself."""
    m = base(QWEN3)
    gate, down = "mlp.gate_proj", "mlp.down_proj"
    swapped = lambda name: name.replace(gate, "x").replace(down, gate).replace("x", down)
    kernels = tuple(dataclasses.replace(k, hf_names=tuple(map(swapped, k.hf_names))) for k in m.kernels)
    wrong = dataclasses.replace(m, kernels=kernels)
    with pytest.raises(ValueError, match=r"layers.0.mlp.down_proj.lora_A.weight is F32 \(3, 48\); .* \(3, 72\)"):
        wrong.check_peft(export(wrong, tmp_path))


# ---- refusals


def refusal(model, **options) -> str:
    """The one line with which `load` turns a model down."""
    with pytest.raises(ValueError) as error:
        load(ModelConfig(model=str(model), **options), state_dir=Path("unused"), devices=jax.devices()[:1])
    assert "\n" not in str(error.value), str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (QWEN3 | dict(architectures=["GPT2LMHeadModel"]), "GPT2LMHeadModel is not served (accepted: Qwen3For"),
        (QWEN3 | dict(architectures=[]), "architecture none is not served"),
        (QWEN3 | dict(attention_bias=True), "attention_bias is True; this server computes only False"),
        (LLAMA | dict(mlp_bias=True), "mlp_bias is True; this server computes only False"),
        (QWEN3 | dict(use_sliding_window=True), "use_sliding_window is True"),
        (LLAMA | dict(hidden_act="gelu"), "hidden_act is 'gelu'; this server computes only 'silu'"),
        (LLAMA | dict(quantization_config={"bits": 4}), "quantization_config is {'bits': 4}"),
        (LLAMA | dict(rope_scaling={"type": "linear", "factor": 2}), "rope_type 'linear' is not served (acc"),
        (QWEN3 | dict(rope_parameters={"rope_type": "yarn", "factor": 4}), "rope_type 'yarn' is not served"),
        (LLAMA | dict(rope_scaling=LLAMA3_SCALING | {"factor": 32.0}), "are not Llama 3.1's"),
        (QWEN3 | LLAMA3_ROPE, "rope_type 'llama3' is not served (accepted: default)"),  # MaxText would ignore it
    ],
    ids=["architecture", "none", "bias", "mlp bias", "window", "act", "bits", "linear", "yarn", "32", "qwen3"],
)  # fmt: skip
def test_a_model_that_would_be_computed_wrongly_is_refused_in_one_line(tmp_path, config, message):
    line = refusal(write(tmp_path, config, weights(QWEN3)))
    assert message in line and str(tmp_path / "config.json") in line


@pytest.mark.parametrize("name", ["nowhere", "./nowhere", "/nowhere", "/no/where/at/all"])
def test_a_path_that_is_not_there_is_refused_in_one_line(name):
    accepted = "(accepted: a Hugging Face directory, a hub name such as Qwen/Qwen3-0.6B, or demo)"
    assert refusal(name) == f"no such model directory: {name} {accepted}"


def test_a_hub_name_without_a_network_is_refused_in_one_line():
    assert "nobody/nothing is neither a directory nor could it be fetched" in refusal("nobody/nothing")


def test_a_directory_without_a_config_is_refused_in_one_line(tmp_path):
    assert f"{tmp_path} has no config.json" in refusal(tmp_path)


def test_a_config_that_is_not_json_is_refused_in_one_line_that_names_it(tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["Qwen3')
    assert str(tmp_path / "config.json") in refusal(tmp_path)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"])
def test_a_config_without_a_size_is_refused_in_one_line_that_names_it(tmp_path, key):
    write(tmp_path, {k: v for k, v in LLAMA.items() if k not in (key, "head_dim")}, {})
    line = refusal(tmp_path)
    assert key in line and str(tmp_path / "config.json") in line


def test_what_an_older_config_leaves_out_has_the_value_that_hugging_face_gives_it(base, tmp_path):
    """Llama 1 and 2 name no number of kv heads (as many as heads) and no rope; some write head_dim: null."""
    config = LLAMA | dict(num_key_value_heads=3, rms_norm_eps=1e-6)
    absent = ("num_key_value_heads", "rms_norm_eps", "rope_theta", "tie_word_embeddings")
    older = {k: v for k, v in config.items() if k not in absent} | dict(head_dim=None)
    m, tokens = load_from(write(tmp_path, older, weights(config))), random_tokens()
    np.testing.assert_allclose(
        logprobs(m, m.zeros(), tokens), oracle(config, weights(config), tokens), atol=1e-4, rtol=0
    )


def test_a_directory_without_weights_is_refused_in_one_line(tmp_path):
    write(tmp_path, QWEN3, {})  # a file of no tensors
    assert f"{tmp_path} has no *.safetensors file" in refusal(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert f"{tmp_path} has no *.safetensors file" in refusal(tmp_path)


def test_a_missing_file_of_a_sharded_checkpoint_is_refused_in_one_line(tmp_path):
    split_checkpoint(write(tmp_path, QWEN3, weights(QWEN3)))
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert f"{tmp_path}: weight file model-00002-of-00002.safetensors is missing (1 of 2" in refusal(tmp_path)


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_truncated_weight_file_is_refused_in_one_line(tmp_path, kept):
    file = write(tmp_path, QWEN3, weights(QWEN3)) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    assert f"{file} is not a whole safetensors file" in refusal(tmp_path)


TENSORS = [
    (LLAMA, False, "model.layers.1.mlp.up_proj.weight"), (QWEN3, True, "model.layers.1.self_attn.q_proj.weight"),
    (QWEN3, False, "model.norm.weight"), (LLAMA, True, "model.embed_tokens.weight"), (LLAMA, True, "lm_head.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "scan", "name"), TENSORS)
def test_a_missing_tensor_is_refused_by_name(tmp_path, family, scan, name):
    write(tmp_path, family, {k: w for k, w in weights(family).items() if k != name})
    assert refusal(tmp_path, scan_layers=scan) == f"{tmp_path}: tensor {name} is in none of its weight files"


@pytest.mark.parametrize(("family", "scan", "name"), TENSORS)
def test_a_misshapen_tensor_is_refused_by_name(tmp_path, family, scan, name):
    tensors = weights(family)
    wrong = np.zeros([n + 1 for n in tensors[name].shape], np.float32)
    write(tmp_path, family, tensors | {name: wrong})
    assert f"{tmp_path}: {name} has shape {wrong.shape}" in refusal(tmp_path, scan_layers=scan)


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "lm_head.weight"])
def test_a_transposed_tensor_is_refused_by_name(tmp_path, name):
    """It has as many numbers, so that a reshape would take it."""
    tensors = weights(LLAMA)
    write(tmp_path, LLAMA, tensors | {name: np.ascontiguousarray(tensors[name].T)})
    assert f"{tmp_path}: {name} has shape {tensors[name].T.shape}" in refusal(tmp_path)


@pytest.mark.parametrize(("option", "value"), [("max_rank", 0), ("remat", "sometimes")])
def test_a_flag_out_of_its_range_is_refused_in_one_line_that_names_it(base, option, value):
    line = refusal(base(QWEN3).directory, **{option: value})
    assert option in line.replace("-", "_") and str(value) in line


def test_parity_without_the_engines_environment_is_refused_in_one_line(base, monkeypatch, tmp_path):
    monkeypatch.setattr(model, "ENGINE", tmp_path)
    with pytest.raises(ValueError, match="python is missing: `uv run sampler.py install` makes .*environment$"):
        model.parity(str(base(QWEN3).directory))


# ---- the demo model


@pytest.fixture(scope="module")
def tokenizer(root):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(write_demo(root / "demo"))


def test_the_demo_is_written_once_and_always_the_same(tmp_path):
    one, two = write_demo(tmp_path / "one"), write_demo(tmp_path / "two")
    files = {f.name: f.read_bytes() for f in one.iterdir()}
    assert files.keys() >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert files == {f.name: f.read_bytes() for f in two.iterdir()}
    assert {f.name for f in tmp_path.iterdir()} == {"one", "two"}
    written = (one / "model.safetensors").stat().st_mtime_ns
    assert write_demo(tmp_path / "one") == one and (one / "model.safetensors").stat().st_mtime_ns == written


def test_the_demo_runs_under_its_name(demo):
    assert (demo.name, demo.vocab_size, demo.dtype, demo.fsdp) == ("demo", 264, jnp.float32, 1)
    tokens = np.random.default_rng(0).integers(0, 264, SHAPE)
    want = oracle(model.DEMO_CONFIG, load_file(demo.directory / "model.safetensors"), tokens)
    np.testing.assert_allclose(logprobs(demo, demo.zeros(), tokens), want, atol=1e-4, rtol=0)


def test_the_demo_tokenizer_has_the_models_vocabulary(tokenizer):
    assert len(tokenizer) == model.DEMO_CONFIG["vocab_size"] == 264
    assert sorted(tokenizer.get_vocab().values()) == list(range(264))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (256, 258, 259)


@given(st.text())
@example("naïve 日本語 👩🏽‍🚀 \x00\r\n\t  . , 's n't ")
@example("<|im_start|>user\nhi<|im_end|>\n")
def test_any_text_comes_back_from_the_demo_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text(alphabet=st.characters(exclude_characters="<", exclude_categories=["Cs"])))
def test_a_token_of_the_demo_is_a_byte(tokenizer, text):
    assert len(tokenizer.encode(text)) == len(text.encode())


def test_the_demo_chat_template_marks_turns(tokenizer):
    messages = [dict(role="user", content="2+2?"), dict(role="assistant", content="4")]
    text = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    prompted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(prompted) == text + "<|im_start|>assistant\n"


@pytest.mark.parametrize("remat, layers", [("none", 0), ("full", 2)])
def test_activations_are_computed_again_only_where_it_was_asked_for(state_dir, remat, layers):
    """MaxText reads "none" as None, which it takes for full: nothing says so but the time."""
    chosen = load(ModelConfig(remat=remat), state_dir=state_dir, devices=jax.devices()[:1])
    ids = jnp.ones((1, 8), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda adapter: chosen.hidden(chosen.base, adapter, ids, ids, ids))(chosen.zeros())
    assert [eqn.primitive.name for eqn in jaxpr.eqns].count("remat2") == layers  # the name of jax.checkpoint's
