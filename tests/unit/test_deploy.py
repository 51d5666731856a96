"""The job files in deploy/: they parse, and every flag in them is one that the programs know."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from torch.distributed.run import get_args_parser

from dragoman.cli.app import app
from dragoman.recipes.catalogue import RECIPES

DEPLOY = Path(__file__).parents[2] / "deploy"


def slurm_words() -> list[str]:
    """The launching command of the batch script, as the shell would cut it."""
    text = (DEPLOY / "slurm.sbatch").read_text().replace("\\\n", " ")
    line = next(line for line in text.splitlines() if line.startswith("srun "))
    return shlex.split(line.split("||")[0])[1:]


def kubernetes() -> list[dict]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def kubernetes_words() -> list[str]:
    return kubernetes()[1]["spec"]["template"]["spec"]["containers"][0]["command"]


@pytest.mark.parametrize("words", [slurm_words(), kubernetes_words()], ids=["slurm", "kubernetes"])
def test_every_flag_exists(words):
    """torchrun parses what is before the module, and `dragoman train` what is after it."""
    assert words[0] == "torchrun"
    launch = get_args_parser().parse_args(words[1:])
    assert (launch.module, launch.training_script, launch.training_script_args[0]) == (
        True,
        "dragoman",
        "train",
    )
    assert launch.max_restarts > 0
    assert launch.rdzv_endpoint
    known = {
        name
        for parameter in typer.main.get_command(app).commands["train"].params
        for name in parameter.opts
    }
    given = [
        word.split("=")[0] for word in launch.training_script_args[1:] if word.startswith("--")
    ]
    assert len(given) >= 5
    assert set(given) <= known, set(given) - known


@pytest.mark.parametrize("words", [slurm_words(), kubernetes_words()], ids=["slurm", "kubernetes"])
def test_the_recipe_exists(words):
    joined = " ".join(words).replace("--recipe=", "--recipe ").split()
    assert joined[joined.index("--recipe") + 1] in RECIPES


def test_the_batch_script_is_a_script():
    assert subprocess.run(["bash", "-n", str(DEPLOY / "slurm.sbatch")], check=False).returncode == 0
    options = re.findall(
        r"^#SBATCH --([a-z-]+)", (DEPLOY / "slurm.sbatch").read_text(), flags=re.MULTILINE
    )
    assert {"nodes", "ntasks-per-node", "signal", "requeue", "time"} <= set(options)


def test_the_batch_script_asks_for_a_requeue_where_the_run_was_stopped(tmp_path):
    """With stubs for Slurm's programs and torchrun: only exit code 75 is queued again."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    programs = {
        "scontrol": 'if [ "$1" = show ]; then echo first; echo second; else echo "$@" >> calls; fi',
        "srun": 'echo "$@" > launched; exit 1',
    }
    for name, text in programs.items():
        (bin_ / name).write_text(f"#!/bin/bash\n{text}\n")
        (bin_ / name).chmod(0o755)
    status = tmp_path / "my-model" / "training" / "status.json"
    status.parent.mkdir(parents=True)
    environment = {
        "PATH": f"{bin_}:/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "some",
    }
    for code, calls in ((70, ""), (75, "requeue 7\n")):
        status.write_text(f'{{\n "exit_code": {code},\n "reason": ""\n}}\n')
        done = subprocess.run(
            ["bash", str(DEPLOY / "slurm.sbatch")],
            cwd=tmp_path,
            env=environment | {"SLURM_SUBMIT_DIR": str(tmp_path)},
            check=False,
        )
        assert done.returncode == 1
        assert ((tmp_path / "calls").read_text() if (tmp_path / "calls").exists() else "") == calls
    assert "--rdzv-endpoint=first:20007" in (tmp_path / "launched").read_text()


def test_the_job_s_parts_fit_together():
    """The pods' names, part of the first pod's address, come from job, service and subdomain."""
    service, job = kubernetes()
    pod = job["spec"]["template"]["spec"]
    words = dict(word.split("=", 1) for word in kubernetes_words() if "=" in word)
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert (
        words["--rdzv-endpoint"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
        f":{service['spec']['ports'][0]['port']}"
    )
    assert job["spec"]["completionMode"] == "Indexed"
    assert job["spec"]["completions"] == job["spec"]["parallelism"] == int(words["--nnodes"])
    mounts = {each["name"] for each in pod["containers"][0]["volumeMounts"]}
    assert mounts == {each["name"] for each in pod["volumes"]}
