"""Carries out the steps of the Dockerfile without Docker, in a clean clone and a virtual environment of its own.

    python benchmarks/container.py [--build-arg NAME=VALUE] [--then "make test"] [--keep]

COPY takes files from a clone of what is committed, less what `.dockerignore` names; RUN runs in a shell whose environment holds nothing but
what the Dockerfile sets, PATH, a home of its own and the settings of pip. Paths below /opt/penstock and /work are those of a temporary
folder. Steps that install packages of the system are not run: the programs that they would bring are looked up instead. The last step
is the image's own command; `--then` is run after it, as `docker run` would. Status 1 where a step fails.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAMS = {"redis-server": "redis-server", "gcc": "gcc", "g++": "g++", "make": "make", "git": "git", "openssl": "openssl"}
"""Packages of the Dockerfile, and a program of each."""


def steps(text: str) -> Iterator[tuple[str, str]]:
    """Instructions and what follows them, lines that go on joined."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    for line in lines:
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


class Image:
    """A folder that stands for an image: its files, its environment and where commands run."""

    def __init__(self, folder: Path, given: dict[str, str]) -> None:
        self.folder, self.where, self.given, self.arguments = folder, folder, given, dict[str, str]()
        self.clone = folder / "clone"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(self.clone)], check=True)
        for name in (self.clone / ".dockerignore").read_text().split():
            shutil.rmtree(self.clone / name, ignore_errors=True)
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "LANG": "C.UTF-8"} | pip

    def take(self, word: str, rest: str) -> None:
        """Carries out one instruction."""
        if word == "ARG":
            name, _, value = rest.partition("=")
            self.arguments[name] = self.given.get(name, value.strip('"'))
        elif word == "ENV":
            for name, value in (pair.split("=", 1) for pair in shlex.split(rest)):
                self.environment[name] = self._inside(self._filled(value))
        elif word == "WORKDIR":
            self.where = Path(self._inside(rest))
            self.where.mkdir(parents=True, exist_ok=True)
        elif word == "COPY":
            self._copy(*shlex.split(rest))
        elif word == "RUN":
            self._system(rest) if "apt-get" in rest else self.run(rest)

    def run(self, command: str) -> None:
        """Runs a command as a layer of the image would."""
        subprocess.run(["sh", "-c", self._inside(command)], cwd=self.where, env=self.environment, check=True)

    def _copy(self, *names: str) -> None:
        target = self.where / names[-1]
        target.mkdir(parents=True, exist_ok=True)
        for name in names[:-1]:
            source = self.clone / name
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True, symlinks=True)
            else:
                shutil.copy(source, target)

    def _system(self, rest: str) -> None:
        packages = re.findall(r"--no-install-recommends ([a-z0-9+ -]+)", rest)[0].split()
        missing = [name for name in packages if shutil.which(PROGRAMS[name]) is None]
        if missing:
            raise SystemExit(f"this machine lacks {', '.join(missing)}, which the image would install")

    def _filled(self, text: str) -> str:
        known = self.arguments | self.environment
        return re.sub(r"\$\{(\w+)\}", lambda name: known.get(name[1], ""), text)

    def _inside(self, text: str) -> str:
        return re.sub(r"(?<![\w/.])/(opt/penstock|work)\b", lambda path: f"{self.folder}/{path[1]}", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--then", default="", help="run in /opt/penstock after all steps")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE", help="as Docker's")
    parser.add_argument("--keep", action="store_true", help="leave the folder behind")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-image-"))
    try:
        image = Image(folder, dict(pair.split("=", 1) for pair in given.build_arg))
        for word, rest in steps((ROOT / "Dockerfile").read_text()):
            start = time.monotonic()
            image.take(word, rest)
            if word == "CMD":
                image.run(shlex.join(re.findall(r'"([^"]+)"', rest)) + " > /dev/null")
            print(f"{time.monotonic() - start:6.1f} s  {word} {rest[:100]}", flush=True)
        if given.then:
            image.where = folder / "opt/penstock"
            image.run(given.then)
    except subprocess.CalledProcessError as error:
        print(f"failed with status {error.returncode}: {shlex.join(map(str, error.cmd))}", file=sys.stderr)
        return 1
    finally:
        if given.keep:
            print(f"left behind: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
