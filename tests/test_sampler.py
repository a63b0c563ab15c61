import dataclasses
import json
from concurrent.futures import CancelledError
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

import model
from sampler import EmbeddedEngine, Overloaded, SamplerConfig, engine_bytes
from trainer import Trainer, TrainerConfig
from wire import Datum, SampleRequest, SamplingParams

CONTEXT = 96
STEP = dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, weight_decay=0.0, grad_clip_norm=0.0)
rng = np.random.default_rng(0)
PROMPT = rng.integers(0, 256, 20).astype(np.int32)


def request(
    prompt=PROMPT, *, n=1, max_tokens=12, temperature=1.0, top_k=0, top_p=1.0, seed=None, stop=(), eos=False, **scores
):
    tokens, strings = (tuple(x for x in stop if isinstance(x, kind)) for kind in (int, str))
    params = SamplingParams(max_tokens, temperature, top_k, top_p, seed, tokens, strings, eos)
    wanted = (
        dict(prompt_logprobs=False, prompt_logprobs_last_n=None, topk_prompt_logprobs=0, topk_sample_logprobs=0)
        | scores
    )
    return SampleRequest("s", 0, n, np.asarray(prompt, np.int32), params, **wanted)


def publish(trainer: Trainer, model_id: str, folder):
    return write_adapter(folder, *trainer.snapshot(model_id))


def write_adapter(folder, tensors: dict, config: dict):
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def score(trainer: Trainer, model_id: str, tokens: np.ndarray) -> np.ndarray:
    """Teacher-forced by the trainer: the log-prob of every token but the first."""
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(len(tokens) - 1, np.float32)}
    data = [Datum(tokens[:-1].astype(np.int32), inputs)]
    return trainer.forward_backward(
        model_id, [SimpleNamespace(data=data, loss_fn="cross_entropy", loss_config={})], backward=False
    )[0][0][0]


def train(trainer: Trainer, model_id: str, steps: int = 2, dice=rng) -> None:
    for _ in range(steps):
        tokens = dice.integers(0, 264, 41)
        inputs = {"target_tokens": tokens[1:], "weights": np.ones(40, np.float32)}
        data = [Datum(tokens[:-1].astype(np.int32), inputs)]
        trainer.forward_backward(
            model_id, [SimpleNamespace(data=data, loss_fn="cross_entropy", loss_config={})], backward=True
        )
        trainer.optim_step(model_id, STEP)


def loop(base: model.Model, tmp_path, **config):
    """(trainer, engine, folders): two trained adapters and the base."""
    trainer = Trainer(base, TrainerConfig(row_len=CONTEXT))
    folders = {"base": None}
    trainer.create("base", seed=0, rank=1)
    for name, rank in (("a", 4), ("b", 32)):
        trainer.create(name, seed=rank, rank=rank)
        train(trainer, name)
        folders[name] = publish(trainer, name, tmp_path / name)
    engine = EmbeddedEngine(base, SamplerConfig(context=CONTEXT, chunk=16, **config))
    engine.warm_up()
    return trainer, engine, folders


@pytest.fixture(scope="module")
def running(demo, tmp_path_factory):
    trainer, engine, folders = loop(demo, tmp_path_factory.mktemp("adapters"), slots=6)
    yield trainer, engine, folders
    engine.close()


def check_agreement(trainer, engine, folders, atol=1e-4):
    futures = [
        (name, engine.submit(request(n=3, seed=i, prompt_logprobs=True), folder))
        for i in range(2)
        for name, folder in folders.items()  # three adapters share every decoding step
    ]
    for name, future in futures:
        answer = future.result()
        for sequence in answer.sequences:
            expected = score(trainer, name, np.concatenate([PROMPT, sequence.tokens]))
            np.testing.assert_allclose(answer.prompt_logprobs[1:], expected[: len(PROMPT) - 1], atol=atol)
            np.testing.assert_allclose(sequence.logprobs, expected[len(PROMPT) - 1 :], atol=atol)


def test_sampled_log_probs_are_the_trainers_for_two_adapters_and_the_base_in_one_batch(running):
    check_agreement(*running)


def test_what_one_process_has_compiled_another_runs_without_maxtext_to_the_same_bits(
    state_dir, tmp_path, monkeypatch, nothing_kept
):
    """Here in one process, where MaxText is made to fail: neither the layout nor a program may ask for it."""
    results = []
    for asked in (model._maxtext_config, None):
        monkeypatch.setattr(model, "_maxtext_config", asked)
        base = model.load(model.ModelConfig(), state_dir=state_dir, devices=jax.devices()[:1])
        trainer = Trainer(base, TrainerConfig(row_len=CONTEXT))
        trainer.warm_up()
        trainer.create("a", seed=1, rank=4)
        train(trainer, "a", dice=np.random.default_rng(1))
        engine = EmbeddedEngine(base, SamplerConfig(context=CONTEXT, chunk=16, slots=2))
        folder = publish(trainer, "a", tmp_path / f"adapter-{len(results)}")
        answer = engine.submit(request(seed=3, prompt_logprobs=True), folder).result()
        (sequence,) = answer.sequences
        engine.close()
        results.append([score(trainer, "a", PROMPT), sequence.tokens, sequence.logprobs, answer.prompt_logprobs])
    for first, again in zip(*results, strict=True):
        np.testing.assert_array_equal(first, again)


@pytest.mark.slow
def test_they_are_with_scanned_layers_on_four_devices_too(state_dir, tmp_path, monkeypatch):
    scanned = model.load(model.ModelConfig(scan_layers=True), state_dir=state_dir)
    trainer, engine, folders = loop(scanned, tmp_path, slots=4)
    check_agreement(trainer, engine, folders)
    engine.close()
    monkeypatch.setattr("model.CHOOSY", ("cpu",))  # and where the compiler lays out the engine's base
    engine = EmbeddedEngine(scanned, engine.config)
    check_agreement(trainer, engine, folders)
    engine.close()


def test_nothing_compiles_after_warm_up(running, compilations):
    _, engine, folders = running
    engine.submit(request(), folders["a"]).result()  # its folder is read once
    before = compilations()
    kinds = [dict(top_k=5), dict(top_p=0.5), dict(temperature=0.0), dict(n=9), dict(topk_sample_logprobs=3), dict(stop=(5, "x")),
             dict(prompt_logprobs=True, topk_prompt_logprobs=2), dict(prompt=PROMPT[:1]), dict(max_tokens=None)]  # fmt: skip
    for future in [engine.submit(request(**kind), folders["a"]) for kind in kinds]:
        future.result()
    assert compilations() == before


def test_a_seed_gives_the_same_tokens_alone_and_in_a_batch(running):
    _, engine, folders = running
    alone = engine.submit(request(n=2, seed=7), folders["a"]).result()
    crowd = [engine.submit(request(n=2, seed=7 + i % 3), folders["a" if i % 2 == 0 else "b"]) for i in range(8)]
    again = crowd[0].result()
    for one, other in zip(alone.sequences, again.sequences, strict=True):
        assert np.array_equal(one.tokens, other.tokens)
    assert not np.array_equal(alone.sequences[0].tokens, alone.sequences[1].tokens)
    assert not np.array_equal(crowd[2].result().sequences[0].tokens, again.sequences[0].tokens)


def test_greedy_takes_the_likeliest_token_and_narrow_truncations_agree(running):
    trainer, engine, folders = running
    greedy = engine.submit(request(temperature=0.0, topk_sample_logprobs=3), folders["a"]).result().sequences[0]
    for narrow in (dict(top_k=1), dict(top_p=1e-6)):
        sequence = engine.submit(request(**narrow), folders["a"]).result().sequences[0]
        assert np.array_equal(sequence.tokens, greedy.tokens)
        np.testing.assert_allclose(sequence.logprobs, greedy.logprobs, atol=1e-5)  # the untruncated model's
    ids, values = greedy.topk
    assert ids.shape == values.shape == (12, 3) and np.array_equal(ids[:, 0], greedy.tokens)
    np.testing.assert_allclose(values[:, 0], greedy.logprobs, atol=1e-6)
    assert (np.diff(values, axis=1) <= 0).all()


def test_frequencies_follow_temperature_and_truncation(running):
    _, engine, _ = running
    n, temperature, k = 600, 0.5, 4
    answer = engine.submit(
        request(n=n, max_tokens=1, temperature=temperature, top_k=k, seed=1, topk_sample_logprobs=k), None
    ).result()
    ids, values = (x[0] for x in answer.sequences[0].topk)
    expected = np.exp(values / temperature) / np.exp(values / temperature).sum()
    drawn = np.array([s.tokens[0] for s in answer.sequences])
    assert set(drawn) <= set(ids)
    frequencies = np.array([(drawn == i).mean() for i in ids])
    assert (np.abs(frequencies - expected) < 5 * np.sqrt(expected * (1 - expected) / n) + 1e-9).all()


def test_a_stop_token_or_string_ends_the_sequence_and_is_part_of_it(running):
    _, engine, folders = running
    free = engine.submit(request(max_tokens=40, seed=3), folders["a"]).result().sequences[0]
    assert free.stop_reason == "length" and len(free.tokens) == 40
    stop = int(free.tokens[5])
    stopped = engine.submit(request(max_tokens=40, seed=3, stop=(stop,)), folders["a"]).result().sequences[0]
    first = int(np.argmax(free.tokens == stop))
    assert stopped.stop_reason == "stop" and np.array_equal(stopped.tokens, free.tokens[: first + 1])
    decode = engine.tokenizer.decode
    pairs = (decode(free.tokens[i : i + 2]) for i in range(4, 39))
    text = next(pair for pair in pairs if "\ufffd" not in pair)
    length = next(n for n in range(1, 41) if text in decode(free.tokens[:n]))  # the whole text, not the engine's window
    stopped = engine.submit(request(max_tokens=40, seed=3, stop=(text,)), folders["a"]).result().sequences[0]
    assert stopped.stop_reason == "stop" and np.array_equal(stopped.tokens, free.tokens[:length])


def test_an_end_of_sequence_token_ends_it_unless_no_stop_was_asked_for(running):
    _, engine, _ = running
    assert engine.eos == {256, 258}
    seeds = [
        engine.submit(request(max_tokens=70, temperature=3.0, seed=i, eos=eos), None)
        for eos in (True, False)
        for i in range(6)
    ]
    sequences = [future.result().sequences[0] for future in seeds]
    ended, endless = sequences[:6], sequences[6:]
    assert all(len(s.tokens) == 70 for s in endless)
    for s, whole in zip(ended, endless, strict=True):
        ends = np.flatnonzero(np.isin(whole.tokens, (256, 258)))
        assert len(s.tokens) == (ends[0] + 1 if len(ends) else 70) and s.stop_reason == (
            "stop" if len(ends) else "length"
        )


def test_prompt_scores_hold_what_was_asked_for(running):
    trainer, engine, folders = running
    asked = request(prompt_logprobs=True, prompt_logprobs_last_n=5, topk_prompt_logprobs=4)
    answer = engine.submit(asked, folders["b"]).result()
    assert np.isnan(answer.prompt_logprobs[:-5]).all() and np.isfinite(answer.prompt_logprobs[-5:]).all()
    ids, values = answer.topk_prompt_logprobs
    assert ids.shape == values.shape == (len(PROMPT), 4) and np.isnan(values[0]).all() and np.isfinite(values[1:]).all()
    expected = score(trainer, "b", PROMPT)
    for position in range(1, len(PROMPT)):
        if PROMPT[position] in ids[position]:
            assert values[position][list(ids[position]).index(PROMPT[position])] == pytest.approx(
                expected[position - 1], abs=1e-4
            )
    nothing = engine.submit(request(), folders["b"]).result()
    assert (
        nothing.prompt_logprobs is None and nothing.topk_prompt_logprobs is None and nothing.sequences[0].topk is None
    )


def test_prompt_and_reply_fill_the_context_exactly(running):
    trainer, engine, _ = running
    assert engine.context_tokens == CONTEXT + 1
    long = rng.integers(0, 256, CONTEXT - 3)
    sequence = engine.submit(request(long, max_tokens=None), None).result().sequences[0]
    assert len(sequence.tokens) == 4
    expected = score(trainer, "base", np.concatenate([long, sequence.tokens]))[len(long) - 1 :]
    np.testing.assert_allclose(sequence.logprobs, expected, atol=1e-4)


def test_a_published_version_is_bit_equal_whatever_is_trained_or_sampled_meanwhile(running, tmp_path):
    trainer, engine, _ = running
    trainer.create("live", seed=5, rank=8)
    train(trainer, "live")
    folder = publish(trainer, "live", tmp_path / "v1")
    asked = request(n=3, seed=1, prompt_logprobs=True)
    before = engine.submit(asked, folder).result()
    state = trainer.adapters["live"]
    bits = jax.device_get((state.weights, state.gradients, state.moments))
    engine.submit(asked, folder).result()  # sampling leaves the trainer alone
    after = jax.device_get((state.weights, state.gradients, state.moments))
    assert jax.tree.all(jax.tree.map(np.array_equal, bits, after))
    train(trainer, "live", steps=3)
    engine.adapters.clear()  # read again from its folder, too
    again = engine.submit(asked, folder).result()
    assert np.array_equal(before.prompt_logprobs, again.prompt_logprobs, equal_nan=True)
    for one, other in zip(before.sequences, again.sequences, strict=True):
        assert np.array_equal(one.tokens, other.tokens) and np.array_equal(one.logprobs, other.logprobs)


def test_a_missing_or_foreign_adapter_fails_its_request_alone(running, tmp_path):
    _, engine, folders = running
    bad = tmp_path / "bad"
    bad.mkdir()
    save_file(
        {"base_model.model.nonsense.lora_A.weight": np.zeros((1, 1), np.float32)}, bad / "adapter_model.safetensors"
    )
    (bad / "adapter_config.json").write_text(json.dumps({"r": 1, "lora_alpha": 32}))
    good = engine.submit(request(max_tokens=30), folders["a"])
    with pytest.raises(ValueError, match="nowhere is gone"):
        engine.submit(request(), tmp_path / "nowhere").result()
    with pytest.raises(ValueError, match="nonsense.lora_A.weight matches no module"):
        engine.submit(request(), bad).result()
    assert len(good.result().sequences[0].tokens) == 30


def test_a_cancelled_request_frees_its_slots_and_the_rest_goes_on(running):
    _, engine, folders = running
    long = [engine.submit(request(n=6, max_tokens=70), folders["a"]) for _ in range(4)]
    assert all(future.cancel() for future in long)
    assert len(engine.submit(request(), folders["b"]).result().sequences[0].tokens) == 12
    with pytest.raises(CancelledError):
        long[0].result()
    assert not any(sample and sample.job.future in long for sample in engine.slots)


def test_a_full_queue_says_so(running):
    _, engine, folders = running
    engine.config, config, accepted = dataclasses.replace(engine.config, max_queue=2), engine.config, []
    try:
        with pytest.raises(Overloaded, match="2 requests are waiting"):
            for _ in range(50):
                accepted.append(engine.submit(request(n=6, max_tokens=70), folders["a"]))
    finally:
        engine.config = config
    for future in accepted:
        assert len(future.result().sequences) == 6


def test_a_failing_step_fails_what_is_in_flight_and_the_engine_recovers(running):
    _, engine, folders = running
    decode, broken = engine.decode, iter([True])

    def fails_once(*args):
        if next(broken, False):
            raise RuntimeError("no memory")
        return decode(*args)

    engine.decode = fails_once
    try:
        with pytest.raises(RuntimeError, match="no memory"):
            engine.submit(request(), folders["a"]).result()
        assert len(engine.submit(request(), folders["a"]).result().sequences[0].tokens) == 12
    finally:
        engine.decode = decode


@pytest.mark.parametrize("devices", [1, 4])
def test_what_the_engine_takes_of_a_device_is_known_before_it_is_there(demo, sharded_demo, devices):
    base, config = {1: demo, 4: sharded_demo}[devices], SamplerConfig(context=CONTEXT, slots=3, adapters=1)
    engine = EmbeddedEngine(base, config)
    engine.close()
    adapter = engine.adapter(None)
    arrays = jax.tree.leaves((engine.state, engine.blank, adapter))
    if devices == 1:  # the trainer's own
        assert engine.head.unsafe_buffer_pointer() == base.head.unsafe_buffer_pointer()
    else:
        arrays += jax.tree.leaves((engine.base, engine.head))
    assert all(array.is_fully_replicated for array in arrays)
    in_the_making = sum(array.nbytes for array in (*engine.blank, *adapter.values()))
    assert engine_bytes(base, config) == sum(array.nbytes for array in arrays) + in_the_making


def test_closing_fails_what_still_waits(demo):
    engine = EmbeddedEngine(demo, SamplerConfig(context=CONTEXT, chunk=16, slots=2))
    futures = [engine.submit(request(max_tokens=70), None) for _ in range(9)]
    engine.close()
    assert any(isinstance(future.exception(), RuntimeError) for future in futures)
