"""python .ci/newcomer.py CHECKOUT [--quick]: what a new user does with the pages, in an environment that has weft.

Runs, page by page and in the current folder, the Python blocks and then the commands of a checkout's pages. Commands
for which this machine lacks something are listed with the reason. Ends with status 1 if something failed.

--quick runs the commands of the README and its program, and no other page.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

CHECKOUT = Path(sys.argv[1]).resolve()
sys.path.insert(0, str(CHECKOUT / "tests"))

from page_parts import PROCESSES, blocks, broken_links, commands, links, pages, program  # noqa: E402

QUICK = "--quick" in sys.argv
# Why a command is not run here. The first that matches counts.
NOT_HERE = {
    r"\.\.\.": "has a part for the reader to fill in",
    r"pip install": "done before",
    r"make (demo|test|explore|docs|newcomer)|pytest|figures": "tests, demo and pages have jobs of their own",
    r"slurm|--partition|--follow|cancel": "needs Slurm",
    r"--gpus|--nproc-per-node gpu|launch train\.py$": "needs GPUs",
}
FIRST = ("README.md", "tutorial.md", "how_to.md", "plan.md", "checkpoints.md", "run_on_a_cluster.md")
LIMIT_S = 300
BEGAN = float(os.environ.get("NEWCOMER_BEGAN", time.time()))


def ran(what: str, command: list[str] | str) -> bool:
    """Run a command, and say how that ended."""
    began = time.monotonic()
    run = subprocess.run(
        command, shell=isinstance(command, str), capture_output=True, text=True, timeout=LIMIT_S, errors="replace"
    )
    status, seconds = "ok  " if run.returncode == 0 else "FAIL", time.monotonic() - began
    print(f"{status} {seconds:4.0f} s, {time.time() - BEGAN:5.0f} s in all  {what}", flush=True)
    if run.returncode:
        print(f"{run.stdout[-2000:]}\n{run.stderr[-4000:]}")
    return run.returncode == 0


def run_blocks(page: Path, text: str) -> bool:
    """The Python of a page as one script, on as many processes as the page says."""
    file = Path("train.py" if page.name == "README.md" else f"{page.stem}_blocks.py")
    file.write_text(program(text))
    found = PROCESSES.search(text)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", found[1]] if found else []
    return ran(f"{page.relative_to(CHECKOUT)}: {len(blocks(text))} Python blocks", [sys.executable, *launch, str(file)])


def main() -> int:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    failed = run = 0
    skipped = []
    all_pages = pages(CHECKOUT)
    order = sorted(all_pages, key=lambda page: FIRST.index(page.name) if page.name in FIRST else len(FIRST))
    for page in order[:1] if QUICK else order:
        text = page.read_text()
        if blocks(text):
            failed += not run_blocks(page, text)
        for command in commands(text):
            why = next((why for pattern, why in NOT_HERE.items() if re.search(pattern, command)), None)
            if why is not None:
                skipped.append(f"{page.relative_to(CHECKOUT)}: {command}: {why}")
                continue
            run += 1
            failed += not ran(f"{page.relative_to(CHECKOUT)}: {command}", command.replace(" RUN", ""))
    import weft

    names = [name for name in weft.__all__ if getattr(weft, name).__doc__]
    print(f"\n{len(names)} of {len(weft.__all__)} public names have a docstring")
    print("\nnot run:", *skipped, sep="\n  ")
    broken = [f"{page.relative_to(CHECKOUT)}: {link}" for page in all_pages for link in broken_links(page)]
    if broken:
        print("\nbroken links:", *broken, sep="\n  ")
    failed += len(broken)
    texts = [page.read_text() for page in all_pages]
    count = sum(len(blocks(text)) for text in texts)
    print(
        f"\n{len(all_pages)} pages, {count} Python blocks, "
        f"{sum(len(links(text)) for text in texts)} links checked, "
        f"{run} commands run, {len(skipped)} not run, {failed} failed"
    )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
