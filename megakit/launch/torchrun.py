"""python -m megakit.launch.torchrun ARGUMENTS: torchrun, whose ranks' exit codes decide what follows, and with one of its own.

torchrun starts all again in place whatever happened, and ends with 1. Here 2, 3, 4 and 75 are never started again in place
(elastic_agent.py), and the exit code is that of the rank that failed first, and 75 after a signal, which torchrun has passed on
to its ranks (give it --signals-to-handle with SIGUSR1, and a --shutdown-timeout in which they can save).
"""

from __future__ import annotations

import sys

from megakit.errors import EXIT_ASKED_TO_STOP, EXIT_DONE, EXIT_STORAGE, NEVER_AGAIN

_TOLD = (*NEVER_AGAIN, EXIT_STORAGE, EXIT_ASKED_TO_STOP)
"""Ends that the ranks have told in a line each: torchrun's summary would bury it under tracebacks."""


def main(argv: list[str] | None = None) -> int:
    """Run torchrun to its end; the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api
    from torch.distributed.run import main as torchrun

    from megakit.launch.elastic_agent import Agent, EndedElsewhere, cause

    api.LocalElasticAgent = Agent  # type: ignore[misc]  # torchrun has no option for it
    try:
        torchrun(sys.argv[1:] if argv is None else argv)
    except ChildFailedError as failed:
        code = cause(failed.failures)
        if code not in _TOLD:
            print(failed, file=sys.stderr)
        return code
    except EndedElsewhere as ended:
        print(f"megakit: {ended}", file=sys.stderr)
        return ended.code
    except SignalException as asked:
        print(f"megakit: torchrun was sent {asked.sigval.name}, and its ranks have ended", file=sys.stderr)
        return EXIT_ASKED_TO_STOP
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
