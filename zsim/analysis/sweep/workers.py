"""Workers of a sweep: this process, joblib's with loky, dask's or ray's.

Each yields results as they come, with the number of their task. A task that kills its worker is
named and ends no other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from zsim.analysis.sweep.axes import SweepError
from zsim.errors import ArgumentError
from zsim.io.arguments import described
from zsim.io.extras import library

Task = TypeVar("Task")
Result = TypeVar("Result")

KINDS = ("loky", "here", "dask", "ray")
"""Kinds of workers: processes of this machine, none but this process, or many machines."""
CHUNK = 32
"""Tasks for each worker that are given out together. Where one kills its worker, so many are done
again, each alone."""


def results(
    function: Callable[[Task], Result], tasks: Sequence[Task], *, on: str = "loky",
    workers: int | None = None,
) -> Iterator[tuple[int, Result | None]]:
    """Number and result of each task; None for one that killed its worker.

    `on`: a kind, for dask and ray perhaps with a colon and the scheduler's address. SweepError for
    another one, or where its library is missing.
    """
    kind, _, address = on.partition(":")
    if kind not in KINDS or (address and kind in ("loky", "here")):
        raise SweepError(
            where="--on", expected="loky, here, dask[:ADDRESS] or ray[:ADDRESS]", found=on[:60]
        )
    number = workers or len(os.sched_getaffinity(0))
    if kind == "here":
        yield from enumerate(map(function, tasks))
    elif kind == "loky":
        yield from _by_loky(function, tasks, workers=number)
    elif kind == "dask":
        yield from _by_dask(function, tasks, address=address, workers=number)
    else:
        yield from _by_ray(function, tasks, address=address, workers=number)


def require(on: str) -> None:
    """SweepError where the library of the workers `on` is missing; ArgumentError for what is no
    text."""
    if not isinstance(on, str):
        raise ArgumentError(where="on", expected="the name of workers", found=described(on))
    kind = on.partition(":")[0]
    if kind in ("loky", "dask", "ray"):
        _library({"loky": "joblib", "dask": "distributed", "ray": "ray"}[kind])


def _library(name: str) -> Any:
    install = {"joblib": "pip install 'zsim[sweep]'", "distributed": "pip install distributed"}
    return library(
        name, error=SweepError, where="--on", expected=f"{name}, which gives out the points",
        remedy=f"{install.get(name, f'pip install {name}')}, or --on here",
    )


def _by_loky(
    function: Callable[[Task], Result], tasks: Sequence[Task], *, workers: int
) -> Iterator[tuple[int, Result | None]]:
    joblib = _library("joblib")
    died = _library("joblib.externals.loky.process_executor").TerminatedWorkerError
    numbers = iter(range(len(tasks)))
    while chunk := list(islice(numbers, CHUNK * workers)):
        done: set[int] = set()
        try:
            for number, result in _parallel(joblib, function, tasks, chunk, workers=workers):
                done.add(number)
                yield number, result
        except died:
            for number in chunk:
                if number not in done:
                    try:
                        yield from _parallel(joblib, function, tasks, [number], workers=1)
                    except died:
                        yield number, None


def _parallel(
    joblib: Any, function: Callable[[Task], Result], tasks: Sequence[Task], chunk: Sequence[int], *,
    workers: int,
) -> Iterator[tuple[int, Result]]:
    """Results of `chunk` from processes, no more than there are tasks."""
    number = min(workers, len(chunk))
    # of one worker joblib makes none: a task would kill this process; of two one is kept idle
    pool = joblib.Parallel(
        n_jobs=max(2, number), pre_dispatch=1 if number == 1 else "2 * n_jobs", backend="loky",
        return_as="generator_unordered",
    )
    yield from pool(joblib.delayed(_numbered)(function, n, tasks[n]) for n in chunk)


def _numbered(function: Callable[[Task], Result], number: int, task: Task) -> tuple[int, Result]:
    return number, function(task)


def _by_dask(
    function: Callable[[Task], Result], tasks: Sequence[Task], *, address: str, workers: int
) -> Iterator[tuple[int, Result | None]]:
    distributed = _library("distributed")
    where = {"address": address} if address else {
        "n_workers": workers, "threads_per_worker": 1, "dashboard_address": None
    }
    with distributed.Client(**where) as client:
        futures = client.map(function, tasks, pure=False, retries=0)
        numbers = {future.key: number for number, future in enumerate(futures)}
        for future in distributed.as_completed(futures):
            error = future.exception()
            if error and not isinstance(error, distributed.KilledWorker):
                raise _unable("dask", error)
            yield numbers[future.key], None if error else future.result()
            future.release()


def _by_ray(
    function: Callable[[Task], Result], tasks: Sequence[Task], *, address: str, workers: int
) -> Iterator[tuple[int, Result | None]]:
    ray = _library("ray")
    where = {"address": address} if address else {"num_cpus": workers, "include_dashboard": False}
    ray.init(log_to_driver=False, **where)
    try:
        remote = ray.remote(max_retries=0)(function)
        waiting = {remote.remote(task): number for number, task in enumerate(tasks)}
        while waiting:
            (ready, *_), _ = ray.wait(list(waiting), num_returns=1)
            number = waiting.pop(ready)
            try:
                yield number, ray.get(ready)
            except ray.exceptions.RayTaskError as error:
                raise _unable("ray", error.cause) from None
            except ray.exceptions.RayError:
                yield number, None
    finally:
        ray.shutdown()


def _unable(kind: str, error: BaseException) -> SweepError:
    """The error of workers that cannot begin; a point's own errors are its row."""
    return SweepError(
        where=f"--on {kind}", expected="workers that have this version of zsim",
        found=f"{type(error).__name__}: {error}"[:200], remedy="install it where they run",
    )
