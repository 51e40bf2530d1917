# Everything a person or a machine does with this checkout. All of it happens in .venv; nothing is installed elsewhere.
#
#   make demo    install, simulate Llama-3.1-8B on an A100, write the report
#   make test    install what the tests need (torch for CPUs, triton) and run them
#   make release-check   the tests of what is published (pages' commands and figures, wheels, the accuracy table), and
#                those that time whole runs
#   make test-deep   property tests on new examples, twenty times as many: what a night is for
#   make check   ruff, its formatter, mypy --strict on both packages
#   make validate    the accuracy table of docs/how-right.md, from measurements/ (some eight minutes, of slow sets
#                    a sample; FULL=1 all rows); WRITE=1 writes it there, CITED=FOLDER has the files that are cited and not committed
#   make docs    the documentation as a site in build/site, which works without a network and from the file system;
#                fails where a link or an anchor leads nowhere
#   make bench   how fast the simulator is
#   make witness vLLM's own scheduler beside ours on new random workloads (an environment of 3 GB under build/witness)
#                (ENGINE=sglang: SGLang's, ENGINE=llama.cpp: llama-server's slots)
#   make compiled-36     the tests of kernels' binaries, all of them, under Triton 3.6, which GPU machines have
#   make compiled-37     the same under this machine's Triton
#   make compiled        a wheel in dist/ whose steps mypyc has compiled; the checkout stays as it is
#   make test-compiled   all tests on a compiled copy of the checkout
#   make dist    wheel and source distribution in dist/, as tags say which, checked as an index would check them
#   make sbom    dist/sbom/: the libraries that the package and each extra run with, as CycloneDX
#   make portable    mypy as on Windows and macOS, and as on each Python that is supported
#
# PYTHON picks the interpreter, PIP_ARGS is passed to pip (another index, a local folder of wheels).

PYTHON ?= python3
PIP_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
COMPILED := build/compiled
PIP := $(BIN)/python -m pip --disable-pip-version-check
WORKERS ?= 2

# One thread per process: with more, BLAS barriers wait for the scheduler and tests run many times slower.
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: demo test release-check test-deep check validate docs bench witness compiled compiled-36 compiled-37 test-compiled dist sbom portable clean

demo: $(VENV)/.core
	$(BIN)/perfmodel simulate llama-3.1-8b-a100 --out out/demo
	@echo "Open the report: $(CURDIR)/out/demo/report.html"

test: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup --ignore=tests/compiled
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) tests/interpreted

release-check: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m release

test-deep: $(VENV)/.test
	HYPOTHESIS_PROFILE=deep $(BIN)/python -m pytest -n $(WORKERS) tests/property

check: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

validate: $(VENV)/.core
	$(BIN)/python benchmarks/accuracy_table.py $(if $(CITED),--cited $(CITED)) $(if $(FULL),--full) $(if $(WRITE),--write) $(if $(BECAUSE),--because "$(BECAUSE)")

# ENGINE_VERSION and CASES: of vLLM, and workloads of each feature.
witness: $(VENV)/.core
	$(BIN)/python benchmarks/witness $(or $(ENGINE),vllm) $(if $(ENGINE_VERSION),--version $(ENGINE_VERSION)) --cases $(or $(CASES),100)

# What is run, notebooks and commands of the reference, is run from this checkout.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict
	@echo "Open the site: $(CURDIR)/build/site/index.html"

# Five minutes. Not run here: quoted_figures.py (all commands that docs/ quote, half an hour; worked_examples.py has the
# figures that no command prints), page_commands.py (all commands of the pages as they stand there, an hour),
# fleet_speed.py as it is (a million requests, ten minutes), planner_ranking.py (twelve minutes), own_servers.py (five),
# own_sweeps.py (ten), peers (forty, installs AIConfigurator, 0.9 GB),
# fuzz.py (two hours), kill_and_resume.py (ten minutes), frozen_answers.py (ten minutes; the answers before and after a
# change of structure), parity.py (two minutes, needs transformers),
# compiled_chains.py (minutes, needs gcc), mutation (an hour), on_vllm (three minutes a model and round, needs vLLM:
# reports/measured has what came of it);
# emulator_accuracy.py (twenty minutes, by lean_client.py), emulator_day.py (24, takes a trace), emulator_parts
# (six, needs GuideLLM, AIPerf, Prometheus and haproxy), deployment_files.py (one, downloads linters);
# web_screenshots.py and web_page.py (three each, need playwright and Chromium); closed_loop.py (eight, needs a
# server); llama_rates (fourteen on a core of its own, needs what make witness ENGINE=llama.cpp installs);
# write_measurements.py, which takes the cited files; accuracy_by_setup.py, which make validate WRITE=1 runs; and
# left_out_index.py, which reads the reports of `perfmodel validate --leave-out`; attention_modules.py (two minutes) and
# sparse_attention.py (a quarter), which take the cited kernel tables; adapters.py (one, fits measurements/adapters),
# trace_hit_rates.py (two, takes a trace), host_libraries.py (one, needs vLLM, arctic-inference and a vocabulary) and
# host_images.py (two, needs vLLM and torchvision).
bench: $(VENV)/.core
	$(BIN)/python benchmarks/simulator_speed.py
	$(BIN)/python benchmarks/planner_speed.py
	$(BIN)/python benchmarks/fleet_speed.py --replicas 100 --requests 10000 20000
	$(BIN)/python benchmarks/emulator_rate.py --seconds 5
	$(BIN)/python benchmarks/emulator_telemetry.py

# In a copy, since what is compiled lies beside its source and Python prefers it: in the checkout it would hide edits.
compiled: $(VENV)/.test
	rm -rf $(COMPILED)
	mkdir -p $(COMPILED)
	git ls-files -z --cached --others --exclude-standard | tar -c --null -T - | tar -x -C $(COMPILED)
	$(PIP) install --quiet $(PIP_ARGS) hatch-mypyc "mypy[mypyc]" setuptools
	version=$$($(BIN)/python -m hatchling version) && cd $(COMPILED) && \
		HATCH_BUILD_HOOKS_ENABLE=1 SETUPTOOLS_SCM_PRETEND_VERSION=$$version \
		$(CURDIR)/$(BIN)/python -m hatchling build -t wheel -d $(CURDIR)/dist

# Built without isolation, by the hatchling that the environment has. The wheel is that of the source distribution.
dist: $(VENV)/.publish
	rm -rf dist/*.whl dist/*.tar.gz
	$(BIN)/python -m build --no-isolation --outdir dist
	$(BIN)/python -m twine check --strict dist/*.whl dist/*.tar.gz
	$(BIN)/check-wheel-contents dist/*.whl

sbom: $(VENV)/.publish
	$(BIN)/python tools/sbom.py dist/sbom

portable: $(VENV)/.test
	$(BIN)/mypy --platform win32 --package perfmodel
	$(BIN)/mypy --platform darwin
	for python in 3.12 3.13 3.14; do $(BIN)/mypy --python-version $$python || exit 1; done

# A folder before the environment's own packages, so that torch is not installed twice; Triton 3.6 wants NumPy < 2.4.
TRITON_36 := build/triton-3.6
$(TRITON_36)/.installed: | $(VENV)/.test
	$(PIP) install --quiet $(PIP_ARGS) --upgrade --target $(TRITON_36) "triton==3.6.0" "numpy<2.4"
	@touch $@

compiled-36: $(VENV)/.test $(TRITON_36)/.installed
	PYTHONPATH=$(TRITON_36) $(BIN)/python -m pytest -n $(WORKERS) tests/compiled

compiled-37: $(VENV)/.test
	$(BIN)/python -m pytest -n $(WORKERS) tests/compiled

test-compiled: compiled
	cd $(COMPILED) && PYTHONPATH=.:executors $(CURDIR)/$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -m ""

clean:
	rm -rf $(VENV) build dist out .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Editable, so that the environment follows the checkout; pyproject.toml says what else is needed.
$(VENV)/.core: pyproject.toml | $(BIN)/python
	$(PIP) install --quiet $(PIP_ARGS) --editable .
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.core
	$(PIP) install --quiet $(PIP_ARGS) --editable ".[docs]"
	@touch $@

# The constraints pin torch and triton: what a plain `torch` resolves to may be the CUDA build, gigabytes of it.
$(VENV)/.test: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --quiet $(PIP_ARGS) --constraint constraints.txt --editable ".[test,check,executor,weights,data,serve,kv-events,web]" triton
	@touch $@ $(VENV)/.core

$(VENV)/.publish: pyproject.toml | $(VENV)/.test
	$(PIP) install --quiet $(PIP_ARGS) --constraint constraints.txt --editable ".[publish]"
	@touch $@
