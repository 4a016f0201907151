"""python -m megakit.queue submit|list|logs|cancel|quota|machines|forget|serve|agent: a queue of runs for one or a few machines.

Exit codes: 0 done, 2 refused, 74 the queue's file can't be written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from megakit.config.arguments import output_cut_off, whole_number
from megakit.errors import EXIT_DONE, Refused, Stop, stop_line

FOLLOW_S = 0.5


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Refused(f"{message}: see {self.prog} --help")


def _submit(args: argparse.Namespace) -> None:
    from megakit.queue.schedule import counted
    from megakit.queue.submission import make_job

    machines = _ask(args, do="machines")
    job = make_job(args.override, args.config_dir, args.config_file, args.gpus, any(m["has_gpus"] for m in machines))
    own = {"user": args.user, "priority": args.priority, "max_restarts": args.max_restarts, "env": _variables(args.env)}
    made = _ask(args, do="submit", job={**job, **own, "name": args.name or job["name"]})
    print(f"job {made['id']}: {counted(job['gpus'])}, run folder {made['run_dir']}")


def _list(args: argparse.Namespace) -> None:
    answer = _ask(args, do="list", all=args.all) if args.id is None else _ask(args, do="show", id=args.id)
    if args.json:
        print(json.dumps(answer, indent=1))
        return
    from megakit.config.terminal import console
    from megakit.queue.show import job_page, jobs_table

    console().print(jobs_table(answer) if args.id is None else job_page(answer))


def _logs(args: argparse.Namespace) -> None:
    from megakit.queue.wire import NoServer

    job = _ask(args, do="show", id=args.id)
    at, path = 0, job["log"]
    while True:
        going = args.follow and job["state"] in ("queued", "running")
        try:
            with open(path, "rb") as file:
                file.seek(at)
                while chunk := file.read(1 << 16):
                    sys.stdout.buffer.write(chunk)
                at = file.tell()
        except FileNotFoundError:
            if not going and not at:
                raise Refused(f"job {args.id} has written nothing yet: {job['why']}") from None
        except OSError as error:
            raise Refused(f"{path}: {error.strerror}: read it where job {args.id} runs, on {job['machine']}") from None
        sys.stdout.flush()
        if not going:  # as it was before the last look, so that nothing of its end is missed
            return
        time.sleep(FOLLOW_S)
        with suppress(NoServer):  # the job goes on, and so does its log
            job = _ask(args, do="show", id=args.id)


def _cancel(args: argparse.Namespace) -> None:
    for job in args.id:
        print(f"job {job}: {_ask(args, do='cancel', id=job, now=args.now)}")


def _quota(args: argparse.Namespace) -> None:
    if args.quota:
        _ask(args, do="quota", quotas=_quotas(args.quota))
    from megakit.config.terminal import console
    from megakit.queue.show import quotas_table

    console().print(quotas_table(_ask(args, do="quotas")))


def _machines(args: argparse.Namespace) -> None:
    from megakit.config.terminal import console
    from megakit.queue.show import machines_table

    console().print(machines_table(_ask(args, do="machines")))


def _forget(args: argparse.Namespace) -> None:
    lost = _ask(args, do="forget", name=args.machine)
    print(f"{args.machine} is forgotten; " + (f"waiting again: jobs {', '.join(map(str, lost))}" if lost else "it had no job"))


def _serve(args: argparse.Namespace) -> None:
    from megakit.queue.agent import find_devices
    from megakit.queue.server import serve

    serve(args.folder, args.name, find_devices(args.slots, os.environ), args.group, args.restart_delay)


def _agent(args: argparse.Namespace) -> None:
    from megakit.queue.agent import find_devices
    from megakit.queue.server import join

    join(args.folder, args.name, find_devices(args.slots, os.environ), args.server)


def _ask(args: argparse.Namespace, **request: Any) -> Any:
    from megakit.queue import wire

    return wire.ask(args.folder / wire.SOCKET, request)


def _variables(given: list[str]) -> dict[str, str]:
    """NAME=VALUE, or NAME as it is here."""
    out = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals and name not in os.environ:
            raise Refused(f"--env {name}: it is not set here: use --env {name}=VALUE")
        out[name] = value if equals else os.environ[name]
    return out


def _quotas(given: list[str]) -> dict[str, int | None]:
    out: dict[str, int | None] = {}
    for text in given:
        if not (match := re.fullmatch(r"([^=]+)=(\d+|none)", text)):
            raise Refused(f"{text}: a quota is written USER=GPUS, as in alice=4 or '*=8', or USER=none")
        out[match[1]] = None if match[2] == "none" else int(match[2])
    return out


def _default_folder() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(os.environ.get("MEGAKIT_QUEUE") or os.path.join(state, "megakit", "queue"))


def _parsers() -> dict[str, tuple[_Parser, Callable[[argparse.Namespace], None]]]:
    out: dict[str, tuple[_Parser, Callable[[argparse.Namespace], None]]] = {}

    def command(name: str, run: Callable[[argparse.Namespace], None], purpose: str) -> _Parser:
        parser = _Parser(prog=f"python -m megakit.queue {name}", description=purpose, allow_abbrev=False)
        help = "the queue's folder, on a local disk; default: MEGAKIT_QUEUE, or ~/.local/state/megakit/queue"
        parser.add_argument("--folder", type=lambda p: Path(p).absolute(), default=_default_folder(), metavar="DIR", help=help)
        out[name] = parser, run
        return parser

    def place(parser: _Parser) -> None:
        host = re.sub(r"[^A-Za-z0-9._-]", "-", os.uname().nodename) or "machine"
        parser.add_argument("--name", default=host, help="name of this machine; default: its host name")
        parser.add_argument("--slots", type=_slots, metavar="N", help="in place of GPUs: N ranks at a time on the CPU; 0: none")

    p = command("submit", _submit, "Check a recipe and queue it; its run folder is the same over all its attempts.")
    p.add_argument("override", nargs="+", metavar="KEY=VALUE", help="the recipe, as for megakit.pretrain: +recipe=NAME KEY=VALUE")
    p.add_argument("--priority", type=int, default=0, metavar="N", help="higher ones come first and stop lower ones; default 0")
    p.add_argument("--gpus", type=whole_number, metavar="N", help="where the recipe leaves parallel.dp open; default: its grid")
    p.add_argument("--user", help="whose quota it counts against; default: the account you are")
    p.add_argument("--name", help="default: run.name of the recipe")
    p.add_argument("--max-restarts", type=int, default=3, metavar="K", help="failures without a newer checkpoint; default 3")
    p.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for the job")
    p.add_argument("--config-dir", metavar="DIR", help="read also your own DIR/recipe/NAME.yaml, ...")
    p.add_argument("--config-file", metavar="FILE", help="a whole configuration in place of a recipe")
    p = command("list", _list, "All unfinished jobs and the last finished ones; or one job, with all that happened to it.")
    p.add_argument("id", nargs="?", type=whole_number, metavar="ID")
    p.add_argument("--all", action="store_true", help="every job there was")
    p.add_argument("--json", action="store_true", help="for programs")
    p = command("logs", _logs, "What a job has printed, over all its attempts.")
    p.add_argument("id", type=whole_number, metavar="ID")
    p.add_argument("-f", "--follow", action="store_true", help="go on until the job has ended")
    p = command("cancel", _cancel, "Ask jobs to save a checkpoint and stop for good; submit with their run.dir to go on.")
    p.add_argument("id", nargs="+", type=whole_number, metavar="ID")
    p.add_argument("--now", action="store_true", help="kill them: what is not saved is lost")
    p = command("quota", _quota, "GPUs that a user's jobs may hold at a time; without arguments, what is set.")
    p.add_argument("quota", nargs="*", metavar="USER=GPUS", help="'*' is everybody without one; USER=none takes it back")
    command("machines", _machines, "Machines, their GPUs and jobs.")
    p = command("forget", _forget, "Give up a machine that will not come back: its jobs wait again.")
    p.add_argument("machine", metavar="NAME")
    p = command("serve", _serve, "Keep the queue, and run jobs on this machine; jobs go on when it ends in any way.")
    place(p)
    p.add_argument("--group", help="let the members of this group queue jobs, which run as the account that serves")
    p.add_argument("--restart-delay", type=float, default=10.0, metavar="S", help="after a failure, then doubled; default 10")
    p = command("agent", _agent, "Run jobs on this machine for the server of another, whose socket ssh brings here.")
    place(p)
    p.add_argument("--server", type=Path, required=True, metavar="SOCKET", help="the server's DIR/socket, as forwarded")
    return out


def _slots(text: str) -> int:
    return 0 if text == "0" else whole_number(text)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; why it was refused or stopped goes to standard error in one line."""
    words, parsers = list(sys.argv[1:] if argv is None else argv), _parsers()
    try:
        if not words or words[0] in ("-h", "--help"):
            print(f"{__doc__}\n" + "\n".join(f"  {name:9} {parser.description}" for name, (parser, _) in parsers.items()))
            return EXIT_DONE
        if words[0] not in parsers:
            raise Refused(f"{words[0]} is not a command: there are {', '.join(parsers)}")
        parser, run = parsers[words[0]]
        run(parser.parse_intermixed_args(words[1:]))
        return EXIT_DONE
    except Stop as stop:
        print(stop_line(stop.code, str(stop)), file=sys.stderr)
        return stop.code
    except BrokenPipeError:
        return output_cut_off()
    except KeyboardInterrupt:
        return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
