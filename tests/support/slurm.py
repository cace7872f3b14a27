"""A SLURM of one node on this machine: its own configuration, keys, ports and folder."""

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.two_processes import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
# CPUs is what is handed out, not what is there. A job that was queued again waits cred_expire
# seconds. Nothing else than a process group holds a job's processes together: control groups need
# more rights than a container has.
CONFIGURATION = """
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={control}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=bf_interval=1,sched_interval=1
NodeName={host} NodeAddr=127.0.0.1 CPUs=1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str | None:
    """Why no SLURM can be started here; None if one can."""
    missing = [name for name in PROGRAMS if _program(name) is None]
    if missing:
        return f"no {', '.join(missing)} here (Debian: slurm-wlm and munge)"
    if os.geteuid() != 0:
        return "SLURM's daemons start jobs as root, which this is not"
    return None


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


@dataclass(frozen=True, slots=True)
class Slurm:
    """A running SLURM.

    Attributes:
        environment: what its commands need to find it.
        folder: its state and its logs.
    """

    environment: dict[str, str]
    folder: Path

    def __call__(self, command: str, *arguments: str, **more: str) -> str:
        """Run a command of it, with more variables; returns what it printed."""
        done = subprocess.run(
            [command, *arguments],
            env={**self.environment, **more},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Its view of a job: JobState, Restarts, ..."""
        words = self("scontrol", "show", "job", number).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def logs(self) -> str:
        """The logs of its daemons."""
        return "\n".join(path.read_text()[-3000:] for path in sorted(self.folder.glob("*.log")))


@contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Start munge and SLURM, and end them with everything that they run."""
    with ExitStack() as stack:
        # Not in the tests' own folder: the path of a socket must be short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-")))
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        (folder / "state").mkdir()
        (folder / "spool").mkdir()
        host = socket.gethostname().partition(".")[0]
        control, node = free_port(), free_port()
        configuration = folder / "slurm.conf"
        configuration.write_text(
            CONFIGURATION.format(host=host, control=control, node=node, folder=folder)
        )
        slurm = Slurm({**os.environ, "SLURM_CONF": str(configuration)}, folder)
        munge = {name: str(folder / f"munge.{name}") for name in ("socket", "pid", "log", "seed")}
        _start(
            stack,
            slurm,
            *("munged", "--foreground", "--force", "--key-file", str(key)),
            *("--socket", munge["socket"], "--pid-file", munge["pid"]),
            *("--log-file", munge["log"], "--seed-file", munge["seed"]),
        )
        until(Path(munge["socket"]).exists, "munge")
        _start(stack, slurm, "slurmctld", "-D", "-i")
        _start(stack, slurm, "slurmd", "-D", "-N", host)
        until(lambda: "idle" in slurm("sinfo", "--noheader"), "SLURM", slurm.logs)
        stack.callback(_end_jobs, slurm)
        yield slurm


def _start(stack: ExitStack, slurm: Slurm, name: str, *arguments: str) -> None:
    program = _program(name)
    assert program is not None
    with (slurm.folder / f"{name}.out.log").open("w") as out:
        process = subprocess.Popen(
            [program, *arguments], env=slurm.environment, stdout=out, stderr=subprocess.STDOUT
        )

    def end() -> None:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    stack.callback(end)


def _end_jobs(slurm: Slurm) -> None:
    subprocess.run(["scancel", "--user=root"], env=slurm.environment, check=False)
    deadline = time.monotonic() + 40  # KillWait is 30
    while slurm("squeue", "--noheader", "--states=running,completing"):
        if time.monotonic() > deadline:
            break
        time.sleep(0.2)


def until(
    is_so: Callable[[], object], what: str, said: Callable[[], str] = str, seconds: float = 60
) -> None:
    """Wait for something; an error names it, with what was said meanwhile, if it does not come."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, f"{what} did not come in {seconds} s: {said()}"
        time.sleep(0.1)
