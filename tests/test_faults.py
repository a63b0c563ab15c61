"""Faults of clients: they die, fall silent, lose answers, ask twice, give up a thousand samples at once.

Whatever one does, the others' numbers are those that they get when alone, bit for bit, and its places can be had again.
What cannot be seen through HTTP is asked of a service in this process, with tests/test_recover.py's scripted engines.
Nothing is asserted of wall time: how long a turn is, is counted in calls of the trainer and in tiles (bench/step.py has
the seconds).
"""

import asyncio
import time

import pytest
from test_recover import Rig, in_loop

import server
from server import Gone, NotFound

# ---- those that fall silent


def fall_silent(rig: Rig, session_id: str, seconds: float = 200) -> None:
    """As if its last heartbeat had been that long ago."""
    rig.service.sessions[session_id].last_seen -= seconds


def create(rig: Rig, session_id: str, number: int) -> str:
    body = {"session_id": session_id, "model_seq_id": number, "base_model": "demo", "lora_config": {"rank": 4}}
    return rig.ask("create_model", **body)


async def fill(rig: Rig, session_id: str) -> None:
    """All places of the trainer are this session's."""
    for number in range(rig.trainer.config.max_adapters):
        assert "error" not in await rig.answer(create(rig, session_id, number))


async def snapshot(rig: Rig, model_id: str, seq_id: int) -> str:
    saved = await rig.answer(rig.ask("save_weights_for_sampler", model_id=model_id, seq_id=seq_id))
    return saved["sampling_session_id"]


@in_loop
async def test_a_silent_sessions_adapters_and_samplers_go_when_another_needs_the_place_and_not_before(tmp_path):
    rig = Rig(tmp_path)
    silent, present = rig.session(), rig.session()
    await fill(rig, silent)
    sampler = rig.service.samplers[await snapshot(rig, f"{silent}:train:0", 1)]
    fall_silent(rig, silent, 100)
    assert "adapters are in training" in (await rig.answer(create(rig, present, 0)))["error"]
    assert rig.service.session(silent).last_seen > time.monotonic() - 1  # a heartbeat in time
    fall_silent(rig, silent)
    await rig.answer(rig.forward_backward(f"{silent}:train:0", 2))  # a request is one, too
    assert "adapters are in training" in (await rig.answer(create(rig, present, 1)))["error"]
    fall_silent(rig, silent)
    assert "error" not in await rig.answer(create(rig, present, 2))
    assert list(rig.trainer.adapters) == [f"{present}:train:2"]
    assert sampler.retired and sampler.folder is not None and not sampler.folder.exists()
    for ask in (lambda: rig.forward_backward(f"{silent}:train:0", 3), lambda: rig.sample(sampler.sampler_id, 0)):
        with pytest.raises(Gone, match="has ended"):
            ask()
    rig.kill()


@in_loop
async def test_a_session_that_only_samples_is_not_silent(tmp_path):
    """Its SamplingClients may have gone to other processes, which send no heartbeat."""
    rig = Rig(tmp_path)
    session_id, present = rig.session(), rig.session()
    await fill(rig, session_id)
    sampler_id = await snapshot(rig, f"{session_id}:train:0", 1)
    fall_silent(rig, session_id)
    await rig.answer(rig.sample(sampler_id, 0))
    assert "adapters are in training" in (await rig.answer(create(rig, present, 0)))["error"]
    rig.kill()


@in_loop
async def test_two_clients_that_come_at_once_both_get_the_places_of_a_silent_one(tmp_path):
    """The second is not refused because the first is still at it: the silent one's adapter is busy."""
    rig = Rig(tmp_path)
    silent, first, second = rig.session(), rig.session(), rig.session()
    await fill(rig, silent)
    forward_backward = rig.trainer.forward_backward
    rig.trainer.copying.clear()
    rig.trainer.forward_backward = lambda *args, **options: (
        rig.trainer.copying.wait() and forward_backward(*args, **options)
    )
    rig.forward_backward(f"{silent}:train:0", 1)
    fall_silent(rig, silent)
    asked = [create(rig, session_id, 0) for session_id in (first, second)]
    await asyncio.sleep(0.1)
    rig.trainer.copying.set()
    assert [(await rig.answer(request_id)).get("error") for request_id in asked] == [None, None]
    assert set(rig.trainer.adapters) == {f"{first}:train:0", f"{second}:train:0"}
    rig.kill()


@in_loop
async def test_after_an_hour_of_silence_nothing_of_a_session_is_left(tmp_path):
    """Whether or not another client needs the place: its adapter, its samples in the queue, its tables and folders."""
    rig = Rig(tmp_path, auto=False)
    silent, empty, present = rig.session(), rig.session(), rig.session()
    await rig.model(silent), await rig.model(present)
    sampler_id = await snapshot(rig, f"{silent}:train:0", 1)
    samples = [rig.sample(sampler_id, seq_id) for seq_id in range(3)]
    for session_id in (silent, empty):
        fall_silent(rig, session_id, 3000)
    await rig.service.end_silent(server.KEEP_RESULTS_S)
    assert len(rig.trainer.adapters) == 2
    for session_id in (silent, empty):
        fall_silent(rig, session_id, 700)
    await rig.service.end_silent(server.KEEP_RESULTS_S)
    assert list(rig.trainer.adapters) == [f"{present}:train:0"]
    assert ["cancelled" in (await rig.answer(each))["error"] for each in samples] == [True] * 3
    assert all(future.cancelled() for future in rig.engine.waiting)
    service = rig.service
    service.forget(before=time.monotonic() + 1)
    assert list(service.sessions) == [present] and list(service.runs) == [f"{present}:train:0"]
    assert not service.samplers and len(service.promises) == 1  # of the one that is there: it was created
    assert not list((tmp_path / "objects").iterdir())
    with pytest.raises(NotFound):
        service.session(silent)
    rig.kill()
