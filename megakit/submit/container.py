"""The words of bash that start the ranks in a container, and that take the variables there."""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from megakit.config.schema import ContainerConfig


def srun_options(container: ContainerConfig, variables: Iterable[str]) -> list[str]:
    """pyxis: options of srun. Variables of the image win over the job's, but for those that --container-env names."""
    if container.image is None or container.runtime != "pyxis":
        return []
    names = ",".join(variables)
    return [
        f"--container-image={shlex.quote(container.image)}",
        f"--container-mounts={_mounts(container)}",
        '--container-workdir="$PWD"',
        *([f"--container-env={names}"] if names else []),
    ]


def command_prefix(container: ContainerConfig, gpus: bool) -> list[str]:
    """apptainer: what stands before the command."""
    if container.image is None or container.runtime != "apptainer":
        return []
    nv = ["--nv"] if gpus else []
    # --no-eval: values are taken as they are, and not run through the container's shell
    return ["apptainer", "exec", *nv, "--no-eval", "--pwd", '"$PWD"', "--bind", _mounts(container), shlex.quote(container.image)]


def exports(container: ContainerConfig, variables: Iterable[str]) -> list[str]:
    """apptainer: lines that make the job's variables win over the image's. (--env would cut values at commas.)"""
    if container.image is None or container.runtime != "apptainer":
        return []
    return [f'export APPTAINERENV_{name}="${name}"' for name in variables]


def _mounts(container: ContainerConfig) -> str:
    """The folder of submission has the run folder, and most often the code and the data."""
    return '"$PWD:$PWD"' + "".join("," + shlex.quote(mount) for mount in container.mounts)
