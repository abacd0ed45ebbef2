"""What the launch recipes would run, read by the parsers that will read it."""

from __future__ import annotations

import argparse
import importlib.util
import io
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from experiments.launch import jobset, slurm, submitit, tpu_vm, xpk

ROOT = Path(__file__).resolve().parents[2]
TRAIN = "python -m experiments.train --config=configs/papers/eagle3.py:llama3_8b --workdir=gs://bucket/eagle3"
SLURM = ["--name=eagle3", f"--command={TRAIN}", "--nodes=2", "--gpus=8", "--dry-run"]
TPU = ["--name=eagle3", f"--command={TRAIN}", "--type=v5litepod-256", "--zone=us-west4-a", "--dry-run"]
TPU += ["--repository=https://example.org/specjax.git"]
JOBSET = ["--name=eagle3", f"--command={TRAIN}", "--image=specjax:1", "--dry-run"]
ON_TPU = ["--accelerator=tpu-v5-lite-podslice", "--topology=16x16", "--hosts=64"]


XPK = ["--name=eagle3", f"--command={TRAIN}", "--cluster=c", "--zone=z", "--type=v6e-256", "--image=specjax:1"]
XPK += ["--dry-run"]


def printed(recipe, arguments, capsys):
    recipe.main(arguments)
    return capsys.readouterr().out


def refused(recipe, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        recipe.main(arguments)
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_the_batch_script(capsys):
    text = printed(slurm, [*SLURM, "--sbatch=--partition=h100"], capsys)
    head = [line for line in text.splitlines() if line.startswith("#SBATCH")]
    assert head == [
        "#SBATCH --job-name=eagle3",
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --time=24:00:00",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=eagle3-%j.log",
        "#SBATCH --signal=TERM@120",
        "#SBATCH --partition=h100",
    ]
    assert f"srun --kill-on-bad-exit=1 {TRAIN} --require_platform=gpu" in text.splitlines()
    # Every process must see all GPUs of its node: JAX picks by local rank.
    assert "gpus-per-task" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    if shutil.which("shellcheck"):
        subprocess.run(["shellcheck", "--severity=warning", "-"], input=text, text=True, check=True)


@pytest.mark.parametrize("status", [0, 1, 75])
def test_only_an_interrupted_job_goes_back_into_the_queue(status, tmp_path, capsys):
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").write_text("")
    for name, body in (("srun", f"exit {status}"), ("scontrol", f"echo requeued >> {tmp_path}/seen")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    text = printed(slurm, [*SLURM, f"--venv={tmp_path / 'venv'}"], capsys)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    ran = subprocess.run(["bash"], input=text, text=True, env=environment, cwd=tmp_path)
    assert ran.returncode == status
    assert (tmp_path / "seen").exists() == (status == 75)


def test_a_pod_of_tpu_vms(capsys):
    calls = [shlex.split(line) for line in printed(tpu_vm, TPU, capsys).splitlines()]
    for words in calls:
        assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "eagle3"]
        assert "--worker=all" in words
        subprocess.run(["bash", "-n"], input=words[-1].removeprefix("--command="), text=True, check=True)
    setup, start, follow = (words[-1] for words in calls)
    assert f"{TRAIN} --require_platform=tpu" in start
    # The branch as the repository has it now, not as it was when the host cloned it.
    assert "git fetch --quiet origin main && git checkout --quiet --detach FETCH_HEAD" in setup
    assert setup.index(" update") < setup.index("install -y")
    assert printed(tpu_vm, [*TPU, "--follow"], capsys).splitlines() == [shlex.join(calls[2])]


def test_a_slice_is_asked_for_and_given_back(capsys):
    asked, state = (shlex.split(line) for line in printed(tpu_vm, [*TPU, "--create", "--spot"], capsys).splitlines())
    assert asked[3:6] == ["queued-resources", "create", "eagle3"]
    assert {"--spot", "--accelerator-type=v5litepod-256", "--runtime-version=v2-alpha-tpuv5-lite"} <= set(asked)
    assert state[4] == "describe"
    (deleted,) = (shlex.split(line) for line in printed(tpu_vm, [*TPU, "--delete"], capsys).splitlines())
    assert deleted[3:6] == ["queued-resources", "delete", "eagle3"] and {"--force", "--quiet"} <= set(deleted)


def test_on_a_host_the_program_outlives_the_connection(tmp_path):
    """The commands that hosts get, run here: start returns at once, stop lets it save, follow ends with its code."""
    (tmp_path / "specjax/.venv/bin").mkdir(parents=True)
    (tmp_path / "specjax/.venv/bin/activate").write_text("")
    (tmp_path / "saves.sh").write_text("trap 'echo saved; exit 75' TERM\necho begun\nwhile true; do sleep 0.1; done\n")
    options = argparse.Namespace(name="eagle3", command=f"bash {tmp_path}/saves.sh")

    def on_host(made, **more):
        command = ["bash", "-c", made(options)]
        return subprocess.run(command, env={**os.environ, "HOME": str(tmp_path)}, cwd=tmp_path, timeout=60, **more)

    assert on_host(tpu_vm.start).returncode == 0
    again = on_host(tpu_vm.start, capture_output=True, text=True)
    assert again.returncode == 1 and "eagle3 runs already" in again.stderr
    until = time.monotonic() + 30
    while "begun" not in (tmp_path / "eagle3.log").read_text() and time.monotonic() < until:
        time.sleep(0.05)
    assert on_host(tpu_vm.stop).returncode == 0
    ended = on_host(tpu_vm.follow, capture_output=True, text=True)
    told = [line for line in ended.stdout.split() if line != "Terminated"]  # bash says so of the sleep, or does not
    assert ended.returncode == 75 and told == ["begun", "saved"]


def test_a_job_set_of_tpus(capsys):
    found = yaml.safe_load(printed(jobset, [*JOBSET, *ON_TPU, "--spot"], capsys))
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (group,) = found["spec"]["replicatedJobs"]
    job = group["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 64
    assert job["backoffLimit"] == 0 and found["spec"]["failurePolicy"]["maxRestarts"] == 50
    pod = job["template"]["spec"]
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "16x16",
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    # The program itself is told to end, not a shell around it.
    assert container["command"][-1] == f"exec env {TRAIN} --require_platform=tpu"
    assert found["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    assert "env" not in container  # the cluster tells TPU hosts who they are


def test_a_wrong_config_is_not_started_again(capsys):
    found = yaml.safe_load(printed(jobset, [*JOBSET, *ON_TPU], capsys))
    job = found["spec"]["replicatedJobs"][0]["template"]["spec"]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": "specjax", "operator": "In", "values": [2]}
    assert job["template"]["spec"]["restartPolicy"] == "Never"  # which such a policy needs
    (rule,) = found["spec"]["failurePolicy"]["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}


@pytest.mark.parametrize("slices", [1, 3])
def test_a_job_set_of_gpus_is_told_where_to_meet(slices, capsys):
    asked = [*JOBSET, "--accelerator=nvidia-h100-80gb", "--hosts=2", "--chips=8", f"--slices={slices}"]
    found = yaml.safe_load(printed(jobset, asked, capsys))
    assert "annotations" not in found["metadata"]
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    told = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert told["JAX_COORDINATOR_ADDRESS"] == "eagle3-worker-0-0.eagle3:8476"
    assert told["JAX_NUM_PROCESSES"] == str(2 * slices)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    # As the pod numbers itself, over all groups.
    script = container["command"][-1].replace(f"{TRAIN} --require_platform=gpu", "bash -c 'echo $JAX_PROCESS_ID'")
    numbers = []
    for group in range(slices):
        for host in range(2):
            set_here = {"HOSTS": told["HOSTS"], "GROUP": str(group), "HOST": str(host), "PATH": os.environ["PATH"]}
            run = subprocess.run(["bash", "-c", script], env=set_here, capture_output=True, text=True, check=True)
            numbers.append(int(run.stdout))
    assert numbers == list(range(2 * slices))


def test_a_workload_of_xpk(capsys):
    (words,) = (shlex.split(line) for line in printed(xpk, [*XPK, "--slices=2"], capsys).splitlines())
    assert words == [
        "xpk",
        "workload",
        "create",
        "--workload=eagle3",
        "--cluster=c",
        "--zone=z",
        "--tpu-type=v6e-256",
        "--num-slices=2",
        "--docker-image=specjax:1",
        "--max-restarts=50",
        "--termination-grace-period-seconds=120",
        f"--command=exec env {TRAIN} --require_platform=tpu",
    ]
    assert printed(xpk, [*XPK, "--delete", "--project=p"], capsys) == (
        "xpk workload delete --workload=eagle3 --cluster=c --zone=z --project=p\n"
    )


SUBMITIT = """\
cluster: slurm
folder: runs/submitit/eagle3
max_num_timeout: 50
name: eagle3
timeout_min: 1440
nodes: 2
tasks_per_node: 8
gpus_per_node: 8
slurm_array_parallelism: 256
slurm_signal_delay_s: 120
slurm_setup: ['unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY all_proxy ALL_PROXY']
slurm_srun_args: ['--kill-on-bad-exit=1']
slurm_additional_parameters: {'requeue': True, 'partition': 'h100', 'exclusive': True}
"""


def test_what_submitit_is_given(capsys, monkeypatch):
    asked = [*SLURM, "--slurm=partition=h100", "--slurm=exclusive"]
    assert printed(submitit, asked, capsys) == f"{SUBMITIT}task: {TRAIN} --require_platform=gpu\n"
    monkeypatch.setattr("sys.stdin", io.StringIO("python -m a --x=1\npython -m a --x=2\n"))
    text = printed(submitit, [*asked, "--command=-"], capsys)
    assert text.splitlines()[-2:] == [f"task: python -m a --x={x} --require_platform=gpu" for x in (1, 2)]
    assert "found nothing on standard input" in refused(submitit, [*asked, "--command=-"], capsys)


needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs submitit")


def by_submitit(*arguments, **more):
    """In a process of its own: submitit takes over logging."""
    command = [sys.executable, "-m", "experiments.launch.submitit", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)


@needs_submitit
def test_the_batch_script_of_submitit(tmp_path):
    """As submitit writes it and hands it to SLURM, of which there are two commands here."""
    for name, body in (("srun", ""), ("sbatch", f'cp "$1" {tmp_path}/script; echo Submitted batch job 7')):
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    asked = [word for word in SLURM if word != "--dry-run"] + ["--slurm=partition=h100", f"--folder={tmp_path}/logs"]
    started = by_submitit(*asked, env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})
    told, _ = started.communicate(timeout=120)
    assert started.returncode == 0 and "submitted: 7, " in told, told
    text = (tmp_path / "script").read_text()
    head = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    wanted = {"--job-name=eagle3", "--nodes=2", "--ntasks-per-node=8", "--gpus-per-node=8", "--time=1440"}
    assert wanted | {"--requeue", "--signal=USR2@120", "--partition=h100", "--open-mode=append"} <= head
    assert "gpus-per-task" not in text and "unset http_proxy" in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


RESUMES = """
import os, signal, sys, time
from pathlib import Path
place = Path(sys.argv[1])
if (place / "saved").exists():
    (place / "resumed").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
    sys.exit(0)
def save(*_):
    (place / "saved").write_text("")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
(place / "begun").write_text(str(os.getpid()))
time.sleep(60)
"""


@needs_submitit
@pytest.mark.parametrize("told", ["the job", "the program"])
def test_submitit_has_a_program_save_and_starts_it_again(told, tmp_path):
    """For real, on this machine: by submitit's own signal, and where the program alone is told to end."""
    (tmp_path / "program.py").write_text(RESUMES)
    program = f"{sys.executable} {tmp_path}/program.py {tmp_path}"
    more = ["--name=again", "--cluster=local", "--gpus=0", f"--folder={tmp_path}/logs"]
    started = by_submitit(*more, f"--command={program}")
    until = time.monotonic() + 120
    while not (tmp_path / "begun").exists() and time.monotonic() < until and started.poll() is None:
        time.sleep(0.1)
    program = int((tmp_path / "begun").read_text())
    if told == "the program":
        os.kill(program, signal.SIGTERM)
    else:  # All processes get the signal, as they may from SLURM.
        status = Path(f"/proc/{program}/status").read_text().splitlines()
        (parent,) = (line.split()[1] for line in status if line.startswith("PPid"))
        os.kill(program, signal.SIGUSR2)
        os.kill(int(parent), signal.SIGUSR2)
    told, _ = started.communicate(timeout=120)
    assert started.returncode == 0 and (tmp_path / "resumed").exists(), told


@needs_submitit
def test_a_program_that_fails_is_not_started_again(tmp_path):
    more = ["--name=fails", "--cluster=local", "--gpus=0", f"--folder={tmp_path}/logs"]
    started = by_submitit(*more, f"--command=bash -c 'echo once >> {tmp_path}/seen; exit 2'")
    told, _ = started.communicate(timeout=120)
    assert started.returncode == 1 and "returned non-zero exit status 2" in told, told
    assert (tmp_path / "seen").read_text() == "once\n"


@pytest.mark.parametrize(
    ("recipe", "arguments", "message"),
    [
        (slurm, [*SLURM, "--name=Eagle_3"], "name 'Eagle_3': expected"),
        (slurm, [*SLURM, "--command=a\nb"], "several lines"),
        (slurm, [*SLURM, "--command= "], "the command is empty"),
        (slurm, [*SLURM, "--nodes=0"], "nodes=0"),
        (slurm, [*SLURM, "--time=soon"], "time 'soon'"),
        (tpu_vm, [*TPU, "--type=v99-8"], "type 'v99-8'"),
        (tpu_vm, [*TPU, "--command=python x.py --workdir=runs/x"], "workdir is 'runs/x'"),
        (xpk, [*XPK, "--slices=0"], "slices=0"),
        (submitit, [*SLURM, "--gpus=0"], "gpus=0"),
        (submitit, [*SLURM, "--command=a\nb"], "several lines"),
        (submitit, [*SLURM, "--hours=0.01"], "hours=0.01, grace=120"),
        (submitit, [*SLURM, "--cluster=local"], "nodes=2: expected 1"),
        (submitit, [*SLURM, "--slurm==h100"], "slurm='=h100'"),
        (xpk, [*XPK, "--command=a\nb"], "several lines"),
        (jobset, [*JOBSET, "--accelerator=tpu-v5-lite-podslice"], "needs --topology"),
        (jobset, [*JOBSET, *ON_TPU, "--hosts=0"], "hosts=0"),
        (jobset, [*JOBSET, *ON_TPU, "--command=python x.py"], "workdir is None"),
        (jobset, [*JOBSET, *ON_TPU, f"--command=cd x && {TRAIN}"], "the command has &&: give one program"),
    ],
)
def test_one_error_before_anything_runs(recipe, arguments, message, capsys):
    assert message in refused(recipe, arguments, capsys)
