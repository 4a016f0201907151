"""A Slurm of several nodes on one machine: each node is a network namespace with its own name, address and slurmd.

Needs root, Slurm and munge from the system's packages, and ip; nothing else of the machine is changed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("slurmctld", "slurmd", "sbatch", "srun", "munged", "ip", "unshare")
NETWORK = "10.78.0"
SLURM_CONF = """ClusterName=mk
SlurmctldHost=ctl({network}.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
SlurmctldParameters=preempt_send_user_signal
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
TopologyPlugin=topology/tree
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,sched_min_interval=0,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=5
MinJobAge=3600
SlurmdTimeout=10
PropagateResourceLimits=NONE
NodeName=node[1-{nodes}] CPUs=8 RealMemory=8000 State=UNKNOWN
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=90
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "DEADLINE", "OUT_OF_MEMORY", "BOOT_FAIL")


def missing() -> str | None:
    """Why such a cluster can't be started here."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{', '.join(lacking)} is not installed: make test-slurm installs Slurm where it may"
    return None if os.geteuid() == 0 else "network namespaces need root"


class Cluster:
    """`nodes` nodes named node1, node2, ...; partitions low (default; its jobs can be preempted) and high."""

    def __init__(self, folder: Path, nodes: int):
        self.folder, self.nodes = folder, nodes
        self.control = f"mkslurm{os.getpid()}-ctl"
        """Namespace of the controller and of the login node; of another run of the tests it is another."""
        self.daemons: dict[str, subprocess.Popen] = {}
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def start(self) -> None:
        """Return when all nodes are idle."""
        for name in ("state", "log", "run", *(f"spool/node{i}" for i in self._numbers())):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(folder=self.folder, nodes=self.nodes, network=NETWORK))
        # neighbours by name are under different switches
        odd, even = (",".join(f"node{i}" for i in self._numbers() if i % 2 == rest) for rest in (1, 0))
        switches = f"SwitchName=s1 Nodes={odd}\nSwitchName=s2 Nodes={even}\nSwitchName=top Switches=s[1-2]\n"
        (self.folder / "topology.conf").write_text(switches)
        # not looked for: /sys of a network namespace shows no cgroups
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        self._munge()
        self._remove_left_behind()
        self._network()
        self._daemon(self.control, "ctl", "slurmctld", "-D", "-c")
        for i in self._numbers():
            self.start_node(i)
        self.until(lambda: self.run("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D") == str(self.nodes), 60, "idle nodes")

    def stop(self) -> None:
        """End every process of the cluster and take its network away."""
        for daemon in self.daemons.values():
            daemon.terminate()
        for namespace in self._namespaces():
            self._remove(namespace)
        for daemon in self.daemons.values():
            daemon.wait(20)

    def start_node(self, number: int) -> None:
        self._daemon(self._namespace(number), f"node{number}", "slurmd", "-D", "-N", f"node{number}")

    def kill_node(self, number: int) -> None:
        """As if its power failed: slurmd, steps and ranks are gone without a word."""
        self._kill_all(self._namespace(number))
        self.daemons[self._namespace(number)].wait(20)

    def run(self, *words: str, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
        """A command on the login node; what it printed."""
        full = {**self.env, **(env or {})}
        done = subprocess.run(
            ["ip", "netns", "exec", self.control, *words], cwd=cwd, env=full, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """What scontrol shows of a job."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()[0]
        return dict(word.split("=", 1) for word in shown.split() if "=" in word)

    def wait(self, job: str, timeout_s: float = 400) -> dict[str, str]:
        """Until a job has ended for good."""
        self.until(lambda: self.state(job)["JobState"] in ENDED, timeout_s, f"job {job} to end")
        return self.state(job)

    def until(self, true: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, f"waited {timeout_s} s for {what}\n{self.run('squeue', '-a')}"
            time.sleep(0.2)

    def _numbers(self) -> range:
        return range(1, self.nodes + 1)

    def _namespace(self, number: int) -> str:
        return self.control.replace("ctl", f"n{number}")

    def _namespaces(self) -> list[str]:
        return [self.control, *(self._namespace(i) for i in self._numbers())]

    def _munge(self) -> None:
        if Path("/run/munge/munge.socket.2").exists() and subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
            return
        folder, key = Path("/run/munge"), Path("/etc/munge/munge.key")
        folder.mkdir(exist_ok=True)
        if not key.exists():
            key.write_bytes(os.urandom(1024))
            shutil.chown(key, "munge", "munge")
            key.chmod(0o400)
        shutil.chown(folder, "munge", "munge")
        folder.chmod(0o755)
        subprocess.run(["runuser", "-u", "munge", "--", shutil.which("munged") or "munged"], check=True)

    def _network(self) -> None:
        hosts = f"127.0.0.1 localhost\n{NETWORK}.1 ctl\n" + "".join(f"{NETWORK}.1{i} node{i}\n" for i in self._numbers())
        # without these files a reverse look-up costs 10 s for each connection
        files = {"hosts": hosts, "nsswitch.conf": "hosts: files\npasswd: files\ngroup: files\n", "resolv.conf": ""}
        for namespace in self._namespaces():
            (etc := Path("/etc/netns") / namespace).mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                (etc / name).write_text(text)
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", self.control, "link", "add", "br0", "type", "bridge")
        _ip("-n", self.control, "addr", "add", f"{NETWORK}.1/24", "dev", "br0")
        _ip("-n", self.control, "link", "set", "br0", "up")
        for i in self._numbers():
            node = self._namespace(i)
            _ip("link", "add", "eth0", "netns", node, "type", "veth", "peer", "name", f"p{i}", "netns", self.control)
            _ip("-n", self.control, "link", "set", f"p{i}", "master", "br0", "up")
            _ip("-n", node, "addr", "add", f"{NETWORK}.1{i}/24", "dev", "eth0")
            _ip("-n", node, "link", "set", "eth0", "up")

    def _daemon(self, namespace: str, host: str, *words: str) -> None:
        command = f'hostname {host}; exec "$@"'
        with open(self.folder / "log" / f"{host}.out", "a") as log:
            self.daemons[namespace] = subprocess.Popen(
                ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", command, "sh", *words],
                env=self.env,
                stdout=log,
                stderr=log,
            )

    def _remove_left_behind(self) -> None:
        """What runs of these tests have left that were killed."""
        found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True).stdout
        for namespace, pid in re.findall(r"^(mkslurm(\d+)-\w+)", found, re.M):
            if not Path("/proc", pid).exists():
                self._remove(namespace)

    def _remove(self, namespace: str) -> None:
        self._kill_all(namespace)
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        shutil.rmtree(f"/etc/netns/{namespace}", ignore_errors=True)

    def _kill_all(self, namespace: str) -> None:
        pids = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
