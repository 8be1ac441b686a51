"""A job that only waits: it writes when it began and ended, fails where its folder is named, and
notes a signal to stop.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

ROOT = Path(os.environ["PRETEND"])


def note(folder, what):
    line = json.dumps([what, str(Path(folder).relative_to(ROOT)), time.monotonic()]) + "\n"
    with (ROOT / "events").open("a") as file:
        file.write(line)


def work(folder, *_):
    def stop(*_):
        note(folder, "saved")
        sys.exit(1)

    signal.signal(signal.SIGTERM, stop)
    note(folder, "began")
    if os.environ.get("FAILS") and os.environ["FAILS"] in folder:
        while os.environ["AFTER"] not in (ROOT / "events").read_text():
            time.sleep(0.05)
        print("a warning\nthe reward of this job cannot be computed. Mend it\n")
        sys.exit(1)
    time.sleep(float(os.environ.get("SECONDS", "0.3")))
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "summary.json").write_text(json.dumps({"name": Path(folder).name}))
    note(folder, "ended")


if __name__ == "__main__":
    work(*sys.argv[1:])
