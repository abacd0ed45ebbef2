"""These files need eight devices, so each runs in a process of its own: `make test-distributed`."""

import jax
import pytest


@pytest.fixture(autouse=True)
def eight_devices() -> None:
    if jax.device_count() != 8:
        pytest.skip(
            f"needs 8 devices, not {jax.device_count()}: run `make test-distributed`, or one file with "
            "XLA_FLAGS=--xla_force_host_platform_device_count=8"
        )
    # Eight devices share one program: what it costs here is compiling it, not running it.
    jax.config.update("jax_disable_most_optimizations", True)
