"""Mixed-integer programs solved in a process of their own, whose end is an answer.

A solver that crashes, hangs or wants more memory than it may have raises `SolverFailure` here and
nothing more; the planner then goes on with what it has, and a training run that plans again goes
on training. One process serves all searches, and a second one where many questions are independent. A process
is started at once (0.2 s, beside other work), and again after it died.
"""

from __future__ import annotations

import atexit
import functools
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from multiprocessing.connection import Connection

from lazyjax.planning.planner.linear import Answer, LinearProgram, Question
from lazyjax.planning.planner.solver_worker import Request, highs_library

#: Address space of the solver's process; 27B's programs take less than 1 GiB.
MEMORY_BYTES = 8 * 2**30
#: Wall time beyond a question's own limit, and its multiple, after which the process counts as hung.
_GRACE_SECONDS, _PATIENCE = 10.0, 2.0
#: Failures after which a search is done without the solver.
_MOST_FAILURES = 3
#: The process; the socket's number and the memory limit are appended.
COMMAND = [sys.executable, "-m", "lazyjax.planning.planner.solver_worker"]


class SolverFailure(RuntimeError):
    """The solver gave no answer; the message says how it ended."""


def solvers() -> tuple[str, ...]:
    """Solvers at hand, the preferred one first."""
    return ("HIGHS", "CBC") if highs_library() else ("CBC",)


class SolverProcess:
    """A process that solves, one question at a time; callers in other threads wait.

    Args:
        memory_bytes: address space that it may use; 0: no limit.
        grace_seconds: see `_GRACE_SECONDS`.
    """

    def __init__(self, *, memory_bytes: int = MEMORY_BYTES, grace_seconds: float = _GRACE_SECONDS) -> None:
        self.memory_bytes, self.grace_seconds = memory_bytes, grace_seconds
        self.failures = 0
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._sent: set[int] = set()
        self._forgotten: list[int] = []

    @property
    def process_id(self) -> int | None:
        """Of the process; None while there is none."""
        return None if self._process is None else self._process.pid

    def begin(self, *, start: bool = True) -> None:
        """Starts the process if there is none, now or with the first question; failures count anew."""
        with self._lock:
            self.failures = 0
            if start and self._connection is None:
                self._start()

    def solve(self, program: LinearProgram, question: Question) -> Answer:
        """Asks.

        Raises:
            SolverFailure: the process ended, did not answer in time, ran out of memory, or its solver
                raised; or that has happened too often since `begin`.
        """
        with self._lock:
            if self.failures >= _MOST_FAILURES:
                raise SolverFailure(f"the solver failed {self.failures} times and is not asked any more")
            try:
                answer = self._ask(program, question)
            except SolverFailure:
                self.failures += 1
                raise
        if isinstance(answer, str):
            self.failures += 1
            raise SolverFailure(f"the solver failed ({answer})")
        return answer

    def close(self) -> None:
        """Ends the process; whoever waits for an answer gets a `SolverFailure`."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _ask(self, program: LinearProgram, question: Question) -> Answer | str:
        if self._connection is None:
            self._start()
        assert self._connection is not None
        known = program.number in self._sent
        forget = tuple(number for number in self._forgotten if number in self._sent)
        self._forgotten.clear()
        patience = question.max_seconds * _PATIENCE + self.grace_seconds
        try:
            self._connection.send(Request(program.number, None if known else program, question, forget))
            if not known:
                self._sent.add(program.number)
                weakref.finalize(program, self._forgotten.append, program.number)
            if not self._connection.poll(patience):
                self._end()
                raise SolverFailure(f"the solver did not answer within {patience:.0f} s and was ended")
            answer: Answer | str = self._connection.recv()
        except (EOFError, OSError) as error:
            raise SolverFailure(f"the solver's process {self._how_it_ended()}") from error
        return answer

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
            # Matrix libraries that nothing here uses would reserve memory for threads, and the C
            # library reserves 64 or 128 MiB of address space for each thread that allocates.
            "OPENBLAS_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",
        }
        with theirs:
            self._process = subprocess.Popen(
                [*COMMAND, str(theirs.fileno()), str(self.memory_bytes)],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        self._sent.clear()

    def _how_it_ended(self) -> str:
        process = self._process
        assert process is not None
        try:
            code = process.wait(timeout=self.grace_seconds)
        except subprocess.TimeoutExpired:
            code = None
        self._end()
        if code is None:
            return "closed its connection"
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@functools.cache
def shared_process(number: int = 0) -> SolverProcess:
    """The process of this program, or one more beside it; ends with it."""
    process = SolverProcess()
    atexit.register(process.close)
    return process
