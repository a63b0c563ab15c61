"""The `tinker` command of the SDK, as a user types it, against a real server."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import tinker

TINKER = Path(sys.executable).with_name("tinker")


@pytest.fixture
def command(server):
    """A function: the output of `tinker <arguments>`; that the command succeeded is asserted.

    CPython 3.12.1 may abort while it ends, all work done and printed: a daemon thread of the SDK's is then in native
    code. That is no failure of a command, whose effects are asserted by the commands that follow.
    """
    environment = os.environ | {"TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-test", "TINKER_TELEMETRY": "0"}

    def command(*arguments: str) -> str:
        ended = subprocess.run([TINKER, *arguments], env=environment, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0 or (ended.returncode == -signal.SIGABRT and not ended.stderr), ended
        return ended.stdout

    return command


@pytest.fixture(scope="module")
def saved(server):
    """(training run id, path of its checkpoint), of a session that has ended."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    client = service.create_lora_training_client("demo", rank=4, seed=0).result()
    path = client.save_state("cli").result().path
    service.close("success").result()
    return client.model_id, path


def test_models_are_listed(command):
    assert "demo" in command("model", "list")


def test_runs_are_listed_and_shown(command, saved):
    run_id, path = saved
    runs = json.loads(command("-f", "json", "run", "list"))["runs"]
    assert run_id in [run["training_run_id"] for run in runs]
    shown = json.loads(command("-f", "json", "run", "info", run_id))
    assert (shown["base_model"], shown["lora_rank"]) == ("demo", 4)
    assert shown["last_checkpoint"]["tinker_path"] == path


def test_a_checkpoint_is_published_given_an_end_and_deleted(command, saved):
    run_id, path = saved
    listed = lambda: json.loads(command("-f", "json", "checkpoint", "list", "--run-id", run_id))["checkpoints"]
    assert [each["tinker_path"] for each in listed()] == [path]
    assert path in command("-f", "json", "checkpoint", "list")
    assert path in command("-f", "json", "checkpoint", "info", path)
    command("checkpoint", "publish", path)
    assert listed()[0]["public"]
    command("checkpoint", "unpublish", path)
    assert not listed()[0]["public"]
    command("checkpoint", "set-ttl", path, "--ttl", "3600")
    assert listed()[0]["expires_at"]
    command("checkpoint", "set-ttl", path, "--remove")
    assert not listed()[0]["expires_at"]
    command("checkpoint", "delete", "-y", path)
    assert listed() == []
