"""Slurm's commands for tests: every node is this machine, and a job starts at once.

A folder with this file under the names sbatch, srun, sacct and scontrol goes in front of PATH. Only what
submitit and graphmoe use is there; ``scontrol requeue`` runs the job again when its step has ended.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

JOB = 4242


def install(folder: Path) -> None:
    folder.mkdir()
    for name in ("sbatch", "srun", "sacct", "scontrol"):
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{Path(__file__).read_text()}")
        path.chmod(0o755)


def sbatch(script: str) -> None:
    """Start the job, or each job of an array, in the background; prints the number of the first."""
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(.*)$", Path(script).read_text(), re.MULTILINE))
    nodes = options["nodes"]
    environment = os.environ | {
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_JOB_NODELIST": ",".join(["localhost"] * int(nodes)),
        "SLURM_CPUS_PER_TASK": options["cpus-per-task"],
    }
    last = options.get("array", "0-0").split("%")[0].split("-")[1]
    for index in range(int(last) + 1):
        environment["SLURM_JOB_ID"] = str(JOB + index)
        if "array" in options:
            environment |= {"SLURM_ARRAY_JOB_ID": str(JOB), "SLURM_ARRAY_TASK_ID": str(index)}
        command = [sys.executable, __file__, "run", script]
        with Path(script).with_name(f"batch_{index}.log").open("w") as log:
            subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    print(f"Submitted batch job {JOB}")


def run(script: str) -> None:
    """The job's script, and again as often as it was put into the queue again."""
    again = _again(os.environ["SLURM_JOB_ID"])
    again.touch()
    while again.exists():
        again.unlink()
        subprocess.run(["bash", script], check=False)


def srun(*words: str) -> None:
    assert os.environ["SRUN_CPUS_PER_TASK"] == os.environ["SLURM_CPUS_PER_TASK"]
    output, command = words[words.index("--output") + 1], words[words.index("--error") + 2 :]
    nodes, tasks = os.environ["SLURM_JOB_NUM_NODES"], []
    by_step = ("SLURM_STEP_NUM_NODES", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    shared = {"SLURM_STEP_ID": "0", "SLURM_LOCALID": "0", **dict.fromkeys(by_step, nodes)}
    shared["SLURM_STEP_NODELIST"] = os.environ["SLURM_JOB_NODELIST"]
    for node in range(int(nodes)):
        environment = os.environ | shared | dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID"), str(node))
        with Path(_filled(output, node)).open("a") as log:
            tasks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    sys.exit(max(task.wait() for task in tasks))


def _filled(path: str, node: int) -> str:
    """The path of a log with the numbers of its job and its task."""
    numbers = {"%j": "SLURM_JOB_ID", "%A": "SLURM_ARRAY_JOB_ID", "%a": "SLURM_ARRAY_TASK_ID"}
    return re.sub("%[jAa]", lambda sign: os.environ.get(numbers[sign[0]], ""), path).replace("%t", str(node))


def sacct(*words: str) -> None:
    """No job is known, so submitit waits for the file of the result."""
    print("JobID|State|NodeList")


def scontrol(action: str, *words: str) -> None:
    if action == "show":
        print("\n".join(words[1].split(",")))
    elif action == "requeue":
        _again(os.environ["SLURM_JOB_ID"]).touch()


def _again(job: str) -> Path:
    return Path(__file__).with_name(f"again_{job}")


if __name__ == "__main__":
    commands = {"sbatch": sbatch, "srun": srun, "sacct": sacct, "scontrol": scontrol}
    if sys.argv[1:2] == ["run"]:
        run(*sys.argv[2:])
    else:
        commands[Path(sys.argv[0]).name](*sys.argv[1:])
