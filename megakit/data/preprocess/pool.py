"""Worker processes that encode blocks; results come back in the order of the blocks.

Each worker has a pipe of its own. A thread in the worker takes blocks out of it while the worker encodes, so that the parent
never waits to hand one over, however large it is. When the parent dies, however it dies, the pipe closes and the worker
leaves: no process stays behind.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Optional, Union, cast

from megakit.data.preprocess.blocks import Block
from megakit.data.preprocess.worker import Result, Task, encode_block
from megakit.data.tokenizer import Tokenizer, load_tokenizer
from megakit.data.tokenizer.fast import FAST, Encoder, EncoderDiffers, build_encoder
from megakit.errors import Stop

_QUEUED = 2  # blocks handed to a worker: the next one waits there
_AHEAD = 4  # blocks per worker that may be under way or done but not yet taken: bounds memory


class Pool:
    """`workers` processes, which start and load the tokenizer at once. A context manager: leaving it ends them."""

    def __init__(self, workers: int, task: Task):
        context = multiprocessing.get_context("spawn")  # never a copy of the caller's threads
        self._processes: dict[Connection, BaseProcess] = {}
        self._queued: dict[Connection, deque[tuple[int, Block]]] = {}
        # workers inherit the mask: Ctrl-C is for the parent, which ends them. The tracker's start would undo it
        resource_tracker.ensure_running()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            for _ in range(workers):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs, task), daemon=True)
                process.start()
                theirs.close()
                self._processes[ours] = process
                self._queued[ours] = deque()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def encode(self, blocks: Iterable[Block], encoder: str) -> Iterator[tuple[Block, Result]]:
        """All blocks encoded, in order; once in the life of a pool.

        An error of `blocks` is raised behind the results of the blocks before it.
        """
        for pipe in self._processes:
            _send(pipe, encoder)
        source = iter(blocks)
        done: dict[int, tuple[Block, Result]] = {}
        handed = taken = 0
        more = True
        failure: Optional[Exception] = None
        while True:
            while more and handed - taken < _AHEAD * len(self._processes):
                pipe = min(self._queued, key=lambda pipe: len(self._queued[pipe]))
                if len(self._queued[pipe]) == _QUEUED:
                    break
                try:
                    block = next(source, None)
                except Exception as e:
                    block, failure = None, e
                if block is None:
                    more = False
                    break
                self._queued[pipe].append((handed, block))
                _send(pipe, block.work)
                handed += 1
            if taken in done:
                yield done.pop(taken)
                taken += 1
            elif taken < handed:
                busy = [pipe for pipe, queued in self._queued.items() if queued]
                for pipe in cast("list[Connection]", wait(busy)):
                    number, block = self._queued[pipe].popleft()
                    done[number] = (block, self._receive(pipe, block))
            elif failure is not None:
                raise failure
            else:
                return

    def _receive(self, pipe: Connection, block: Block) -> Result:
        try:
            result: Union[Result, Stop, str] = pipe.recv()
        except (EOFError, OSError):
            process = self._processes[pipe]
            process.join(timeout=5)
            raise Stop(
                f"a worker died with exit code {process.exitcode} at {str(block.work)[:200]} (-9: killed, often for memory):"
                " the same command goes on from where the job is; use fewer workers if it was for memory"
            ) from None
        if isinstance(result, Stop):
            raise result
        if isinstance(result, str):
            raise Stop(f"a worker failed at {str(block.work)[:200]}:\n{result}")
        return result

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._processes:
            pipe.close()
        for process in self._processes.values():
            process.terminate()
            process.join()


def _send(pipe: Connection, message: object) -> None:
    with contextlib.suppress(OSError):  # a process that died is noticed when it is waited for
        pipe.send(message)


def _work(pipe: Connection, task: Task) -> None:
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_take, args=(pipe, inbox), daemon=True).start()
    try:
        tokenizer = load_tokenizer(task.tokenizer)
        guess = _fastest(tokenizer)
        name = inbox.get()
        if name is None:
            return
        encoder = guess if guess is not None and guess.name == name else build_encoder(tokenizer, name)
        while (work := inbox.get()) is not None:
            pipe.send(encode_block(work, task, tokenizer, encoder))
    except BrokenPipeError:
        return  # the parent is gone, or wants no more
    except Stop as e:
        _send(pipe, e)
    except BaseException:
        _send(pipe, traceback.format_exc())


def _fastest(tokenizer: Tokenizer) -> Optional[Encoder]:
    """The fastest encoder, which most often is the one: made while the parent still tries it on the input."""
    try:
        encoder = build_encoder(tokenizer, next(iter(FAST)))
        encoder.encode_batch([" "])  # loads what is loaded late
        return encoder
    except EncoderDiffers:
        return None


def _take(pipe: Connection, inbox: queue.SimpleQueue[Any]) -> None:
    """Move what the parent sends into the inbox: the name of the encoder, work, and None when it sends no more."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            inbox.put(pipe.recv())
    inbox.put(None)
