"""The table of what fits: what it says suffices, suffices; less does not."""

import dataclasses

from experiments.what_fits import ROWS, least_host, request_for
from lazyjax.planning.planner.feasibility import feasible
from lazyjax.specs import Tier
from tests import tiny

TEMPLATE = tiny.template("qwen2", tied=False, blocks=3)


def test_the_least_host_memory_is_enough_and_the_least():
    for nvme in (False, True):
        request = request_for(TEMPLATE, 10**9, nvme=nvme)
        need = least_host(request)
        assert need is not None
        finest = dataclasses.replace(request, microbatches=ROWS)
        for host, fits in ((need.host, True), (int(0.98 * need.host), False)):
            capacity = {**request.capacity, Tier.HOST: host}
            assert feasible(dataclasses.replace(finest, capacity=capacity)) is fits
        assert (need.nvme > 0) is nvme


def test_a_gpu_that_is_too_small_fits_nothing():
    assert least_host(request_for(TEMPLATE, 10_000, nvme=False)) is None
