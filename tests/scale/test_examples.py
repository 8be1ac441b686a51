"""The files for clusters: Ray's own schema takes one, and both start what tether has."""

import json
from pathlib import Path

import yaml
from tests.conftest import REPOSITORY
from typer.main import get_command

from tether.cli import app

FOLDER = REPOSITORY / "examples" / "cluster"


def test_ray_takes_its_file():
    import jsonschema
    import ray

    config = yaml.safe_load((FOLDER / "ray.yaml").read_text())
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(config, schema)
    assert config["max_workers"] == len(config["provider"]["worker_ips"])


def test_the_job_of_kubernetes_runs_a_command_of_tether():
    job = yaml.safe_load((FOLDER / "kuberay.yaml").read_text())
    words = job["spec"]["entrypoint"].split()
    run = get_command(app).commands["run"]
    assert words[:2] == ["tether", "run"] and any("--on" in option.opts for option in run.params)
    machines = [
        job["spec"]["rayClusterSpec"]["headGroupSpec"],
        *job["spec"]["rayClusterSpec"]["workerGroupSpecs"],
    ]
    mounts = {
        m["mountPath"]
        for one in machines
        for c in one["template"]["spec"]["containers"]
        for m in c["volumeMounts"]
    }
    assert all(words[2].startswith(mount) for mount in mounts), (
        "the recipe lies where all machines see it"
    )
