# Two commands: `make demo` trains a language model, `make test` checks the project. Both set up .venv first.
#
#   PYTHON      the interpreter to build .venv from; where it already has a torch with CUDA, that torch is used
#   PIP_ARGS    more arguments for pip, such as an index of CPU builds of torch
#   RANKS       processes of the demo; all GPUs where there are any, else 2
#   DEMO_ARGS   more arguments for examples/train_lm.py (--help lists them)
#   TEST_ARGS   more arguments for pytest
#   PROGRAMS    how many random programs `make programs` runs eagerly and compiled
#   SCHEDULES   how many random task graphs `make schedules` compares with their best orders
#   STEPS       how many steps `make memory` trains on two ranks; FORMS: how many forms of a step it makes
#   PROCESSES   of `make schedules` and `make programs`
#   SECONDS     how long `make explore` tries new random examples on all property tests, and `make stress` runs threads

PYTHON ?= python3
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?=
SECONDS ?= 600
PROGRAMS ?= 5000
SCHEDULES ?= 100000
STEPS ?= 20000
FORMS ?= 300
PROCESSES ?= 1
PY := .venv/bin/python
HAS = $(PY) -c "import importlib.util, sys; sys.exit(importlib.util.find_spec('$(1)') is None)"

export OMP_NUM_THREADS ?= 1
# NVLink multicast stays off: a process that dies holding a multicast object can take the host's GPUs with it.
export NCCL_NVLS_ENABLE = 0
export TORCH_SYMM_MEM_DISABLE_MULTICAST = 1
export NVSHMEM_DISABLE_NVLS = 1

.PHONY: demo test slurm-test explore programs schedules stress memory nightly newcomer check docs clean

demo: .venv/ready
	@ranks=$${RANKS:-$$($(PY) -c "import torch; print(torch.cuda.device_count() or 2)")}; \
	$(PY) -m torch.distributed.run --standalone --nproc-per-node $$ranks examples/train_lm.py $(DEMO_ARGS)

test: check
	@if $(call HAS,xdist); then parallel="-n 2 --dist worksteal"; else echo "pytest-xdist is not installed: one process"; fi; \
	$(PY) -m pytest $$parallel $(TEST_ARGS)

# Needs root and Debian's packages. `make test` runs the same tests where Slurm is installed.
slurm-test: .venv/ready
	@command -v slurmctld >/dev/null || test -x /usr/sbin/slurmctld || { \
	  apt-get install -y --no-install-recommends slurm-wlm slurm-client munge \
	  || { apt-get update && apt-get install -y --no-install-recommends slurm-wlm slurm-client munge; }; }
	$(PY) -m pytest -m slurm tests/launch $(TEST_ARGS)

explore: .venv/ready
	$(PY) tests/exploration.py --seconds $(SECONDS) $(TEST_ARGS)

programs: .venv/ready
	$(PY) -W ignore tests/program_search.py --programs $(PROGRAMS) --processes $(PROCESSES)

schedules: .venv/ready
	$(PY) tests/schedule_search.py --problems $(SCHEDULES) --processes $(PROCESSES)

memory: .venv/ready
	$(PY) -W ignore tests/memory_growth.py --steps $(STEPS) --forms $(FORMS)

# What takes hours: everything that `make test` does in small.
nightly: explore programs schedules stress memory

stress: .venv/ready
	$(PY) tests/thread_stress.py --seconds $(SECONDS)

# A fresh clone, an environment of its own, and every page's blocks and commands: minutes.
newcomer:
	PIP_ARGS="$(PIP_ARGS)" .ci/newcomer $(PYTHON)

check: .venv/ready
	@if $(call HAS,ruff); then $(PY) -m ruff check .; else echo "ruff is not installed: skipped"; fi
	@if $(call HAS,pyrefly); then \
	  git ls-files -co --exclude-standard '*.py' ':!tests' ':!bench/training_code' | sed 's|^|.types/weft/|' \
	  | xargs .venv/bin/pyrefly check -c pyproject.toml --python-interpreter-path $(PY) --output-format min-text; \
	else echo "pyrefly is not installed: skipped"; fi

.venv/ready: pyproject.toml constraints.txt
	PIP_ARGS="$(PIP_ARGS)" sh .ci/venv $(PYTHON) .venv
	@touch $@

docs: .venv/ready
	@if ! $(call HAS,mkdocs); then echo "mkdocs is not installed: .venv/bin/pip install -e '.[docs]'"; exit 1; fi
	$(PY) -m mkdocs build --strict

clean:
	rm -rf .venv build dist out *.egg-info .pytest_cache .ruff_cache
