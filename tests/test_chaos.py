"""A server that is killed again and again, and a client that must not notice more than a wait."""

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from cache import Store

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
KILLS = 20


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

    def said(self) -> str:
        return self.log.read_text()[self.begin :]

    def wait(self, text: str) -> None:
        while text not in self.said():
            assert self.process.poll() is None, self.said()
            time.sleep(0.01)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def answers(self) -> int:
        """How many the journal has, without stopping it."""
        with contextlib.closing(sqlite3.connect(f"file:{self.state_dir}/journal.sqlite?mode=ro", uri=True)) as database:
            ((count,),) = database.execute("SELECT count(*) FROM records WHERE kind = 'answer'")
            return count

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
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def final(state_dir: Path) -> bytes:
    """The adapter and its moments, as saved at the end."""
    with Store(state_dir) as store:
        (saved,) = store.list()
        return (store.open(saved.path).folder / "adapter.safetensors").read_bytes()


def test_a_run_whose_server_is_killed_twenty_times_ends_as_the_undisturbed_one_bit_for_bit(tmp_path):
    calm, hunted = Killable(tmp_path / "calm"), Killable(tmp_path / "hunted")
    calm.start()
    calm.wait("ready in")
    undisturbed = client(calm, tmp_path / "calm.json")
    output, _ = undisturbed.communicate(timeout=500)
    assert undisturbed.returncode == 0, output
    calm.process.send_signal(signal.SIGINT)
    calm.process.wait()

    dice, phases = random.Random(0), Counter()
    hunted.start()
    hunted.wait("ready in")
    running = client(hunted, tmp_path / "hunted.json")
    for kill in range(KILLS):
        if kill % 5 == 4:  # while it goes on where the last one was
            time.sleep(dice.uniform(0, 0.3))
        else:
            before = hunted.answers()
            while hunted.answers() == before and running.poll() is None:
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

    assert (tmp_path / "hunted.json").read_text() == (tmp_path / "calm.json").read_text()
    assert final(tmp_path / "hunted") == final(tmp_path / "calm")
    assert {"forward_backward", "asample"} <= phases.keys() and len(phases) >= 3, phases
    assert not re.search("Traceback|ERROR", hunted.log.read_text()), hunted.log.read_text()
