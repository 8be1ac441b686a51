"""Every test of `on_device.py`, in a process of its own: torch keeps a device that was put in place
once.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

pytestmark = pytest.mark.timeout(1800)  # the first test waits for all
SCRIPT = Path(__file__).with_name("on_device.py")
NAMES = re.findall(r"^def (test_\w+)", SCRIPT.read_text(encoding="utf-8"), re.MULTILINE)
GUARD = Path(__file__).with_name("guard.cpp")
FAULTS = ("failure", "error", "skipped")


@pytest.fixture(scope="module")
def guard(tmp_path_factory):
    """The library of `guard.cpp`, built against the installed torch, and the folder of torch's own
    libraries.
    """
    compiler = next(filter(None, map(shutil.which, ("g++", "c++", "clang++"))), None)
    if compiler is None or sys.platform != "linux":
        pytest.skip("the pretended cuda:0 needs Linux and a C++ compiler")
    if torch.version.cuda is not None:
        pytest.skip(
            "the pretended cuda:0 needs a CPU build of torch: this one has a cuda of its own",
        )
    library, root = tmp_path_factory.mktemp("guard") / "guard.so", Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    headers = [f"-I{root / 'include'}", f"-I{root / 'include/torch/csrc/api/include'}"]
    links = [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-std=c++20",
        abi,
        *headers,
        str(GUARD),
        "-o",
        str(library),
        *links,
    ]
    subprocess.run(command, check=True, capture_output=True)
    return library, root / "lib"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, guard):
    """By the name of a test, what went wrong in each of its cases: nothing, where the text is
    empty.
    """
    record = tmp_path_factory.mktemp("outcomes") / "junit.xml"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=short",
        "--timeout=900",
        f"--junitxml={record}",
        "-o",
        "junit_family=xunit2",
    ]
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "COV_"))
    }
    environment |= {"LD_PRELOAD": str(guard[0]), "LD_LIBRARY_PATH": str(guard[1])}
    command, root = [sys.executable, "-m", "pytest", *options, str(SCRIPT)], SCRIPT.parents[2]
    ended = subprocess.run(
        command,
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert record.is_file(), (
        f"the device stopped its process:\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    )
    found = defaultdict(list)
    for case in ElementTree.parse(record).iter("testcase"):
        faults = [fault.text or fault.tag for fault in case if fault.tag in FAULTS]
        found[case.attrib["name"].split("[")[0]].append("\n".join(faults))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_on_the_pretend_device(outcomes, name):
    assert outcomes[name], "it did not run"
    assert not any(outcomes[name]), "\n".join(outcomes[name])
