"""Processes that die or hang are noticed and named."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
from jax.errors import JaxRuntimeError

from lazyjax.distributed.watch import DEAD_SECONDS, Watch
from tests.distributed.stores import MemoryStore


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class Group:
    """The watches of some processes, looked at by hand."""

    def __init__(self, count: int, timeout_seconds: float = 100.0) -> None:
        self.clock, self.store, self.left = Clock(), MemoryStore(), []
        self.watches = [
            Watch(
                self.store, "run", index, count,
                timeout_seconds=timeout_seconds, now=self.clock, leave=self.left.append,
            )
            for index in range(count)
        ]  # fmt: skip

    def look(self, seconds: float, *, without: int | None = None, step: float = 2.0) -> list[str | None]:
        """The last reasons of all that look, after so many seconds of looking."""
        found: list[str | None] = []
        end = self.clock.seconds + seconds
        while self.clock.seconds < end:
            self.clock.seconds += step
            found = [watch.look() for index, watch in enumerate(self.watches) if index != without]
            if all(reason is not None for reason in found):
                break
        return found


def test_processes_that_live_are_left_alone() -> None:
    assert Group(3).look(1000) == [None] * 3


@pytest.mark.parametrize("silent", [0, 2])
def test_one_that_is_silent_is_named_within_a_minute(silent: int) -> None:
    group = Group(3)
    group.look(10)
    assert group.look(DEAD_SECONDS - 4, without=silent) == [None] * 2
    found = group.look(60 - DEAD_SECONDS, without=silent)
    assert all(reason is not None and f"process {silent} has died" in reason for reason in found)


def test_one_that_has_ended_on_this_host_is_noticed_at_once() -> None:
    group = Group(2)
    group.watches[0]._gone = lambda: [1]
    assert "process 1 has died" in str(group.watches[0].look())


def test_process_0_leaves_when_the_others_know_why() -> None:
    group = Group(3)
    ending = threading.Thread(target=group.watches[0]._end, args=("process 2 has died",))
    ending.start()
    time.sleep(0.5)
    assert group.left == []
    group.watches[1]._end("process 2 has died")
    ending.join(timeout=20)
    assert group.left == [1, 1]


def test_a_process_that_ended_because_of_another_is_not_named() -> None:
    group = Group(3)
    group.watches[1]._gone = lambda: [0, 2]
    group.store.key_value_set("run/known/0", "1")
    assert "process 2 has died" in str(group.watches[1].look())


def test_the_one_that_is_least_far_hangs() -> None:
    group = Group(3, timeout_seconds=100.0)
    with contextlib.ExitStack() as stack:
        for watch in group.watches:
            stack.enter_context(watch.training())
        for index, operations in enumerate((5, 3, 4)):
            for _ in range(operations):
                group.watches[index].advance()
        assert group.look(90) == [None] * 3
        found = group.look(20)
    assert all(reason is not None and "process 1 hangs" in reason for reason in found)


def test_as_long_as_one_gets_on_none_hangs() -> None:
    group = Group(2, timeout_seconds=100.0)
    with group.watches[0].training(), group.watches[1].training():
        for _ in range(20):
            group.watches[1].advance()
            assert group.look(50) == [None] * 2


def test_what_takes_long_outside_of_training_is_no_hanging() -> None:
    group = Group(2, timeout_seconds=100.0)
    with group.watches[0].training():
        assert group.look(1000) == [None] * 2


def test_a_failure_is_told_with_its_words_and_without_waiting() -> None:
    group = Group(2)
    group.store.key_value_set("run/known/0", "1")
    group.watches[1].tell(OSError("no space left"))
    assert group.watches[0].look() == "process 1 failed: OSError: no space left"


def test_a_coordinator_that_does_not_answer_is_named() -> None:
    group = Group(2)
    group.look(4)
    group.store.fails = True
    assert group.look(DEAD_SECONDS - 4, without=0) == [None]
    (reason,) = group.look(10, without=0)
    assert "process 0, the coordinator, does not answer" in str(reason)


def test_a_process_that_ends_says_why_and_leaves_with_a_status(capsys: pytest.CaptureFixture[str]) -> None:
    group, reasons = Group(2), []
    watch = group.watches[0]
    watch.on_end = reasons.append
    watch._end("process 1 has died")
    assert reasons == [watch.ended] == ["process 1 has died"]
    assert group.left == [1]
    assert "error: process 1 has died; process 0 ends" in capsys.readouterr().err
    assert dict(group.store.key_value_dir_get("run/known/"))


def test_an_error_of_the_store_while_telling_is_no_second_error() -> None:
    group = Group(2)
    group.store.fails = True
    group.watches[1].tell(ValueError("bad"))
    with pytest.raises(JaxRuntimeError):
        group.store.key_value_dir_get("run/")


class Waits:
    """In the place of the event that ends the watch: never set, it keeps how long it was waited for."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def wait(self, seconds: float) -> bool:
        self.seconds.append(seconds)
        return False


def device_error() -> JaxRuntimeError:
    return JaxRuntimeError("UNKNOWN: Gloo AllGather failed: Connection reset by peer")


def wrapped(kind: str) -> Exception:
    """An error that follows from one of the device."""
    try:
        try:
            raise device_error()
        except JaxRuntimeError as error:
            if kind == "cause":
                raise RuntimeError("an earlier step failed") from error
            raise OSError("the queue is closed")  # noqa: B904 - raised while the other is handled
    except Exception as error:
        return error


@pytest.mark.parametrize(
    ("failure", "gone", "waits"),
    [
        (device_error(), [], True),
        (wrapped("cause"), [], True),
        (wrapped("context"), [], True),
        (OSError("no space left"), [], False),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory"), [], False),
        (OSError("no space left"), [1], True),
        (OSError("no space left"), [0], False),
    ],
)
def test_what_may_come_of_anothers_end_is_not_told_before_that_is_known(
    failure: Exception, gone: list[int], waits: bool
) -> None:
    group = Group(2)
    group.store.key_value_set("run/known/1", "1")
    watch, event = group.watches[0], Waits()
    watch._stopped, watch._gone = event, lambda: gone
    watch.tell(failure)
    assert event.seconds == ([DEAD_SECONDS + 4] if waits else [])
