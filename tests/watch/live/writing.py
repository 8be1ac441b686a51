"""A program that holds a run directory and writes a step to it so often, until it is ended."""

import sys
import time
from pathlib import Path

from tether.core.locks import hold, release
from tether.core.rundir import RunDirectory, write_json


def main(root: Path, steps: int, pause: float) -> None:
    root.mkdir(parents=True, exist_ok=True)
    hold(root)
    write_json(root / "command.json", {"command": "stages", "stages": ["ppo"], "config": {}})
    run = RunDirectory.open(root / "ppo", {"ppo": {"steps": steps}})
    run.expect(steps)
    for step in range(1, steps + 1):
        run.log({"reward/proxy": step / 10, "kl/policy_reference_k1": 0.5, "alarms": 0.0}, step)
        run.sample([{"step": step, "prompt": f"prompt {step}", "response": "yes", "proxy": 0.5}])
        print(step, flush=True)
        time.sleep(pause)
    run.finish({"steps": steps})
    release(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
