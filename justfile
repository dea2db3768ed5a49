# `just` lists the recipes. Each runs in the environment that it was called from.

set shell := ["bash", "-euo", "pipefail", "-c"]

python := env("HANGWATCH_PYTHON", if path_exists(".venv/bin/python") == "true" { ".venv/bin/python" } else { "python3" })

# list the recipes
default:
    @just --list --unsorted

# all that .ci/run runs: format, lint, types, contracts, tests with coverage, docs
check: lint types contracts test docs

# the tests, with branch coverage; those that need a whole Ray come by themselves, and last
test *ARGS:
    {{python}} -m pytest -n 2 --dist worksteal --ignore=tests/ray --cov --cov-report= {{ARGS}}
    {{python}} -m pytest tests/ray --cov --cov-append --cov-report=term {{ARGS}}

# formatting and ruff's rules
lint:
    {{python}} -m ruff format --check .
    {{python}} -m ruff check .

# rewrite the files as the formatter wants them
format:
    {{python}} -m ruff format .
    {{python}} -m ruff check --fix .

# mypy, strict
types:
    {{python}} -m mypy

# imports point down; pure floors are pure
contracts:
    {{python}} -c 'from importlinter.cli import lint_imports_command as lint; lint()'

# the documentation, every warning an error
docs:
    {{python}} -m sphinx -q -W --keep-going -b html docs docs/_build/html

# regenerate the figures that the docs publish (minutes)
proof:
    {{python}} -m benchmarks

# kill captures of real processes at N random moments, and look at the processes (25 minutes)
proof-safety N="500":
    HANGWATCH_PROOF_KILLS={{N}} {{python}} -m pytest -n 2 -rP tests/integration/test_contract_kills.py

# let every fault of the laboratory happen to SERVERS servers, and tell what is said of it (half an hour)
proof-lab SERVERS="8" *FAULTS:
    {{python}} tools/lab_proof.py {{SERVERS}} {{FAULTS}}

# record the picture of attach's live page that the documentation shows
picture:
    {{python}} tools/attach_picture.py

# regenerate what the docs publish of the verdicts, over DAYS instance-days (an hour or two)
proof-verdicts DAYS="1000" HANGS="40":
    HANGWATCH_PROOF_DAYS={{DAYS}} HANGWATCH_PROOF_HANGS={{HANGS}} {{python}} -m benchmarks verdicts
    {{python}} -m benchmarks.verdicts 40 6 docs/explanation/trade-off.svg

# write dist/hangwatch-rescue.py, the one file that needs no installation
rescue:
    {{python}} tools/make_rescue.py

# regenerate what the docs publish of the task reader, with N programs for each interpreter (an hour)
proof-remote N="14":
    rm -f proof.jsonl
    HANGWATCH_PROOF_SEEDS={{N}} HANGWATCH_PROOF_READINGS=60 HANGWATCH_PROOF_TRIALS=1000 HANGWATCH_PROOF_FILE=proof.jsonl \
        {{python}} -m pytest tests/integration/test_remote*.py
    {{python}} tools/remote_proof.py proof.jsonl
    HANGWATCH_PROOF_ROUNDS={{N}} {{python}} -m benchmarks remote
