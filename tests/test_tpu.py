"""What the TPU's compiler says of the step, for chips that are not here (`tpu_compile`), and what chips would (`tpu`).

Run: `uv run --group topology pytest -n 0 -m tpu_compile` (under 4 minutes on two cores)
On a TPU VM: `JAX_PLATFORMS=tpu,cpu uv run --extra tpu pytest -n 0 -s -m tpu`
"""

import functools
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_sampler
import test_trainer
from jax.experimental.pallas import tpu as pltpu
from maxtext.layers.attention_op import AttentionOp

import model as model_module
import trainer as trainer_module
from losses import target_logprobs
from model import ModelConfig, abstract, load
from sampler import SamplerConfig, shapes
from sampler import programs as engine_programs
from trainer import CALLS, CHIPS, GIB, Blocks, Plan, choose_blocks, largest, make_plan, read_hlo, topology

MIB = 2**20
CHIP = CHIPS["TPU v5p"]
DENSE_V = 248_320
DENSE = dict(  # 27.4 billion parameters
    architectures=["Qwen3ForCausalLM"],
    hidden_size=5120,
    intermediate_size=20_480,
    num_hidden_layers=64,
    num_attention_heads=24,
    num_key_value_heads=4,
    head_dim=256,
    vocab_size=DENSE_V,
    rope_theta=1e6,
    max_position_embeddings=131_072,
)
NARROW = DENSE | dict(  # as many loops and collectives: optimised in 20 s, Qwen3-8B's step in 120
    hidden_size=512,  # less, and a quarter of an adapter is padded
    intermediate_size=1024,
    num_hidden_layers=36,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=128,
    vocab_size=36_864,
)
tpu_compile = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="no libtpu: uv sync --group topology"),
]


# ---- the arithmetic around the compiler


HLO = """
HloModule step

%body (p: s32[]) -> s32[] {
  %w = bf16[8,16]{1,0:T(8,128)(2,1)} all-gather(%x), dimensions={0}
  %f = f32[4]{0} fusion(%w), kind=kLoop, backend_config={"estimated_cycles":"10"}
}

%condition (p: s32[]) -> pred[] {
  %c = s32[] constant(5)
}

%traced (p: s32[]) -> s32[] {
  %g = (f32[2,3]{1,0}, bf16[4]{0}) all-reduce(%x, %y), to_apply=%add
  %u = f32[4]{0} fusion(%w), kind=kLoop, backend_config={"estimated_cycles":"1000"}
}

%add (x: f32[], y: f32[]) -> f32[] {
  %s = f32[] add(%x, %y)
}

%known (p: s32[]) -> pred[] {
  %z = pred[] compare(%n, %m)
}

ENTRY %main (p: s32[]) -> s32[] {
  %l = s32[] while(%s), condition=%condition, body=%body, metadata={op_name="jit(step)/jvp()/while"}
  %t = s32[] while(%s), condition=%known, body=%traced, metadata={op_name="jit(step)/jvp(tiles)/while"}
  %o = s32[] while(%s), condition=%known, body=%traced, metadata={op_name="jit(step)/further/while"}
  %e = f32[4]{0} fusion(%w), kind=kLoop, backend_config={"estimated_cycles":"7"}
  ROOT %q = f32[4]{0} fusion(%w), kind=kLoop, backend_config={"estimated_cycles":"9223372036854775807"}
}
"""


def test_loops_multiply_cycles_and_collectives_by_their_trips():
    cycles, collectives = read_hlo(HLO, {"tiles": 3, "further": 0})
    assert cycles == 5 * 10 + 3 * 1000 + 7
    assert [tuple(one) for one in collectives] == [
        ("all-gather", "bf16[8,16]", 256, 5, True),
        ("all-reduce", "f32[2,3], bf16[4]", 32, 3, True),
    ]


def made_up(row_len: int, *, limit: int = 10_000, bend: float = 0.0) -> Plan:
    temp = int(2 * row_len + bend * row_len**2)
    if temp + 1000 > 1.5 * limit:
        raise ValueError("too large even for the compiler")
    return Plan(
        rows=1,
        row_len=row_len,
        blocks=Blocks(),
        held={"base": 1000},
        temp={"step": temp},
        report={},
        limit_bytes=limit,
        collectives=[],
        seconds=None,
        mfu=None,
        formats=None,
    )


@pytest.mark.parametrize("bend", [0.0, 0.001, -0.0001])
@pytest.mark.parametrize("start", [64, 1024])
def test_the_search_ends_at_the_largest_size_that_fits(bend, start):
    asked = []

    def make(size):
        asked.append(size)
        return made_up(size, bend=bend)

    search = functools.partial(largest, make, made_up(start, bend=bend), lambda plan: plan.row_len, unit=64)
    found = search(most=10**6).row_len
    sizes = range(64, 8192, 64)
    assert found == max(size for size in sizes if 1000 + int(2 * size + bend * size**2) <= 10_000)
    assert len(asked) <= 8
    assert search(most=2000).row_len == 1984  # the model ends before the memory


def test_a_plan_names_every_byte_the_program_is_given(sharded_demo):
    plan = make_plan(sharded_demo, Blocks(), rows=4, row_len=64, max_adapters=1)
    adapter = sum(4 * np.prod(shape) for shape in sharded_demo.shapes.values()) / 4  # each device has a part
    assert plan.held["1 adapters"] == adapter
    outside = plan.held["their moments"] + CALLS * adapter  # two moments; the other gradients
    assert abs((sum(plan.held.values()) - outside) / plan.report["arguments"] - 1) <= 0.03
    assert sum(plan.temp.values()) == plan.report["temp"]
    (gathers,) = [one.times for one in plan.collectives if one.kind == "all-gather" and "128,256" in one.shape]
    assert gathers == 4  # two such matrices in each of two layers, once for both passes: no scan, no remat


def test_the_abstract_model_is_the_loaded_one_in_shapes(sharded_demo, state_dir):
    other = abstract(ModelConfig(), devices=jax.devices())
    shapes = lambda tree: jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree)
    assert shapes(other.base) == shapes(sharded_demo.base) and shapes(other.head) == shapes(sharded_demo.head)
    assert other.shapes == sharded_demo.shapes and other.parameters == sharded_demo.parameters


@pytest.mark.parametrize(
    "name, says",
    [
        ("qwen3-30b-a3b", "architecture qwen3_moe is not served"),
        ("no-such-model", "no such model directory: no-such-model"),
    ],
)
def test_what_cannot_be_planned_is_named(name, says):
    with pytest.raises(ValueError, match=says):
        abstract(ModelConfig(model=name), devices=jax.devices())


# ---- the same numbers from the TPU's attention, run by its interpreter


def test_splash_attention_and_plain_attention_give_the_same_hidden_states(state_dir, monkeypatch):
    """Called by name: which of the two MaxText takes depends on the device alone."""
    config = model_module.DEMO_CONFIG | dict(head_dim=128, num_attention_heads=2, num_key_value_heads=1)
    folder = state_dir / "wide"
    model_module.write_demo(folder)
    (folder / "config.json").write_text(json.dumps(config))
    model_module.save_file(model_module.random_weights(config, seed=0), folder / "model.safetensors")
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 260, (1, 512)).astype(np.int32)
    lengths = (200, 150, 130)  # and 32 of padding
    segments = np.repeat([1, 2, 3, 0], [*lengths, 32]).astype(np.int32)[None]
    positions = np.concatenate([*map(np.arange, lengths), np.arange(32)]).astype(np.int32)[None]
    demo = load(ModelConfig(model=str(folder)), state_dir=state_dir, devices=jax.devices()[:1])
    run = lambda tokens: np.asarray(jax.jit(demo.hidden)(demo.base, demo.zeros(), tokens, positions, segments))
    plain = run(tokens)
    with pltpu.force_tpu_interpret_mode(), monkeypatch.context() as patch:

        def splash(op, *, query, key, value, decoder_segment_ids, **_):
            return op.tpu_flash_attention(query, key, value, decoder_segment_ids)[0], None, None

        patch.setattr(AttentionOp, "apply_attention", splash)
        jax.clear_caches()
        flash, others = run(tokens), run(np.where(segments == 1, 7, tokens))  # another first sequence
    live = segments[0] > 0
    assert not np.array_equal(flash, plain)  # it is another program
    np.testing.assert_allclose(flash[0, live], plain[0, live], atol=2e-5)
    np.testing.assert_array_equal(others[0, 200:480], flash[0, 200:480])


# ---- what the compiler says


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """A function: the model of this name or configuration on four v5p chips."""

    @functools.cache
    def named(name: str):
        return abstract(ModelConfig(model=name, remat="full"), devices=topology("v5p:2x2x1"))

    def model_of(what: str | dict):
        if isinstance(what, str):
            return named(what)
        folder = tmp_path_factory.getbasetemp() / f"{what['hidden_size']}"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(what))
        return named(str(folder))

    return model_of


@pytest.fixture(scope="module")
def planned(model_of):
    """A function: the plan of four rows for such a model."""

    def planned(what: str | dict, row_len: int, *, quick: bool) -> Plan:
        model = model_of(what)
        plan = make_plan(model, Blocks(1024, 16_384), rows=4, row_len=row_len, max_adapters=1, quick=quick)
        check_total(plan)
        check_collectives(model, plan, gathered=np.float32 if quick else model.dtype)
        return plan

    return planned


def check_total(plan: Plan) -> None:
    """What the plan says is what the compiler reports, and what only the trainer knows of."""
    outside = plan.held["their moments"] + CALLS * plan.held["1 adapters"]  # the program is given one gradient
    assert abs(plan.total_bytes / (plan.report["peak"] + outside) - 1) <= 0.03


def check_collectives(model, plan: Plan, *, gathered) -> None:
    """`gathered`: the dtype in which the adapters move; that of the base, once the program is optimised."""
    config = model.hf_config
    axes = lambda one: sorted(map(int, re.findall(r"(?<=[\[,])\d+", one.shape)))
    loops = [one for one in plan.collectives if one.looped]
    vocabulary = {config["vocab_size"], config["vocab_size"] // model.fsdp}
    assert loops and not any(vocabulary.intersection(axes(one)) for one in loops)
    # the base: layer by layer, so no gather outside of the loops is as large as one layer's largest matrix
    matrix = 2 * config["hidden_size"] * config["intermediate_size"]
    layers = [one for one in loops if one.kind == "all-gather" and one.times % config["num_hidden_layers"] == 0]
    assert max(one.bytes for one in layers) == matrix
    whole = [sorted(shape) for shape in model.shapes.values()]  # the adapters, of all layers
    others = [one for one in plan.collectives if not one.looped and axes(one) not in whole]
    assert all(one.bytes < matrix for one in others if one.kind == "all-gather")
    # an adapter is gathered as it is applied, and its gradient is reduced: once
    numbers, rank = sum(np.prod(shape) for shape in model.shapes.values()), str(model.config.max_rank)
    moved = lambda kind, which: sum(
        one.bytes * one.times for one in plan.collectives if one.kind == kind and which(one)
    )
    assert moved("all-gather", lambda one: axes(one) in whole) == numbers * np.dtype(gathered).itemsize
    assert moved("all-reduce", lambda one: f"{rank}]" in one.shape) == numbers * model.dtype.itemsize


class TestCompiled:
    pytestmark = tpu_compile

    def test_qwen3_8b_at_its_long_context_peaks_below_16_5_gib_a_chip(self, planned):
        assert planned("qwen3-8b", 22_528, quick=True).report["peak"] <= 16.5 * GIB

    def test_a_27b_model_peaks_below_34_gib_a_chip(self, planned):
        assert planned(DENSE, 20_480, quick=True).report["peak"] <= 34 * GIB

    def test_a_27b_model_fits_three_times_that_context(self, planned):
        assert planned(DENSE, 65_536, quick=True).total_bytes <= CHIP.hbm_bytes

    def test_optimised_it_moves_adapters_in_the_dtype_of_the_base(self, planned):
        """The memory of the others is an unoptimised program's: bench/tpu.py finds Qwen3-8B's at 4 x 22,528 the same."""
        assert planned(NARROW, 1024, quick=False).seconds > 0

    def test_the_embedded_engine_copies_nothing_but_its_caches_at_a_token(self, model_of):
        model, config = model_of(NARROW), SamplerConfig()
        row, adapter, slots = shapes(model, config)
        whole = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=model.sharding())
        ints, floats = np.zeros((4, config.slots), np.uint32), np.zeros((2, config.slots), np.float32)
        _, _, decode = engine_programs(model, config.context)
        base, head = jax.tree.map(whole, model.base), whole(model.head)
        compiled = decode.compile(slots, base, head, ints, floats, np.bool_(False), quick=True).memory_analysis()
        temp = compiled.peak_memory_in_bytes - compiled.argument_size_in_bytes
        caches = sum(2 * np.prod(x.shape) for x in slots[0])  # which `engine_bytes` counts twice
        assert 0.9 * caches < temp < 1.1 * caches

    def test_the_walk_over_the_head_is_the_cheapest_and_chosen_once(self, nothing_kept, monkeypatch):
        model = lambda: abstract(ModelConfig(), devices=topology("v5p:2x2x1"))
        assert trainer_module._loss_cycles(model(), Blocks()) > 0
        asked = []
        made_up = lambda model, blocks: asked.append(blocks) or blocks.tile - blocks.block
        monkeypatch.setattr(trainer_module, "_loss_cycles", made_up)
        choices = [choose_blocks(model()) for _ in range(2)]
        assert choices == [Blocks(1024, 16_384)] * 2 and len(asked) == 4  # the second was read

    def test_the_log_probs_take_370_mib_and_275_ms_on_one_chip(self):
        mesh = jax.sharding.Mesh(np.array(topology("v5p:2x2x1")[:1]), ("fsdp",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)
        arguments = (
            shape(jnp.bfloat16, 20_480, 5120),
            shape(jnp.bfloat16, DENSE_V, 5120),
            shape(np.int32, 20_480),
            shape(np.float32, 20_480),
        )

        def loss(hidden, head, targets, cotangents):
            return (target_logprobs(hidden, head, targets, tile=2048, block=4096) * cotangents).sum()

        compiled = jax.jit(jax.value_and_grad(loss)).lower(*arguments).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= 370 * MIB
        cycles, _ = read_hlo(compiled.as_text(), {"tiles": 10})
        assert 227 <= 1e3 * cycles / CHIP.hz <= 275  # below the roofline nothing was counted


# ---- with chips: what only they can say. bfloat16 products leave a few hundredths of a nat


@pytest.fixture(scope="module")
def on_chips(state_dir):
    return load(ModelConfig(), state_dir=state_dir)


@pytest.mark.tpu
@pytest.mark.skipif(jax.default_backend() != "tpu", reason="no TPU here")
class TestOnChips:
    def test_a_real_step_takes_what_the_plan_says(self, on_chips):
        trainer = trainer_module.Trainer(on_chips, trainer_module.TrainerConfig())
        plan = trainer.plan()
        trainer.warm_up()
        peak = max(device.memory_stats()["peak_bytes_in_use"] for device in on_chips.mesh.local_devices)
        print(f"measured peak {peak / GIB:.3f} GiB, planned {plan.total_bytes / GIB:.3f}")
        assert peak <= 1.03 * plan.total_bytes

    def test_chips_and_cpu_agree_on_a_packed_tile(self, state_dir):
        lengths, scores = np.random.default_rng(0).integers(9, 99, 40), []
        for devices in (jax.devices(), jax.devices("cpu")[:1]):
            model = load(ModelConfig(dtype="float32"), state_dir=state_dir, devices=devices)
            trainer = trainer_module.Trainer(model, trainer_module.TrainerConfig(row_len=512))
            trainer.warm_up()
            trainer.create("a", seed=0, rank=8)
            data = [test_trainer.datum(i, int(n)) for i, n in enumerate(lengths)]
            scores.append(np.concatenate(test_trainer.fb(trainer, "a", data, backward=False)[0]))
        print(f"largest gap {abs(scores[0] - scores[1]).max():.2e} nats")
        np.testing.assert_allclose(*scores, atol=0.05)

    def test_adapters_swapped_while_others_decode_sample_their_own_distribution(self, state_dir, tmp_path):
        trainer, engine, folders = test_sampler.loop(load(ModelConfig(), state_dir=state_dir), tmp_path, slots=6)
        test_sampler.check_agreement(trainer, engine, folders, atol=0.1)
        engine.close()
