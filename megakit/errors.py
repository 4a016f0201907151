"""What ends a run on purpose, and the exit code that each end is documented to have."""

import signal

from megakit.redact import printable, redact

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_NOT_FINITE = 3
EXIT_REPEATED = 4
EXIT_STORAGE = 74
EXIT_ASKED_TO_STOP = 75
NEVER_AGAIN = (EXIT_REFUSED, EXIT_NOT_FINITE, EXIT_REPEATED)
"""After these nothing is started again: it would only repeat what happened."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What asks a run to save and stop."""


class Stop(Exception):
    """A run ends with one line for the user and `code` for the scheduler."""

    code = EXIT_FAILED

    def __str__(self) -> str:
        return printable(redact(super().__str__()))


class Refused(Stop):
    """A recipe, a plan or an input can't be used as it is. The message states both values and the cure, in one line."""

    code = EXIT_REFUSED


class NotFinite(Stop):
    """Training is not finite any more: requeueing would only repeat it."""

    code = EXIT_NOT_FINITE


class StorageFailed(Stop):
    """A checkpoint could not be written; those before it are intact."""

    code = EXIT_STORAGE


class AskedToStop(Stop):
    """A signal or a time limit asked for an end; the checkpoint is saved and the job may be requeued."""

    code = EXIT_ASKED_TO_STOP


def stop_line(code: int, text: str) -> str:
    """What the user reads when something ends on purpose with this exit code: one line."""
    label = {EXIT_REFUSED: "refused", EXIT_FAILED: "failed"}.get(code, "stopped")
    return f"megakit: {label}: {' '.join(text.split())}"
