"""The `nyala` command: verbs, supervision of runs, displays, fault injection."""

import os
import sys
from pathlib import Path

if os.environ.get("PYTHONPATH"):  # its folders may have packages of our names
    sys.path.insert(0, str(Path(__file__).parents[1]))
