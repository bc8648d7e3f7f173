# make train     set up .venv and run the main job
# make test      set up .venv and pass the tests
# make figures   redraw assets/*.png
# TORCH=torch==2.13.0 chooses a version of PyTorch; ARGS="--method all" goes to train.py.

PYTHON ?= python3
TORCH ?= torch
ARGS ?=

.PHONY: train test figures clean

train: .venv/ready
	.venv/bin/python train.py --task math $(ARGS)

test: .venv/ready-dev
	.venv/bin/python -m pytest

figures: .venv/ready
	.venv/bin/python -m extras.plot
	.venv/bin/python shift_theory.py

.venv/ready: requirements.txt
	$(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet "$(TORCH)"
	.venv/bin/python -m pip install --quiet -r requirements.txt
	touch $@

.venv/ready-dev: .venv/ready requirements-dev.txt
	.venv/bin/python -m pip install --quiet -r requirements-dev.txt
	touch $@

clean:
	rm -rf .venv
