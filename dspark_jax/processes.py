"""Several processes, one run: how they meet, who writes, and how all stop at the same step."""

import signal
import threading

import jax
from jax.experimental import multihost_utils
from orbax.checkpoint import multihost


def meet(how: str) -> None:
    """Joins this process to the others; before anything else of JAX runs.

    Args:
      how: "auto" where the environment says who takes part (Cloud TPU, Slurm, Open MPI,
        Kubernetes); otherwise "HOST:PORT,COUNT,INDEX": where process 0 listens, the number of
        processes, and which of them this one is.

    Raises:
      ValueError: `how` is neither.
    """
    if how == "auto":
        return jax.distributed.initialize()
    address, *numbers = how.split(",")
    if len(numbers) != 2 or ":" not in address or not all(n.isdigit() for n in numbers):
        raise ValueError(f"distributed = {how!r}: expected 'auto' or 'HOST:PORT,COUNT,INDEX'")
    count, index = map(int, numbers)
    if index >= count:
        raise ValueError(f"distributed = {how!r}: INDEX counts from 0, COUNT is {count}")
    if jax.config.jax_platforms == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, num_processes=count, process_id=index)


def is_first() -> bool:
    """Whether this process writes what the run says: metrics, configs, the drafter."""
    return jax.process_index() == 0


def wait_for_all(name: str, seconds: int = 600) -> None:
    """Waits until every process is here; the error of a timeout names who is missing."""
    if jax.process_count() > 1:
        multihost.get_barrier_sync_fn()(key=name, timeout_ms=1000 * seconds)


class StopRequests:
    """Context: SIGTERM becomes a question that the loop asks where it may stop."""

    def __enter__(self) -> "StopRequests":
        self._requested, self._asked = False, 0
        # With several processes JAX itself listens, and agrees on a step. Python lets no thread
        # but the main one handle signals.
        self._is_alone = jax.process_count() == 1
        self._listens = self._is_alone and threading.current_thread() is threading.main_thread()
        if self._listens:
            self._before = signal.signal(signal.SIGTERM, self._request)
        return self

    def now(self) -> bool:
        """Whether to stop here: all processes ask at the same points and get the same answer."""
        # Without the service nobody listens; the last checkpoint is what remains.
        if not self._is_alone and jax.config.jax_enable_preemption_service and not self._requested:
            self._asked += 1
            self._requested = multihost_utils.reached_preemption_sync_point(self._asked)
        return self._requested

    def _request(self, *_) -> None:
        self._requested = True

    def __exit__(self, *_) -> None:
        if self._listens:
            signal.signal(signal.SIGTERM, self._before)
