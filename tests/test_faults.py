"""Faults of clients: they die, fall silent, lose answers, ask twice, give up a thousand samples at once.

Whatever one does, the others' numbers are those that they get when alone, bit for bit, and its places can be had again.
What cannot be seen through HTTP is asked of a service in this process, with tests/test_recover.py's scripted engines.
Nothing is asserted of wall time: how long others wait is counted, in calls of the trainer and in tokens.
"""

import asyncio
import contextlib
import json
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import httpx
import numpy as np
import pytest
from test_coverage import Leaf
from test_recover import Rig, in_loop
from test_server import (
    ADAM,
    ROOT,
    TOKENS,
    connect,
    datum,
    fb_body,
    finish,
    logprobs,
    new_adapter,
    numbers,
    post_fb,
    prompt,
    raw_model,
    result,
    sample_body,
    train,
)
from tinker import types
from tinker.lib.public_interfaces import training_client

import server as tinker_server
import wire
from server import Gone, NotFound


@pytest.fixture
def service(server):
    with connect(server.url) as client:
        yield client


@pytest.fixture
def http(server):
    with httpx.Client(base_url=f"{server.url}/api/v1/", timeout=40) as client:
        yield client


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
    assert rig.service.session(silent).last_seen > time.monotonic() - 60  # a heartbeat in time
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
    turns = rig.trainer.turns
    rig.trainer.copying.clear()

    def waiting(*args, **options):
        rig.trainer.copying.wait()
        yield from turns(*args, **options)

    rig.trainer.turns = waiting
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
    await rig.service.end_silent(tinker_server.KEEP_RESULTS_S)
    assert len(rig.trainer.adapters) == 2
    for session_id in (silent, empty):
        fall_silent(rig, session_id, 700)
    await rig.service.end_silent(tinker_server.KEEP_RESULTS_S)
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


# ---- those that have finished, or died


def test_a_finished_session_refuses_every_verb_with_410(http):
    model_id = raw_model(http)
    session_id = model_id.split(":")[0]
    opened = {"session_id": session_id, "base_model": "demo"}
    sampler_id = http.post("create_sampling_session", json=opened | {"sampling_session_seq_id": 0}).json()
    finish(http, model_id)
    mine, new = {"model_id": model_id, "seq_id": 1}, {"session_id": session_id, "model_seq_id": 1}
    weights = {"path": "tinker://s0:train:0/weights/x", "optimizer": True}
    asked = [
        ("session_heartbeat", {"session_id": session_id}),
        ("create_model", new | {"base_model": "demo", "lora_config": {"rank": 4}}),
        ("load_weights", new | weights),
        ("load_weights", mine | weights),
        ("optim_step", mine | {"adam_params": ADAM.model_dump()}),
        ("save_weights", mine),
        ("save_weights_for_sampler", mine),
        ("save_weights_external", mine | {"path": "x"}),
        ("create_sampling_session", opened | {"sampling_session_seq_id": 1}),
        ("asample", sample_body(sampler_id["sampling_session_id"], 0)),
    ]
    answers = [http.post(verb, json=body) for verb, body in asked]
    answers.append(http.post("forward_backward", content=fb_body(model_id, 1)))
    assert {answer.status_code for answer in answers} == {410}, [answer.text for answer in answers]
    assert all("has ended" in answer.json()["detail"] for answer in answers)


DYING = """
import sys
sys.path.insert(0, "tests")
from test_server import connect, datum, new_adapter, prompt, train, types

client = new_adapter(connect(sys.argv[1]), seed=9)
train(client)
sampler = client.save_weights_and_get_sampling_client().result()
client.forward_backward([datum()], "cross_entropy").result()
working = [client.forward_backward([datum()] * 20, "cross_entropy") for _ in range(6)]
sampling = [sampler.sample(prompt(), 4, types.SamplingParams(max_tokens=300, stop=[])) for _ in range(3)]
working[1].result()
print(client.model_id, flush=True)
working[-1].result()
sampling[-1].result()
"""


def test_a_client_killed_in_the_middle_of_an_accumulation_leaves_no_half_gradient_for_the_next(server, service, http):
    neighbour, alone = new_adapter(service, seed=3), new_adapter(service, seed=3)
    expected, next_expected = train(alone, steps=2), train(new_adapter(service, seed=9))
    train(neighbour)
    snapshots = lambda: set((server.state_dir / "objects").iterdir())
    before = snapshots()
    command, environment = [sys.executable, "-c", DYING, server.url], os.environ | {"JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as dying:
        assert dying.stdout is not None
        model_id = dying.stdout.readline().strip()
        dying.kill()
    assert model_id
    assert train(neighbour) == expected
    assert train(new_adapter(service, seed=9)) == next_expected
    finish(http, model_id)  # as the server itself does after a while
    assert snapshots() == before
    for seed in range(4):  # of 8; this session has the others
        new_adapter(service, seed=seed)


def test_half_a_request_is_none(server, http):
    """A client that dies inside a forward_backward: its place in the order is still to be had."""
    cut, whole = raw_model(http), raw_model(http)
    host, port = server.url.removeprefix("http://").split(":")
    body, head = fb_body(cut, 1), "POST /api/v1/forward_backward HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n"
    with socket.create_connection((host, int(port))) as dying:
        dying.sendall(head.format(len(body)).encode() + body[:-10])
    answers = [numbers(result(http, post_fb(http, model_id, 1))) for model_id in (cut, whole)]
    assert answers[0] == answers[1]
    for model_id in (cut, whole):
        finish(http, model_id)


# ---- answers that are lost, requests that come twice or in another order


@contextlib.contextmanager
def bad_line(url: str):
    """A proxy that loses the first answer of each verb, posts every second request twice, and tells the SDK to send
    each datum as a request of its own (which it does at once, the first one last).
    """
    seen, order, upstream = Counter(), [], httpx.Client(base_url=url, timeout=60)

    class Line(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body, verb = self.rfile.read(int(self.headers.get("Content-Length", 0))), self.path.rpartition("/")[2]
            number = seen[verb]
            seen[verb] += 1
            if verb == "forward_backward":
                order.append(wire.decode_envelope(body)[1])
            ask = lambda: upstream.request(self.command, self.path, content=body)
            answers = [ask() for _ in range(1 + number % 2)]
            if verb in PROMISED:
                assert len({answer.content for answer in answers}) == 1
            if number == 0:
                self.close_connection = True
                return self.connection.shutdown(socket.SHUT_RDWR)
            content = answers[-1].content if verb != "config" else json.dumps({"fwdbwd_max_chunk_len": 1}).encode()
            self.send_response(answers[-1].status_code)
            self.send_header("Content-Type", answers[-1].headers.get("Content-Type", "application/json"))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Line) as line:
        thread = threading.Thread(target=line.serve_forever)
        thread.start()
        try:
            yield SimpleNamespace(url=f"http://127.0.0.1:{line.server_port}", seen=seen, order=order)
        finally:
            line.shutdown()
            thread.join()
            upstream.close()


PROMISED = {"create_model", "forward_backward", "optim_step", "save_weights_for_sampler", "asample"}


def test_lost_answers_doubled_requests_and_reordered_chunks_change_no_bit(server):
    def work(url: str) -> list:
        with connect(url) as service:
            client, got = new_adapter(service, seed=4), []
            for _ in range(2):
                data = [datum(TOKENS[i:]) for i in range(3)]
                got.append(logprobs(client.forward_backward(data, "cross_entropy").result()))
                got.append(client.optim_step(ADAM).result().metrics["optim/step"])
            sampler = client.save_weights_and_get_sampling_client().result()
            params = types.SamplingParams(max_tokens=12, seed=7)
            replies = [sampler.sample(prompt(), 2, params) for _ in range(3)]
            got += [[(s.tokens, s.logprobs) for s in reply.result().sequences] for reply in replies]
            return [*got, logprobs(client.forward([datum()], "cross_entropy").result())]

    with bad_line(server.url) as line:
        assert work(line.url) == work(server.url)
    assert set(line.seen) >= PROMISED | {"create_session", "retrieve_future"}
    assert line.order != sorted(line.order) and len(set(line.order)) < len(line.order)


# ---- what goes wrong in the client itself


def test_a_custom_loss_that_raises_stops_its_own_client_and_nobody_else(server, service):
    """The SDK had reserved a place in the order for the gradient, which never comes."""

    def loss(data, leaves):
        raise ZeroDivisionError("mine")

    stand_in = SimpleNamespace(tensor=lambda data: Leaf((len(data),)))  # of torch
    neighbour, expected = new_adapter(service), train(new_adapter(service), steps=2)
    train(neighbour)
    for _ in range(2):  # and its places are free again
        with connect(server.url) as other, mock.patch.object(training_client, "torch", stand_in):
            client, *_ = [new_adapter(other) for _ in range(6)]
            client.forward_backward([datum()], "cross_entropy").result()
            failing, behind = client.forward_backward_custom([datum()], loss), client.optim_step(ADAM)
            with pytest.raises(ZeroDivisionError, match="mine"):
                failing.result()
            with pytest.raises(RuntimeError, match="poisoned"):
                behind.result()
    assert train(neighbour) == expected


# ---- many at once


def test_a_thousand_samples_cancelled_at_once_end_and_the_next_one_is_served(server, http, service):
    mine = service.create_sampling_client(base_model="demo").result()
    sample = lambda: mine.sample(prompt(), 1, types.SamplingParams(max_tokens=12, seed=7)).result().sequences[0].tokens
    expected, other = sample(), service.create_sampling_client(base_model="demo").result()._sampling_session_id

    def post(verb: str, bodies: list[dict]) -> list[dict]:
        line, answers = HTTPConnection(server.url.removeprefix("http://")), []  # httpx takes longer than the server
        with contextlib.closing(line):
            for body in bodies:
                line.request("POST", f"/api/v1/{verb}", json.dumps(body))
                answers.append(json.loads(line.getresponse().read()))
        return answers

    def post_all(verb: str, bodies: list[dict]) -> list[dict]:
        with ThreadPoolExecutor(20) as pool:
            parts = pool.map(lambda i: post(verb, bodies[i : i + 50]), range(0, 1000, 50))
            return [answer for part in parts for answer in part]

    asked = post_all("asample", [sample_body(other, seq, 450) for seq in range(1000)])
    promises = [{"request_id": answer["request_id"]} for answer in asked]
    assert post_all("cancel_future", promises) == promises
    assert "cancelled" in result(http, promises[-1]["request_id"]).json()["error"]
    assert sample() == expected
    ask = {"target": {"sampling_session_id": other}, "prev_cursor": 0, "timeout": 0.0}
    states = Counter(each["state"] for each in http.post("retrieve_futures", json=ask).json()["completions"])
    assert states.total() == 1000 and states["failed"] > 800  # the first may have ended before


@in_loop
async def test_cancelled_samples_leave_nothing_behind(tmp_path):
    rig = Rig(tmp_path, auto=False, max_queue=1000)
    sampler_id = await rig.sampler(rig.session())
    for request_id in [rig.sample(sampler_id, seq_id) for seq_id in range(1000)]:
        rig.service.cancel_future(types.FutureRetrieveRequest(request_id=request_id))
    assert all(future.cancelled() for future in rig.engine.waiting)
    while rig.service.background:
        await asyncio.wait(rig.service.background)
    rig.service.forget(before=time.monotonic() + 1)
    await asyncio.wrap_future(rig.journal.durable())
    assert not rig.service.promises and not rig.service.samplers[sampler_id].requests
    assert not {"request", "payload", "answer"} & {record.kind for record in rig.journal.records()}
    rig.kill()


def test_two_train_and_four_sample_and_each_gets_what_it_gets_alone(service):
    def learn(seed: int) -> list:
        client = new_adapter(service, seed=seed)
        return [train(client) for _ in range(3)]

    def sample(sampler) -> list:
        params = [types.SamplingParams(max_tokens=30, seed=seed, stop=[]) for seed in range(4)]
        replies = [sampler.sample(prompt(), 2, each) for each in params]
        return [[(s.tokens, s.logprobs) for s in reply.result().sequences] for reply in replies]

    frozen = [new_adapter(service, seed=seed) for seed in range(2)]
    samplers = [client.save_weights_and_get_sampling_client().result() for client in frozen]
    samplers += [service.create_sampling_client(base_model="demo").result() for _ in range(2)]
    work = [lambda seed=seed: learn(seed) for seed in (5, 6)]
    work += [lambda sampler=sampler: sample(sampler) for sampler in samplers]
    alone = [each() for each in work]
    with ThreadPoolExecutor(len(work)) as pool:
        together = [future.result() for future in [pool.submit(each) for each in work]]
    assert together == alone


@in_loop
async def test_a_model_waits_for_one_tile_of_each_other_however_much_these_have_asked_for(tmp_path):
    """Calls take turns on the device, a tile each; and what is decoded for a call of many requests is bounded."""
    rig = Rig(tmp_path)
    greedy, modest, third = [await rig.model(rig.session()) for _ in range(3)]
    bound, scripted, calls, turns = 2 * rig.trainer.rows * rig.trainer.row_len, rig.trainer.turns, [], []

    def recorded(model_id, requests, **options):
        rig.trainer.copying.wait()
        calls.append((model_id, sum(len(datum.tokens) for request in requests for datum in request.data)))
        for answers in scripted(model_id, requests, **options):
            turns.append(model_id)
            yield answers
            time.sleep(0.01)  # of the device thread: the loop can ask for others' turns

    rig.trainer.turns = recorded
    rig.trainer.copying.clear()
    with mock.patch.object(tinker_server, "SHARED_TILES", 2):
        asked = [rig.forward_backward(greedy, seq_id, tokens=201) for seq_id in range(1, 101)]
        await asyncio.sleep(0.1)  # its first call has the device
        last = [rig.forward_backward(modest, seq_id) for seq_id in range(1, 4)][-1]
        last = [rig.optim_step(modest, 4), last][0]
        other = [rig.forward_backward(third, seq_id) for seq_id in range(1, 4)][-1]
        await asyncio.sleep(0.1)
        rig.trainer.copying.set()
        await asyncio.gather(*map(rig.answer, (last, other, asked[-1])))
    assert Counter(turns) == {greedy: 100, modest: 3, third: 3}
    both = max(i for i, model_id in enumerate(turns) if model_id != greedy)
    assert Counter(turns[:both])[greedy] <= 8, turns  # one of theirs, one of each other's
    assert max(tokens for _, tokens in calls) < bound + 200
    assert sum(tokens for model_id, tokens in calls if model_id == greedy) == 100 * 200
    assert len([model_id for model_id, _ in calls if model_id == greedy]) >= math.ceil(100 * 200 / (bound + 200))
    rig.kill()


@in_loop
async def test_a_model_waits_for_one_tile_of_the_prompts_that_are_scored(tmp_path):
    rig = Rig(tmp_path)
    model_id, asked, scored, scripted = await rig.model(rig.session()), [], [], rig.trainer.score_turns

    def recorded(prompts, folder):
        for scores in scripted(prompts, folder):
            scored.append(folder)
            yield scores
            time.sleep(0.01)

    rig.trainer.score_turns = recorded
    for i in range(300):
        folder = Path("ab"[i % 2])
        asked.append(asyncio.wrap_future(rig.service.score(np.zeros(3 + i % 5, np.int32), folder)))
    await asyncio.sleep(0.1)
    before = len(scored)
    await rig.answer(rig.forward_backward(model_id, 1))
    assert before > 0 and len(scored) - before <= 6 < 300 - before
    rig.trainer.score_turns = scripted
    assert [len(scores) for scores in await asyncio.gather(*asked)] == [3 + i % 5 for i in range(300)]
    assert not rig.service.to_score
    rig.kill()


def test_nothing_of_all_this_was_a_failure_of_the_servers(server):
    assert "Traceback" not in server.log.read_text(), server.log.read_text()
