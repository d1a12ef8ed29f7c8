"""Install unmodified SGLang for a CPU into an environment of its own, with this checkout's plug-in: for development and tests.

    python deploy/sglang-cpu/install.py .vertumnus/sglang

Repeating it brings the environment up to date. Prefill/decode disaggregation needs four libraries of Debian, for the transfer
engine; they are unpacked inside the environment, and where `apt-get` is missing all else works without them.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
PIP = "pip==26.3"
DEBIAN = ("libibverbs1", "librdmacm1", "libnl-3-200", "libnl-route-3-200")
EARLY = "vertumnus_sglang_cpu_torchvision.pth"
"""Read by Python when it starts."""

READY = "READY"
"""There when all of the environment is: tests on real servers are skipped without it."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="of the environment")
    directory: Path = parser.parse_args().directory.absolute()
    python = directory / "bin/python"
    (directory / READY).unlink(missing_ok=True)
    if not python.exists():
        _run(sys.executable, "-m", "venv", str(directory))
    _pip(python, "--upgrade", PIP)
    constraints = ("--constraint", str(HERE / "constraints.txt"))
    _pip(python, *constraints, "--requirement", str(HERE / "requirements.txt"))
    _pip(python, *constraints, "--no-deps", "sglang", "torchvision")
    # The build backend is already there, so neither of ours asks an index for anything.
    _pip(python, "--no-deps", "--no-build-isolation", "--force-reinstall", str(HERE))
    _pip(python, "--no-deps", "--no-build-isolation", "--editable", str(CHECKOUT))
    packages = next(directory.glob("lib/python3*/site-packages"))
    (packages / EARLY).write_text("import vertumnus_sglang_cpu.torchvision_ops\n")
    transfers = _unpack_debian(directory / "debian")
    _run(str(python), "-c", "import torchvision, sglang.srt.entrypoints.http_server")
    (directory / READY).touch()
    print(f"{python}: SGLang for development, {'with' if transfers else 'without'} prefill/decode disaggregation")


def _unpack_debian(into: Path) -> bool:
    """False where there is no apt-get."""
    if into.exists():
        return True
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return False
    with tempfile.TemporaryDirectory(dir=into.parent) as downloads:
        _run("apt-get", "download", *DEBIAN, cwd=Path(downloads))
        for package in Path(downloads).glob("*.deb"):
            _run("dpkg", "--extract", str(package), f"{downloads}/all")
        Path(downloads, "all").rename(into)  # once it is whole: what is there is not unpacked again
    return True


def _pip(python: Path, *arguments: str) -> None:
    _run(str(python), "-m", "pip", "install", "-qq", "--no-compile", *arguments)


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd)


if __name__ == "__main__":
    main()
