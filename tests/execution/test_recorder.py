"""A bar of the timeline covers the operation, not what it waited for."""

import dataclasses

from lazyjax.execution.recorder import Recorder
from lazyjax.planning.program.schedule import Action, Operation
from lazyjax.timeline import Resource

BACKWARD = Operation(0, Action.BACKWARD, Resource.COMPUTE, 1, 0, 0)
GRADIENT_OUT = dataclasses.replace(
    BACKWARD, index=1, action=Action.GRADIENT_OUT, resource=Resource.D2H, waits=(0,)
)


def test_a_gradient_leaves_when_its_backward_pass_is_over():
    recorder = Recorder()
    try:
        recorder.begin_step(1)
        # Both are issued at once; the copy is ready shortly after the compute.
        recorder.timer(BACKWARD)(10.0, 14.0)
        recorder.timer(GRADIENT_OUT)(10.1, 14.5)
        backward, out = recorder.timeline().events
    finally:
        recorder.close()
    assert (backward.action, out.action) == ("backward", "gradient_out")
    assert (backward.start_seconds, backward.end_seconds) == (0.0, 4.0)
    assert (out.start_seconds, out.end_seconds) == (4.0, 4.5)
