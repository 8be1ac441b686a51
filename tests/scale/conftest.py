"""A cluster of Ray for the tests."""

import pytest


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two CPUs on this machine's loopback, which ends with a file's tests."""
    from tether.scale.clusters import ray as scale

    ray = scale.ray
    ray.init(
        "local", num_cpus=2, _node_ip_address=scale.LOOPBACK, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
        namespace=scale.NAMESPACE, object_store_memory=100_000_000,
    )  # fmt: skip
    yield
    ray.shutdown()
