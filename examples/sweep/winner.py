"""Print the words of a sweep's best job: python winner.py FOLDER"""

import json
import shlex
import sys
from pathlib import Path

jobs = json.loads(Path(sys.argv[1], "sweep.json").read_text(encoding="utf-8"))["jobs"]
best = min((job for job in jobs if job["status"] == "finished"), key=lambda job: job["value"])
print(f"job {best['job']}, validation loss {best['value']:.4f}: {shlex.join(best['differs_by'])}")
