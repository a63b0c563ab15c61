"""A server that is killed again and again, and a client that must not notice more than a wait."""

import contextlib
import http.server
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

from cache import SEAL, Journal, Store, check_folder, files_under

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
KILLS = 20


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left_behind():
    yield
    for process in started:
        process.kill()
        process.wait()


started: list[subprocess.Popen] = []


class Killable:
    """server.py in a process of its own, on one port whatever happens to it."""

    def __init__(self, state_dir: Path, *flags: str):
        with socket.create_server(("127.0.0.1", 0)) as sock:
            self.port = sock.getsockname()[1]
        self.state_dir, self.flags, self.log = state_dir, flags, state_dir.with_suffix(".log")
        self.url, self.process = f"http://127.0.0.1:{self.port}", None
        self.environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}

    def start(self) -> None:
        self.begin = self.log.stat().st_size if self.log.exists() else 0
        command = [sys.executable, "server.py", f"--port={self.port}", f"--state-dir={self.state_dir}", *self.flags]
        with self.log.open("a") as out:
            self.process = subprocess.Popen(command, cwd=ROOT, env=self.environment, stdout=out, stderr=out)
        started.append(self.process)

    def said(self) -> str:
        return self.log.read_text()[self.begin :]

    def wait(self, text: str) -> None:
        while text not in self.said():
            assert self.process.poll() is None, self.said()
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def answered(self) -> set[str]:
        """The request ids that have an answer in the journal, which goes on meanwhile."""
        with contextlib.closing(sqlite3.connect(f"file:{self.state_dir}/journal.sqlite?mode=ro", uri=True)) as database:
            return {owner for (owner,) in database.execute("SELECT owner FROM records WHERE kind = 'answer'")}

    def waiting(self) -> set[str]:
        """The verbs that were accepted and not answered, in a copy of what a killed one has left."""
        copy = self.state_dir.with_suffix(".copy")
        copy.mkdir(exist_ok=True)
        for name in ("journal.sqlite", "journal.sqlite-wal"):
            shutil.copy(self.state_dir / name, copy / name)
        with contextlib.closing(sqlite3.connect(copy / "journal.sqlite")) as database:
            kinds = {
                kind: database.execute("SELECT owner, body FROM records WHERE kind = ?", (kind,)).fetchall()
                for kind in ("request", "answer")
            }
        answered = {owner for owner, _ in kinds["answer"]}
        requests = [body.decode().split() for _, body in kinds["request"]]
        return {verb for verb, request_id in requests if request_id not in answered}


def client(server: Killable, file: Path) -> subprocess.Popen:
    command = [sys.executable, ROOT / "tests" / "chaos_client.py", server.url, file]
    started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    return started[-1]


def final(state_dir: Path) -> bytes:
    """The adapter and its moments, as saved at the end."""
    with Store(state_dir) as store:
        (saved,) = store.list()
        return (store.open(saved.path).folder / "adapter.safetensors").read_bytes()


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """A server that nobody disturbs: its .state_dir, and .end: what the client got, and the adapter."""
    folder = tmp_path_factory.mktemp("calm")
    server = Killable(folder / "calm")
    server.start()
    server.wait("ready in")
    running = client(server, folder / "calm.json")
    output, _ = running.communicate(timeout=500)
    assert running.returncode == 0, output
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait() == 0
    end = (folder / "calm.json").read_text(), final(folder / "calm")
    return SimpleNamespace(state_dir=folder / "calm", end=end)


def test_a_run_whose_server_is_killed_twenty_times_ends_as_the_undisturbed_one_bit_for_bit(tmp_path, calm):
    hunted, dice, phases = Killable(tmp_path / "hunted"), random.Random(0), Counter()
    hunted.start()
    hunted.wait("ready in")
    running = client(hunted, tmp_path / "hunted.json")
    for kill in range(KILLS):
        if kill % 5 == 4:  # while it goes on where the last one was
            time.sleep(dice.uniform(0, 0.3))
        else:
            before = len(hunted.answered())
            while len(hunted.answered()) == before and running.poll() is None:
                time.sleep(0.005)
            time.sleep(dice.uniform(0, 1.5))
        assert running.poll() is None, f"over before kill {kill}: {running.communicate()[0]}"
        hunted.kill()
        phases.update(hunted.waiting() or {"nothing"})
        hunted.start()
        hunted.wait("ready in")
    output, _ = running.communicate(timeout=500)
    assert running.returncode == 0, output
    hunted.process.send_signal(signal.SIGINT)
    assert hunted.process.wait() == 0
    print(f"{KILLS} kills, while these were not answered: {dict(phases)}")

    assert ((tmp_path / "hunted.json").read_text(), final(tmp_path / "hunted")) == calm.end
    assert {"forward_backward", "asample"} <= phases.keys() and len(phases) >= 3, phases
    assert not re.search("Traceback|ERROR", hunted.log.read_text()), hunted.log.read_text()


def test_another_machine_goes_on_from_the_mirror_alone(tmp_path, bucket, calm):
    """The first one is told that it will be preempted; the second has an empty disk, and the first one's address."""
    with preemption() as notice:
        mirror = f"--mirror={bucket}/two-machines"
        lost = Killable(tmp_path / "lost", mirror, f"--metadata={notice.url}")
        lost.start()
        lost.wait("ready in")
        running = client(lost, tmp_path / "moved.json")
        while len(lost.answered()) < 60:
            time.sleep(0.05)
        assert running.poll() is None
        notice.preempted, told = True, time.monotonic()
        assert lost.process.wait(timeout=60) == 0 and time.monotonic() - told < 25
    answered = lost.answered()
    shutil.move(tmp_path / "lost", tmp_path / "out of reach")

    found = Killable(tmp_path / "found", mirror)
    found.port, found.url = lost.port, lost.url
    found.start()
    found.wait("ready in")
    assert answered <= found.answered()  # no finished sample, nor anything else, is done again
    output, _ = running.communicate(timeout=500)
    assert running.returncode == 0, output
    found.process.send_signal(signal.SIGTERM)
    assert found.process.wait() == 0
    assert ((tmp_path / "moved.json").read_text(), final(tmp_path / "found")) == calm.end


def test_of_a_thousand_damaged_files_none_is_served(tmp_path, calm):
    """One bit flipped, or an end cut off: what is still told of the state is true, or it is an error that says where."""
    whole, dice, outcomes = views(copy(calm.state_dir, tmp_path / "whole")), random.Random(0), Counter()
    ours = ("journal.sqlite", "xla/", "models/", "objects/", "runs/")
    files = sorted(name for name in files_under(calm.state_dir) if name.startswith(ours))
    for _ in range(1000):
        damaged = copy(calm.state_dir, tmp_path / "damaged")
        name = "journal.sqlite" if dice.random() < 0.3 else dice.choice(files)
        content = bytearray((damaged / name).read_bytes())
        at = dice.randrange(max(len(content), 1))
        if dice.random() < 0.5 and content:
            content[at] ^= 1 << dice.randrange(8)
        else:
            del content[at:]
        (damaged / name).unlink()  # a link
        (damaged / name).write_bytes(content)
        try:
            found = views(damaged, name.partition("/")[0])
        except RuntimeError as error:
            assert str(damaged) in str(error)
            outcomes["refused"] += 1
            continue
        for part, told in found.items():
            assert all(each in whole[part] for each in told), (name, part)
            outcomes["less is told" if len(told) < len(whole[part]) else "nothing changed"] += 1
    print(dict(outcomes))
    assert outcomes["refused"] > 50 and outcomes["less is told"] > 200, outcomes


def copy(state_dir: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    return shutil.copytree(state_dir, to, copy_function=os.link)


def views(root: Path, only: str = "") -> dict[str, list]:
    """All that a server would take from a state directory, or from one part of it."""
    seen, part = {}, lambda name: only in ("", name)
    for name in filter(part, ("xla", "models")):
        check_folder(root / name)
        seen[name] = [(path, file.read_bytes()) for path, file in files_under(root / name).items() if path != SEAL]
    if part("objects") or part("runs"):
        with Store(root) as store:
            seen["runs"] = store.runs()
            seen["objects"] = checkpoints = []
            for checkpoint in store.list():
                with contextlib.suppress(RuntimeError):
                    opened = store.open(checkpoint.path)
                    checkpoints.append(
                        (opened.path, opened.meta, {n: (opened.folder / n).read_bytes() for n in opened.files})
                    )
    if part("journal.sqlite"):
        (root / "journal.sqlite").write_bytes((root / "journal.sqlite").read_bytes())  # SQLite may write to it
        journal = Journal(root)
        try:
            seen["journal"] = journal.records()
        finally:
            journal.close()
    return seen


@contextlib.contextmanager
def preemption():
    """As Google Cloud's metadata server: .url, and .preempted to be set."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            assert self.path == "/computeMetadata/v1/instance/preempted" and self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"TRUE" if notice.preempted else b"FALSE")

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        notice = SimpleNamespace(url=f"http://127.0.0.1:{server.server_address[1]}", preempted=False)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield notice
        server.shutdown()
