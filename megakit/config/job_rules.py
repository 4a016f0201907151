"""Rules about the job: what can stand in a job script, the environment of the ranks, and how a job goes on."""

from __future__ import annotations

import re

from megakit.config.keys import changes_nothing, show
from megakit.config.schema import Config, KubernetesConfig, SlurmConfig, SubmitConfig
from megakit.errors import Refused

_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_GRID = "cluster.nodes, cluster.gpus_per_node and the recipe's grid"
_HAVE_KEYS = {
    **dict.fromkeys(("nodes", "ntasks", "ntasks-per-node", "gpus-per-node"), _GRID),
    **{name: f"launch.slurm.{name}" for name in ("partition", "account", "qos", "constraint")},
    **dict.fromkeys(("requeue", "no-requeue"), "launch.slurm.requeue"),
    "cpus-per-task": "launch.slurm.cpus_per_task",
    "time": "launch.slurm.time_limit",
    "signal": "launch.slurm.signal_lead_s",
    "array": "submit.sweep and submit.sweep_parallel",
    "job-name": "run.name",
}
"""Options of sbatch that the script sets from a key: a second one would win."""
UNLIMITED = ("UNLIMITED", "INFINITE")


def check(cfg: Config) -> None:
    """Raise Refused for the first rule that the configuration breaks."""
    _check_slurm(cfg.launch.slurm)
    _check_environment(cfg.cluster.env or {})
    _check_submit(cfg.submit)
    _check_kubernetes(cfg.submit)
    _check_chain(cfg.submit, cfg.launch.slurm)


def time_limit_s(text: str) -> float | None:
    """Seconds of a time as Slurm writes it, H:MM:SS, MM:SS, D-HH, D-HH:MM or D-HH:MM:SS; infinite for UNLIMITED.

    None for anything else, a plain number too: YAML reads 24:00:00 without quotes as one.
    """
    if text in UNLIMITED:
        return float("inf")
    match = _TIME.fullmatch(text)
    if not match or (match[1] is None and match[3] is None):
        return None
    days, *parts = (int(group or 0) for group in match.groups())
    if match[1] is not None or match[4] is not None:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, parts[:2]
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _check_slurm(slurm: SlurmConfig) -> None:
    if time_limit_s(slurm.time_limit) is None:
        raise Refused(
            f"launch.slurm.time_limit = {slurm.time_limit} must be like 24:00:00 or 2-12:00:00, hours and minutes, or UNLIMITED"
        )
    limit = time_limit_s(slurm.time_limit) or 0.0
    if slurm.signal_lead_s >= limit:
        raise Refused(
            f"launch.slurm.signal_lead_s = {slurm.signal_lead_s} leaves nothing of launch.slurm.time_limit ="
            f" {slurm.time_limit}: use less, or a longer limit"
        )
    for name, signs in (("partition", ""), ("account", ""), ("qos", ""), ("constraint", r"&|()\[\]*:")):
        value = getattr(slurm, name)
        if value is not None and not re.fullmatch(rf"[A-Za-z0-9,._{signs}-]+", value):
            raise Refused(
                f"launch.slurm.{name} = {value!r} is not a name of Slurm's: use letters, digits, ',', '.', '_' and '-'"
                + (", joined by & or |" if signs else "")
            )
    for option in slurm.extra:
        if (key := _HAVE_KEYS.get(option.partition("=")[0].removeprefix("--"))) is not None:
            raise Refused(f"launch.slurm.extra has {show(option)}, which the job script has already: use {key}")
        if not re.fullmatch(r"--[a-z][a-z0-9-]*(=[^\n\"'`$\\]*)?", option):
            raise Refused(
                f"launch.slurm.extra has {show(option)}: write each option as --name=value, without quotes, in one line"
            )


def _check_environment(env: dict[str, str]) -> None:
    for name, value in env.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise Refused(f"cluster.env has {name!r}, which can't name a variable: use letters, digits and '_'")
        if "\n" in value or "\0" in value:
            raise Refused(f"cluster.env: {name} has more than one line, which job scripts don't carry: use one line")


def _check_submit(submit: SubmitConfig) -> None:
    container = submit.container
    if container.image is None:
        for name in ("runtime", "mounts"):
            value, default = getattr(container, name), {"runtime": "pyxis", "mounts": []}[name]
            if value != default:
                raise changes_nothing(
                    f"submit.container.{name}", value, "submit.container.image = null", "submit.container.image=IMAGE"
                )
    for mount in container.mounts:
        if not re.fullmatch(r"/[^:,\n]*:/[^:,\n]*(:[A-Za-z+]+)?", mount):
            raise Refused(f"submit.container.mounts has {show(mount)}: write each as /SOURCE:/TARGET or /SOURCE:/TARGET:ro")
    for name in ("modules", "setup", "sweep"):
        for entry in getattr(submit, name):
            if "\n" in entry or not entry.strip():
                raise Refused(f"submit.{name} has {entry!r}: give one line for each entry")
    if submit.sweep_parallel is not None and not submit.sweep:
        raise changes_nothing("submit.sweep_parallel", submit.sweep_parallel, "an empty submit.sweep", "submit.sweep=[KEY=V1,V2]")


def _check_kubernetes(submit: SubmitConfig) -> None:
    kubernetes = submit.kubernetes
    for name in ("namespace", "claim", "mount"):
        value, default = getattr(kubernetes, name), getattr(KubernetesConfig, name)
        if submit.target != "kubernetes" and value != default:
            raise changes_nothing(
                f"submit.kubernetes.{name}", value, f"submit.target = {submit.target}", "submit.target=kubernetes"
            )
        pattern = r"/[A-Za-z0-9._/-]+" if name == "mount" else r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?"
        if value is not None and not re.fullmatch(pattern, value):
            kind = "an absolute path" if name == "mount" else "a name of Kubernetes': use small letters, digits, '-' and '.'"
            raise Refused(f"submit.kubernetes.{name} = {value!r} is not {kind}")


def _check_chain(submit: SubmitConfig, slurm: SlurmConfig) -> None:
    if submit.chain == 1:
        return
    if slurm.requeue:
        raise Refused(
            f"submit.chain = {submit.chain} and launch.slurm.requeue = true: a job that is queued again needs no others behind"
            " it; leave submit.chain out, or use launch.slurm.requeue=false where the cluster allows no requeue"
        )
    if submit.sweep:
        raise Refused(
            f"submit.chain = {submit.chain} and submit.sweep are both given: use launch.slurm.requeue=true with a sweep"
        )
