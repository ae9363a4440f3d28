"""The scripts in scripts/ start launch.train on every host, with options that it accepts."""

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import yaml

from configs.schema import HostsConfig, RunConfig
from launch.cli.options import parse_run
from tests.documents import ROOT

SCRIPTS = ROOT / "scripts"
BATCH = SCRIPTS / "slurm.sbatch"
# Stand-ins for Slurm's programs. There are two hosts, and each task gets its number.
STUBS = {
    "scontrol": 'if [ "$1" = show ]; then echo node7; echo node9; else echo "scontrol $*"; fi',
    "srun": """
if [ "$1" = --help ]; then echo "{help}"; exit; fi
while [ "$1" != bash ] && [ "$1" != apptainer ]; do shift; done
if [ "$1" = apptainer ]; then echo "$@" >> "$LOG"; while [ "$1" != bash ]; do shift; done; fi
for task in 0 1; do SLURM_PROCID=$task "$@"; done
exit {code}
""",
    "python": 'echo "$@" >> "$LOG"',
}
ALLOCATION = {
    "SLURM_JOB_NODELIST": "node[7,9]",
    "SLURM_JOB_ID": "41",
    "SLURM_NNODES": "2",
    "SLURM_GPUS_PER_NODE": "h:8",
}


# Fields of the Kubernetes API (1.37) and of JobSet v1alpha2, with their types: those that such a file may need.
CONTAINER = {
    **dict(name=str, image=str, imagePullPolicy=str, workingDir=str, command=[str], args=[str]),
    "env": [dict(name=str, value=str, valueFrom=dict(fieldRef=dict(fieldPath=str, apiVersion=str)))],
    "ports": [dict(name=str, containerPort=int, hostPort=int, protocol=str)],
    "resources": dict(limits=dict, requests=dict),
    "volumeMounts": [dict(name=str, mountPath=str, subPath=str, readOnly=bool)],
}
VOLUME = dict(name=str, emptyDir=dict(medium=str, sizeLimit=str), hostPath=dict(path=str, type=str))
VOLUME |= dict(persistentVolumeClaim=dict(claimName=str, readOnly=bool))
POD = dict(restartPolicy=str, terminationGracePeriodSeconds=int, hostNetwork=bool, nodeSelector=dict)
POD |= dict(containers=[CONTAINER], volumes=[VOLUME])
METADATA = dict(name=str, namespace=str, labels=dict, annotations=dict)
JOB = dict(parallelism=int, completions=int, completionMode=str, backoffLimit=int, activeDeadlineSeconds=int)
JOB |= dict(template=dict(metadata=METADATA, spec=POD))
JOBSET = {
    **dict(apiVersion=str, kind=str, metadata=METADATA),
    "spec": {
        "network": dict(enableDNSHostnames=bool, publishNotReadyAddresses=bool, subdomain=str),
        "failurePolicy": dict(maxRestarts=int, restartStrategy=str),
        "replicatedJobs": [dict(name=str, replicas=int, template=dict(metadata=METADATA, spec=JOB))],
    },
}


def assert_fits(value: Any, schema: Any, where: str = "") -> None:
    """Verify that a value has fields of the schema alone, and their types."""
    if isinstance(schema, type):
        assert type(value) is schema, f"{where}: {value!r}"
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, where
        for each in value:
            assert_fits(each, schema[0], where)
    else:
        for name in value:
            assert name in schema, f"{where}: no field {name}"
            assert_fits(value[name], schema[name], f"{where}.{name}")


def slurm(directory: Path, *options: str, help: str = "--container-image", code: int = 0, **more: str) -> Any:
    """Run the batch script with stand-ins for Slurm's programs, which log to LOG."""
    for name, text in STUBS.items():
        path = directory / name
        path.write_text(f"#!/bin/sh\n{text.replace('{help}', help).replace('{code}', str(code))}")
        path.chmod(0o755)
    environment = ALLOCATION | {"PATH": f"{directory}:{os.environ['PATH']}", "LOG": str(directory / "log")} | more
    return subprocess.run(["bash", str(BATCH), *options], env=environment, capture_output=True, text=True)


def config_of(command: list[str]) -> RunConfig:
    assert command[:3] == ["-m", "launch.supervise", "launch.train"]
    return parse_run(command[3:], "test", "")


def test_each_slurm_task_trains_as_one_process(tmp_path: Path) -> None:
    ended = slurm(tmp_path, "--mesh.data", "2", "--mesh.tensor", "8")
    assert ended.returncode == 0, ended.stderr
    runs = [config_of(shlex.split(line)) for line in (tmp_path / "log").read_text().splitlines()]
    assert [run.hosts for run in runs] == [HostsConfig("node7:20041", 2, index) for index in (0, 1)]
    assert runs[0].out == "/shared/specjax/gsm8k" and runs[0].mesh.shape == (2, 1, 1, 8)


def test_slurm_without_pyxis_takes_apptainer_and_queues_a_stopped_job_again(tmp_path: Path) -> None:
    ended = slurm(tmp_path, help="", code=143)
    assert ended.returncode == 143 and ended.stdout.splitlines()[-1] == "scontrol requeue 41"
    container, *commands = (tmp_path / "log").read_text().splitlines()
    assert container.startswith("apptainer exec --nv") and len(commands) == 2


def test_the_sbatch_file_is_valid_bash_and_shows_what_it_would_start(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", str(BATCH)], check=True)
    shown = slurm(tmp_path, DRY_RUN="1").stdout
    assert shown.startswith("srun --kill-on-bad-exit=0") and not (tmp_path / "log").exists()


def test_each_pod_trains_as_one_process() -> None:
    job = yaml.safe_load((SCRIPTS / "kubernetes.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert_fits(job, JOBSET)
    (hosts,) = job["spec"]["replicatedJobs"]
    spec = hosts["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert spec["parallelism"] == spec["completions"] == int(variables["HOSTS"])
    variables |= {"JOBSET": job["metadata"]["name"], "INDEX": "1"}
    words = [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], word) for word in container["command"][1:]]
    words += [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], word) for word in container["args"]]
    run = config_of(words)
    # JobSet names pods JOBSET-REPLICATED_JOB-JOB-POD, in the domain JOBSET.
    port = container["ports"][0]["containerPort"]
    assert run.hosts == HostsConfig(f"specjax-{hosts['name']}-0-0.specjax:{port}", 2, 1)
    assert run.mesh.data == 2 * container["resources"]["limits"]["nvidia.com/gpu"]


def test_the_image_holds_what_the_scripts_start() -> None:
    text = (SCRIPTS / "Dockerfile").read_text()
    for path in re.findall(r"--constraint (\S+)", text):
        assert (ROOT / path).exists()
    images = [re.findall(r"[\w./-]+/specjax:\w+", (SCRIPTS / name).read_text()) for name in ("Dockerfile", BATCH.name)]
    assert images[0][:1] == images[1][:1] != []
