"""What a restart makes of a journal, without a model: a trainer that adds numbers, a sampler that answers when told to."""

import asyncio
import json
import math
import sqlite3
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
from test_server import fb_body
from tinker import types

import cache
import server


class Adder:
    """A trainer whose adapter is one number: `turns` adds the tokens' sum to its gradient, a step adds that."""

    def __init__(self, row_len: int):
        self.rows, self.row_len, self.config = 4, row_len, SimpleNamespace(max_adapters=8)
        self.model = SimpleNamespace(
            name="demo", directory=Path("demo"), vocab_size=512, config=SimpleNamespace(max_rank=32)
        )
        self.adapters: dict[str, dict] = {}
        self.copying = threading.Event()  # cleared: `checkpoint` waits
        self.copying.set()

    def create(self, model_id, *, seed, rank, train_attn, train_mlp):
        if len(self.adapters) >= self.config.max_adapters:
            raise ValueError(f"{len(self.adapters)} adapters are in training")
        self.adapters[model_id] = {"weights": float(seed), "gradient": 0.0, "step": 0}

    def release(self, model_id):
        self.adapters.pop(model_id, None)

    def turns(self, model_id, requests, *, backward):
        """A request a turn."""
        adapter, answers, gradient = self.adapters[model_id], [], 0.0
        for request in requests:
            if answers:
                yield
            gradient += sum(float(datum.tokens.sum()) for datum in request.data) * backward
            logprobs = [np.full(len(datum.tokens), adapter["weights"], np.float32) for datum in request.data]
            answers.append((logprobs, {"loss:sum": adapter["weights"]}))
        adapter["gradient"] += gradient
        yield answers

    def score_turns(self, prompts, folder):
        """A prompt a turn."""
        for _ in prompts[1:]:
            yield
        yield [np.zeros(len(prompt), np.float32) for prompt in prompts]

    def optim_step(self, model_id, adam):
        adapter = self.adapters[model_id]
        adapter.update(weights=adapter["weights"] + adapter["gradient"], gradient=0.0, step=adapter["step"] + 1)
        return {"optim/step": float(adapter["step"])}

    def checkpoint(self, model_id, *, gradients=False):
        self.copying.wait()
        tensors = {name: np.array(value) for name, value in self.adapters[model_id].items()}
        return tensors, {"rank": 4, "train_attn": True, "train_mlp": True}

    def restore(self, model_id, tensors, meta, *, optimizer):
        self.adapters[model_id] = {name: value.item() for name, value in tensors.items()}

    def snapshot(self, model_id):
        return {"weights": np.array(self.adapters[model_id]["weights"])}, {}


class Engine:
    """A sampler whose log-prob is its adapter's number; it answers once `auto` is set, and what is asked after that."""

    context_tokens = 256

    def __init__(self, max_queue: int, auto: bool):
        self.max_queue, self.auto, self.waiting = max_queue, auto, []

    def submit(self, request, folder):
        if len(self.waiting) >= self.max_queue:
            raise server.Overloaded("too many")
        future: Future = Future()
        self.waiting.append(future)
        if self.auto:
            self.waiting.remove(future)
            file = folder / "adapter_model.safetensors" if folder else None
            number = safetensors.numpy.load_file(file)["weights"] if file else 0
            reply = dict(tokens=np.array([1]), logprobs=np.array([number]), stop_reason="length", topk=None)
            result = dict(sequences=[SimpleNamespace(**reply)], prompt_logprobs=None, topk_prompt_logprobs=None)
            future.set_result(SimpleNamespace(**result))
        return future

    def publish(self, folder):
        future: Future = Future()
        future.set_result(None)
        return future

    retire = publish


class Rig:
    """A service on a state directory, up to `kill`, and what a client does with it."""

    def __init__(self, root: Path, *, row_len: int = 256, max_queue: int = 100, auto: bool = True):
        self.store, self.journal = cache.Store(root), cache.Journal(root)
        self.trainer, self.engine = Adder(row_len), Engine(max_queue, auto)
        config = server.ServerConfig(state_dir=root)
        self.service = server.Service(config, self.store, self.journal, self.trainer, self.engine)  # type: ignore
        self.service.closing = asyncio.Future()
        server.recover(self.service)

    def kill(self) -> None:
        """What is noted from now on is lost."""
        self.journal.close()
        self.store.close()

    def session(self) -> str:
        request = types.CreateSessionRequest(tags=[], sdk_version="0", user_metadata={})
        return self.service.create_session(request)["session_id"]

    async def model(self, session_id: str, seed: int = 0) -> str:
        lora = {"rank": 4, "seed": seed}
        body = {"session_id": session_id, "model_seq_id": 0, "base_model": "demo", "lora_config": lora}
        return (await self.answer(self.ask("create_model", **body)))["model_id"]

    async def sampler(self, session_id: str, model_path: str | None = None) -> str:
        what: Any = {"model_path": model_path} if model_path else {"base_model": "demo"}
        request = types.CreateSamplingSessionRequest(session_id=session_id, sampling_session_seq_id=0, **what)
        return (await self.service.create_sampling_session(request))["sampling_session_id"]

    def ask(self, verb: str, **body) -> str:
        return getattr(self.service, verb)(json.dumps(body).encode())["request_id"]

    def forward_backward(self, model_id: str, seq_id: int, tokens: int = 10) -> str:
        return self.service.forward_backward(fb_body(model_id, seq_id, list(range(tokens))))["request_id"]

    def optim_step(self, model_id: str, seq_id: int) -> str:
        return self.ask("optim_step", model_id=model_id, seq_id=seq_id, adam_params={"learning_rate": 1e-2})

    def sample(self, sampler_id: str, seq_id: int) -> str:
        prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}
        options = {"prompt": prompt, "num_samples": 1, "sampling_params": {"max_tokens": 1}}
        return self.ask("asample", sampling_session_id=sampler_id, seq_id=seq_id, **options)

    async def answer(self, request_id: str) -> Any:
        answer = await asyncio.wait_for(asyncio.shield(self.service.promises[request_id].answer), 5)
        await asyncio.sleep(0.01)  # its worker goes on
        await asyncio.wrap_future(self.journal.durable())
        return answer

    async def repeated(self, model_id: str) -> dict:
        """The adapter, once all that there is has been done again."""
        if (worker := self.service.runs[model_id].worker) is not None:
            await asyncio.wait_for(asyncio.shield(worker), 5)
        return self.trainer.adapters[model_id]


async def written(run: server.Run) -> None:
    assert run.saving is not None
    await run.saving


def in_loop(test):
    """A test that awaits."""

    def run(tmp_path: Path):
        asyncio.run(asyncio.wait_for(test(tmp_path), 30))

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_an_adapter_is_what_it_was(tmp_path):
    rig = Rig(tmp_path)
    model_id = await rig.model(rig.session(), seed=7)
    for ask, seq_id in ((rig.forward_backward, 1), (rig.optim_step, 2), (rig.forward_backward, 3)):
        await rig.answer(ask(model_id, seq_id))
    before = rig.trainer.adapters[model_id]
    rig.kill()
    rig = Rig(tmp_path)
    assert await rig.repeated(model_id) == before == {"weights": 43.0, "gradient": 36.0, "step": 1}
    rig.kill()


@in_loop
async def test_of_a_request_all_is_in_the_journal_or_nothing(tmp_path):
    """Else it would be known after a restart, and never be done."""
    rig = Rig(tmp_path)
    model_id = await rig.model(rig.session())
    add, alone = rig.journal.add, []

    def add_slowly(*change):
        add(*change)
        time.sleep(0.05)  # the journal's thread commits what it may
        alone.append(Counter(record.kind for record in rig.journal.records()))

    rig.journal.add = add_slowly  # type: ignore
    rig.forward_backward(model_id, 1)
    assert all(kinds["request"] == kinds["payload"] for kinds in alone) and len(alone) == 2
    rig.kill()


@in_loop
async def test_an_hour_old_result_of_the_greatest_seq_id_is_forgotten_too(tmp_path):
    rig = Rig(tmp_path)
    sampler_id = await rig.sampler(rig.session())
    await rig.answer(rig.sample(sampler_id, 2**63 - 1))
    rig.service.forget(before=time.monotonic() + 1)
    await asyncio.wait_for(asyncio.wrap_future(rig.journal.durable()), 5)
    assert "answer" not in {record.kind for record in rig.journal.records()}
    rig.kill()


@in_loop
async def test_what_comes_while_the_sweeper_saves_a_state_is_not_in_it(tmp_path):
    rig = Rig(tmp_path)
    model_id = await rig.model(rig.session())
    await rig.answer(rig.forward_backward(model_id, 1))
    run, rig.service.runs[model_id].unsaved_s = rig.service.runs[model_id], math.inf
    rig.trainer.copying.clear()
    saving = asyncio.ensure_future(asyncio.to_thread(rig.trainer.copying.wait))
    rig.service.save_state(run)
    request_id = rig.forward_backward(model_id, 2)
    await asyncio.sleep(0.1)
    rig.trainer.copying.set()
    await saving
    await rig.answer(request_id)
    await written(run)
    before = rig.trainer.adapters[model_id]
    rig.kill()
    rig = Rig(tmp_path)
    assert rig.service.runs[model_id].covered == 2 and await rig.repeated(model_id) == before
    rig.kill()


@in_loop
async def test_an_adapter_of_which_a_part_cannot_be_repeated_is_none(tmp_path):
    """As under a smaller --row-len: without one gradient it would be another, and nobody would know."""
    rig = Rig(tmp_path)
    model_id = await rig.model(rig.session())
    await rig.answer(rig.forward_backward(model_id, 1, tokens=200))
    await rig.answer(rig.forward_backward(model_id, 2))
    told = await rig.answer(rig.optim_step(model_id, 3))
    rig.kill()
    rig = Rig(tmp_path, row_len=64)
    await rig.repeated(model_id)
    assert await rig.answer(rig.optim_step(model_id, 3)) == told
    assert "could not be repeated" in (await rig.answer(rig.forward_backward(model_id, 4)))["error"]
    rig.kill()


@in_loop
async def test_a_session_that_ended_in_the_middle_of_a_sample_does_not_stop_the_next_start(tmp_path):
    """Its payload goes before its answer is there; whoever polls is told."""
    rig = Rig(tmp_path, auto=False)
    sampler_id = await rig.sampler(session_id := rig.session())
    request_id = rig.sample(sampler_id, 0)
    rig.engine.waiting[0].set_running_or_notify_cancel()  # it cannot be cancelled
    await rig.service.end_session(rig.service.sessions[session_id])
    rig.kill()
    rig = Rig(tmp_path)
    assert "ended" in (await rig.answer(request_id))["error"]
    assert [told["request_id"] for told in rig.service.samplers[sampler_id].completions] == [request_id]
    rig.kill()


@in_loop
async def test_more_samples_in_flight_than_may_wait_are_all_asked_again(tmp_path):
    rig = Rig(tmp_path, auto=False)
    sampler_id = await rig.sampler(rig.session())
    request_ids = [rig.sample(sampler_id, seq_id) for seq_id in range(5)]
    rig.kill()
    rig = Rig(tmp_path, max_queue=3, auto=False)
    assert len(rig.engine.waiting) == 3
    rig.engine.auto, rig.engine.waiting = True, []
    for request_id in request_ids[3:]:
        assert isinstance(await rig.answer(request_id), bytes)
    rig.kill()


@in_loop
async def test_the_runs_of_ended_sessions_are_listed_after_a_restart(tmp_path):
    rig = Rig(tmp_path)
    model_id = await rig.model(session_id := rig.session())
    await rig.service.end_session(rig.service.sessions[session_id])
    rig.kill()
    rig = Rig(tmp_path)
    request = SimpleNamespace(path_params={}, query_params={})
    (run,) = (await server.training_runs(rig.service, request))["training_runs"]  # type: ignore
    assert (run["training_run_id"], run["lora_rank"]) == (model_id, 4)
    rig.kill()


@in_loop
async def test_a_name_that_means_another_version_now_is_not_taken_for_the_old_one(tmp_path):
    rig = Rig(tmp_path, auto=False)
    model_id = await rig.model(session_id := rig.session(), seed=7)
    await rig.answer(rig.ask("save_weights_for_sampler", model_id=model_id, seq_id=1, path="a"))
    await rig.answer(rig.ask("save_weights", model_id=model_id, seq_id=2, path="a"))
    sampler_id = await rig.sampler(session_id, f"tinker://{model_id}/sampler_weights/a")
    request_id = rig.sample(sampler_id, 0)
    rig.service.write_state = lambda *_: asyncio.sleep(0)  # type: ignore  # not in time
    load = {"path": f"tinker://{model_id}/weights/a", "optimizer": True}
    await rig.answer(rig.ask("load_weights", model_id=model_id, seq_id=3, **load))
    await rig.answer(rig.forward_backward(model_id, 4))
    await rig.answer(rig.optim_step(model_id, 5))
    for segment, verb, seq_id in (("sampler_weights", "save_weights_for_sampler", 6), ("weights", "save_weights", 7)):
        rig.store.delete(cache.TinkerPath(model_id, segment, "a"))
        await rig.answer(rig.ask(verb, model_id=model_id, seq_id=seq_id, path="a"))
    rig.kill()
    rig = Rig(tmp_path)
    assert "another version" in (await rig.answer(request_id))["error"]
    await rig.repeated(model_id)
    assert "another version" in (await rig.answer(rig.forward_backward(model_id, 8)))["error"]
    rig.kill()


@in_loop
async def test_after_an_hour_the_journal_holds_no_request_and_no_result(tmp_path):
    rig = Rig(tmp_path)
    model_id, sampler_id = await rig.model(session_id := rig.session()), await rig.sampler(rig.session())
    for seq_id in range(1, 4):
        await rig.answer(rig.forward_backward(model_id, seq_id))
        await rig.answer(rig.sample(sampler_id, seq_id))
    await rig.service.end_session(rig.service.sessions[session_id])
    rig.service.forget(before=time.monotonic() + 1)
    await asyncio.wrap_future(rig.journal.durable())
    assert not {"request", "payload", "answer"} & {record.kind for record in rig.journal.records()}
    rig.kill()
    rig = Rig(tmp_path)
    assert rig.service.samplers[sampler_id].forgotten == 3
    rig.kill()


@in_loop
async def test_what_is_refused_for_want_of_room_is_not_sampled(tmp_path):
    rig = Rig(tmp_path, auto=False)
    sampler_id = await rig.sampler(rig.session())
    rig.journal.most_bytes = -1
    with pytest.raises(cache.Full):
        rig.sample(sampler_id, 0)
    assert rig.engine.waiting == []
    rig.kill()


@in_loop
async def test_the_state_that_the_journal_on_the_disk_names_stays_while_it_cannot_be_written(tmp_path):
    rig, apply = Rig(tmp_path), cache.apply_changes
    run = rig.service.runs[model_id := await rig.model(rig.session())]

    def full(*_):
        raise sqlite3.OperationalError("database or disk is full")

    try:
        for seq_id in (1, 2):
            run.unsaved_s = math.inf
            await rig.answer(rig.forward_backward(model_id, seq_id))
            await written(run)
            cache.apply_changes = full
        rig.kill()
    finally:
        cache.apply_changes = apply
    rig = Rig(tmp_path)
    assert (await rig.repeated(model_id))["gradient"] == 36
    rig.kill()
