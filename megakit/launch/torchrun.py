"""python -m megakit.launch.torchrun ARGUMENTS: torchrun, with an exit code that a job script can act on.

torchrun's own is 1 whatever happened. Here it is that of the rank that failed first, and 75 after a signal, which torchrun
has passed on to its ranks (give it --signals-to-handle with SIGUSR1, and a --shutdown-timeout in which they can save).
"""

from __future__ import annotations

import sys

from megakit.errors import EXIT_ASKED_TO_STOP, EXIT_DONE, EXIT_FAILED


def main(argv: list[str] | None = None) -> int:
    """Run torchrun to its end; the exit code."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    try:
        torchrun(sys.argv[1:] if argv is None else argv)
    except ChildFailedError as failed:
        print(failed, file=sys.stderr)
        code = failed.get_first_failure()[1].exitcode
        return code if 0 < code < 256 else EXIT_FAILED
    except SignalException as asked:
        print(f"megakit: torchrun was sent {asked.sigval.name}, and its ranks have ended", file=sys.stderr)
        return EXIT_ASKED_TO_STOP
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
