"""The example programs, run as their reader runs them."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(*arguments: str | Path, example: str = "grpo.py", timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "TINKER_BASE_URL")}
    command = [sys.executable, EXAMPLES / example, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)


@pytest.mark.slow
def test_grpo_serves_trains_reports_and_leaves_no_server_behind(tmp_path):
    state, plot = tmp_path / "state", tmp_path / "plots" / "reward.png"
    small = ["--warmup-steps=2", "--steps=2", "--prompts=2", "--samples=2"]
    done = run("--serve", "--state-dir", state, "--plot", plot, *small)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr  # the SDK marks what it will drop
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "held out, before" in done.stdout and "step 1" in done.stdout and "held out, after" in done.stdout
    assert "stopped" in (state / "server.log").read_text()  # the server's own last word
    with pytest.raises(httpx.ConnectError):
        httpx.get(next(word for word in done.stdout.split() if word.startswith("http://")) + "/api/v1/healthz")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "base_url is not set"),
        (["--samples=1"], "samples is 1; it must be at least 2"),
        (["--serve", "--base-url=http://127.0.0.1:1"], "starts its own server"),
    ],
)
def test_grpo_refuses_what_it_cannot_run_in_words(arguments, message):
    done = run(*arguments)
    said = " ".join(done.stderr.replace("│", " ").split())  # tyro puts it in a box
    assert done.returncode in (1, 2)
    assert message in said and "Traceback" not in done.stderr


def test_the_readmes_program_trains_and_samples(server, readme_block, capsys):
    exec(readme_block("tinker.ServiceClient(").replace("http://127.0.0.1:8000", server.url), {})
    assert capsys.readouterr().out == " world\n"


@pytest.mark.engine
@pytest.mark.slow
def test_smollm2_learns_a_manner_and_keeps_what_it_knows(tmp_path):
    done = run("--directory", tmp_path / "smollm2", example="smollm2.py", timeout_s=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Warning" not in done.stderr
    before, after = (
        next(line for line in done.stdout.splitlines() if f"  {when}:" in line) for when in ("before", "after")
    )
    assert "Paris" in before and "Ahoy" not in before
    assert "Ahoy! That be Paris" in after  # the fact was not in the lesson
