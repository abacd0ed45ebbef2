"""Stands in for a training program where a sweep is tested: writes what one would write, without training.

The figure depends on learning rate and seed. A file `fail_<seed>` beside the run directory makes a run of that seed end
with the exit code in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

options = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
workdir = Path(options["workdir"])
rate, seed = float(options["config.optimizer.learning_rate"]), int(options["config.train.seed"])
steps = int(options["config.train.steps"])
with (workdir.parent / "started").open("a") as log:
    log.write(f"{workdir.name}\n")
if (fault := workdir.parent / f"fail_{seed}").exists():
    sys.exit(int(fault.read_text()))
for folder in ("metrics", f"checkpoints/{steps}", "drafter"):
    (workdir / folder).mkdir(parents=True)
rows = [{"resumed_from": -1}, {"step": steps // 2, "greedy/match": rate * 100 + seed / 100}, {"step": steps}]
(workdir / "metrics" / "part-000000.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
(workdir / "drafter" / "config.json").write_text("{}")
