"""Training of a small target, its tokenizer and its drafter with PyTorch (extra `train`); only the cli imports it.

presets: shapes and runs. stages: what `ddtree train` does. corpus: files, held-out split, tokens. target, drafter,
branch: the three networks. fit_target, fit_drafter, fit_branch: their losses. bank, generate: the target's own
continuations; branch_rows: a drafter's slots along them; drafter_batches: blocks of them. evaluate, acceptance,
branch_report: what is printed at the end. export: bundles. loop: steps, checkpoints, the log; captured: a step as one
CUDA graph; muon: the drafter's optimizer.
"""
