import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from losses import LOSSES
from trainer import ADAM, SENTINEL, Trainer, TrainerConfig, adamw_program, check_adam, make_tiles, pack

STEP = dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0)
ROW = 64


@dataclasses.dataclass
class Datum:
    tokens: np.ndarray
    inputs: dict


def datum(seed: int, n: int = 20, loss: str = "cross_entropy") -> Datum:
    rng = np.random.default_rng(seed)
    draw = {
        "weights": rng.uniform(0, 1, n),
        "logprobs": rng.uniform(-7, -4, n),  # near what an untrained demo model says, so that ratios stay finite
        "advantages": rng.normal(size=n),
    }
    inputs = {name: draw[name].astype(np.float32) for name in LOSSES[loss].inputs}
    inputs["target_tokens"] = rng.integers(0, 264, n)
    return Datum(rng.integers(0, 264, n).astype(np.int32), inputs)


def bits(trainer: Trainer, model_id: str) -> list[np.ndarray]:
    state = trainer.adapters[model_id]
    return jax.tree.leaves(jax.device_get((state.weights, state.gradients, state.moments, state.step)))


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def trainer(demo):
    trainer = Trainer(demo, TrainerConfig(row_len=ROW, max_adapters=4))
    trainer.warm_up()
    return trainer


@pytest.fixture
def adapter(trainer):
    """A function that makes adapters, gone after the test."""
    made = []

    def make(name: str, seed: int = 0, rank: int = 8, **flags) -> str:
        trainer.create(name, seed=seed, rank=rank, **flags)
        made.append(name)
        return name

    yield make
    for name in made:
        trainer.release(name)


def train(trainer, name, data, loss="cross_entropy", config=None, **adam):
    logprobs, metrics = trainer.forward_backward(name, data, loss, config or {}, backward=True)
    return logprobs, metrics, trainer.optim_step(name, STEP | adam)


# ---- packing


@given(st.lists(st.integers(1, ROW), max_size=60))
def test_packing_places_every_datum_once_and_overfills_no_row(lengths):
    rows = pack(lengths, ROW)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= ROW for row in rows)


def test_packing_prefers_the_fullest_row_that_still_fits():
    assert pack([6, 4, 3, 7], 10) == [[3, 2], [0, 1]]
    assert pack([], 10) == []


@given(st.lists(st.integers(1, ROW), min_size=1, max_size=30), st.integers(1, 3))
def test_tiles_hold_each_datum_where_they_say_with_its_own_positions(lengths, rows):
    data = [datum(i, n, "ppo") for i, n in enumerate(lengths)]
    tiles = make_tiles(data, rows=rows, row_len=ROW)
    seen = Counter()
    for tile in tiles:
        for i, (row, start) in tile.places.items():
            here = np.s_[row, start : start + lengths[i]]
            tokens, positions, segments, targets = (plane[here] for plane in tile.ints)
            assert np.array_equal(tokens, data[i].tokens) and np.array_equal(targets, data[i].inputs["target_tokens"])
            assert np.array_equal(positions, np.arange(lengths[i])) and len(set(segments)) == 1 and segments[0] > 0
            assert (tile.ints[2, row] == segments[0]).sum() == lengths[i]  # nobody else in the row has its segment
            assert np.array_equal(tile.floats[2][here], data[i].inputs["advantages"])
            seen[i] += 1
        assert (tile.ints[2] > 0).sum() == sum(lengths[i] for i in tile.places)  # the rest is padding
    assert seen == Counter(range(len(lengths)))


# ---- numbers


def naive_loss(model, adapter, scale, d: Datum):
    """One datum alone, full logits: the slow path."""
    tokens = jnp.asarray(d.tokens)[None]
    scaled = model.scaled(adapter, jnp.asarray(scale))
    hidden = model.hidden(model.base, scaled, tokens, jnp.arange(tokens.size)[None], jnp.ones_like(tokens))[0]
    logprobs = jax.nn.log_softmax(hidden.astype(jnp.float32) @ model.head.T.astype(jnp.float32))
    picked = jnp.take_along_axis(logprobs, jnp.asarray(d.inputs["target_tokens"])[:, None], 1)[:, 0]
    return -(picked * d.inputs["weights"]).sum(), picked


def test_packed_log_probs_loss_and_gradients_equal_those_of_each_datum_alone(trainer, adapter, demo):
    name = adapter("a", rank=4)
    train(trainer, name, [datum(9)])  # b must not be zero, or half the gradient is
    state, data = trainer.adapters[name], [datum(i, n) for i, n in enumerate((20, 33, 20))]
    logprobs, metrics = trainer.forward_backward(name, data, "cross_entropy", {}, backward=True)
    got = jax.device_get(state.gradients)
    alone = jax.value_and_grad(lambda a, d: naive_loss(demo, a, state.scale, d), has_aux=True)
    answers = [alone(state.weights, d) for d in data]
    for mine, ((_, expected), _) in zip(logprobs, answers, strict=True):
        np.testing.assert_allclose(mine, expected, atol=2e-5)
    assert metrics["loss:sum"] == pytest.approx(sum(float(loss) for (loss, _), _ in answers), rel=1e-6)
    for path, gradient in got.items():
        expected = sum(np.asarray(g[path]) for _, g in answers)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_four_devices_give_the_numbers_of_one(trainer, adapter, sharded_demo):
    wide = Trainer(sharded_demo, TrainerConfig(row_len=ROW))
    wide.create("a", seed=3, rank=4)
    name, data = adapter("a", seed=3, rank=4), [datum(i, 10 + i) for i in range(12)]
    for _ in range(2):
        (one, loss, step), (four, wide_loss, wide_step) = train(trainer, name, data), train(wide, "a", data)
        np.testing.assert_allclose(np.concatenate(one), np.concatenate(four), atol=1e-4)
        assert loss["loss:sum"] == pytest.approx(wide_loss["loss:sum"], rel=1e-5)
        assert step["optim/grad_norm"] == pytest.approx(wide_step["optim/grad_norm"], rel=1e-4)


def test_two_calls_accumulate_to_the_gradients_of_one(trainer, adapter):
    a, b = [datum(i, 30) for i in range(4)], [datum(10 + i, 25) for i in range(3)]
    apart, together = adapter("apart", seed=1), adapter("together", seed=1)
    for data in (a, b):
        trainer.forward_backward(apart, data, "cross_entropy", {}, backward=True)
    trainer.forward_backward(together, a + b, "cross_entropy", {}, backward=True)
    gradients = [jax.device_get(trainer.adapters[name].gradients) for name in (apart, together)]
    trainer.optim_step(apart, STEP), trainer.optim_step(together, STEP)
    weights = [jax.device_get(trainer.adapters[name].weights) for name in (apart, together)]
    for path in gradients[0]:
        scale = np.abs(gradients[0][path]).max()
        np.testing.assert_allclose(gradients[0][path], gradients[1][path], atol=1e-6 * scale + 1e-12)
    used = lambda path: (
        np.abs(gradients[0][path]) > 1e-3
    )  # Adam's first step is the sign of the gradient: of noise, elsewhere
    for path in weights[0]:
        np.testing.assert_allclose(weights[0][path][used(path)], weights[1][path][used(path)], atol=1e-6)


def test_forward_only_gives_the_same_log_probs_and_touches_nothing(trainer, adapter):
    name, data = adapter("a"), [datum(1), datum(2)]
    expected, metrics = trainer.forward_backward(name, data, "cross_entropy", {}, backward=True)
    before = bits(trainer, name)
    logprobs, forward = trainer.forward_backward(name, data, "cross_entropy", {}, backward=False)
    assert same(before, bits(trainer, name)) and trainer.adapters[name].accumulated == 1
    np.testing.assert_allclose(np.concatenate(logprobs), np.concatenate(expected), atol=1e-5)
    assert forward["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-6)


def test_outputs_come_in_the_clients_order_and_length(trainer, adapter):
    name, data = adapter("a"), [datum(i, n) for i, n in enumerate((3, 64, 1, 40, 24, 7))]
    logprobs, _ = trainer.forward_backward(name, data, "cross_entropy", {}, backward=False)
    assert [len(x) for x in logprobs] == [3, 64, 1, 40, 24, 7] and all(x.dtype == np.float32 for x in logprobs)
    for i in (0, 2, 5):
        alone, _ = trainer.forward_backward(name, [data[i]], "cross_entropy", {}, backward=False)
        np.testing.assert_allclose(alone[0], logprobs[i], atol=1e-5)


# ---- the optimizer


@pytest.mark.parametrize("changes", [{}, {"weight_decay": 0.1}, {"grad_clip_norm": 0.5}, {"beta1": 0.0, "eps": 1e-3}])
def test_adamw_equals_optax_over_five_steps(changes):
    adam, rng = STEP | changes, np.random.default_rng(0)
    mine = theirs = {"w": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)}
    zeros = jax.tree.map(jnp.zeros_like, mine)
    clip = optax.clip_by_global_norm(adam["grad_clip_norm"] or np.inf)
    rule = optax.adamw(*(adam[name] for name in ADAM[:4]), weight_decay=adam["weight_decay"])
    oracle = optax.chain(clip, rule)
    state, moments = oracle.init(theirs), (zeros, zeros)
    for step in range(5):
        gradients = {"w": jnp.asarray(rng.normal(size=(5, 3)), jnp.float32)}
        updates, state = oracle.update(gradients, state, theirs)
        theirs = optax.apply_updates(theirs, updates)
        mine, cleared, moments, out = adamw_program(
            mine, gradients, moments, np.int32(step), jnp.asarray(check_adam(adam))
        )
        np.testing.assert_allclose(mine["w"], theirs["w"], atol=1e-6)
        assert not cleared["w"].any() and float(out[0]) == pytest.approx(
            float(jnp.linalg.norm(gradients["w"])), rel=1e-6
        )


def test_adamw_by_hand():
    one = {"w": jnp.array([1.0])}
    zero = {"w": jnp.array([0.0])}
    adam = jnp.asarray(check_adam(STEP | {"learning_rate": 0.1, "weight_decay": 0.5}))
    # first step: m-hat = g, v-hat = g^2, so the direction is sign(g); w - 0.1 * (1 + 0.5 * w)
    w, *_ = adamw_program(one, {"w": jnp.array([4.0])}, (zero, zero), np.int32(0), adam)
    assert float(w["w"][0]) == pytest.approx(1.0 - 0.1 * (1 + 0.5))


@pytest.mark.parametrize("name", ADAM)
@pytest.mark.parametrize("value", [-0.5, np.nan, np.inf])
def test_a_number_outside_its_domain_is_refused_by_name(name, value):
    with pytest.raises(ValueError, match=rf"adam_params.{name} is {value}; allowed: .\d, (1|inf)\)"):
        check_adam(STEP | {name: value})


@pytest.mark.parametrize(
    "extreme", [{"learning_rate": 1e39}, {"beta1": 1 - 1e-9}, {"eps": 1e-40}, {"weight_decay": 1e39}]
)
def test_a_number_outside_its_domain_only_in_float32_is_refused_too(extreme):
    with pytest.raises(ValueError, match=f"adam_params.{next(iter(extreme))}"):
        check_adam(STEP | extreme)


def test_an_update_that_would_destroy_the_adapter_is_skipped(trainer, adapter):
    name = adapter("a")
    train(trainer, name, [datum(1)])
    weights = jax.device_get(trainer.adapters[name].weights)
    _, _, metrics = train(trainer, name, [datum(2)], learning_rate=1e30)
    assert metrics["optim/skipped"] == 1
    assert jax.tree.all(jax.tree.map(np.array_equal, weights, jax.device_get(trainer.adapters[name].weights)))


def test_a_step_without_gradients_changes_nothing_and_says_so(trainer, adapter):
    name = adapter("a")
    train(trainer, name, [datum(1)])
    before = bits(trainer, name)
    metrics = trainer.optim_step(name, STEP | {"weight_decay": 0.5})
    assert same(before, bits(trainer, name)) and metrics["optim/skipped"] == 1


def test_columns_beyond_the_rank_and_modules_not_trained_stay_exactly_zero(trainer, adapter):
    name = adapter("a", rank=3, train_attn=False)
    for seed in range(3):
        train(trainer, name, [datum(seed)], weight_decay=0.1)
    for path, array in jax.device_get(trainer.adapters[name].weights).items():
        if "self_attention" in path:
            assert not array.any(), path
        else:
            inside, outside = (array[..., :3], array[..., 3:]) if path.endswith("/a") else (array[:3], array[3:])
            assert inside.all() and not outside.any(), path


# ---- isolation, checkpoints, limits


@pytest.mark.parametrize("poison", ["gradient", "weight decay", "sampling log-probs"])
def test_what_happens_to_one_adapter_changes_no_bit_of_another(trainer, adapter, poison):
    sick, well = adapter("sick", seed=1), adapter("well", seed=2)
    train(trainer, well, [datum(1)])
    train(trainer, sick, [datum(1)])
    trainer.forward_backward(well, [datum(2)], "cross_entropy", {}, backward=True)
    before = bits(trainer, well)
    if poison == "gradient":
        bad = datum(3)
        bad.inputs["weights"][4] = 3e38
        state = trainer.adapters[sick]
        untouched = jax.device_get((state.weights, state.moments))
        _, _, metrics = train(trainer, sick, [bad, bad])
        assert metrics["optim/skipped"] == 1 and state.step == 1
        assert same(jax.tree.leaves(untouched), jax.tree.leaves(jax.device_get((state.weights, state.moments))))
        _, _, metrics = train(trainer, sick, [datum(4)])  # the poison is gone with the step that it spoiled
        assert metrics["optim/skipped"] == 0 and np.isfinite(metrics["optim/grad_norm"])
    elif poison == "weight decay":
        train(trainer, sick, [datum(3)], weight_decay=0.9)
    else:
        bad = datum(3, loss="importance_sampling")
        bad.inputs["logprobs"][:3] = np.nan, SENTINEL - 1, np.inf
        logprobs, metrics, step = train(trainer, sick, [bad], loss="importance_sampling")
        assert np.isfinite(metrics["loss:sum"]) and np.isfinite(logprobs[0]).all() and step["optim/skipped"] == 0
    assert same(before, bits(trainer, well))


@pytest.mark.parametrize("optimizer", [True, False])
def test_a_checkpoint_restored_elsewhere_takes_bit_equal_steps(trainer, adapter, demo, optimizer):
    name = adapter("a", rank=5, train_mlp=False)
    train(trainer, name, [datum(1)])
    tensors, meta = trainer.checkpoint(name)
    other = Trainer(demo, TrainerConfig(row_len=ROW))
    other.restore("b", tensors, meta, optimizer=optimizer)
    if not optimizer:  # the same as restoring over the original
        trainer.restore(name, tensors, meta, optimizer=False)
    for seed in (2, 3):
        mine, theirs = train(trainer, name, [datum(seed)]), train(other, "b", [datum(seed)])
        assert same(mine[0], theirs[0]) and mine[1:] == theirs[1:]
    assert same(bits(trainer, name), bits(other, "b"))
    assert max(array.shape[-1] if key.endswith("/a") else array.shape[0] for key, array in tensors.items()) == 5


def test_a_checkpoint_that_does_not_fit_is_refused_by_tensor(trainer, adapter):
    tensors, meta = trainer.checkpoint(adapter("a", rank=4))
    first = next(iter(tensors))
    with pytest.raises(ValueError, match=f"{first} is missing"):
        trainer.restore("b", {k: v for k, v in tensors.items() if k != first}, meta, optimizer=True)
    with pytest.raises(ValueError, match=f"{first} is of shape"):
        trainer.restore("b", tensors | {first: np.zeros((1, 1), np.float32)}, meta, optimizer=True)
    with pytest.raises(ValueError, match="rank is 64; this server takes 1..32"):
        trainer.restore("b", tensors, meta | {"rank": 64}, optimizer=True)
    assert "b" not in trainer.adapters


def test_one_adapter_more_than_the_limit_is_refused_and_disturbs_none(trainer, adapter):
    for i in range(4):
        adapter(f"m{i}")
    with pytest.raises(ValueError, match=r"4 adapters are in training, the limit .*--max-adapters"):
        trainer.create("one more", seed=0, rank=1)
    assert len(trainer.adapters) == 4


@pytest.mark.parametrize(
    ("options", "message"), [({"rows": 0}, "--rows is 0"), ({"row_len": 1}, "--row-len is 1; demo takes 2..2048")]
)
def test_an_impossible_tile_is_refused_at_start(demo, options, message):
    with pytest.raises(ValueError, match=message):
        Trainer(demo, TrainerConfig(**options))


def test_rows_must_divide_over_the_devices(sharded_demo):
    with pytest.raises(ValueError, match="--rows is 6; it must be a multiple of the 4 devices"):
        Trainer(sharded_demo, TrainerConfig(rows=6))


# ---- one compiled shape


def live() -> Counter:
    return Counter((a.shape, str(a.dtype)) for a in jax.live_arrays())


def test_two_hundred_calls_of_any_kind_compile_nothing_and_leave_no_array(trainer, adapter, compilations):
    rng = np.random.default_rng(0)
    names = [adapter(f"m{i}", seed=i, rank=rank) for i, rank in enumerate((1, 8, 32))]
    configs = {"ppo": [{}, {"clip_low_threshold": 0.5}], "dro": [{"beta": 0.1}, {}]}
    before, arrays = compilations(), live()
    for call in range(200):
        loss = str(rng.choice(list(LOSSES)))
        data = [datum(call + i, int(rng.integers(1, ROW + 1)), loss) for i in range(rng.integers(1, 5))]
        config = configs.get(loss, [{}])[call % len(configs.get(loss, [{}]))]
        name = str(rng.choice(names))
        trainer.forward_backward(name, data, loss, config, backward=bool(call % 4))
        if call % 5 == 0:
            trainer.optim_step(name, STEP | {"learning_rate": float(rng.uniform(0, 1e-3))})
        if call == 100:
            trainer.create("late", seed=call, rank=int(rng.integers(1, 33)))
            trainer.release("late")
    assert compilations() == before
    assert live() == arrays


def test_gradients_and_weights_are_donated(trainer, adapter):
    name = adapter("a")
    state = trainer.adapters[name]
    old = list(state.gradients.values())
    trainer.forward_backward(name, [datum(1)], "cross_entropy", {}, backward=True)
    assert all(array.is_deleted() for array in old)
    weights = list(state.weights.values())
    trainer.optim_step(name, STEP)
    assert all(array.is_deleted() for array in weights)
