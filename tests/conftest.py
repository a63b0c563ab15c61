"""Every test but those marked tpu runs on the CPU: four virtual devices in this process, one in its servers."""

import os
import re
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the tests marked tpu are run with tpu,cpu
# Most of the tests' time is compilation; servers are started without these flags, and compute as users' do.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0"
os.environ["HF_HUB_OFFLINE"] = "1"

import warnings
from collections import Counter
from pathlib import Path

with warnings.catch_warnings():  # what other packages say of themselves while they are imported is not ours to mend
    warnings.simplefilter("ignore")
    import tinker  # noqa: F401

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

import model

ROOT = Path(model.__file__).parent
hypothesis.settings.register_profile("tests", deadline=None)  # nothing is asserted of wall time
hypothesis.settings.load_profile("tests")
jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp(prefix="tinker-tpu-xla-"))  # trainers share programs
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)

COMPILED = Counter()  # one entry a backend compilation of this process
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: COMPILED.update([name]) if name.endswith("backend_compile_duration") else None
)


# A worker takes a file at a time, in this order: the longest first, so that both end at about the same moment.
LONGEST = ("tpu", "chaos", "model", "coverage", "trainer", "server", "sampler", "losses", "examples", "restart")


def pytest_collection_modifyitems(config, items):
    """Slow tests, those of the TPU's compiler and those of vLLM are left out where -m does not name them.

    Without vLLM its tests are skipped, and say how to have it; where it must be there (.ci/run) they fail.
    """
    place = {f"test_{name}": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))
    unasked = {"slow", "tpu_compile", "engine"} - set(re.findall(r"\w+", config.getoption("markexpr")))
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
    missing = not (model.ENGINE / "installed").is_file() and not os.environ.get("REQUIRE_ENGINE")
    for item in items if missing else ():
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.skip(reason="no vLLM in .engine: `uv run sampler.py install` makes it"))


@pytest.fixture
def compilations():
    """A function: how many programs were compiled since the test began."""
    before = COMPILED.total()
    return lambda: COMPILED.total() - before


@pytest.fixture
def nothing_kept(tmp_path):
    """The folder, empty, in which this test's programs are kept, by JAX all of them."""
    settings = {"jax_compilation_cache_dir": str(tmp_path / "xla"), "jax_persistent_cache_min_compile_time_secs": 0.0}
    with model.configured(**settings):
        compilation_cache.reset_cache()
        yield tmp_path / "xla"
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def readme_block():
    """A function: the README's one block of this language that says this."""

    def readme_block(says: str, language: str = "python") -> str:
        blocks = re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
        (block,) = (block for block in blocks if says in block)
        return block

    return readme_block


@pytest.fixture(scope="session")
def state_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("state")


@pytest.fixture(scope="session")
def demo(state_dir):
    """The demo model on one device."""
    return model.load(model.ModelConfig(), state_dir=state_dir, devices=jax.devices()[:1])


@pytest.fixture(scope="session")
def sharded_demo(state_dir):
    """The demo model sharded over four devices."""
    return model.load(model.ModelConfig(), state_dir=state_dir)


@pytest.fixture(scope="session")
def serve(tmp_path_factory):
    """A function: `with serve(state_dir, *flags) as server:` runs server.py in a process of its own, on one device.

    `server.url` is ready; `server.interrupt()` is Ctrl-C and returns the seconds until the process had ended.
    Leaving the block interrupts too, and asserts that the server says it has ended well. What the first one compiles
    the others find, as after a restart.
    """
    import contextlib
    import shutil
    import signal
    import subprocess
    import sys
    import time
    from types import SimpleNamespace

    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    base = tmp_path_factory.getbasetemp()
    compiled = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "compiled"  # for both workers

    @contextlib.contextmanager
    def serve(state_dir, *flags):
        state_dir.mkdir(parents=True, exist_ok=True)
        if compiled.is_dir() and not (state_dir / "xla").exists():
            shutil.copytree(compiled, state_dir / "xla")
        log = state_dir / "server.log"
        command = [sys.executable, "server.py", "--port", "0", "--state-dir", str(state_dir), *flags]
        with log.open("w") as out:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out)

        def interrupt() -> float:
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)
            return time.monotonic() - started

        try:
            while not (ready := re.search(r"ready in .*TINKER_BASE_URL=(\S+)", log.read_text())):
                assert process.poll() is None, log.read_text()
                time.sleep(0.1)
            if not compiled.is_dir():
                shutil.copytree(state_dir / "xla", base / "xla", dirs_exist_ok=True)
                with contextlib.suppress(OSError):  # the other worker's came first
                    (base / "xla").rename(compiled)
            yield SimpleNamespace(url=ready[1], state_dir=state_dir, log=log, process=process, interrupt=interrupt)
            if process.poll() is None:
                interrupt()
            assert process.returncode == 0, log.read_text()
        finally:
            process.kill()
            process.wait()

    return serve


@pytest.fixture(scope="session")
def shared_server(serve, tmp_path_factory):
    with serve(tmp_path_factory.mktemp("server")) as running:
        yield running


@pytest.fixture(scope="module")
def server(shared_server):
    """The server that most tests share. No file leaves a session to the next: there are 8 places for adapters."""
    import httpx

    yield shared_server
    with httpx.Client(base_url=f"{shared_server.url}/api/v1/", timeout=60) as http:
        for session_id in http.get("sessions", params={"limit": 10_000}).json()["sessions"]:
            assert http.post(f"sessions/{session_id}/finish", json={}).is_success


@pytest.fixture(scope="session")
def bucket(tmp_path_factory):
    """gs://run of a Cloud Storage emulator in a process of its own; a context that points $STORAGE_EMULATOR_HOST at it."""
    import socket
    import subprocess
    import sys
    import time

    import httpx

    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    emulator = Path(sys.executable).with_name("gcp-storage-emulator")
    flags = ["start", "--host=127.0.0.1", f"--port={port}", "--in-memory", "--default-bucket=run"]
    log = tmp_path_factory.mktemp("bucket") / "emulator.log"
    with log.open("w") as out:
        process = subprocess.Popen([emulator, *flags], stdout=out, stderr=out)
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            assert process.poll() is None, log.read_text()
            try:
                if httpx.get(f"{address}/storage/v1/b/run").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        os.environ["STORAGE_EMULATOR_HOST"] = address
        yield "gs://run"
    finally:
        os.environ.pop("STORAGE_EMULATOR_HOST", None)
        process.kill()
        process.wait()
