"""Write into a root folder how pip on this machine finds packages: `registries.py ROOT`.

pip's indexes and folders of wheels go into ROOT/etc/pip.conf. Of local folders only the wheels of
torch are copied, for the Python that the root has; local indexes are left out.
"""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from pathlib import Path

KEPT = ("index-url", "extra-index-url", "find-links", "trusted-host")


def main(root: Path) -> None:
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    ).stdout
    found = {}
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        name = key.rpartition(".")[2]
        if name in KEPT:
            found[name] = value.strip("'").replace("\\n", " ").split()
    found["extra-index-url"] = [
        url for url in found.get("extra-index-url", []) if not url.startswith("file:")
    ]
    tag = "cp" + next((root / "usr/lib").glob("python3.*")).name.removeprefix("python").replace(
        ".", ""
    )
    for place in found.get("find-links", []):
        for wheel in Path(place).glob(f"torch-*-{tag}-*.whl"):
            (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
            shutil.copy(wheel, root / place.lstrip("/"))
    config = configparser.ConfigParser(interpolation=None)
    config["global"] = {name: " ".join(value) for name, value in found.items() if value}
    config["global"]["cert"] = "/etc/ssl/certs/ca-certificates.crt"
    with (root / "etc/pip.conf").open("w") as file:
        config.write(file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
