import dataclasses
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_sampler import publish

import model as model_module
from losses import LOSSES
from trainer import (
    ADAM,
    MOST_ROWS,
    SENTINEL,
    Trainer,
    TrainerConfig,
    adamw_program,
    check_adam,
    make_pieces,
    make_tiles,
    pack,
    token_budget,
)

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
        "sequence_ratio_mask": np.ones(n),
    }
    inputs = {name: draw[name].astype(np.float32) for name in LOSSES[loss].inputs}
    inputs["target_tokens"] = rng.integers(0, 264, n)
    return Datum(rng.integers(0, 264, n).astype(np.int32), inputs)


def bits(trainer: Trainer, model_id: str) -> list[np.ndarray]:
    state = trainer.adapters[model_id]
    return jax.tree.leaves(jax.device_get((state.weights, state.gradients, state.moments, state.step)))


def timeless(answer) -> tuple:
    _, metrics, step = answer
    return {name: value for name, value in metrics.items() if "per_s" not in name}, step


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


@dataclasses.dataclass
class Request:
    data: list
    loss_fn: str = "cross_entropy"
    loss_config: dict = dataclasses.field(default_factory=dict)


def fb(trainer, name, data, loss="cross_entropy", config=None, *, backward=True):
    """One request alone."""
    (answer,) = trainer.forward_backward(name, [Request(data, loss, config or {})], backward=backward)
    return answer


def train(trainer, name, data, loss="cross_entropy", config=None, **adam):
    logprobs, metrics = fb(trainer, name, data, loss, config or {}, backward=True)
    return logprobs, metrics, trainer.optim_step(name, STEP | adam)


# ---- packing


@given(st.lists(st.integers(1, ROW), max_size=60))
def test_packing_places_every_datum_once_and_overfills_no_row(lengths):
    rows = pack(lengths, ROW)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= ROW for row in rows)


@given(st.lists(st.integers(1, 10_000), max_size=200), st.integers(10_000, 81_920))
def test_packing_at_any_size_places_every_datum_once(lengths, row_len):
    rows = pack(lengths, row_len)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in row) <= row_len for row in rows)


def test_packing_prefers_the_fullest_row_that_still_fits():
    assert pack([6, 4, 3, 7], 10) == [[3, 2], [0, 1]]
    assert pack([], 10) == []


@given(st.lists(st.integers(1, ROW), min_size=1, max_size=30), st.integers(1, 3))
def test_tiles_hold_each_datum_where_they_say_with_its_own_positions(lengths, rows):
    data = [datum(i, n, "ppo") for i, n in enumerate(lengths)]
    tiles = make_tiles(make_pieces([Request(data, "ppo")]), rows=rows, row_len=ROW)
    seen = Counter()
    for tile in tiles:
        for i, (row, start) in tile.places.items():
            here = np.s_[row, start : start + lengths[i]]
            tokens, positions, segments, targets, _ = (plane[here] for plane in tile.ints)
            assert np.array_equal(tokens, data[i].tokens) and np.array_equal(targets, data[i].inputs["target_tokens"])
            assert np.array_equal(positions, np.arange(lengths[i])) and len(set(segments)) == 1 and segments[0] > 0
            assert (tile.ints[2, row] == segments[0]).sum() == lengths[i]  # nobody else in the row has its segment
            assert np.array_equal(tile.floats[2][here], data[i].inputs["advantages"])
            seen[i] += 1
        assert (tile.ints[2] > 0).sum() == sum(lengths[i] for i in tile.places)  # the rest is padding
    assert seen == Counter(range(len(lengths)))


# ---- numbers


def naive_loss(model, adapter, scale, tokens, targets, weights):
    """One datum alone, full logits: the slow path."""
    tokens = tokens[None]
    scaled = model.scaled(adapter, jnp.asarray(scale))
    hidden = model.hidden(model.base, scaled, tokens, jnp.arange(tokens.size)[None], jnp.ones_like(tokens))[0]
    logprobs = jax.nn.log_softmax(hidden.astype(jnp.float32) @ model.head.T.astype(jnp.float32))
    picked = jnp.take_along_axis(logprobs, targets[:, None], 1)[:, 0]
    return -(picked * weights).sum(), picked


def test_packed_log_probs_loss_and_gradients_equal_those_of_each_datum_alone(trainer, adapter, demo):
    name = adapter("a", rank=4)
    train(trainer, name, [datum(9)])  # b must not be zero, or half the gradient is
    state, data = trainer.adapters[name], [datum(i, n) for i, n in enumerate((20, 33, 20))]
    logprobs, metrics = fb(trainer, name, data, "cross_entropy", {}, backward=True)
    got = jax.device_get(state.gradients)
    naive = lambda a, *parts: naive_loss(demo, a, state.scale, *parts)
    alone = jax.jit(jax.value_and_grad(naive, has_aux=True))
    answers = [alone(state.weights, d.tokens, d.inputs["target_tokens"], d.inputs["weights"]) for d in data]
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
        fb(trainer, apart, data, "cross_entropy", {}, backward=True)
    fb(trainer, together, a + b, "cross_entropy", {}, backward=True)
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
    expected, metrics = fb(trainer, name, data, "cross_entropy", {}, backward=True)
    before = bits(trainer, name)
    logprobs, forward = fb(trainer, name, data, "cross_entropy", {}, backward=False)
    assert same(before, bits(trainer, name)) and trainer.adapters[name].accumulated == 1
    np.testing.assert_allclose(np.concatenate(logprobs), np.concatenate(expected), atol=1e-5)
    assert forward["loss:sum"] == pytest.approx(metrics["loss:sum"], rel=1e-6)


def test_outputs_come_in_the_clients_order_and_length(trainer, adapter):
    name, data = adapter("a"), [datum(i, n) for i, n in enumerate((3, 64, 1, 40, 24, 7))]
    logprobs, _ = fb(trainer, name, data, "cross_entropy", {}, backward=False)
    assert [len(x) for x in logprobs] == [3, 64, 1, 40, 24, 7] and all(x.dtype == np.float32 for x in logprobs)
    for i in (0, 2, 5):
        alone, _ = fb(trainer, name, [data[i]], "cross_entropy", {}, backward=False)
        np.testing.assert_allclose(alone[0], logprobs[i], atol=1e-5)


def soft(seed: int, n: int, k: int) -> Datum:
    """K targets a position, their weights a distribution, but for every third position: a prompt."""
    d, rng = datum(seed, n), np.random.default_rng(seed)
    d.inputs = {
        "target_tokens": rng.integers(0, 264, (n, k)),
        "weights": rng.dirichlet(np.ones(k), n).astype(np.float32),
    }
    d.inputs["weights"][::3] = 0
    return d


@pytest.mark.parametrize("where", ["one device", "four devices"])
def test_soft_targets_equal_the_sum_over_their_columns(trainer, adapter, sharded_demo, where):
    """40 targets a position are more than a tile takes: the datum is run twice, and its answer is one again."""
    if where == "four devices":
        trainer = Trainer(sharded_demo, TrainerConfig(row_len=ROW))
    make = adapter if where == "one device" else lambda name, **kwargs: trainer.create(name, **kwargs) or name
    whole, apart, wide, narrow = (
        make("whole", seed=1, rank=4),
        make("apart", seed=1, rank=4),
        soft(1, 20, 40),
        soft(2, 9, 1),
    )
    columns = [Datum(wide.tokens, {name: x[:, k] for name, x in wide.inputs.items()}) for k in range(40)]
    logprobs, metrics = fb(trainer, whole, [wide, narrow])
    expected, sums = fb(
        trainer, apart, [*columns, Datum(narrow.tokens, {k: x[:, 0] for k, x in narrow.inputs.items()})]
    )
    assert [x.shape for x in logprobs] == [(20, 40), (9, 1)]
    np.testing.assert_allclose(logprobs[0], np.stack(expected[:40], axis=1), atol=2e-5)
    np.testing.assert_allclose(logprobs[1][:, 0], expected[40], atol=2e-5)
    assert metrics["loss:sum"] == pytest.approx(sums["loss:sum"], rel=1e-5)
    gradients = [jax.device_get(trainer.adapters[name].gradients) for name in (whole, apart)]
    for path, gradient in gradients[0].items():
        np.testing.assert_allclose(gradient, gradients[1][path], atol=1e-5 * np.abs(gradient).max() + 1e-9)


def test_more_targets_than_a_tile_takes_count_their_tokens_once(trainer, adapter):
    d = soft(1, 20, 70)
    d.inputs["weights"][:, 1:] = 0
    logprobs, metrics = fb(trainer, adapter("a"), [d])
    asked = (d.inputs["weights"] != 0).any(1)
    assert (metrics["tokens:sum"], metrics["scored_tokens:sum"]) == (20, asked.sum())
    assert (logprobs[0][asked] < 0).all() and not logprobs[0][~asked].any()  # all 70, weighted or not


@pytest.mark.parametrize("loss", list(LOSSES))
def test_forward_and_forward_backward_agree_on_the_loss_of_a_datum_with_a_prompt(trainer, adapter, loss):
    name, d = adapter("a"), datum(1, 20, loss)
    for field in set(d.inputs) - {"target_tokens"}:
        d.inputs[field][:12] = 0
    config = {"kl_coeff": 0.05} if loss == "stable_reinforce" else {}
    losses = [fb(trainer, name, [d], loss, config, backward=backward)[1]["loss:sum"] for backward in (True, False)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_inputs_of_other_losses_are_not_read(trainer, adapter):
    name, d = adapter("a"), datum(1, 20)
    _, expected = fb(trainer, name, [d])
    d.inputs |= {"logprobs": np.full(20, -np.inf, np.float32), "advantages": np.full(20, np.nan, np.float32)}
    _, metrics = fb(trainer, name, [d])
    assert timeless((0, metrics, 0)) == timeless((0, expected, 0))


@pytest.mark.parametrize("point", ["_commit", "_flops", "_by_datum", "request_metrics"])
def test_whatever_fails_the_gradients_are_those_of_before(trainer, adapter, monkeypatch, point):
    sick, well, other = adapter("sick", seed=1), adapter("well", seed=1), adapter("other", seed=2)
    for name in (sick, well):
        fb(trainer, name, [datum(1)])
    with monkeypatch.context() as patch:
        place = trainer if hasattr(trainer, point) else "trainer"
        broken = lambda *_, **__: (_ for _ in ()).throw(RuntimeError("broken"))
        patch.setattr(place, point, broken) if place is trainer else patch.setattr(f"trainer.{point}", broken)
        with pytest.raises(RuntimeError, match="broken"):
            fb(trainer, sick, [datum(2)])
    for name in (sick, well):
        fb(trainer, name, [datum(3)])
    fb(trainer, other, [datum(4)])
    assert same(bits(trainer, sick), bits(trainer, well))


def test_prompts_cost_no_head_and_change_nothing_else(trainer, adapter):
    name, d = adapter("a"), datum(1, 20, "importance_sampling")
    d.inputs["logprobs"][:8] = d.inputs["advantages"][:8] = 0
    logprobs, metrics = fb(trainer, name, [d], "importance_sampling")
    everything, _ = fb(trainer, name, [d], "importance_sampling", backward=False)
    assert not logprobs[0][:8].any() and metrics["scored_tokens:sum"] == 12
    np.testing.assert_allclose(logprobs[0][8:], everything[0][8:], atol=1e-6)
    assert (everything[0] < 0).all()


def test_requests_that_share_tiles_get_the_answers_of_each_alone(trainer, adapter):
    """Configurations may differ; only the loss is one. Three requests of 20 tokens take one tile of 64 instead of three."""
    shared, alone = adapter("shared", seed=1), adapter("alone", seed=1)
    requests = [
        Request([datum(i, 10, "ppo"), datum(9 + i, 10, "ppo")], "ppo", {"clip_high_threshold": 1.1 + i})
        for i in range(3)
    ]
    together = trainer.forward_backward(shared, requests, backward=True)
    apart = [trainer.forward_backward(alone, [request], backward=True)[0] for request in requests]
    for (logprobs, metrics), (expected, single) in zip(together, apart, strict=True):
        np.testing.assert_allclose(np.stack(logprobs), np.stack(expected), atol=2e-5)
        for key in ("loss:sum", "kl_sample_train:mean", "clipped_fraction:mean", "entropy:mean"):
            assert metrics[key] == pytest.approx(single[key], rel=1e-4), key
        assert (metrics["tiles:sum"], single["tiles:sum"]) == (pytest.approx(1 / 3), 1)
    gradients = [jax.device_get(trainer.adapters[name].gradients) for name in (shared, alone)]
    for path, gradient in gradients[0].items():
        np.testing.assert_allclose(gradient, gradients[1][path], atol=1e-5 * np.abs(gradient).max() + 1e-9)


def test_gspo_takes_its_mean_over_one_sequence_of_a_packed_row(trainer, adapter):
    name, data = adapter("a"), [datum(i, 15, "gspo") for i in range(4)]
    for d in data:
        d.inputs["sequence_ratio_mask"][:5] = 0
    config = {"clip_low_threshold": 0.0, "clip_high_threshold": 1e6}
    logprobs, metrics = fb(trainer, name, data, "gspo", config)
    expected = 0.0
    for d, lp in zip(data, logprobs, strict=True):
        expected -= np.exp((lp - d.inputs["logprobs"])[5:].mean(dtype=np.float64)) * d.inputs["advantages"].sum()
    assert metrics["loss:sum"] == pytest.approx(expected, rel=1e-4) and metrics["clipped_fraction:mean"] == 0


def test_agreement_is_measured_by_hand(trainer, adapter):
    name, d = adapter("a"), datum(1, 6, "ppo")
    truth = fb(trainer, name, [d], "ppo", backward=False)[0][0]
    gaps = np.array([0.0, 0.1, -0.3, 0.0, 0.5, 0.0], np.float32)  # of the trainer over the sampler
    d.inputs["logprobs"] = truth - gaps
    d.inputs["advantages"][3], d.inputs["logprobs"][3] = 0, 0  # a prompt token
    d.inputs["logprobs"][5] = -99999  # the engine had none
    _, metrics = fb(trainer, name, [d], "ppo")
    assert metrics["kl_sample_train:mean"] == pytest.approx(-0.3 / 4, abs=1e-5)
    assert metrics["max_logprob_gap:max"] == pytest.approx(0.5, abs=1e-5)
    assert metrics["clipped_fraction:mean"] == 2 / 4  # exp(-0.3) < 0.8, exp(0.5) > 1.2
    assert (metrics["unusable_tokens:sum"], metrics["scored_tokens:sum"], metrics["tokens:sum"]) == (1, 5, 6)


def test_unusable_numbers_count_for_nothing_and_are_counted(trainer, adapter):
    bad, good = adapter("bad", seed=1), adapter("good", seed=1)
    d = datum(3, 20, "importance_sampling")
    spoiled = Datum(d.tokens, {name: x.copy() for name, x in d.inputs.items()})
    spoiled.inputs["logprobs"][:3], spoiled.inputs["advantages"][3:5] = (np.nan, -9999, np.inf), (np.nan, -np.inf)
    d.inputs["advantages"][:5] = 0
    (_, mine), (_, theirs) = (
        fb(trainer, bad, [spoiled], "importance_sampling"),
        fb(trainer, good, [d], "importance_sampling"),
    )
    assert mine["unusable_tokens:sum"] == 5 and mine["loss:sum"] == pytest.approx(theirs["loss:sum"], rel=1e-6)
    for path, gradient in jax.device_get(trainer.adapters[bad].gradients).items():
        np.testing.assert_allclose(gradient, trainer.adapters[good].gradients[path], rtol=1e-5, atol=1e-9)


def test_stable_reinforce_says_that_it_is_not_tinkers(trainer, adapter):
    _, metrics = fb(trainer, adapter("a"), [datum(1, loss="stable_reinforce")], "stable_reinforce", {"kl_coeff": 0.1})
    assert metrics["stable_reinforce_is_not_tinkers:max"] == 1


# ---- memory


class OutOfMemory:
    """In the place of a compiled program: says at the given calls what XLA says, and gives its first buffer up."""

    def __init__(self, program, calls):
        self.program, self.calls, self.count = program, calls, 0

    def __call__(self, *args):
        self.count += 1
        if self.count in self.calls:
            jax.tree.map(lambda array: array.delete(), args[3])  # as a donated buffer is, when execution fails
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")
        return self.program(*args)


def test_an_allocation_that_fails_once_is_tried_again(trainer, adapter, monkeypatch, compilations):
    sick, well, data = adapter("sick", seed=1), adapter("well", seed=1), [datum(i, 40) for i in range(3)]
    monkeypatch.setattr("trainer.RETRY_S", (0.01, 0.01))
    fb(trainer, sick, [datum(7)]), fb(trainer, well, [datum(7)])
    expected, before = fb(trainer, well, data), compilations()
    monkeypatch.setattr(trainer, "_gradient", OutOfMemory(trainer._gradient, {2, 4}))  # in the midst of two attempts
    logprobs, metrics = fb(trainer, sick, data)
    assert same(logprobs, expected[0]) and metrics["loss:sum"] == expected[1]["loss:sum"]
    assert same(bits(trainer, sick), bits(trainer, well)) and compilations() == before


def test_one_that_goes_on_failing_fails_its_request_alone(trainer, adapter, monkeypatch, compilations):
    sick, well = adapter("sick", seed=1), adapter("well", seed=2)
    monkeypatch.setattr("trainer.RETRY_S", (0.01, 0.01))
    for name in (sick, well):
        fb(trainer, name, [datum(1)])
    before, count = [bits(trainer, name) for name in (sick, well)], compilations()
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "_gradient", OutOfMemory(trainer._gradient, {2, 4, 6}))
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            fb(trainer, sick, [datum(i, 40) for i in range(3)])
    assert all(same(old, bits(trainer, name)) for old, name in zip(before, (sick, well), strict=True))
    assert np.isfinite(train(trainer, sick, [datum(2)])[1]["loss:sum"]) and compilations() == count


def test_calls_that_take_turns_give_to_the_bit_what_each_gives_alone(trainer, adapter, monkeypatch, compilations):
    """Also where one of them fails in the middle, and where a client's call is given up."""
    long, data, short = [datum(i, 40) for i in range(3)], [datum(9)], lambda name: fb(trainer, name, [datum(9)])
    alone = [adapter(name, seed=seed) for seed, name in enumerate(("a", "b"))]
    expected, before = (fb(trainer, alone[0], long), short(alone[1])), compilations()
    twins = [bits(trainer, name) for name in alone]
    trainer.release("a")
    mine, other, given_up = [adapter(name, seed=seed) for name, seed in (("c", 0), ("d", 1), ("e", 0))]
    untouched = bits(trainer, given_up)
    turns = trainer.turns(mine, [Request(long)], backward=True)
    assert next(turns) is None and same(bits(trainer, mine), untouched)
    dropped = trainer.turns(given_up, [Request(long)], backward=True)
    assert next(dropped) is None
    dropped.close()
    assert same(short(other)[0], expected[1][0])
    assert next(turns) is None
    with monkeypatch.context() as patch:
        patch.setattr("trainer.RETRY_S", ())
        patch.setattr(trainer, "_gradient", OutOfMemory(trainer._gradient, {1}))
        with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
            fb(trainer, given_up, data)
    (((logprobs, metrics),),) = turns
    assert same(logprobs, expected[0][0]) and metrics["tiles:sum"] == 3
    assert all(same(bits(trainer, name), twin) for name, twin in zip((mine, other), twins, strict=True))
    assert same(bits(trainer, given_up), untouched) and compilations() == before


def test_the_token_budget_follows_from_the_memory_that_is_free():
    assert token_budget(1000, 100, rows=4, row_len=512) == 9  # nine tenths of what is free
    assert token_budget(10**9, 100, rows=4, row_len=512) == MOST_ROWS
    with pytest.raises(
        ValueError, match="--row-len is 512: .* 100 bytes a device, of which 50 are free; about 256 tokens"
    ):
        token_budget(50, 100, rows=4, row_len=512)


def test_rows_are_chosen_by_the_compilers_count_of_bytes(demo, monkeypatch):
    few = Trainer(demo, TrainerConfig(row_len=ROW))
    plan = few.plan()
    held, temp = sum(plan.held.values()), sum(plan.temp.values())
    monkeypatch.setattr("trainer._memory_limit", lambda model: held + 4 * temp)
    assert few.affordable(few.plan()) == 3  # nine tenths of four
    monkeypatch.setattr("trainer._memory_limit", lambda model: held + temp - 1)
    for rows in (None, 1):  # chosen by the trainer or by the user
        with pytest.raises(ValueError, match=f"--row-len is {ROW}"):
            Trainer(demo, TrainerConfig(row_len=ROW, rows=rows)).warm_up()
    monkeypatch.setattr("trainer._memory_limit", lambda model: held + 4 * temp)
    with pytest.raises(ValueError, match=r"of which 0 are free; .* \(--sampler vllm --replica URL\)"):
        Trainer(demo, TrainerConfig(row_len=ROW), beside={"the embedded sampler": 5 * temp}).warm_up()


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_a_base_that_the_compiler_lays_out_gives_the_same_numbers(state_dir, tmp_path, monkeypatch, tied):
    folder = model_module.write_demo(tmp_path / "demo")
    config = model_module.DEMO_CONFIG | {"tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(config))
    model_module.save_file(model_module.random_weights(config, seed=0), folder / "model.safetensors")
    results = []
    for choosy in ((), ("cpu",)):
        monkeypatch.setattr("model.CHOOSY", choosy)
        model = model_module.load(model_module.ModelConfig(model=str(folder)), state_dir=state_dir)
        trainer = Trainer(model, TrainerConfig(row_len=ROW))
        trainer._fit()
        assert (trainer.model is model) == (not choosy)
        trainer.create("a", seed=1, rank=4)
        results.append([fb(trainer, "a", [datum(1), datum(2)])[0], bits(trainer, "a")])
    assert same(results[0][0], results[1][0]) and same(results[0][1], results[1][1])
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(model.base))  # no second copy stays


def test_a_model_that_sees_across_segments_gets_a_row_for_each_sequence(demo, adapter):
    class Leaky(type(demo)):
        def hidden(self, base, adapter, tokens, positions, segment_ids):
            hidden = super().hidden(base, adapter, tokens, positions, segment_ids)
            return hidden + 0.1 * jnp.cumsum(hidden, axis=1)  # a recurrent layer that forgets to forget

    leaky = Trainer(
        Leaky(**{f.name: getattr(demo, f.name) for f in dataclasses.fields(demo)}), TrainerConfig(row_len=ROW)
    )
    leaky.warm_up()
    assert leaky.alone
    leaky.create("a", seed=0, rank=4)
    together, _ = fb(leaky, "a", [datum(1), datum(2)])
    alone, metrics = fb(leaky, "a", [datum(2)])
    np.testing.assert_allclose(together[1], alone[0], atol=1e-5)
    assert metrics["tile_fill:mean"] == 20 / ROW


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
            a = path.endswith("/a")
            inside, outside = (array[:3], array[3:]) if a else (array[:, :3], array[:, 3:])
            assert inside.all() and not outside.any(), path


def test_prompts_are_scored_under_what_was_published_and_nothing_compiles(trainer, adapter, tmp_path, compilations):
    name, base = adapter("a", rank=4), adapter("base", rank=1)  # a fresh adapter changes nothing
    for seed in range(3):
        train(trainer, name, [datum(seed)])
    folder = publish(trainer, name, tmp_path / "a")
    prompts = [np.random.default_rng(n).integers(0, 264, n).astype(np.int32) for n in (2, 30, ROW + 1, 30)]
    data = [Datum(p[:-1], {"target_tokens": p[1:], "weights": np.zeros(len(p) - 1, np.float32)}) for p in prompts]
    trainer.score(prompts[:1], folder)  # reading alpha / rank compiles a conversion, once
    before = compilations()
    for model_id, where in ((name, folder), (base, None)):
        scores, (expected, _) = trainer.score(prompts, where), fb(trainer, model_id, data, backward=False)
        for got, logprobs in zip(scores, expected, strict=True):
            assert np.isnan(got[0]) and got.dtype == np.float32
            np.testing.assert_array_equal(got[1:], logprobs)
    assert compilations() == before


# ---- isolation, checkpoints, limits


@pytest.mark.parametrize("poison", ["gradient", "weight decay", "sampling log-probs"])
def test_what_happens_to_one_adapter_changes_no_bit_of_another(trainer, adapter, poison):
    sick, well = adapter("sick", seed=1), adapter("well", seed=2)
    train(trainer, well, [datum(1)])
    train(trainer, sick, [datum(1)])
    fb(trainer, well, [datum(2)], "cross_entropy", {}, backward=True)
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
        assert same(mine[0], theirs[0]) and timeless(mine) == timeless(theirs)
    assert same(bits(trainer, name), bits(other, "b"))
    assert {array.shape[0] if key.endswith("/a") else array.shape[1] for key, array in tensors.items()} == {5}


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
        fb(trainer, name, data, loss, config, backward=bool(call % 4))
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
    fb(trainer, name, [datum(1)])
    old = list(trainer._spare.values())
    fb(trainer, name, [datum(1)])
    assert all(array.is_deleted() for array in old)
    weights = list(state.weights.values())
    trainer.optim_step(name, STEP)
    assert all(array.is_deleted() for array in weights)
