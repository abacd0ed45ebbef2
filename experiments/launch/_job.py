"""A program as submitit runs it: told to save when its time is up or its node is wanted, and started again after that.

Imported on the nodes too, where jobs are unpickled by the names in here.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import time
from typing import Any

from experiments import _main

POLL = 0.2  # seconds
REQUEUE = 600.0  # that a process which is done waits for the scheduler to end it


class ProgramJob:
    """A command line, run as a child process.

    submitit sends its signal (USR2, or what `SUBMITIT_PREEMPT_SIGNAL` names) ahead of the time limit and calls
    `checkpoint` in the first process: the program is sent SIGTERM, saves together with the programs of the other
    processes, and the job goes back into the queue. The same happens where the program was told to end by others, and
    says so by its exit code.

    Attributes:
        command: one line, as typed.
    """

    def __init__(self, command: str):
        self.command = command
        self._child: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Runs the program to its end.

        Returns:
            0.

        Raises:
            subprocess.CalledProcessError: it failed. It is not started again: the same command would fail again.
        """
        # SLURM may signal all processes of a step: what is meant for submitit must not end the program.
        number = getattr(signal, f"SIG{os.environ.get('SUBMITIT_PREEMPT_SIGNAL', 'USR2')}")
        before = signal.signal(number, signal.SIG_IGN)  # inherited by the child alone
        try:
            self._child = subprocess.Popen(shlex.split(self.command))
        finally:
            signal.signal(number, before)
        # Not `wait`, whose lock `checkpoint` would meet in a signal handler.
        while (code := self._child.poll()) is None:
            time.sleep(POLL)
        if code == _main.RESTART and callable(before):
            signal.raise_signal(number)  # Of the first process this does not come back.
            time.sleep(REQUEUE)
        if code:
            raise subprocess.CalledProcessError(code, self.command)
        return 0

    def checkpoint(self) -> Any:
        """Has the program save and end; what submitit is to start in its place."""
        from submitit.helpers import DelayedSubmission

        if self._child is not None and self._child.poll() is None:
            self._child.terminate()
            with contextlib.suppress(ChildProcessError):  # It ended meanwhile.
                os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        return DelayedSubmission(ProgramJob(self.command))
