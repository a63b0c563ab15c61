"""Every test runs on the CPU: four virtual devices in this process, one in the servers that it starts."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["HF_HUB_OFFLINE"] = "1"

import warnings
from collections import Counter

with warnings.catch_warnings():  # what other packages say of themselves while they are imported is not ours to mend
    warnings.simplefilter("ignore")
    import tinker  # noqa: F401

import jax
import pytest

import model

COMPILED = Counter()  # one entry a backend compilation of this process
jax.monitoring.register_event_duration_secs_listener(
    lambda name, *_, **__: COMPILED.update([name]) if name.endswith("backend_compile_duration") else None
)


@pytest.fixture
def compilations():
    """A function: how many programs were compiled since the test began."""
    before = COMPILED.total()
    return lambda: COMPILED.total() - before


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
