"""Restarts of the service without HTTP, at every point of a short life: what a crash leaves is what the next one finds.

tests/test_chaos.py kills whole servers; here a crash is a copy of the state directory, and a restart takes milliseconds.
"""

import asyncio
import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_server import TOKENS, fb_body
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

import cache
from sampler import EmbeddedEngine, SamplerConfig
from server import Gone, NotFound, ServerConfig, Service, recover
from trainer import Trainer, TrainerConfig


@pytest.fixture(scope="module")
def engines(demo):
    trainer = Trainer(demo, TrainerConfig(rows=1, row_len=64))
    trainer.warm_up()
    sampler = EmbeddedEngine(demo, SamplerConfig(slots=4, context=64))
    sampler.warm_up()
    yield trainer, sampler
    sampler.close()


def serve(engines, root: Path, work: Callable[[Service], Awaitable[Any]]) -> Any:
    """One life of a service on a state directory: it recovers, does this work, and is gone."""

    async def life():
        trainer, sampler = engines
        trainer.adapters.clear()
        with cache.Store(root) as store:
            journal = cache.Journal(root)
            try:
                service = Service(ServerConfig(), store, journal, trainer, sampler)
                service.closing = asyncio.Future()
                recover(service)
                return await work(service)
            finally:
                journal.close()

    return asyncio.run(life())


async def durable(service: Service) -> None:
    await asyncio.wrap_future(service.journal.durable())


async def crash(service: Service, to: Path) -> None:
    """What would be left of the state directory if the process ended now."""
    await durable(service)
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    service.journal.copy(to / "journal.sqlite")
    for name in ("objects", "runs"):
        shutil.copytree(service.store.root / name, to / name)


def body(**fields) -> bytes:
    return json.dumps(fields).encode()


def open_session(service: Service) -> str:
    opened = types.CreateSessionRequest(tags=[], user_metadata=None, sdk_version="0.38.0", type="create_session")
    return service.create_session(opened)["session_id"]


ADAM = {"learning_rate": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12}


class Life:
    """A client's requests, in the order of `VERBS`, by number: asking for one again is what a client does that lost
    the answer.
    """

    VERBS = (
        "create",
        "fb",
        "fb",
        "optim",
        "save",
        "snapshot",
        "sample",
        "fb",
        "load",
        "fb",
        "optim",
        "snapshot",
        "sample",
    )

    def __init__(self, session_id: str):
        self.session_id, self.model_id = session_id, f"{session_id}:train:0"

    def seq(self, i: int) -> int:
        return i - self.VERBS[:i].count("sample")

    def ask(self, service: Service, i: int) -> dict:
        verb, seq, model_id = self.VERBS[i], self.seq(i), self.model_id
        before = self.VERBS[:i].count(verb)
        if verb == "create":
            config = {"rank": 4, "train_unembed": False}  # no seed: the server chooses one
            return service.create_model(
                body(session_id=self.session_id, model_seq_id=0, base_model="demo", lora_config=config)
            )
        if verb == "fb":
            return service.forward_backward(fb_body(model_id, seq, TOKENS[i:]))
        if verb == "optim":
            return service.optim_step(body(model_id=model_id, seq_id=seq, type="optim_step", adam_params=ADAM))
        if verb == "save":
            return service.save_weights(body(model_id=model_id, seq_id=seq, path="kept", type="save_weights"))
        if verb == "load":
            path = f"tinker://{model_id}/weights/kept"
            return service.load_weights(
                body(model_id=model_id, seq_id=seq, path=path, optimizer=True, type="load_weights")
            )
        if verb == "snapshot":
            named = {"sampling_session_seq_id": before, "type": "save_weights_for_sampler"}
            return service.save_weights_for_sampler(body(model_id=model_id, seq_id=seq, **named))
        prompt = {"chunks": [{"tokens": TOKENS[:6], "type": "encoded_text"}]}
        params = {"max_tokens": 8, "seed": 7, "temperature": 1.0}
        sampler_id = f"{self.session_id}:sample:{before}"
        asked = {
            "sampling_session_id": sampler_id,
            "seq_id": 0,
            "prompt": prompt,
            "sampling_params": params,
            "num_samples": 2,
        }
        return service.asample(body(**asked))

    async def answer(self, service: Service, i: int) -> Any:
        """What the client is told when it asks, once more or for the first time."""
        answer = await service.promises[self.ask(service, i)["request_id"]].answer
        assert not (isinstance(answer, dict) and "error" in answer), answer
        return told(self.VERBS[i], answer)

    async def all_answers(self, service: Service) -> list:
        return [await self.answer(service, i) for i in range(len(self.VERBS))]


def told(verb: str, answer: dict | bytes) -> Any:
    """What may not change: all but how fast it was."""
    if verb != "fb":
        return answer
    output = pb.ForwardBackwardOutput.FromString(answer)
    timeless = {name: value for name, value in output.metrics.items() if "per_s" not in name}
    return timeless, output.loss_fn_outputs[0].fields["logprobs"].data


@pytest.fixture(scope="module")
def crashes(engines, tmp_path_factory) -> SimpleNamespace:
    """A whole life, and what crashes would have left: after each answer, and after each acknowledgement."""
    folder, life = tmp_path_factory.mktemp("life"), None

    async def work(service: Service):
        nonlocal life
        life, answers = Life(open_session(service)), []
        for i in range(len(Life.VERBS)):
            life.ask(service, i)
            await crash(service, folder / f"asked-{i}")
            answers.append(await life.answer(service, i))
            await crash(service, folder / f"answered-{i}")
        return answers

    answers = serve(engines, folder / "undisturbed", work)
    return SimpleNamespace(folder=folder, life=life, answers=answers)


@pytest.mark.parametrize("when", ["asked", "answered"])
@pytest.mark.parametrize("i", range(len(Life.VERBS)))
def test_a_crash_at_any_point_changes_no_answer_before_or_after_it(engines, crashes, tmp_path, when, i):
    root = shutil.copytree(crashes.folder / f"{when}-{i}", tmp_path / "state")
    assert serve(engines, root, crashes.life.all_answers) == crashes.answers
    assert serve(engines, root, crashes.life.all_answers) == crashes.answers  # and once more


def test_a_saved_state_takes_the_place_of_what_led_to_it(engines, crashes, tmp_path, monkeypatch):
    """Between any two requests, gradients that have accumulated included."""
    monkeypatch.setattr("server.STATE_EVERY_S", 0.0)
    life = crashes.life

    async def until(service: Service, i: int):
        run = service.runs[life.model_id]
        await life.answer(service, i)
        await run.worker
        await run.saving
        await durable(service)
        assert run.covered == run.next_seq == life.seq(i) + 1
        payloads = [
            record for record in service.journal.records() if (record.kind, record.owner) == ("payload", life.model_id)
        ]
        assert not payloads  # nothing of it is computed again

    root = shutil.copytree(crashes.folder / "asked-0", tmp_path / "state")
    for i in (j for j, verb in enumerate(Life.VERBS) if verb != "sample"):
        serve(engines, root, lambda service, i=i: until(service, i))
    assert serve(engines, root, life.all_answers) == crashes.answers


def test_what_is_an_hour_old_is_forgotten_and_an_ended_session_leaves_nothing(engines, tmp_path, monkeypatch):
    monkeypatch.setattr("server.STATE_EVERY_S", 0.0)

    async def work(service: Service):
        life = Life(open_session(service))
        await life.all_answers(service)
        run = service.runs[life.model_id]
        await run.worker
        await run.saving
        service.forget(before=time.monotonic() + 1)
        await durable(service)
        kinds = [record.kind for record in service.journal.records()]
        assert kinds.count("answer") == kinds.count("request") == len(run.requests) == run.next_seq - run.covered < 9
        with pytest.raises(Gone, match="no longer kept"):
            life.ask(service, 1)
        assert service.samplers[f"{life.session_id}:sample:0"].forgotten == 1
        await service.end_session(run.session)
        service.forget(before=time.monotonic() + 1)
        await durable(service)
        assert {record.kind for record in service.journal.records()} == {"base"}
        assert not (service.sessions or service.runs or service.samplers or service.promises)
        left = {folder.name for folder in (service.store.root / "objects").iterdir()}
        assert left == {checkpoint.folder.name for checkpoint in service.store.list()}
        with pytest.raises(NotFound):
            life.ask(service, 1)

    serve(engines, tmp_path / "state", work)


def test_a_state_of_another_model_is_refused_while_it_has_sessions(engines, tmp_path):
    async def work(service: Service):
        open_session(service)
        service.journal.drop("base", "")
        service.note("base", "", "Qwen/Qwen3-8B")

    serve(engines, tmp_path / "state", work)
    with pytest.raises(ValueError, match="1 sessions of Qwen/Qwen3-8B"):
        serve(engines, tmp_path / "state", work)


def test_a_snapshot_that_is_damaged_is_not_sampled(engines, crashes, tmp_path):
    root = shutil.copytree(crashes.folder / "answered-6", tmp_path / "state")
    for file in root.glob("objects/*/adapter_model.safetensors"):
        file.write_bytes(file.read_bytes()[:-1] + b"?")

    async def work(service: Service):
        sampler = service.samplers[f"{crashes.life.session_id}:sample:0"]
        assert "damaged" in sampler.trouble
        with pytest.raises(Gone, match="did not survive"):
            sampler.requests.clear()
            crashes.life.ask(service, 6)

    serve(engines, root, work)


def test_a_sample_in_flight_at_the_servers_end_is_not_answered_but_sampled_by_the_next(engines, crashes, tmp_path):
    root = shutil.copytree(crashes.folder / "answered-5", tmp_path / "state")

    async def ended(service: Service):
        accepted = crashes.life.ask(service, 6)
        await asyncio.sleep(0)  # it is under way
        service.closing.set_result(None)  # as uvicorn's end does, and then asyncio's
        tasks = list(service.background)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await durable(service)
        assert accepted["request_id"] not in {record.owner for record in service.journal.records()}

    serve(engines, root, ended)
    assert serve(engines, root, crashes.life.all_answers) == crashes.answers
